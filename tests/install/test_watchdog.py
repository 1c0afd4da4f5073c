"""The keeper with small children, and start, stop and status over it. No test waits for a clock."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds4.cli import service, watchdog
from ds4.cli.home import Home
from ds4.cli.processes import Process, boot_id, locked
from ds4.cli.watchdog import CRASHED, MAX_CRASHES, PAUSING, RUNNING, STOPPED, State
from ds4.errors import Ds4Error

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]
STUBBORN = [
    sys.executable, "-c",
    "import signal, pathlib, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "pathlib.Path(sys.argv[1]).touch()\nwhile True: signal.pause()",
]  # fmt: skip


def until(true: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for a condition that must come true; the limit only ends a broken run."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "d")
    made.make()
    made.save_settings({"port": free_port()})
    made.link_venv(Path(sys.prefix))
    yield made
    service.stop(made)


def state(home: Home) -> State:
    found = State.load(home.var)
    assert found is not None
    return found


def counting(home: Home, code: int) -> list[str]:
    """A server that notes each start and ends with `code`."""
    text = f"open({str(home.var / 'starts')!r}, 'a').write('x'); raise SystemExit({code})"
    return [sys.executable, "-c", text]


def run_watchdog(home: Home, command: list[str], *flags: str) -> int:
    words = [sys.executable, "-m", "ds4.cli.watchdog", "--dir", str(home.root), *flags, "--", *command]
    return subprocess.run(words, stderr=subprocess.DEVNULL, timeout=60).returncode


def test_five_crashes_in_a_row_and_no_sixth(home: Home) -> None:
    assert run_watchdog(home, counting(home, 1), "--backoff", "0.001") == 1
    assert (home.var / "starts").read_text() == "x" * MAX_CRASHES
    now = state(home)
    assert (now.state, now.crashes) == (CRASHED, MAX_CRASHES)
    assert "exit code 1" in now.why
    told = service.status(home)
    assert told.state == CRASHED and told.pid is None and "exit code 1" in told.line()


def test_crashes_of_a_steady_server_do_not_add_up(home: Home) -> None:
    """With a steady time of 0 every run was long enough: the ninth start is reached, and ends it with 0."""
    mark = home.var / "starts"
    text = f"f = open({str(mark)!r}, 'a+'); f.write('x'); f.seek(0); raise SystemExit(0 if len(f.read()) > 8 else 1)"
    assert run_watchdog(home, [sys.executable, "-c", text], "--backoff", "0.001", "--steady", "0") == 0
    assert mark.read_text() == "x" * 9
    assert state(home).state == STOPPED


def test_pauses_grow(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(watchdog.Watchdog, "_pause", lambda self, s: pauses.append(s))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        assert watchdog.Watchdog(home.var, counting(home, 3), {}, 20.0, 300.0).run() == 1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        (home.var / watchdog.STATE).unlink()  # it names this process as the keeper: `stop` would end the tests
    assert pauses == [20.0, 40.0, 60.0, 60.0]  # doubled, at most a minute


def test_wrong_settings_are_not_tried_again(home: Home) -> None:
    assert run_watchdog(home, counting(home, 2)) == 1
    assert (home.var / "starts").read_text() == "x"
    assert state(home).state == CRASHED and "server.log" in state(home).why


def test_a_command_that_does_not_exist(home: Home) -> None:
    assert run_watchdog(home, ["/no/such/program"]) == 1
    assert state(home).state == CRASHED and "/no/such/program" in state(home).why


def test_one_watchdog_a_folder(home: Home) -> None:
    with locked(home.var / "watchdog.lock", "busy"):
        assert run_watchdog(home, counting(home, 0)) == 1
    assert not (home.var / "starts").exists()


def test_start_status_stop(home: Home) -> None:
    port = free_port()
    home.save_settings({"port": port, "model": "m.gguf"})
    assert service.start(home, SLEEPER)
    until(lambda: state(home).server)
    told = service.status(home)
    assert (told.state, told.port, told.model, told.answering) == (RUNNING, port, "m.gguf", False)
    assert told.pid is not None and told.watchdog_pid is not None
    assert f"process {told.pid}" in told.line() and f":{port}" in told.line() and "m.gguf" in told.line()
    assert json.loads(told.json())["pid"] == told.pid
    both = [Process.of(told.pid), Process.of(told.watchdog_pid)]
    assert not service.start(home, SLEEPER)  # once is enough
    assert service.status(home).pid == told.pid
    assert service.stop(home)
    assert not any(p is not None and p.alive for p in both)
    assert service.status(home).state == STOPPED
    assert not service.stop(home)


def test_other_settings_restart_the_server(home: Home) -> None:
    home.save_settings({"model": "a.gguf", "port": free_port()})
    service.start(home, SLEEPER)
    first = state(home).keeper
    home.save_settings({"model": "b.gguf", "port": free_port()})
    assert service.start(home, SLEEPER)
    assert not first.alive
    assert service.status(home).model == "b.gguf"


def test_a_server_that_does_not_want_to_end_is_killed(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper is killed first, so that only `stop` is left to deal with the server."""
    mark = home.var / "ready"
    service.start(home, [*STUBBORN, str(mark)])
    until(mark.exists)
    server = state(home).server
    assert server is not None
    state(home).keeper.send(signal.SIGKILL)
    until(lambda: not state(home).keeper.alive)
    assert server.alive  # it ignores the SIGTERM that the kernel sends it
    assert service.status(home).state == CRASHED
    monkeypatch.setattr(service, "GRACE_S", 0.01)
    assert service.stop(home)
    assert not server.alive


def test_the_server_goes_with_its_watchdog(home: Home) -> None:
    service.start(home, SLEEPER)
    until(lambda: state(home).server)
    server = state(home).server
    assert server is not None
    state(home).keeper.send(signal.SIGKILL)
    assert server.wait(30)
    told = service.status(home)
    assert told.state == CRASHED and "watchdog was killed" in told.line()
    assert not service.stop(home)  # nothing to end, and nothing left to report
    assert service.status(home).state == STOPPED
    assert service.start(home, SLEEPER)  # and it can be started again
    assert service.status(home).state == RUNNING


def test_a_killed_server_is_started_again(home: Home) -> None:
    home.save_settings({"port": free_port()})
    service.start(home, SLEEPER, ["--backoff", "0.01"])
    until(lambda: state(home).server)
    first = state(home).server
    assert first is not None
    first.send(signal.SIGKILL)
    until(lambda: state(home).server not in (None, first))
    now = state(home)
    assert now.state == RUNNING and now.crashes == 1 and "SIGKILL" in now.why


def test_stop_between_two_starts(home: Home) -> None:
    service.start(home, counting(home, 1), ["--backoff", "3600"])
    until(lambda: state(home).state == PAUSING and state(home).crashes)
    assert "about to start again" in service.status(home).line()
    assert service.stop(home)
    assert service.status(home).state == STOPPED


def test_a_number_used_again_is_not_ours(home: Home) -> None:
    """A state that names this test's process with another start time or another boot: it must not be signalled."""
    me = Process.of(os.getpid())
    assert me is not None
    for other in (Process(me.pid, me.ticks + 1, me.boot), Process(me.pid, me.ticks, "another boot")):
        assert not other.alive and not other.send(signal.SIGKILL) and other.wait(0)
        State(RUNNING, other, other).save(home.var)
        told = service.status(home)
        assert told.state == (CRASHED if other.boot == boot_id() else STOPPED)
        assert told.pid is None and told.watchdog_pid is None
        assert not service.stop(home)


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = Process.of(child.pid)
    if process is not None:
        assert process.wait(30)
        assert not process.alive and Process.of(child.pid) is None
    child.wait()


@pytest.mark.parametrize("text", ["", "{}", '{"state": "running"', '{"state":"running","keeper":{"pid":1}}', "[1]"])
def test_a_broken_state_file_is_no_state(home: Home, text: str) -> None:
    (home.var / watchdog.STATE).write_text(text)
    assert service.status(home).state == STOPPED
    assert not service.stop(home)


def test_two_starts_at_once(home: Home) -> None:
    """The second waits for the first, then finds the server running."""
    home.save_settings({"port": free_port()})
    text = (
        "import sys; from ds4.cli import service; from ds4.cli.home import Home; from pathlib import Path; "
        f"print(service.start(Home(Path({str(home.root)!r})), {SLEEPER!r}))"
    )
    both = [subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(p.communicate(timeout=60)[0].strip() for p in both) == ["False", "True"]


def test_a_long_log_is_shortened(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with open(log, "ab") as writer:  # as the server holds it
        writer.write(b"old\n")
        writer.truncate(watchdog.LOG_BYTES + 1)
        writer.flush()
        watchdog._shorten(log)
        assert log.stat().st_size == 0 and (tmp_path / "server.log.1").stat().st_size == watchdog.LOG_BYTES + 1
        writer.write(b"new\n")
        writer.flush()
    assert log.read_bytes() == b"new\n"


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(Ds4Error, match=rf"port {port} .* in use by process {os.getpid()} .*--port"):
            service.refuse_taken_port("127.0.0.1", port)
    service.refuse_taken_port("127.0.0.1", port)
