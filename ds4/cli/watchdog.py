"""The server's keeper: starts it, starts it again when it crashes, gives up after five crashes in a row.

    python -m ds4.cli.watchdog --dir D -- COMMAND ARGS...

It owns D/var/service.json (who runs, since when, how it ended), D/var/server.log and the lock D/var/watchdog.lock;
ds4/cli/service.py starts, stops and reads it. One process, one child: if the keeper is killed, the server gets
SIGTERM from the kernel, so neither outlives the other unnoticed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ds4.cli.processes import Process, locked, own_child, write_file
from ds4.errors import Ds4Error

MAX_CRASHES = 5
BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
STEADY_S = 300.0  # a server that lived this long has not crashed "in a row"
GRACE_S = 40.0  # a server gets 30 s to end its requests, and a little to end itself
LOG_BYTES = 16 << 20
STATE = "service.json"

RUNNING, PAUSING, STOPPED, CRASHED = "running", "pausing", "stopped", "crashed"


@dataclass(frozen=True)
class State:
    """What service.json says.

    Attributes:
        state: "running", "pausing" (between a crash and the next start), "stopped" or "crashed" (given up).
        keeper, server: the two processes; server None while there is none.
        since: Unix time of the server's last start.
        crashes: in a row.
        why: how the server ended last, in words.
        label: what `start` was asked for (host, port, model, ...).
    """

    state: str
    keeper: Process
    server: Process | None = None
    since: float = 0.0
    crashes: int = 0
    why: str = ""
    label: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        write_file(folder / STATE, json.dumps(asdict(self)) + "\n")

    @staticmethod
    def load(folder: Path) -> State | None:
        """The state in D/var; None if there is none or it cannot be understood (written by another version)."""
        try:
            raw = json.loads((folder / STATE).read_text(encoding="utf-8"))
            server = raw["server"]
            return State(
                **{**raw, "keeper": Process(**raw["keeper"]), "server": Process(**server) if server else None}
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None


class Watchdog:
    """Keeps one command running.

    Args:
        folder: D/var.
        command: the server.
        label: kept in the state for `status`.
        backoff_s: the first pause; each next one is twice as long, up to a minute.
        steady_s: a run at least this long sets the count of crashes back.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], label: dict[str, Any], backoff_s: float, steady_s: float
    ) -> None:
        me = Process.of(os.getpid())
        assert me is not None
        self._folder, self._command = folder, list(command)
        self._backoff_s, self._steady_s = backoff_s, steady_s
        self._state = State(PAUSING, me, label=label)
        self._ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}

    def run(self) -> int:
        """Until the server ends by itself (0), somebody asks for the end (0), or it crashes too often (1)."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._ends | {signal.SIGCHLD})  # taken one by one, in `_next`
        crashes = 0
        while True:
            started = time.monotonic()
            try:
                with open(self._folder / "server.log", "ab") as log:
                    child = subprocess.Popen(
                        self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        preexec_fn=own_child(signal.SIGTERM),
                    )  # fmt: skip
            except OSError as e:
                return self._give_up(f"{self._command[0]} cannot be started: {e.strerror or e}", crashes)
            self._note(RUNNING, server=Process.of(child.pid), since=time.time(), crashes=crashes)
            self._say(f"started, process {child.pid}")
            if not self._watch(child):
                self._end(child)
                return self._stop("as asked")
            why = _ending(child.returncode)
            self._say(why)
            if child.returncode == 0:
                return self._stop(why)
            if child.returncode == 2:  # a wrong setting does not get right by trying again
                return self._give_up(f"{why}: its settings are wrong, see server.log", crashes + 1)
            crashes = 1 if time.monotonic() - started >= self._steady_s else crashes + 1
            if crashes >= MAX_CRASHES:
                return self._give_up(f"{why}, the {MAX_CRASHES}th time in a row", crashes)
            pause = min(self._backoff_s * 2 ** (crashes - 1), MAX_BACKOFF_S)
            self._note(PAUSING, server=None, crashes=crashes, why=why)
            self._say(f"crash {crashes} of {MAX_CRASHES}; next start in {pause:g} s")
            if self._pause(pause):
                return self._stop("as asked, between two starts")

    def _watch(self, child: subprocess.Popen[bytes]) -> bool:
        """Wait for the child; False when somebody asks for the end first."""
        while child.poll() is None:
            number = self._next(30.0)
            if number in self._ends:
                return False
            _shorten(self._folder / "server.log")
        return True

    def _pause(self, seconds: float) -> bool:
        """Whether somebody asked for the end meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._next(left) in self._ends:
                return True
        return False

    def _next(self, seconds: float) -> int | None:
        taken = signal.sigtimedwait(self._ends | {signal.SIGCHLD}, seconds)
        return None if taken is None else taken.si_signo

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._say(f"the server does not end in {GRACE_S:g} s: killed")
            child.kill()
            child.wait()

    def _stop(self, why: str) -> int:
        self._note(STOPPED, server=None, why=why)
        self._say(f"stopped: {why}")
        return 0

    def _give_up(self, why: str, crashes: int) -> int:
        self._note(CRASHED, server=None, why=why, crashes=crashes)
        self._say(f"giving up: {why}")
        return 1

    def _note(self, state: str, **changes: Any) -> None:
        self._state = replace(self._state, state=state, **changes)
        try:
            self._state.save(self._folder)
        except Ds4Error as e:  # a full disk is no reason to let the server go
            self._say(f"state not written: {e}")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} watchdog: {text}", file=sys.stderr, flush=True)


def _ending(code: int) -> str:
    if code >= 0:
        return f"the server ended with exit code {code}"
    try:
        return f"the server was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"the server was killed by signal {-code}"


def _shorten(log: Path) -> None:
    """Keep the log under 16 MB: the server appends through its own handle, so the file is copied and emptied."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > LOG_BYTES:
            shutil.copyfile(log, log.with_name(log.name + ".1"))
            os.truncate(log, 0)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="ds4.cli.watchdog", description="Keep a command running.")
    p.add_argument("--dir", type=Path, required=True, metavar="D", help="folder whose var/ holds state and logs")
    p.add_argument("--label", type=json.loads, default={}, help="JSON object kept in the state")
    p.add_argument("--backoff", type=float, default=BACKOFF_S, metavar="S", help="seconds before the second start")
    p.add_argument("--steady", type=float, default=STEADY_S, metavar="S", help="a longer run is no crash in a row")
    p.add_argument("command", nargs="+", metavar="COMMAND")
    args = p.parse_args(argv)
    folder = args.dir / "var"
    try:
        with locked(folder / "watchdog.lock", f"another watchdog (process {{pid}}) runs in {args.dir}"):
            return Watchdog(folder, args.command, args.label, args.backoff, args.steady).run()
    except Ds4Error as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
