"""The other side of a server's `/admin/`: a night's job has it mount what was solved, and borrows its device.

    server = Server("http://127.0.0.1:8000", "admin.key")
    with server.borrow(lease_s=60) as lease:
        while there is more to do:
            lease.check()                         # raises where the lease is lost
            if lease.waiting: break               # somebody waits: give back, borrow again later
            one step
        close the engine, give back its memory
    server.reload()

The lease lives as long as it is kept alive, which a thread does; a borrower that dies is noticed by its silence. Only
a server on this machine is asked: what is borrowed is this machine's device, and the key is sent as it is.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ds4.errors import Ds4Error, UsageError
from ds4.posttrain.admin_key import read_key

log = logging.getLogger("ds4.posttrain")
ANSWER_S = 30.0  # what needs no device is answered within this
CLOSE_S = 120.0  # closing an engine takes no longer
RELOAD_S = 3600.0  # a reload waits for the request that runs, and for a model that loads
WAIT_S = 3600.0  # for the requests that came before


class ServerAway(Ds4Error):
    """Nothing answers there, or nothing that is a ds4-server."""


class InUse(Ds4Error):
    """The device cannot be lent now: it is lent, or requests that came before are not done. Try again later."""


class LeaseLost(Ds4Error):
    """The server has taken its device back, or is no more: the borrower must leave the device now."""


class _Refused(Ds4Error):
    """An error that the server answered."""

    def __init__(self, status: int, code: object, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Lease:
    """The device, borrowed. Its methods are for any thread.

    Attributes:
        id: what the server calls it.
        waiting: requests that wait for the device, as of the last sign of life.
    """

    def __init__(self, server: Server, lease_id: str, lease_s: float, waiting: int) -> None:
        self.id, self.waiting = lease_id, waiting
        self._server, self._lease_s, self._alive = server, lease_s, time.monotonic()
        self._lost: str | None = None
        self._end = threading.Event()

    @property
    def lost(self) -> bool:
        """Whether the device is somebody else's again."""
        return self._lost is not None

    def check(self) -> None:
        """To be called between two steps.

        Raises:
            LeaseLost: as `lost`; says why.
        """
        if self._lost is not None:
            raise LeaseLost(f"{self._server.url}: the device is not lent any more ({self._lost})")

    def keep_alive(self, on_waiting: Callable[[int], object] | None) -> None:
        """Until `end`: a sign of life at once, three a lease, and more where one was not answered."""
        pause = 0.0
        while not self._end.wait(pause):
            asked = time.monotonic()
            try:
                told = self._server.ask(f"/admin/lend/{self.id}/keep", {}, min(self._lease_s / 3, ANSWER_S))
            except _Refused as e:
                if e.status == 404:
                    self._lost = str(e)
                    return
                why = str(e)
            except Ds4Error as e:
                why = str(e)
            else:
                # the server counts from when it heard of us, which is not before this
                self._alive, pause = asked, self._lease_s / 3
                self.waiting = _number(told, "waiting")
                if self.waiting and on_waiting is not None:
                    on_waiting(self.waiting)
                continue
            if time.monotonic() - self._alive > self._lease_s:
                self._lost = f"the server does not answer: {why}"
                return
            pause = min(self._lease_s / 10, 1.0)

    def end(self) -> None:
        self._end.set()


class Server:
    """A ds4-server of this machine.

    Args:
        url: http://HOST:PORT, an address of this machine.
        admin_key: the file that the server was given as --admin-key.

    Raises:
        UsageError: no such address here, or no key that can be used.
    """

    def __init__(self, url: str, admin_key: str | Path) -> None:
        self.url = url.rstrip("/")
        self._host, self._port = _address(url)
        self._key = read_key(Path(admin_key))

    def health(self) -> dict[str, Any]:
        """What /health says, whatever its status.

        Raises:
            ServerAway: nothing answers, or something else than a ds4-server.
        """
        _, told = self._talk("GET", "/health", None, ANSWER_S, {})
        if not isinstance(told.get("status"), str) or "queue" not in told:
            raise ServerAway(f"{self.url}: /health is not a ds4-server's")
        return told

    def check(self) -> None:
        """Whether a server answers there and takes this key; nothing is changed.

        Raises:
            ServerAway, UsageError: as `reload`.
        """
        try:
            self.ask("/admin/lend/none/keep", {"lease_s": 1}, ANSWER_S)
        except _Refused as e:
            if e.code != "lease_over":
                raise

    def reload(self, wait_s: float = RELOAD_S) -> dict[str, Any]:
        """Have the server mount what its folders have now; returns when that is so, with what is mounted. While the
        device is lent the server will do so when it is back, and "status" is "lent".

        Raises:
            ServerAway: as `health`.
            UsageError: the server takes no orders, or not with this key.
            Ds4Error: it could not be mounted, and why; what was mounted stays.
        """
        return self.ask("/admin/reload", {}, wait_s)

    @contextlib.contextmanager
    def borrow(
        self,
        lease_s: float = 60.0,
        *,
        purpose: str = "ds4 nightly",
        wait_s: float = WAIT_S,
        on_waiting: Callable[[int], object] | None = None,
    ) -> Iterator[Lease]:
        """The device, from when the requests that came before are answered to the end of the block. The borrower's
        engine must be gone by then, and its memory with it.

        Args:
            lease_s: silence after which the server takes the device back.
            purpose: what /health shows.
            wait_s: for requests that came before.
            on_waiting: called, in the lease's thread, with the number of requests that wait, again and again.

        Raises:
            InUse: it is lent to somebody else, or was in use all the time.
            ServerAway, UsageError: as `reload`.
        """
        wanted = {"for": purpose, "lease_s": lease_s, "wait_s": wait_s}
        try:
            told = self.ask("/admin/lend", wanted, wait_s + CLOSE_S)
        except _Refused as e:
            if e.code in ("lent_already", "device_in_use"):
                raise InUse(str(e)) from e
            raise
        lease = Lease(self, str(told.get("lease")), lease_s, _number(told, "waiting"))
        keeper = threading.Thread(target=lease.keep_alive, args=(on_waiting,), name="ds4-lease", daemon=True)
        keeper.start()
        try:
            yield lease
        finally:
            lease.end()
            keeper.join(ANSWER_S)
            if not lease.lost:
                try:
                    self.ask(f"/admin/lend/{lease.id}/return", {}, ANSWER_S)
                except Ds4Error as e:  # the server takes it back by itself when the lease has run out
                    log.warning("warning: the device could not be returned: %s", e)

    def ask(self, path: str, body: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """The answer to a POST with the key.

        Raises:
            UsageError: the server takes no orders, or not with this key.
            ServerAway: as `health`.
            Ds4Error: any other error that it answers.
        """
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        status, told = self._talk("POST", path, json.dumps(body).encode(), timeout_s, headers)
        if status < 300:
            return told
        error = told.get("error")
        if not isinstance(error, dict) or not isinstance(error.get("message"), str):
            raise ServerAway(f"{self.url}: answers {status} to {path}, and not as a ds4-server does")
        message = f"{self.url}: {error['message']}"
        if status in (401, 403):
            raise UsageError(f"{message} (--admin-key is the file that the server has)")
        if error.get("code") == "not_found":
            raise ServerAway(f"{message}; is this an older ds4-server?")
        raise _Refused(status, error.get("code"), message)

    def _talk(
        self, method: str, path: str, body: bytes | None, timeout_s: float, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            status, data = answer.status, answer.read()
        except TimeoutError as e:
            raise ServerAway(f"{self.url}: no answer to {path} within {timeout_s:g} s") from e
        except (OSError, http.client.HTTPException) as e:
            why = getattr(e, "strerror", None) or str(e) or type(e).__name__
            raise ServerAway(f"{self.url}: no ds4-server answers there ({why}); is it running?") from e
        finally:
            connection.close()
        try:
            told = json.loads(data)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise ServerAway(f"{self.url}: answers {status} to {path} with something else than a JSON object")
        return status, told


def _number(told: Mapping[str, Any], name: str) -> int:
    value = told.get(name)
    return value if isinstance(value, int) else 0


def _address(url: str) -> tuple[str, int]:
    """Host and port of `url`.

    Raises:
        UsageError: it is no plain http address, or not one of this machine.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as e:
        raise UsageError(f"--server {url}: {e}; write it as http://127.0.0.1:8000") from e
    if (
        parts.scheme != "http"
        or not host
        or port is None
        or parts.path not in ("", "/")
        or parts.query
        or parts.username
    ):
        raise UsageError(f"--server {url}: write it as http://127.0.0.1:8000")
    if not _is_here(host):
        raise UsageError(f"--server {url}: {host} is not this machine, and only its own device can be borrowed")
    return host, port


def _is_here(host: str) -> bool:
    """Whether `host` is an address of this machine: what can be bound here is."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, proto, _, address in found:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if ip.is_unspecified:  # 0.0.0.0 may lead here, but names no machine
            return False
        if ip.is_loopback:  # also one that has no IPv6, whose localhost has an address of it all the same
            continue
        try:
            with socket.socket(family, kind, proto) as s:
                s.bind(address)
        except OSError:
            return False
    return bool(found)
