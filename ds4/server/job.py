"""A request on its way: when it got how far, and what it has drawn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ds4.server.outbox import Outbox
from ds4.server.request import Generation


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
        cached: tokens of the prompt that were not run again.
        read: tokens of the prompt that the session has.
        times: how far it came when.
        sidecars: what was mounted when it was taken up.
    """

    def __init__(self, generation: Generation, outbox: Outbox) -> None:
        self.generation, self.outbox = generation, outbox
        self.cancelled = False
        self.drawn: list[int] = []
        self.cached = self.read = 0
        self.times = Times()
        self.sidecars: Mapping[str, object] = {}
