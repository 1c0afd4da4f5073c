"""Borrowing a server's device: kept while it is used, given back, known to be lost; errors that say what is wrong."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ds4.errors import Ds4Error, UsageError
from ds4.posttrain.borrow import InUse, LeaseLost, Server, ServerAway
from ds4.server.worker import Worker
from tests.server.standin import ADMIN_KEY, StandIn, ids_of, serve, until
from tests.server.test_lend import Opener, lending
from tests.server.test_life import Gate


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "admin.key"
    path.write_text(ADMIN_KEY + "\n")
    path.chmod(0o600)
    return path


def test_borrowed_kept_and_returned(key: Path) -> None:
    """For three times its lease; it hears that somebody waits, who is answered when it has given the device back."""
    opener = Opener()
    heard: list[int] = []
    with lending(opener) as (served, pool):
        server = Server(served.url, key)
        with server.borrow(0.6, purpose="a night", on_waiting=heard.append) as lease:
            assert server.health()["lent"]["for"] == "a night" and lease.waiting == 0
            time.sleep(1.8)
            lease.check()
            assert opener.made[0].closed and len(opener.made) == 1
            answer = pool.submit(served.chat)
            until(lambda: lease.waiting == 1)
            until(lambda: heard)
            assert heard[0] == 1 and server.reload()["status"] == "lent"
        assert answer.result().status_code == 200 and len(opener.made) == 2
        assert not lease.lost and server.reload()["status"] == "ok" and server.health()["status"] == "ok"
        with pytest.raises(ValueError, match="of the borrower's own"), server.borrow(5):
            raise ValueError("of the borrower's own")
        until(lambda: served.worker.state == "ready")


def test_a_lease_that_is_lost_is_known(key: Path) -> None:
    """Taken back by the server, or by the end of it; in the second case only when the lease would be over."""
    with serve(StandIn(ids_of("x"))) as served:
        server = Server(served.url, key)
        with server.borrow(0.6) as lease:
            lease.check()
            served.worker.give_back(lease.id)
            until(lambda: lease.lost)
            with pytest.raises(LeaseLost, match="no such lease"):
                lease.check()
        with server.borrow(0.9) as lease:
            served.admin(f"lend/{lease.id}/keep", {"lease_s": 3600})
            time.sleep(0.1)
            lease._server._port = unused()  # nothing answers any more
            asked = time.monotonic()
            until(lambda: lease.lost)
            assert 0.5 < time.monotonic() - asked < 10
            with pytest.raises(LeaseLost, match="does not answer"):
                lease.check()


def test_one_that_cannot_be_had_now(key: Path) -> None:
    """Lent to somebody else; in use for longer than one would wait."""
    gate = Gate(0)
    with lending(Opener(gate), gate) as (served, pool):
        server = Server(served.url, key)
        with server.borrow(30), pytest.raises(InUse, match="lent to ds4 nightly already"), server.borrow(30):
            pass
        until(lambda: served.worker.state == "ready")
        runs = pool.submit(served.chat)
        assert gate.reached.wait(30)
        with pytest.raises(InUse, match="in use"), server.borrow(30, wait_s=0.2):
            pass
        gate.open.set()
        assert runs.result().status_code == 200


def unused() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Other(BaseHTTPRequestHandler):
    """A server that is not ours: pages, or JSON of its own."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(404 if self.command == "POST" else 200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def other(body: bytes) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), type("Made", (Other,), {"body": body}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"status": 7}', b'{"error": "no"}', b"\xff"])
def test_what_is_no_ds4_server(key: Path, body: bytes) -> None:
    with other(body) as url:
        server = Server(url, key)
        for ask in (server.health, server.reload, functools.partial(enter, server)):
            with pytest.raises(ServerAway, match=url):
                ask()


def enter(server: Server) -> None:
    with server.borrow(1, wait_s=0.1):
        pytest.fail("nothing can have been lent")


def test_nobody_is_there(key: Path) -> None:
    server = Server(f"http://127.0.0.1:{unused()}", key)
    for ask in (server.health, server.reload, functools.partial(enter, server)):
        with pytest.raises(ServerAway, match="is it running"):
            ask()
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        with pytest.raises(ServerAway, match=r"no answer to /admin/reload within 0\.2 s"):
            Server(f"http://127.0.0.1:{deaf.getsockname()[1]}", key).reload(0.2)


def test_the_wrong_key(key: Path) -> None:
    with serve(StandIn()) as served:
        key.write_text("another-key-of-tests")
        with pytest.raises(UsageError, match="the admin key is wrong"):
            enter(Server(served.url, key))
        key.chmod(0o644)
        with pytest.raises(UsageError, match="others may use this key"):
            Server(served.url, key)
    key.chmod(0o600)
    with serve(StandIn(), admin_key=None) as served, pytest.raises(UsageError, match="--admin-key"):
        Server(served.url, key).reload()


def test_a_reload_that_failed_says_why(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(engine: object) -> None:
        raise Ds4Error("gr_L00.bin: is cut off")

    with (
        serve(StandIn(), remount=refuse) as served,
        pytest.raises(Ds4Error, match=r"mounted stays: gr_L00\.bin: is cut"),
    ):
        Server(served.url, key).reload()
    with serve(StandIn()) as served:
        monkeypatch.setattr(Worker, "_check_orders", lambda self: self.no_such_thing)
        with pytest.raises(Ds4Error, match="internal error"):
            Server(served.url, key).reload()


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000", "https://127.0.0.1:8000", "http://127.0.0.1", "http://127.0.0.1:8000/v1", "http://:8000",
        "http://127.0.0.1:port", "http://me:secret@127.0.0.1:8000", "http://[::1:8000", "http://127.0.0.1:99999",
    ],
)  # fmt: skip
def test_what_is_no_address(key: Path, url: str) -> None:
    with pytest.raises(UsageError, match="write it as http://127"):
        Server(url, key)


@pytest.mark.parametrize("host", ["192.0.2.7", "no.such.host.invalid", "0.0.0.0", "[2001:db8::7]", "a" * 70])
def test_another_machine_is_not_asked(key: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by a packet: the key must not leave."""
    monkeypatch.setattr("http.client.HTTPConnection.connect", lambda self: pytest.fail("it connects"))
    with pytest.raises(UsageError, match="is not this machine"):
        Server(f"http://{host}:8000", key)


def test_addresses_of_this_machine(key: Path) -> None:
    """Any of them: those of its interfaces too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind((socket.gethostname(), 0))
        own = s.getsockname()[0]
    for host in ("127.0.0.1", "localhost", "127.9.9.9", "[::1]", own):
        Server(f"http://{host}:8000/", key)
