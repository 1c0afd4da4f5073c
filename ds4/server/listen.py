"""The socket, and uvicorn as it is run here."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import Callable
from typing import cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ds4.errors import Ds4Error, UsageError
from ds4.server.edge import Connections
from ds4.server.errors import HttpError, error_body, json_bytes
from ds4.server.request import Limits

log = logging.getLogger("ds4.server")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, before anything slow begins.

    Raises:
        UsageError: no such host.
        Ds4Error: the port is in use, or not ours to take.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as e:
        raise UsageError(f"--host {host}: {e}") from e
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)  # now: two sockets may be bound to one port until one of them listens
    except OSError as e:
        sock.close()
        if e.errno == errno.EADDRINUSE:
            raise Ds4Error(f"port {port} on {host} is in use; stop the other server or choose another --port") from e
        raise Ds4Error(f"cannot listen on {host} port {port}: {e.strerror}") from e
    sock.setblocking(False)
    return sock


class _Server(uvicorn.Server):
    """uvicorn whose drain ends in answers: it would cancel the tasks and leave their clients without one."""

    def __init__(self, config: uvicorn.Config, drain_s: float, drained: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain_s, self._drained = drain_s, drained

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._drained)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def make_server(
    app: ASGIApp, connections: Connections, limits: Limits, drained: Callable[[], None]
) -> uvicorn.Server:
    """uvicorn with its own logging off.

    Args:
        connections: kept up to date.
        drained: called on the loop when the drain is over and requests may still run: it should end them.
    """

    class Protocol(H11Protocol):
        """HTTP/1.1 whose connections can be cut, from outside and when no request comes."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if self.client is not None:
                connections[self.client] = transport
            self._patience = self.loop.call_later(limits.body_s, self._cut_if_silent)

        def connection_lost(self, exc: Exception | None) -> None:
            self._patience.cancel()
            if self.client is not None:
                connections.pop(self.client, None)
            super().connection_lost(exc)

        def _cut_if_silent(self) -> None:
            if self.scope is None:
                self.transport.abort()

        def send_400_response(self, msg: str) -> None:
            """What is no HTTP gets the same shape of error as everything else."""
            log.info("invalid HTTP from %s: %s", "{}:{}".format(*self.client or "??"), msg)
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = json_bytes(error_body(HttpError(400, msg, "invalid_http")))
                headers = [("content-type", "application/json"), ("connection", "close")]
                for event in (
                    h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                    h11.Data(data=body),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", Protocol),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=cast("int", limits.drain_s + limits.close_s),  # any number will do
    )
    return _Server(config, limits.drain_s, drained)
