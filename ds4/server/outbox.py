"""Events from the device's thread to a connection's task.

`put` never waits. Deltas that were not fetched yet are joined, so what a slow reader costs is the text itself; past a
limit its request is over.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from ds4.errors import Ds4Error
from ds4.server.stream import CallDelta, Delta

LOGPROB_CHARS = 32  # about what one takes beside its token's text


@dataclass(frozen=True)
class Started:
    """The prompt has been read; tokens follow."""


@dataclass(frozen=True)
class Reading:
    """The prompt is being read: `done` of `total` tokens so far, `cached` of them without running them again."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True)
class Finished:
    """The answer is complete.

    Attributes:
        reason: "stop", "length" or "tool_calls".
        decode: what the session reports of its rounds.
        stop: the stop string that ended it; None: none did.
        cached: tokens of the prompt that were not run again.
    """

    reason: str
    tokens: int
    reasoning_tokens: int
    decode: Mapping[str, object]
    stop: str | None = None
    cached: int = 0


@dataclass(frozen=True)
class Failed:
    """There will be no more."""

    error: Exception


Event = Reading | Started | Delta | CallDelta | Finished | Failed


class Gone(Exception):
    """The client went away."""


class SlowReader(Ds4Error):
    """A client did not fetch its answer."""


class Outbox:
    """Events of one request, in order. Made on the event loop; `put` is called by the device's thread."""

    def __init__(self, limit_chars: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = limit_chars
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._chars = 0
        self._ready = asyncio.Event()
        self._closed = False  # no more events are taken in
        self._abandoned = False  # nobody will fetch them

    def put(self, event: Event) -> bool:
        """Add an event; False if nobody wants any more: the caller should end the request."""
        with self._lock:
            if self._closed:
                return False
            self._add(event)
            self._closed = isinstance(event, (Finished, Failed))
            if self._chars > self._limit:
                self._closed = True
                self._events.append(
                    Failed(SlowReader(f"{self._chars} characters wait for the reader; request dropped"))
                )
            alive = not self._closed or isinstance(event, (Finished, Failed))
        return self._wake() and alive

    def _add(self, event: Event) -> None:
        if isinstance(event, Reading) and self._events and isinstance(self._events[-1], Reading):
            self._events[-1] = event  # nobody asks how far it was
            return
        if isinstance(event, CallDelta):
            self._chars += len(event.text) + len(event.name or "")
            last = self._events[-1] if self._events else None
            if isinstance(last, CallDelta) and last.index == event.index:
                self._events[-1] = last.joined(event)
                return
        if isinstance(event, Delta):
            self._chars += len(event.text) + LOGPROB_CHARS * sum(1 + len(t.top) for t in event.told)
            last = self._events[-1] if self._events else None
            if isinstance(last, Delta) and last.channel == event.channel:
                self._events[-1] = Delta(last.channel, last.text + event.text, last.told + event.told)
                return
        self._events.append(event)

    def _wake(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the loop is closed: the server has ended
            return False
        return True

    def abandon(self) -> None:
        """The client is gone: wake `take`, refuse every `put`."""
        with self._lock:
            self._closed = self._abandoned = True
            self._events.clear()
        self._ready.set()

    async def take(self, timeout_s: float | None = None) -> list[Event]:
        """The events so far, at least one; none after `timeout_s`.

        Raises:
            Gone: the request was abandoned.
        """
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()
            except TimeoutError:
                return []
            self._ready.clear()
            with self._lock:
                if self._abandoned:
                    raise Gone
                events, self._events = self._events, []
                self._chars = 0
            if events:  # else: a wake-up for events that the last call took along
                return events
