"""A request on its way, and what the device's thread does with it: prefill, decode, text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ds4.engine import Cancelled
from ds4.server.outbox import Event, Finished, Outbox, Started
from ds4.server.request import Generation, ServedEngine
from ds4.server.stream import TextStream


@dataclass
class Times:
    """When a job was queued, taken up, its prompt read, its answer ended: seconds of a monotonic clock."""

    queued: float = field(default_factory=time.monotonic)
    taken: float | None = None
    read: float | None = None
    ended: float | None = None

    def report(self) -> dict[str, float | None]:
        """Seconds in the queue, of the prompt, of the answer; None: it did not come to that."""
        marks = (self.queued, self.taken, self.read, self.ended)
        spans = (None if a is None or b is None else round(b - a, 4) for a, b in pairwise(marks))
        return dict(zip(("queued_s", "prefill_s", "decode_s"), spans))


class Job:
    """A request on its way. `cancelled` may be set from any thread, at any time.

    Attributes:
        drawn: tokens of the answer so far, the one that ended it too.
        times: how far it came when.
        sidecars: what was mounted when it was taken up.
    """

    def __init__(self, generation: Generation, outbox: Outbox) -> None:
        self.generation, self.outbox = generation, outbox
        self.cancelled = False
        self.drawn: list[int] = []
        self.times = Times()
        self.sidecars: Mapping[str, object] = {}

    def answer(self, engine: ServedEngine, stopped: Callable[[], bool]) -> Finished:
        """Prefill and decode; events go to the outbox, but for the last one, which is returned.

        Args:
            stopped: asked where `cancelled` is: between prefill chunks, and before every token.

        Raises:
            Cancelled: by the client, by a reader that is too slow, or because the server stops.
        """
        g = self.generation

        def cancelled() -> bool:
            return self.cancelled or stopped()

        def put(event: Event) -> None:
            if not self.outbox.put(event):
                raise Cancelled

        self.times.taken, self.sidecars = time.monotonic(), engine.sidecars
        if cancelled():
            raise Cancelled
        session = engine.session()
        session.sync(g.prompt_ids, cancelled=cancelled)
        self.times.read = time.monotonic()
        put(Started())
        text = TextStream(
            engine.tokenizer, in_reasoning=g.in_reasoning, stops=g.stops, calls=g.tools is not None,
            one_call=g.tools is not None and g.tools.one,
        )  # fmt: skip
        reason = "length"
        while text.tokens < g.max_tokens:
            if cancelled():
                raise Cancelled
            token = session.next(g.sampling, left=g.max_tokens - text.tokens)
            self.drawn.append(token)
            if token == engine.config.eos_token_id or token in g.ends:
                reason = "stop"
                break
            for delta in text.push(token, session.last if g.logprobs else None):
                put(delta)
            if text.stopped:
                break
        for delta in text.finish():
            put(delta)
        self.times.ended = time.monotonic()
        if text.stopped or reason == "stop":
            reason = "tool_calls" if text.called else "stop"
        return Finished(reason, text.tokens, text.reasoning_tokens, session.report(), text.stop)


def without_frames(error: BaseException | None) -> None:
    """Take the frames off an error and off what led to it: they hold the session, and with it device memory."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
