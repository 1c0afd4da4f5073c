"""install.sh: usage, refusals, interruptions at every step, and the way to an answer."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from ds4 import embedded
from ds4.cli import build, environment, install, service
from ds4.cli.home import Home
from ds4.cli.processes import Process, locked
from ds4.errors import BuildError, CapacityError, Ds4Error, FileFormatError, UsageError
from tests.base.toys import toy_base, toy_dir
from tests.conftest import opened

ROOT = Path(__file__).resolve().parent.parent.parent
CHECKPOINT = toy_dir("oracle-a")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def words(folder: Path, *flags: str) -> list[str]:
    return ["bash", str(ROOT / "install.sh"), "--dir", str(folder), *flags]


def run(folder: Path, *flags: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, in this test's environment."""
    return subprocess.run(words(folder, *flags), capture_output=True, text=True, timeout=timeout)


def prepare(folder: Path, *flags: str) -> list[str]:
    return words(folder, "--venv", sys.prefix, "--model", str(CHECKPOINT), "--no-start", *flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "0"], "between 1 and 65535"),
        (["--port", "65536"], "between 1 and 65535"),
        (["--host", " "], "--host is empty"),
        (["--model", ""], "--model is empty"),
        (["--engram-dir", ""], "--engram-dir is empty"),
        (["start", "--venv", ""], "--venv is empty"),
        (["--model", "/no/such/thing"], "no such file or folder"),
        (["--model", str(ROOT / "LICENSE")], "must be a base"),
        (["--model", str(ROOT / "docs")], "no config.json"),
        (["--engram-dir", "/no/such/folder"], "no such folder"),
        (["--venv", "/no/such/venv"], "no bin/python"),
        (["start", "--port", "8000"], "--port belongs to the installation"),
        (["--json"], "--json belongs to status"),
    ],
)
def test_usage(tmp_path: Path, flags: Sequence[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        install.run([*flags, "--dir", str(tmp_path / "d"), *(["--no-start"] if "--venv" in flags else [])])
    assert "--venv" in flags or not (tmp_path / "d").exists()


def test_exit_codes(tmp_path: Path) -> None:
    assert run(tmp_path / "d", "--no-such-flag").returncode == 2
    assert run(tmp_path / "d", "--port", "0").returncode == 2
    done = run(tmp_path / "d", "status")
    assert (done.returncode, done.stdout) == (1, f"stopped ({tmp_path / 'd'}, where nothing is installed)\n")
    assert run(tmp_path / "d", "stop").stdout == "not running\n"
    done = run(tmp_path / "d", "start")
    assert done.returncode == 2 and "nothing is installed" in done.stderr
    assert not (tmp_path / "d").exists()  # looking leaves nothing behind


def test_no_python(tmp_path: Path) -> None:
    env = {**os.environ, "DS4_PYTHON": "/no/such/python"}
    done = subprocess.run(words(tmp_path / "d"), capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "3.11" in done.stderr and "DS4_PYTHON" in done.stderr


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        install.run(["--dir", str(tmp_path / "file")])
    with pytest.raises(Ds4Error, match="/proc/ds4"):  # nobody may make folders there, not even root
        install.run(["--dir", "/proc/ds4"])


def test_two_installs_at_once(tmp_path: Path) -> None:
    home = Home(tmp_path / "d")
    home.make()
    with locked(home.var / "install.lock", ""):
        done = run(home.root, "--venv", sys.prefix, "--no-start")
    assert done.returncode == 1
    assert f"another install (process {os.getpid()})" in done.stderr


def test_a_port_in_use_and_no_compiler_are_said_first(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = str(s.getsockname()[1])
        env = {**os.environ, "DS4_CXX": "/no/such/g++", "DS4_DRIVER": "simt"}
        command = words(tmp_path / "d", "--port", port, "--venv", sys.prefix)
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use by process {os.getpid()}" in done.stderr
    assert "no C++ compiler (/no/such/g++)" in done.stderr
    assert not (tmp_path / "d" / "venv").exists()


def kill_at(folder: Path, line: str) -> bool:
    """Start an install and kill it, and nothing else, when it prints `line`; False if it never does."""
    with subprocess.Popen(prepare(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as p:
        assert p.stdout is not None
        for said in p.stdout:
            if line in said:
                p.send_signal(signal.SIGKILL)
                return True
    return False


def test_killed_anywhere_and_run_again(tmp_path: Path) -> None:
    """Killed at the start of every step and inside the quantizer, in one folder; the last run completes it all."""
    folder = tmp_path / "a folder"
    points = ["[2/6]", "[3/6]", "quantizing", "bytes; errors", "[4/6]", "[5/6]"]
    for line in points:
        assert kill_at(folder, line), line
        for name in (folder / "ds4.toml", folder / "venv"):  # whole, or not there
            assert not name.exists() or name.stat().st_size > 0
    done = subprocess.run(prepare(folder), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (base,) = (folder / "models").glob("*.gguf")
    names = {p.name for p in (folder / "models").iterdir()}
    assert names == {base.name, base.name + ".report.json"}
    straight = tmp_path / "straight.gguf"
    ds4 = [sys.executable, "-m", "ds4.cli.main"]
    subprocess.run([*ds4, "quantize", str(CHECKPOINT), "-o", str(straight)], check=True, capture_output=True)
    assert base.read_bytes() == straight.read_bytes()
    assert Home(folder).settings() == {
        "model": str(base), "engram_dir": str(CHECKPOINT), "host": "127.0.0.1", "port": 8000,
        "admin_key": str(folder / "var" / "admin.key"),
    }  # fmt: skip
    again = subprocess.run(prepare(folder), capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "is there" in again.stdout and "as before" in again.stdout
    assert base.read_bytes() == straight.read_bytes()


def test_to_an_answer_and_back(tmp_path: Path) -> None:
    """From a checkpoint to an answer; a second run finds it running; a killed server comes back; stop stops it."""
    folder, port = tmp_path / "d", free_port()
    home = Home(folder)
    flags = ["--venv", sys.prefix, "--model", str(CHECKPOINT), "--port", str(port)]
    try:
        done = run(folder, *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"asking: {install.QUESTION}" in done.stdout
        told = service.status(home)
        assert (told.state, told.port, told.answering) == ("running", port, True) and told.pid is not None
        again = run(folder, "--venv", sys.prefix)  # model, host and port of before
        assert again.returncode == 0 and "runs already" in again.stdout, again.stderr
        assert service.status(home).pid == told.pid
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as answer:
            assert Path(told.model).stem.encode() in answer.read()
        server = Process.of(told.pid)
        assert server is not None
        server.send(signal.SIGKILL)
        assert server.wait(60)
        service.wait_until_answering(home, lambda _: None)
        assert service.status(home).crashes == 1
        assert run(folder, "stop").stdout == "stopped\n"
        assert run(folder, "start").returncode == 0
        assert run(folder, "status").stdout.startswith("running: process ")
    finally:
        stopped = run(folder, "stop")
    assert stopped.returncode == 0 and service.status(home).state == "stopped"
    service.refuse_taken_port("127.0.0.1", port)


def test_a_server_that_cannot_load_is_reported(tmp_path: Path) -> None:
    """The settings were spoilt by hand: one message with the log's end, no loop."""
    home = Home(tmp_path / "d")
    home.make()
    home.link_venv(Path(sys.prefix))
    home.save_settings({"model": str(tmp_path / "none.gguf"), "port": free_port(), "bogus": 1})
    done = run(home.root, "start")
    assert done.returncode == 1 and "does not stay up" in done.stderr and "bogus" in done.stderr
    assert service.status(home).state == "crashed"


def test_an_hour_of_work_is_refused_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that will not fit is named when it is planned, and not with --no-start: it may go elsewhere."""
    monkeypatch.setattr("ds4.cli.machine.available_memory", lambda: 10**6)
    for flags, refused in (([], True), (["--no-start"], False)):
        made = install.Install(install.parse(["--dir", str(tmp_path), "--model", str(CHECKPOINT), *flags]))
        made.home.make()
        ran: list[list[str]] = []
        monkeypatch.setattr(made, "_ds4", lambda words, failed, ran=ran: ran.append(words))
        monkeypatch.setattr(made, "_planned_bytes", lambda checkpoint, flags: 2 * 10**6)
        if refused:
            with pytest.raises(Ds4Error, match=r"oracle-a-.* takes"):
                made._model()
        else:
            made._model()
        assert [words[0] for words in ran] == ["preflight"] + ["quantize"] * (not refused)


@pytest.mark.parametrize("line", ["model = 1", "port = 'x'", "port = 70000"])
def test_settings_of_a_wrong_kind_are_named(tmp_path: Path, line: str) -> None:
    home = Home(tmp_path)
    home.make()
    home.toml.write_text(line if line.startswith("port") else f"{line}\nport = {free_port()}")
    with pytest.raises(UsageError, match=r"ds4\.toml.*" + line.split()[0]):
        install.run(["--dir", str(tmp_path), "--venv", sys.prefix])


def test_what_was_not_foreseen_is_one_line_too(tmp_path: Path) -> None:
    """A lock that cannot be opened: no traceback."""
    home = Home(tmp_path / "d")
    home.make()
    (home.var / "install.lock").mkdir()
    done = run(home.root, "--no-start", "--venv", sys.prefix)
    assert done.returncode == 1 and "install.lock" in done.stderr and "Traceback" not in done.stderr


def test_another_host_gets_a_key(tmp_path: Path) -> None:
    made = install.Install(install.parse(["--dir", str(tmp_path), "--host", "0.0.0.0"]))
    made.settings = {"model": "m.gguf"}
    made.home.make()
    made._settings()
    key = made.home.settings()["api_key"]
    assert len(key) >= 32
    made._settings()
    assert made.home.settings()["api_key"] == key


# -- the environment, with stand-ins for venv and pip


def test_an_environment_is_linked_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "d")
    home.make()
    calls: list[str] = []

    def fake(words: Sequence[str], log: Path, failed: str, check: bool = True) -> None:
        step = "venv" if "venv" in words else "pip" if "pip" in words else "compile"
        calls.append(step)
        if step == "venv":
            Path(words[-1]).mkdir()
        if step == "pip":
            source = Path(words[-1])
            assert (source / "ds4" / "cli" / "install.py").is_file() and (source / "cuda" / "common.cuh").is_file()
            assert not list(source.rglob("__pycache__"))
            if len(calls) < 3:
                raise Ds4Error(failed)

    monkeypatch.setattr(environment, "_run", fake)
    monkeypatch.setattr(environment, "_works", lambda target: not broken)
    broken: list[str] = []
    with pytest.raises(Ds4Error, match="network"):
        environment.make_environment(home, ROOT, lambda _: None)
    assert not home.venv.exists()
    (home.root / "env" / "older").mkdir()
    made = Path(environment.make_environment(home, ROOT, lambda _: None))
    assert calls == ["venv", "pip", "venv", "pip", "compile"]
    assert home.venv.resolve() == made and os.listdir(home.root / "env") == [made.name]
    environment.make_environment(home, ROOT, lambda _: None)
    assert len(calls) == 5  # nothing to do
    broken.append("its interpreter is gone")
    environment.make_environment(home, ROOT, lambda _: None)
    assert len(calls) == 8


@pytest.mark.long
def test_everything_from_nothing(tmp_path: Path) -> None:
    """As on a fresh machine: environment from the package index, embedded model, answer. Killed inside pip first."""
    folder, port = tmp_path / "d", str(free_port())
    with subprocess.Popen(words(folder, "--port", port), stdout=subprocess.PIPE, text=True) as p:
        assert p.stdout is not None
        next(line for line in p.stdout if "installing ds4" in line)
        p.send_signal(signal.SIGKILL)
    assert not (folder / "venv").exists()
    try:
        done = run(folder, "--port", port, timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"asking: {install.EMBEDDED_QUESTION}" in done.stdout and "(an empty answer)" not in done.stdout
        ds4 = folder / "venv" / "bin" / "ds4"
        assert "quantize" in subprocess.run([ds4, "--help"], capture_output=True, text=True, cwd="/").stdout
    finally:
        run(folder, "stop")


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fixture in the embedded model's place."""
    monkeypatch.setattr(embedded, "HOME", folder)
    (folder / "model").mkdir(parents=True)
    for path in CHECKPOINT.glob("*"):
        if path.suffix in (".json", ".safetensors") and path.name != "reference.safetensors":
            (folder / "model" / path.name).write_bytes(path.read_bytes())
    (folder / "base.toml").write_text('bits = 6\ngain = "norm"\n')
    (folder / "SHA256SUMS").write_text(embedded.sums())
    return folder / "model"


def test_the_embedded_model_is_copied_and_quantized_by_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stand_in(tmp_path / "embedded", monkeypatch)
    made = install.Install(install.parse(["--dir", str(tmp_path / "d"), "--venv", sys.prefix, "--no-start"]))
    made.home.make()
    made._environment()
    made._model()
    base = Path(made.settings["model"])
    report = json.loads((base.parent / f"{base.name}.report.json").read_text())
    assert report["gain"] == "norm" and {layer["bits"] for layer in report["layers"]} == {6}
    copy = Path(made.settings["engram_dir"])
    assert copy.parent == made.home.models and base.stem == copy.name
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == {p.name: p.read_bytes() for p in model.iterdir()}
    before = base.stat().st_mtime_ns
    made._model()  # again: nothing to do
    assert base.stat().st_mtime_ns == before
    # another model: another base
    (model.parent / "base.toml").write_text('bits = 5\ngain = "norm"\n')
    made._model()
    assert made.settings["model"] != str(base)


def test_a_damaged_or_absent_embedded_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stand_in(tmp_path / "embedded", monkeypatch)
    made = install.Install(install.parse(["--dir", str(tmp_path / "d")]))
    made.home.make()
    (model / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(FileFormatError, match=r"tokenizer\.json: is not the file that SHA256SUMS lists"):
        made._model()
    (model / "config.json").unlink()
    with pytest.raises(FileFormatError, match="embedded model is not there"):
        made._model()
    assert os.listdir(made.home.models) == []


def test_an_embedded_model_that_cannot_be_copied_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path / "embedded", monkeypatch)
    made = install.Install(install.parse(["--dir", str(tmp_path / "d")]))
    made.home.make()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ds4.cli.install.os.fsync", full)
    with pytest.raises(CapacityError, match="the disk is full"):
        made._model()
    assert os.listdir(made.home.models) == []


def test_kernels_tell_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal a line now and then; a kernel that does not compile ends it at once."""
    base = toy_base("oracle-a")
    builder = opened("fast", "greedy").builder
    monkeypatch.setattr(build, "TELL_EVERY_S", 0.0)
    monkeypatch.setattr(type(builder), "host", lambda *_: tmp_path)
    monkeypatch.setattr(type(builder), "gpu", lambda *_: tmp_path)
    _, n = build.build(str(base), str(CHECKPOINT))
    lines = capsys.readouterr().out.splitlines()
    assert n > 1 and lines == [f"      {i} of {n} kernel files" for i in range(1, n + 1)]

    def fails(*_: object) -> None:
        raise BuildError("norm.cu: no")

    monkeypatch.setattr(type(builder), "host", fails)
    monkeypatch.setattr(type(builder), "gpu", fails)
    with pytest.raises(BuildError, match=r"norm\.cu"):
        build.build(str(base), str(CHECKPOINT))
