"""Findings about a machine, each with its remedy; the folder's files; what the installer may import."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ds4.cli import machine, processes, service
from ds4.cli.environment import PARTS
from ds4.cli.home import Home, is_loopback, key_of, source_key
from ds4.cli.machine import Gpu, check
from ds4.errors import CapacityError, Ds4Error, UsageError
from ds4.settings import DeviceSettings, device_settings

ROOT = Path(__file__).resolve().parent.parent.parent
CPU: DeviceSettings = replace(device_settings({}), driver="auto")


def findings(
    tmp_path: Path, settings: DeviceSettings = CPU, gpu: Gpu | None = None, need_environment: bool = True
) -> str:
    return "\n".join(check(tmp_path / "d", settings, gpu, "no driver", need_environment))


def test_this_machine_runs_the_suite_so_it_is_fine(tmp_path: Path) -> None:
    assert findings(tmp_path, device_settings()) == ""


def test_no_compiler(tmp_path: Path) -> None:
    said = findings(tmp_path, replace(CPU, cxx="no-such-compiler"))
    assert "no-such-compiler" in said and "apt-get install g++" in said and "DS4_CXX" in said
    assert findings(tmp_path, replace(CPU, cxx="no-such-compiler"), Gpu(13, "GB10")) == ""  # a GPU needs none


def test_a_compiler_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "old-g++"
    old.write_text("#!/bin/sh\necho \"unrecognized option '-std=c++20'\" >&2\nexit 1\n")
    old.chmod(0o755)
    said = findings(tmp_path, replace(CPU, cxx=str(old)))
    assert "unrecognized option" in said and "11 or newer" in said


def test_drivers(tmp_path: Path) -> None:
    assert "CUDA 12" in findings(tmp_path, CPU, Gpu(12, "old")) and "580" in findings(tmp_path, CPU, Gpu(12, "old"))
    said = findings(tmp_path, replace(CPU, driver="nvidia"))
    assert "DS4_DRIVER=nvidia" in said and "no driver" in said
    assert machine.find_gpu(replace(CPU, driver="simt")) == (None, "DS4_DRIVER=simt asks for the CPU")


def test_a_build_cache_that_others_can_write_is_said_first(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    asked = replace(CPU, cache=root)
    assert findings(tmp_path, asked) == ""  # it will be made
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    assert f"build cache {root} has mode 0755" in findings(tmp_path, asked)
    assert f"chmod 700 {root}" in findings(tmp_path, asked, Gpu(13, "GB10"))
    root.chmod(0o700)
    assert findings(tmp_path, asked) == ""
    root.rmdir()
    root.write_text("")
    assert f"build cache {root} is not a directory" in findings(tmp_path, asked)
    below = replace(CPU, cache=root / "below")
    assert f"build cache {root / 'below'}: cannot be looked at" in findings(tmp_path, below)


def test_a_lock_whose_file_its_holder_removed_is_taken_anew(tmp_path: Path) -> None:
    """Else whoever waited would hold a file without a name, and the next one another."""
    path, told = tmp_path / "lock", []

    def wait() -> None:
        with processes.locked(path, "busy", wait_s=30):
            try:
                with processes.locked(path, "busy"):
                    told.append("two hold it")
            except Ds4Error as e:
                told.append(str(e))

    with processes.locked(path, ""):
        waiting = threading.Thread(target=wait)
        waiting.start()
        deadline = time.monotonic() + 30
        while opened(path) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        path.unlink()
    waiting.join(30)
    assert told == ["busy"]


def opened(path: Path) -> int:
    """How often this process has the file open."""
    found = 0
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself is closed by now
            found += os.readlink(f"/proc/self/fd/{handle}") == str(path)
    return found


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4.cli.machine.shutil.disk_usage", lambda _: Usage(10**10, 0, 500_000_000))
    said = findings(tmp_path)
    assert "0.5 GB are free, 0.9 GB are needed" in said and "--dir" in said
    assert findings(tmp_path, need_environment=False) == ""  # the environment is what takes the space


def test_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 10**9)
    assert "1.0 GB of memory are available" in findings(tmp_path)
    assert "big.gguf takes 114.0 GB" in machine.memory_for("big.gguf", 114 * 10**9)[0]


def test_a_processor_without_avx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4.cli.machine.platform.machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "_cpu_flags", lambda: frozenset({"sse2", "fma"}))
    assert "avx2" in findings(tmp_path) and "fma" not in findings(tmp_path)
    monkeypatch.setattr("ds4.cli.machine.platform.machine", lambda: "riscv64")
    assert "riscv64" in findings(tmp_path)


def test_an_old_python_and_no_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4.cli.machine.sys.version_info", (3, 9, 2))
    monkeypatch.setattr("ds4.cli.machine.importlib.util.find_spec", lambda name: None)
    said = findings(tmp_path)
    assert "3.11" in said and "apt-get install python3-venv" in said


def test_findings_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 1)
    assert len(findings(tmp_path, replace(CPU, cxx="no-such-compiler")).splitlines()) == 2


# -- files


def test_settings_are_written_once(tmp_path: Path) -> None:
    home = Home(tmp_path)
    values: dict[str, Any] = {
        "model": 'a "b" \\ \x7f\n/ü/m.gguf', "port": 8000, "no_graph": True, "queue": 4, "api_key": "k"
    }  # fmt: skip
    assert home.save_settings(values) and not home.save_settings(values)
    assert home.settings() == tomllib.loads(home.toml.read_text()) == values
    assert home.toml.stat().st_mode & 0o777 == 0o600  # it holds a key
    before = home.toml.stat().st_mtime_ns
    home.toml.write_text("# mine\n" + home.toml.read_text())
    assert not home.save_settings(values) and home.toml.read_text().startswith("# mine")
    assert before <= home.toml.stat().st_mtime_ns
    of_others = {"nightly": {"at": "03:30", "min-flipped": 0.9, "corrections": ["a b", "\u00e9.jsonl"], "a.b": True}}
    label = service.label(home)
    assert home.save_settings(of_others | values) and home.settings() == of_others | values
    assert service.label(home) == label  # no reason to start the server anew


@pytest.mark.parametrize("text", ["port = ", "\xff"])
def test_broken_settings_are_named(tmp_path: Path, text: str) -> None:
    home = Home(tmp_path)
    home.toml.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"ds4\.toml"):
        home.settings()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    target.write_text("old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ds4.cli.processes.os.fsync", full)
    with pytest.raises(CapacityError, match="the disk is full"):
        processes.write_file(target, "new")
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Ds4Error, match="file"):
        Home(tmp_path / "file" / "d").make()
    refused = OSError(errno.EACCES, "Permission denied")
    assert "--dir" in str(processes.file_error(tmp_path, refused))


def test_the_link_is_replaced_in_one_step(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        home.link_venv(tmp_path / name)
        assert home.venv.resolve() == tmp_path / name
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "venv"]


def test_what_interruptions_leave_is_swept(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    keep = ["models/embedded-1", "models/embedded-1.gguf", "models/embedded-1.gguf.part", "env/123"]
    for name in (*keep, "models/embedded-1.part-ab", "env/source-123", ".ds4.toml.ab", ".venv.ab"):
        (tmp_path / name).mkdir()
    home.sweep()
    left = {str(p.relative_to(tmp_path)) for p in (*tmp_path.glob("*/*"), *tmp_path.glob(".*"))}
    assert left == set(keep)


def test_keys_change_with_every_byte_and_border(tmp_path: Path) -> None:
    assert len({key_of(p) for p in (["ab", "c"], ["a", "bc"], ["abc"], ["abd"], [])}) == 5
    (tmp_path / "ds4" / "__pycache__").mkdir(parents=True)
    (tmp_path / "ds4" / "a.py").write_text("1")
    before = source_key(tmp_path, ["ds4"], ["3.11"])
    (tmp_path / "ds4" / "__pycache__" / "a.pyc").write_text("1")
    assert source_key(tmp_path, ["ds4"], ["3.11"]) == before != source_key(tmp_path, ["ds4"], ["3.12"])
    (tmp_path / "ds4" / "a.py").write_text("2")
    assert source_key(tmp_path, ["ds4"], ["3.11"]) != before
    with pytest.raises(Ds4Error, match="missing"):
        source_key(tmp_path, ["missing"], [])


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


# -- packaging


def test_the_installer_needs_the_standard_library_only() -> None:
    """It runs before any library is installed: imported here without site-packages."""
    text = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import ds4.cli.install, ds4.cli.watchdog"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_package_is_in_the_distribution() -> None:
    """A folder that is not listed is missing after `pip install`, though it is there in a checkout."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed, data = set(table["packages"]), table["package-data"]
    for top in ("ds4", "rulers", "solvers"):
        for init in (ROOT / top).rglob("__init__.py"):
            assert ".".join(init.parent.relative_to(ROOT).parts) in listed
    for folder in {p.parent for p in (ROOT / "cuda").rglob("*") if p.is_file()}:
        name = ".".join(("ds4", "_cuda", *folder.relative_to(ROOT / "cuda").parts))
        assert name in listed
        unmatched = [p.name for p in folder.iterdir() if p.is_file() and not any(p.match(g) for g in data[name])]
        assert unmatched == []
    home = ROOT / "ds4" / "embedded"
    files = {p for p in home.rglob("*") if p.is_file() and p.suffix != ".py" and "__pycache__" not in p.parts}
    assert files - {p for pattern in data["ds4.embedded"] for p in home.glob(pattern)} == set()
    tops = {name.split(".")[0] for name in listed} | {"cuda", "pyproject.toml", "LICENSE"}
    assert tops == set(PARTS)
