"""How commands end: output that cannot be written, Ctrl-C while modules load, and the launchers."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ds4.cli import entry, main
from ds4.errors import Ds4Error

ROOT = Path(__file__).resolve().parent.parent.parent
CHECKPOINT = ROOT / "tests" / "data" / "oracle-a"


def started(words: Sequence[object], **options: object) -> subprocess.CompletedProcess[str]:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 120, **options}
    return subprocess.run([str(w) for w in words], **given)  # type: ignore[call-overload,no-any-return]


def ds4(*argv: object, **options: object) -> subprocess.CompletedProcess[str]:
    return started([sys.executable, "-B", "-m", "ds4.cli.main", *argv], **options)


# -- standard output


@pytest.mark.parametrize(
    "argv",
    [["inspect", CHECKPOINT, "--json"], ["inspect", CHECKPOINT], ["preflight", CHECKPOINT], ["--help"]],
    ids=["one large value", "a table", "one line", "help"],
)
def test_output_that_cannot_be_written_is_one_line(argv: list[object], tmp_path: Path) -> None:
    """A size limit of 0 stands for a full disk: write() fails with EFBIG, as it would with ENOSPC."""
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))}
    with open(tmp_path / "out", "w") as out:
        done = ds4(*argv, stdout=out, **limit)
    assert (done.returncode, done.stderr) == (1, "error: standard output cannot be written: File too large\n")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = ds4("inspect", CHECKPOINT, "--json", stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_no_standard_output_at_all() -> None:
    done = ds4("preflight", CHECKPOINT, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(5, "Input/output error", "a.gguf"), "error: a.gguf: Input/output error\n"),
        (OSError(5, "Input/output error"), "error: input or output: Input/output error\n"),
        (Ds4Error("a.gguf: no"), "error: a.gguf: no\n"),
    ],
)
def test_an_error_of_a_file_is_not_blamed_on_the_output(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        print("before")
        raise error

    assert main.guarded(work) == 1
    got = capsys.readouterr()
    assert (got.out, got.err) == ("before\n", said)


# -- Ctrl-C


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_while_a_command_loads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("ds4.cli.main.importlib.import_module", interrupted)
    assert main.run(["inspect", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("launcher", ["ds4", "ds4-server"])
def test_ctrl_c_while_the_launcher_loads(launcher: str, tmp_path: Path) -> None:
    """argparse, which both modules import at once, is replaced by Ctrl-C."""
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt\n")
    done = started([ROOT / "bin" / launcher], env={**at(sys.prefix), "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_entry_takes_the_name_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["entry", "main", "--version"])
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert not stopped.value.code and capsys.readouterr().out.startswith("ds4 ")


# -- the launchers


def at(venv: str | None, home: Path | None = None) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("DS4_VENV", "PYTHONPATH")}
    return env | ({"DS4_VENV": venv} if venv is not None else {}) | ({"HOME": str(home)} if home else {})


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The launchers alone, in a folder with a space; no .venv."""
    (tmp_path / "check out" / "bin").mkdir(parents=True)
    for name in ("ds4", "ds4-server", "find-python"):
        copy = tmp_path / "check out" / "bin" / name
        copy.write_bytes((ROOT / "bin" / name).read_bytes())
        copy.chmod(0o755)
    return tmp_path / "check out"


@pytest.fixture
def stub() -> Callable[[Path], Path]:
    def make(venv: Path) -> Path:
        """An environment whose Python says its own path and its arguments."""
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").write_text('#!/bin/sh\necho "$0 $@"\n')
        (venv / "bin" / "python").chmod(0o755)
        return venv

    return make


@pytest.mark.parametrize(("launcher", "module"), [("ds4", "main"), ("ds4-server", "serve")])
def test_which_python_the_launchers_take(
    launcher: str, module: str, checkout: Path, stub: Callable[[Path], Path], tmp_path: Path
) -> None:
    home, given = tmp_path / "home", tmp_path / "given"
    tail = f"/bin/python -P -m ds4.cli.entry {module} -m a b\n"
    (tmp_path / "linked").symlink_to(checkout / "bin" / launcher)

    def said(venv: str | None) -> str:
        return started([tmp_path / "linked", "-m", "a b"], env=at(venv, home)).stdout

    none = started([checkout / "bin" / launcher], env=at(None, home))
    assert none.returncode == 2 and none.stdout == ""
    assert none.stderr.startswith("error: ") and none.stderr.count("\n") == 1 and "install.sh" in none.stderr
    assert "installation in another folder D: DS4_VENV=D/venv" in none.stderr
    wrong = started([checkout / "bin" / launcher], env=at(str(given), home))
    assert wrong.returncode == 2 and f"DS4_VENV={given} has no bin/python" in wrong.stderr
    installed = stub(home / ".local" / "share" / "ds4" / "venv")
    assert said(None) == f"{installed}{tail}"
    own = stub(checkout / ".venv")
    assert said(None) == f"{own}{tail}"
    stub(given)
    assert said(str(given)) == f"{given}{tail}"


@pytest.mark.parametrize("launcher", ["ds4", "ds4-server"])
def test_nothing_is_imported_from_the_current_folder(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "ds4").mkdir()
    for name in ("ds4/__init__.py", "argparse.py", "numpy.py"):
        (tmp_path / name).write_text("raise SystemExit('from the current folder')\n")
    done = started([ROOT / "bin" / launcher, "--version"], env=at(sys.prefix), cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("ds4 "), done.stderr


@pytest.mark.parametrize("absolute", [True, False])
def test_bin_test_takes_an_environment_anywhere(absolute: bool, stub: Callable[[Path], Path], tmp_path: Path) -> None:
    """`python` of the last line is the environment's, by the path in DS4_VENV, absolute or from the checkout."""
    venv = stub(tmp_path / "v")
    (venv / ".ds4-dev").write_text(hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest() + "\n")
    given = str(venv) if absolute else os.path.relpath(venv, ROOT)
    env = {**at(given), "DS4_PYTHON": sys.executable, "DS4_CXX": "true"}
    done = started([ROOT / "bin" / "test", "tests/none"], env=env)
    assert done.stdout == f"{venv}/bin/python -m pytest -m not long tests/none\n", done.stderr
