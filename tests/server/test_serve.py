"""ds4-server's command line: flags, ds4.toml, exit codes, signals."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from ds4.cli.machine import total_memory
from ds4.cli.model_flags import MOST_CHUNK, MOST_MB
from ds4.cli.serve import parse, run
from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError
from ds4.posttrain.log import read_log
from ds4.server.listen import is_loopback, listen
from tests.base.toys import toy_base, toy_dir


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of whoever runs the tests do not count."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_defaults() -> None:
    args = parse(["-m", "x.gguf"])
    assert (args.host, args.port, args.api_key, args.queue) == ("127.0.0.1", 8000, None, 32)
    assert (args.prefill, args.mem_budget_mb, args.engram_dir) == ("replay", None, None)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "ds4.toml").write_text(
        'model = "a.gguf"\nport = 9000\nqueue = 5\nmem-budget-mb = 77\nno_graph = true\nprefill = "full"\n'
    )
    args = parse(["--dir", str(tmp_path), "--port", "9001"])
    assert (args.model, args.port, args.queue, args.mem_budget_mb) == ("a.gguf", 9001, 5, 77)
    assert args.no_graph and args.prefill == "full"
    assert parse(["--dir", str(tmp_path), "-m", "b.gguf"]).model == "b.gguf"


def test_the_users_file_is_the_second_place(tmp_path: Path) -> None:
    home = tmp_path / "home" / ".config" / "ds4"
    home.mkdir(parents=True)
    (home / "ds4.toml").write_text('model = "home.gguf"\napi_key = "k"\nhost = "0.0.0.0"\n')
    args = parse(["--dir", str(tmp_path)])
    assert (args.model, args.api_key, args.host) == ("home.gguf", "k", "0.0.0.0")


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "192.168.1.5"], "--api-key"),
        (["--host", "::"], "--api-key"),
        (["--port", "65536"], "--port"),
        (["--queue", "-1"], "--queue"),
        (["--memory-floor-mb", "-1"], "--memory-floor-mb"),
        (["--memory-floor-mb", str((total_memory() or 0) >> 20)], "--memory-floor-mb .*less than this"),
        (["--prefix-memory-mb", "9" * 20], "--prefix-memory-mb 9{20}: must be between 0 and"),
        (["--prefix-dir", "p", "--prefix-disk-mb", "9" * 20], f"must be between 1 and {MOST_MB}"),
    ],
)
def test_wrong_flags_are_named(argv: list[str], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        parse(["-m", "x.gguf", *argv])


def test_a_floor_below_the_machines_memory() -> None:
    most = ((total_memory() or 0) >> 20) - 1
    assert parse(["-m", "x.gguf", "--memory-floor-mb", str(most)]).memory_floor_mb == most


TEXTS = (
    "model", "dir", "host", "api_key", "api_key_file", "admin_key", "reports", "prefix_dir", "log_requests",
    "posttrain", "zchain", "engram_dir",
)  # fmt: skip


@pytest.mark.parametrize("empty", ["", " "])
@pytest.mark.parametrize("name", TEXTS)
def test_an_empty_value_is_not_the_current_folder(
    name: str, empty: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the command line and in the file."""
    flag = "--" + name.replace("_", "-")
    (tmp_path / "ds4.toml").write_text(f'{name} = "{empty}"\n')
    ways = [[flag, empty], *([] if name == "dir" else [["--dir", str(tmp_path)]])]
    for words in ways:
        with pytest.raises(SystemExit) as e:
            parse([*([] if name == "model" else ["-m", "x.gguf"]), *words])
        assert e.value.code == 2 and re.search(f"{flag}: is empty", capsys.readouterr().err)


def test_a_chunk_has_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["-m", "x.gguf", "--chunk", str(MOST_CHUNK)]).chunk == MOST_CHUNK
    for wrong in (str(MOST_CHUNK + 1), "999999999", "0"):
        with pytest.raises(SystemExit) as e:
            parse(["-m", "x.gguf", "--chunk", wrong])
        assert e.value.code == 2
        assert f"--chunk: {wrong}: must be between 1 and {MOST_CHUNK}" in capsys.readouterr().err


def test_a_budget_of_nothing_is_a_usage_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On the command line and in the file."""
    (tmp_path / "ds4.toml").write_text("mem_budget_mb = 0")
    for argv in (["--mem-budget-mb", "0"], ["--mem-budget-mb", "-5"], ["--dir", str(tmp_path)]):
        with pytest.raises(SystemExit) as e:
            parse(["-m", "x.gguf", *argv])
        assert e.value.code == 2 and "--mem-budget-mb" in capsys.readouterr().err


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    for text, names in (("colour = 1", "colour"), ('port = "x"', "port"), ("port = ", "ds4.toml")):
        (tmp_path / "ds4.toml").write_text('model = "a"\n' + text)
        with pytest.raises(UsageError, match=names):
            parse(["--dir", str(tmp_path)])
    (tmp_path / "ds4.toml").write_text('model = "a"\nprefill = "sometimes"')
    with pytest.raises(SystemExit) as e:  # the parser of the flags says so
        parse(["--dir", str(tmp_path)])
    assert e.value.code == 2


def test_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        parse([])
    assert e.value.code == 2 and "--model" in capsys.readouterr().err


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_a_port_in_use_is_one_clear_error() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Ds4Error, match=f"port {port} on 127.0.0.1 is in use"):
            run(["-m", "x.gguf", "--port", str(port)])
    with pytest.raises(UsageError, match="--host"):
        listen("no.such.host.invalid", 0)


def launch(tmp_path: Path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ds4.cli.serve", "--port", "0", *argv],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DS4_DRIVER": os.environ.get("DS4_DRIVER", "simt")},
    )


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 40)
    process = launch(tmp_path, "-m", str(tmp_path / "bad.gguf"))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert [line for line in said.splitlines() if line.startswith("error: ")] == [said.splitlines()[-1]]
    assert "bad.gguf" in said.splitlines()[-1] and "Traceback" not in said
    assert "listening" not in said


def test_a_model_is_looked_at_before_listening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Missing, a folder, a pipe, cut short, without its shards: said at once, by the right class, with the name."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("ds4.cli.serve.make_server", lambda *_: pytest.fail("the server was made"))
    os.mkfifo(tmp_path / "pipe.gguf")
    base = toy_base("oracle-a", bits=6)
    (tmp_path / "short.gguf").write_bytes(base.read_bytes()[:-4096])
    (tmp_path / "alone.gguf").write_bytes(base.read_bytes())
    for name in ("missing.gguf", ".", "pipe.gguf", "short.gguf", "alone.gguf"):
        with pytest.raises(Ds4Error, match=re.escape(str(tmp_path))):
            run(["-m", str(tmp_path / name), "--port", "0"])
    assert "listening" not in caplog.text


def test_an_admin_key_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the server listens; the file of ds4.toml is the flag's."""
    monkeypatch.setattr("ds4.cli.serve.listen", lambda *_: pytest.fail("it listens"))
    path = tmp_path / "admin.key"
    path.write_text("a-key-of-both-kinds")
    path.chmod(0o600)
    (tmp_path / "ds4.toml").write_text(f'model = "x.gguf"\nadmin_key = "{path}"\n')
    with pytest.raises(UsageError, match="would then give orders too"):
        run(["--dir", str(tmp_path), "--api-key", "a-key-of-both-kinds"])
    path.chmod(0o644)
    with pytest.raises(UsageError, match="others may use this key"):
        run(["--dir", str(tmp_path)])


def test_a_night_that_is_not_there_is_named_before_listening(tmp_path: Path) -> None:
    (tmp_path / "nightly.json").write_text('{"kind": "ds4-nightly", "version": 1}')
    (tmp_path / "current").symlink_to("nights/2026-11-30")
    flags = ["-m", str(toy_base("oracle-a", bits=6)), "--engram-dir", str(toy_dir("oracle-a")), "--port", "0"]
    with pytest.raises(FileFormatError, match="ds4 nightly rollback"):
        run([*flags, "--posttrain", str(tmp_path)])


def test_from_the_command_to_an_answer_to_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole program, with SIGTERM as its end."""
    monkeypatch.undo()  # the kernel cache lies in the home folder
    base = toy_base("oracle-a", bits=6)
    flags = ["--api-key", "k", "--log-requests", str(tmp_path / "log"), "--memory-floor-mb", "7"]
    process = launch(tmp_path, "-m", str(base), "--engram-dir", str(toy_dir("oracle-a")), *flags)
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        match = re.search(r"listening on http://127\.0\.0\.1:(\d+)", said)
        assert match, said
        url = f"http://127.0.0.1:{match[1]}"
        for line in process.stderr:
            if "is loaded" in line:
                break
        health = httpx.get(url + "/health", timeout=30).json()
        assert health["status"] == health["memory"]["state"] == "ok" and health["memory"]["floor_bytes"] == 7 << 20
        body = {"prompt": "hello", "max_tokens": 4}
        assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 401
        key = {"Authorization": "Bearer k"}
        answer = httpx.post(url + "/v1/completions", json=body, headers=key, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["total_tokens"] >= 2
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0, rest
        assert rest.splitlines()[-1].endswith("stopped")
        assert list(read_log(tmp_path / "log")) == [answer.json()["id"]]
    finally:
        process.kill()
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", int(match[1]))) != 0


def test_errors_of_the_run_are_what_the_worker_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CapacityError("too large")

    monkeypatch.setattr("ds4.cli.serve.open_engine", fail)
    base = toy_base("oracle-a", bits=6)
    with pytest.raises(CapacityError, match="too large"):
        run(["-m", str(base), "--engram-dir", str(toy_dir("oracle-a")), "--port", "0"])
