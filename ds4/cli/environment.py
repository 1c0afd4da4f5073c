"""The Python environment of an installation: made beside, linked when complete. Standard library only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ds4.cli.home import Home, source_key
from ds4.cli.processes import file_error, own_child, write_file
from ds4.cli.service import status, tail
from ds4.errors import Ds4Error, UsageError

PARTS = ("pyproject.toml", "LICENSE", "ds4", "cuda", "solvers", "rulers")  # what the distribution is made of
COMPLETE = ".complete"


def make_environment(home: Home, source: Path, tell: Callable[[str], None]) -> str:
    """An environment of the present sources in D/env/KEY, and D/venv pointing to it; says where it is.

    Raises:
        Ds4Error: it cannot be made: no network, no space.
    """
    key = source_key(source, PARTS, [sys.version, os.path.realpath(sys.executable)])
    target = home.root / "env" / key
    if not (target / COMPLETE).is_file() or not _works(target):  # a system upgrade may take its Python away
        tell("installing ds4 and the libraries it uses; this takes a minute or two")
        _make(home, source, target)
    if os.path.realpath(home.venv) != os.path.realpath(target):
        home.link_venv(target)
    _remove_others(home, target)
    return str(target)


def use_environment(home: Home, given: str) -> str:
    """D/venv points to an environment that has ds4 already.

    Raises:
        UsageError: it is none.
    """
    target = Path(os.path.abspath(given))
    python = target / "bin" / "python"
    if not python.exists():
        raise UsageError(f"--venv {given}: no bin/python in it; name a virtual environment")
    if not _works(target):
        raise UsageError(f"--venv {given}: ds4 is not installed in it; leave the flag out to have one made")
    if os.path.realpath(home.venv) != os.path.realpath(target):
        home.link_venv(target)
    return f"{target}, as given"


def _works(target: Path) -> bool:
    """Whether the environment's Python starts and finds ds4."""
    try:
        words = [str(target / "bin" / "python"), "-I", "-c", "import ds4, numpy"]
        return subprocess.run(words, capture_output=True).returncode == 0
    except OSError:
        return False


def _make(home: Home, source: Path, target: Path) -> None:
    """Sources are copied first: the checkout is not written to, and setuptools leaves old files in build/."""
    copied = target.with_name(f"source-{target.name}")
    log = home.var / "install.log"
    try:
        for folder in (copied, target):
            if folder.exists():
                shutil.rmtree(folder)
        copied.mkdir(parents=True)
        for part in PARTS:
            _copy(source / part, copied / part)
        write_file(log, "")
    except (OSError, shutil.Error) as e:
        raise file_error(copied, e) if isinstance(e, OSError) and e.errno else Ds4Error(f"{copied}: {e}") from e
    python = str(target / "bin" / "python")
    _run([sys.executable, "-I", "-m", "venv", str(target)], log, "making the environment failed")
    pip = [python, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "install", str(copied)]
    _run(pip, log, "installing the libraries failed (is the network, or a package index, reachable?)")
    _run([python, "-I", "-m", "compileall", "-q", str(target / "lib")], log, "", check=False)
    write_file(target / COMPLETE, "")
    shutil.rmtree(copied, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info"))
    else:
        shutil.copyfile(source, target)


def _run(words: Sequence[str], log: Path, failed: str, check: bool = True) -> None:
    with open(log, "ab") as out:
        try:
            code = subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=own_child(signal.SIGKILL)
            ).returncode
        except OSError as e:
            raise Ds4Error(f"{words[0]}: cannot be started: {e.strerror}") from e
    if code != 0 and check:
        raise Ds4Error(f"{failed}; {log} ends with\n{tail(log)}")


def _remove_others(home: Home, keep: Path) -> None:
    """Environments of older sources, unless a server still runs from one."""
    if status(home).watchdog_pid is None:
        for other in keep.parent.iterdir():
            if other != keep:
                shutil.rmtree(other, ignore_errors=True)
