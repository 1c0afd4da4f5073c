"""Start, stop and look at the server of an installation. Standard library only.

The truth is in the processes, not in the file: service.json names them with their start times, and each answer
compares those with what runs now.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds4.cli.domain import NONE, mounted
from ds4.cli.home import HOST, PORT, Home, key_of
from ds4.cli.processes import boot_id, locked
from ds4.cli.watchdog import CRASHED, GRACE_S, PAUSING, RUNNING, STOPPED, State
from ds4.errors import Ds4Error

NO_PROGRESS_S = 900.0  # loading may take minutes, but something moves
BUSY = "another start or stop (process {pid}) is at work; wait for it and try again"


@dataclass(frozen=True)
class Status:
    """What `install.sh status` says.

    Attributes:
        state: "running", "pausing" (crashed, next start is near), "stopped" or "crashed".
        answering: whether /health says that requests are answered.
        uptime_s: of the server process.
        why: how it ended, if it did.
        domain: name of the sidecar that is mounted, or "none".
    """

    state: str
    pid: int | None
    watchdog_pid: int | None
    host: str
    port: int
    model: str
    uptime_s: float
    answering: bool
    crashes: int
    why: str
    domain: str

    def line(self) -> str:
        where = f"http://{self.host}:{self.port}"
        if self.state == RUNNING:
            how = "" if self.answering else ", not answering yet"
            since = _duration(self.uptime_s)
            what = f"model {self.model}, domain {self.domain}"
            return f"running{how}: process {self.pid}, {where}, {what}, up {since}"
        if self.state == PAUSING:
            return f"crashed {self.crashes} times, about to start again: {self.why}"
        return self.state + (f": {self.why}" if self.why else "")

    def json(self) -> str:
        return json.dumps(asdict(self))


def label(home: Home) -> dict[str, Any]:
    """What a running server was started with; another label means that a restart is due."""
    settings = home.settings()
    own = {name: value for name, value in settings.items() if not isinstance(value, dict)}  # tables are no server's
    return {
        "host": settings.get("host", HOST),
        "port": settings.get("port", PORT),
        "model": str(settings.get("model", "")),
        "domain": mounted(settings),
        "environment": os.path.realpath(home.venv),
        "settings": key_of([json.dumps(own, sort_keys=True)]),
    }


def status(home: Home) -> Status:
    saved = State.load(home.var)
    if saved is None:
        settings = home.settings()
        where = settings.get("host", HOST), settings.get("port", PORT), str(settings.get("model", ""))
        return Status(STOPPED, None, None, *where, 0.0, False, 0, "", mounted(settings))
    kept = saved.keeper.alive
    served = saved.server is not None and saved.server.alive
    state, why = saved.state, saved.why
    if not kept and state in (RUNNING, PAUSING):
        if saved.keeper.boot == boot_id():
            state, why = CRASHED, "the watchdog was killed" + ("; its server is ending" if served else "")
        else:
            state, why = STOPPED, "the machine was started anew"
    told = saved.label
    return Status(
        state=state,
        pid=saved.server.pid if served and saved.server else None,
        watchdog_pid=saved.keeper.pid if kept else None,
        host=str(told.get("host", HOST)),
        port=int(told.get("port", PORT)),
        model=str(told.get("model", "")),
        uptime_s=max(time.time() - saved.since, 0.0) if served else 0.0,
        answering=state == RUNNING and served and health(home, 2.0)[0],
        crashes=saved.crashes,
        why=why if state != RUNNING else "",
        domain=str(told.get("domain", NONE)),
    )


def start(home: Home, command: Sequence[str], options: Sequence[str] = ()) -> bool:
    """Start `command` under a watchdog; False if it runs already with these settings, else it is restarted.

    Args:
        options: further flags of the watchdog.

    Raises:
        Ds4Error: the port is in use, or no watchdog comes up.
    """
    with locked(home.var / "control.lock", BUSY, wait_s=GRACE_S + 15):
        wanted = label(home)
        saved = State.load(home.var)
        if saved is not None and saved.keeper.alive and saved.label == wanted and saved.state != CRASHED:
            return False
        _stop(home)
        refuse_taken_port(wanted["host"], wanted["port"])
        with open(home.var / "watchdog.log", "ab") as log:
            words = [str(home.python), "-I", "-m", "ds4.cli.watchdog", "--dir", str(home.root)]
            keeper = subprocess.Popen(
                [*words, "--label", json.dumps(wanted), *options, "--", *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=home.root,
            )  # fmt: skip
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            now = State.load(home.var)
            if now is not None and now.keeper.pid == keeper.pid:
                return True
            if keeper.poll() is not None:
                break
            time.sleep(0.02)
        raise Ds4Error(f"the watchdog does not come up:\n{tail(home.var / 'watchdog.log')}")


def stop(home: Home) -> bool:
    """End watchdog and server for sure; False if neither ran."""
    if not home.var.is_dir():
        return False
    with locked(home.var / "control.lock", BUSY, wait_s=GRACE_S + 15):
        return _stop(home)


def _stop(home: Home) -> bool:
    saved = State.load(home.var)
    if saved is None:
        return False
    found = saved.keeper.alive
    if found and saved.keeper.end(GRACE_S + 10):  # it was killed: the state is what it was
        saved = State.load(home.var) or saved
    last = State.load(home.var) or saved
    for server in {s for s in (saved.server, last.server) if s is not None}:
        if server.alive:
            found = True
            server.end(GRACE_S)
    if found or saved.state in (RUNNING, PAUSING):  # the latter: both were killed and nobody wrote it down
        State(STOPPED, last.keeper, label=last.label, why="as asked").save(home.var)
    return found


def health(home: Home, timeout_s: float) -> tuple[bool, str]:
    """Whether requests are answered, and what /health said (empty: no answer)."""
    try:
        with _open(home, "/health", None, timeout_s) as answer:
            return answer.status == 200, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as e:
        return False, e.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return False, ""


def wait_until_answering(home: Home, tell: Callable[[str], None]) -> None:
    """Until /health says ok.

    Raises:
        Ds4Error: the server was given up, or nothing moved for a quarter of an hour. Has the log's end.
    """
    last, moved, told = "", time.monotonic(), ""
    while True:
        well, said = health(home, 5.0)
        if well:
            return
        now = State.load(home.var)
        if now is None or not now.keeper.alive:
            why = now.why if now else "its state is gone"
            raise Ds4Error(f"the server does not stay up: {why}\n{tail(home.var / 'server.log')}")
        if said != last:
            last, moved = said, time.monotonic()
        doing = _loading(said)
        if doing and doing != told:
            tell(doing)
            told = doing
        if time.monotonic() - moved > NO_PROGRESS_S:
            raise Ds4Error(f"the server does not answer; its log ends with\n{tail(home.var / 'server.log')}")
        time.sleep(0.2)


def ask(home: Home, question: str, max_tokens: int, timeout_s: float) -> str:
    """The answer of /v1/chat/completions.

    Raises:
        Ds4Error: the server refuses or does not answer.
    """
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0}
    try:
        with _open(home, "/v1/chat/completions", json.dumps(body).encode(), timeout_s) as answer:
            said = json.load(answer)
        message = said["choices"][0]["message"]
        return str(message.get("content") or message.get("reasoning_content") or "")
    except urllib.error.HTTPError as e:
        raise Ds4Error(f"the server refuses the question: {e.code} {e.read().decode('utf-8', 'replace')}") from e
    except (OSError, ValueError, KeyError, IndexError) as e:
        raise Ds4Error(f"the server does not answer the question ({e}); see {home.var / 'server.log'}") from e


def _open(home: Home, path: str, body: bytes | None, timeout_s: float) -> Any:
    settings = home.settings()
    host, port = str(settings.get("host", HOST)), settings.get("port", PORT)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    headers = {"Content-Type": "application/json"}
    if settings.get("api_key"):
        headers["Authorization"] = f"Bearer {settings['api_key']}"
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by a proxy: it is this machine
    return opener.open(urllib.request.Request(url, body, headers), timeout=timeout_s)


def _loading(said: str) -> str:
    try:
        progress = json.loads(said)["progress"]
        return f"loading: {progress['done']} of {progress['total']}" if progress["total"] else ""
    except (ValueError, TypeError, KeyError):
        return ""


def refuse_taken_port(host: str, port: int) -> None:
    """Say before anything slow that the port is in use, and by whom if that can be known.

    Raises:
        Ds4Error: it is, or the address is not this machine's.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
            s.listen(1)
    except OSError as e:
        holder = holder_of(port)
        by = f" by process {holder[0]} ({holder[1]})" if holder else ""
        if holder or e.errno == 98:
            raise Ds4Error(f"port {port} on {host} is in use{by}; stop that, or choose another with --port") from e
        raise Ds4Error(f"cannot listen on {host} port {port}: {e.strerror or e}") from e


def holder_of(port: int) -> tuple[int, str] | None:
    """Process id and name of who listens on a TCP port, as far as this user may see."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            words = row.split()
            if words[3] == "0A" and int(words[1].rsplit(":", 1)[1], 16) == port:  # 0A: listening
                inodes.add(f"socket:[{words[9]}]")
    for folder in Path("/proc").glob("[0-9]*") if inodes else ():
        try:
            if any(os.readlink(fd) in inodes for fd in (folder / "fd").iterdir()):
                return int(folder.name), (folder / "comm").read_text().strip()
        except OSError:
            continue
    return None


def tail(path: Path, n: int = 12) -> str:
    """The last lines of a log."""
    try:
        with open(path, "rb") as f:
            f.seek(max(path.stat().st_size - 8192, 0))
            return "\n".join("  " + line for line in f.read().decode("utf-8", "replace").splitlines()[-n:])
    except OSError:
        return "  (no log)"


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    parts = ((days, "d"), (h, "h"), (m, "min"), (s, "s"))
    shown = [f"{n} {unit}" for n, unit in parts if n][:2]
    return " ".join(shown) or "0 s"
