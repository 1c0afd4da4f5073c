"""A job's events to HTTP: one JSON object, or server-sent events. A client that leaves takes its job with it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ds4.engine import Cancelled
from ds4.server.answer import Writer
from ds4.server.errors import json_response, overloaded
from ds4.server.job import Job
from ds4.server.outbox import Event, Failed, Finished, Gone, Reading, Started
from ds4.server.requests_log import Exchange
from ds4.server.sse import PING
from ds4.server.stream import CallDelta, Delta, Piece
from ds4.server.worker import Worker

log = logging.getLogger("ds4.server")
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@asynccontextmanager
async def watched(job: Job, worker: Worker, receive: Receive) -> AsyncIterator[None]:
    """While inside, a disconnect cancels the job; leaving for any reason does too."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        worker.cancel(job)
        job.outbox.abandon()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        worker.cancel(job)


def failure(error: Exception) -> Exception:
    """What a client is told when its job failed."""
    return overloaded("the request was cancelled", "cancelled") if isinstance(error, Cancelled) else error


class Log:
    """One line a request, on its end; and where requests are kept (`exchange`), what they were given."""

    def __init__(self, path: str, job: Job, exchange: Exchange | None) -> None:
        self._path, self._job, self._exchange, self._begun = path, job, exchange, time.monotonic()

    def hear(self, event: Event) -> None:
        """An event that goes out, or went."""
        if self._exchange is not None:
            self._exchange.hear(event)

    async def heard(self, event: Event) -> None:
        """`hear`, for what awaits it: on the loop, so that requests come in the order of their answers."""
        self.hear(event)

    def end(self, how: str, tokens: int | None = None) -> None:
        size = len(self._job.generation.prompt_ids)
        out = "" if tokens is None else f"+{tokens}"
        log.info("%s %s: %d%s tokens, %.2f s", self._path, how, size, out, time.monotonic() - self._begun)


async def whole(job: Job, answer: Writer, worker: Worker, receive: Receive, line: Log) -> Response:
    """The answer as one JSON object.

    Raises:
        Gone: the client left; there is nobody to answer.
        Exception: what the job failed with.
    """
    deltas: list[Piece] = []
    async with watched(job, worker, receive):
        try:
            while True:
                for event in await job.outbox.take():
                    if isinstance(event, (Delta, CallDelta)):
                        line.hear(event)
                        deltas.append(event)
                    elif isinstance(event, Finished):
                        line.end(event.reason, event.tokens)
                        response = json_response(answer.whole(deltas, event))
                        response.background = BackgroundTask(line.heard, event)  # when the answer has left
                        return response
                    elif isinstance(event, Failed):
                        line.end(f"failed: {failure(event.error)}")
                        raise failure(event.error)
        except Gone:
            line.end("client left")
            raise


class EventStream(Response):
    """The answer as server-sent events.

    The status waits for the prompt: a request that fails before its first token is answered with the error's status.
    If reading the prompt takes longer than a ping, or its reader asked to hear of it (`at_once`), the stream opens.
    """

    def __init__(
        self, job: Job, answer: Writer, worker: Worker, ping_s: float, line: Log, *, at_once: bool = False
    ) -> None:
        super().__init__(b"", 200, SSE_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._job, self._answer, self._worker, self._ping_s = job, answer, worker, ping_s
        self._line, self._patience_s = line, 0.0 if at_once else ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with watched(self._job, self._worker, receive):
            try:
                await self._stream(_Body(self, send))
            except Gone:
                self._line.end("client left")

    async def _stream(self, body: _Body) -> None:
        patience = time.monotonic() + self._patience_s
        while True:
            events = await self._job.outbox.take(self._ping_s)
            if not events:
                await body.write(PING)
            for event in events:
                if isinstance(event, Failed) and not body.opened:
                    self._line.end(f"failed: {failure(event.error)}")
                    raise failure(event.error)
                told = self._encoded(event)
                if isinstance(event, Reading) and not body.opened and time.monotonic() < patience:
                    continue  # it may still fail, and be told so by a status
                await body.write(told)
                self._line.hear(event)
                if isinstance(event, (Finished, Failed)):
                    await body.close()
                    return

    def _encoded(self, event: Event) -> bytes:
        if isinstance(event, Reading):
            return self._answer.reading(event)
        if isinstance(event, Started):
            return self._answer.opening()
        if isinstance(event, (Delta, CallDelta)):
            return self._answer.piece(event)
        if isinstance(event, Finished):
            self._line.end(event.reason, event.tokens)
            return self._answer.closing(event)
        self._line.end(f"failed: {failure(event.error)}")
        return self._answer.failure(failure(event.error))


class _Body:
    """The response, opened by its first byte."""

    def __init__(self, response: Response, send: Callable[[Message], Awaitable[None]]) -> None:
        self._response, self._send = response, send
        self.opened = False

    async def write(self, data: bytes) -> None:
        if not self.opened:
            self.opened = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": self._response.status_code,
                    "headers": self._response.raw_headers,
                }
            )
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
