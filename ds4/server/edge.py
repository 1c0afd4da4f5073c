"""The outermost layer: who may come in, how long a write may wait, and the last word on errors."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ds4.errors import RequestError
from ds4.server.cors import PREFLIGHT, Headers, allowed, is_preflight
from ds4.server.errors import HttpError, error_body, error_response, in_messages, json_bytes, stopping
from ds4.server.logs import HEADER, id_of, request_id
from ds4.server.outbox import Gone
from ds4.server.request import Limits

log = logging.getLogger("ds4.server")
OPEN_PATHS = ("/health", "/", "/reports")  # no key needed: watchdogs have none, nor has an address that is typed
OPEN_BELOW = "/web/"  # files of those pages
ADMIN = "/admin"  # it and what is below it: the admin key, and no other
PAUSE_S = 2.0  # a sender of an unwanted body that is silent for so long has read its answer


class Connection(Protocol):
    """What can be cut: asyncio's transport."""

    def abort(self) -> None: ...


Connections = dict[tuple[str, int], Connection]


class Stalled(Exception):
    """A reader did not take what was sent; its connection has been cut."""


class Edge:
    """Wraps the application.

    Args:
        connections: live connections by client address, to cut the one whose reader stalls.
        api_key: asked of every path but `OPEN_PATHS`, what is below `OPEN_BELOW`, and below `ADMIN`; None: of none.
        admin_key: asked of what is below `ADMIN`; None: nobody comes in there.
        cors: the origin whose pages may call the server, or "*"; None: none. Never of what is below `ADMIN`.
        answered: told path, method and status of every answer that begins.
    """

    def __init__(
        self, app: ASGIApp, connections: Connections, api_key: str | None, limits: Limits, admin_key: str | None,
        *, cors: str | None = None, answered: Callable[[str, str, int], None] = lambda path, method, status: None,
    ) -> None:  # fmt: skip
        self._cors, self._answered = cors, answered
        self._app, self._connections, self._limits = app, connections, limits
        self._key = None if api_key is None else api_key.encode()
        self._admin_key = None if admin_key is None else admin_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = dict(scope["headers"]), scope["path"]
        mark = id_of(headers.get(HEADER.encode()))
        request_id.set(mark)  # of this task: the server makes one a request
        marks = [(HEADER.encode(), mark.encode())]
        marks += [(b"request-id", mark.encode())] if in_messages(path) else []  # as that API's clients look for it
        opened = [] if _is_admin(path) else allowed(self._cors, headers.get(b"origin"))
        guarded = _Send(
            send, self._limits.stall_s, [*marks, *opened],
            lambda status: self._answered(path, scope["method"], status),
        )  # fmt: skip
        try:
            try:
                if opened and is_preflight(scope["method"], headers):
                    await Response(status_code=204, headers=_texts(PREFLIGHT))(scope, receive, guarded)
                    return
                self._check_key(scope)
                await self._app(scope, receive, guarded)
            except (Gone, Stalled):
                raise
            except asyncio.CancelledError:  # uvicorn's last word, past the drain
                if guarded.begun:
                    log.info("%s: cut off by the end of the server", scope["path"])
                    self._cut(scope)
                    await asyncio.sleep(0)  # the connection hears of it before uvicorn asks how the request ended
                else:
                    await error_response(stopping(), path)(scope, receive, guarded)
            except Exception as e:
                if not guarded.begun:
                    await error_response(e, path)(scope, receive, guarded)
                if not guarded.ended:
                    log.error("%s broke off: %s", scope["path"], e)
                    self._cut(scope)
        except Gone:  # nobody is there to be answered; uvicorn wants an answer all the same
            if not guarded.ended:
                self._cut(scope)
        except Stalled:
            log.info("%s: the reader stalled for %g s; connection cut", scope["path"], self._limits.stall_s)
            self._cut(scope)

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"]
        if scope["method"] == "OPTIONS":  # browsers send no key with it; it tells nothing but what a path takes
            return
        admin = _is_admin(path)
        if admin and self._admin_key is None:
            raise HttpError(403, "this server takes no orders: start it with --admin-key FILE", "admin_disabled")
        wanted = self._admin_key if admin else self._key
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        kind, _, bearer = given.partition(b" ")
        keys = [bearer.strip()] if kind.lower() == b"bearer" else []
        how = "send it as Authorization: Bearer KEY"
        if not admin:  # orders have one way in
            keys += [headers[b"x-api-key"].strip()] if b"x-api-key" in headers else []
            how += " or as x-api-key: KEY"
        known = wanted is None or any(hmac.compare_digest(key, wanted) for key in keys)
        scope.setdefault("state", {})["known"] = known  # to open paths too: they may tell more then
        if not known and path not in OPEN_PATHS and not path.startswith(OPEN_BELOW):
            name = "admin key" if admin else "API key"
            what = f"no {name} was given" if not given and not keys else f"the {name} is wrong"
            raise HttpError(
                401, f"{what}; {how}", f"invalid_{'admin' if admin else 'api'}_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    def _cut(self, scope: Scope) -> None:
        client = scope.get("client")
        connection = self._connections.get(tuple(client)) if client else None
        if connection is not None:
            connection.abort()


def _is_admin(path: str) -> bool:
    return path == ADMIN or path.startswith(ADMIN + "/")


def _texts(headers: Headers) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}


class _Send:
    """`send` that knows how far the response is, does not wait for ever and adds headers of its own; `told` hears
    the status.
    """

    def __init__(self, send: Send, stall_s: float, headers: Headers, told: Callable[[int], None]) -> None:
        self._send, self._stall_s, self._headers, self._told = send, stall_s, headers, told
        self.begun = self.ended = False

    async def __call__(self, message: Message) -> None:
        self.begun = True
        if message["type"] == "http.response.start":
            self._told(message["status"])
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except TimeoutError as e:
            raise Stalled from e
        self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body, at most `limits.body_bytes`.

    Raises:
        TooLarge: by its Content-Length, before a byte is read, or by what came.
        HttpError: 408.
        Gone: the client left in the middle.
    """
    length = request.headers.get("content-length", "").lstrip("0")
    if length.isdecimal() and (len(length) > 18 or int(length) > limits.body_bytes):
        raise TooLarge(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            more = True
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                body += message.get("body", b"")
                if len(body) > limits.body_bytes:
                    raise TooLarge(limits)
                more = message.get("more_body", False)
    except TimeoutError as e:
        raise HttpError(
            408, f"the request did not arrive within {limits.body_s:g} s", "timeout", headers={"Connection": "close"}
        ) from e
    if not body:
        raise RequestError("the body is empty; it must be a JSON object", code="invalid_json")
    return bytes(body)


class TooLarge(HttpError):
    """413. Answered by `response`, which knows that a body may be on its way."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(
            413, f"the request is larger than {limits.body_bytes} bytes", "request_too_large",
            headers={"Connection": "close"},
        )  # fmt: skip
        self._limits = limits

    def response(self, path: str = "") -> Response:
        return _Lingering(self, self._limits, path)


class _Lingering(Response):
    """An answer, complete at once, whose connection stays a while.

    A connection closed on unread bytes is reset, and a client that is still sending may lose the answer: what comes
    is read and thrown away, up to eight times the limit, until it pauses.
    """

    def __init__(self, error: TooLarge, limits: Limits, path: str) -> None:
        super().__init__(
            json_bytes(error_body(error, path)), error.status, error.headers, media_type="application/json"
        )
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if b"expect" not in dict(scope["headers"]):  # else the client waits to be asked for its body
            await self._discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self, receive: Receive) -> None:
        seen, more = 0, True
        try:
            async with asyncio.timeout(self._limits.body_s):
                while more and seen <= 8 * self._limits.body_bytes:
                    async with asyncio.timeout(PAUSE_S):
                        message = await receive()
                    seen += len(message.get("body", b""))
                    more = message.get("more_body", False)  # a disconnect has none
        except TimeoutError:
            pass
