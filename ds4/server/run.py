"""A job on the device: its prompt a chunk at a time, its answer a token at a time, and the text that they make."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from ds4.engine import Ask, Cancelled
from ds4.server.job import Job
from ds4.server.outbox import Event, Finished, Reading, Started
from ds4.server.prefix_store import PrefixStats
from ds4.server.request import ServedEngine, ServedSession
from ds4.server.stream import TextStream

if TYPE_CHECKING:
    from ds4.engine import Session


class Prefixes(Protocol):
    """Keeps what sessions know of prompts for later ones; see prefixes.py. Called by the device's thread alone."""

    def begin(self, engine: ServedEngine, prompt_ids: Sequence[int]) -> tuple[ServedSession, int]: ...
    def reading(
        self, session: ServedSession, prompt_ids: Sequence[int]
    ) -> Generator[tuple[int, int], None, object]: ...
    def worth_waiting(self, engine: ServedEngine, reading: ServedSession, prompt_ids: Sequence[int]) -> bool: ...
    def ended(self, session: ServedSession, *, sound: bool = True) -> None: ...
    def forget(self) -> None: ...
    @property
    def stats(self) -> PrefixStats: ...


class Run:
    """One job under way. Dropping it frees its session; `close` it first.

    Args:
        mark: the request's id, for the log's lines.
        number: of this run: later ones have higher ones.

    Attributes:
        waits: it has no room to go on; others have to end first.
        tried: it found no room, and tries once more.
    """

    def __init__(
        self, job: Job, mark: str | None, engine: ServedEngine, prefixes: Prefixes | None, number: int = 0
    ) -> None:
        self.job, self.mark, self.number = job, mark, number
        self._engine, self._prefixes = engine, prefixes
        self.waits = self.tried = False
        self._judged: dict[int, bool] = {}  # by other runs' numbers
        self._session: ServedSession | None = None
        self._reading: Generator[tuple[int, int], None, object] | None = None
        g = job.generation
        self._text = TextStream(
            engine.tokenizer, in_reasoning=g.in_reasoning, stops=g.stops, calls=g.tools is not None,
            one_call=g.tools is not None and g.tools.one,
        )  # fmt: skip

    @property
    def reads(self) -> bool:
        """Its prompt is not read yet."""
        return self._session is None or self._reading is not None

    @property
    def ready(self) -> bool:
        """Tokens were drawn that it has not been given yet."""
        return self._session is not None and self._session.waiting > 0

    @property
    def holds(self) -> bool:
        """There is a session."""
        return self._session is not None

    def better_after(self, other: Run) -> bool:
        """Whether this run, if it has not begun, gains by waiting until the other one's prompt is read, which begins
        like its own. Decided once.
        """
        if self._prefixes is None or other._session is None or other._reading is None or self._session is not None:
            return False
        if other.number not in self._judged:
            ids = self.job.generation.prompt_ids
            self._judged[other.number] = self._prefixes.worth_waiting(self._engine, other._session, ids)
        return self._judged[other.number]

    def read(self) -> None:
        """One chunk of the prompt.

        Raises:
            Cancelled: nobody wants the answer any more.   CapacityError: there is no room for it.
        """
        job, total = self.job, len(self.job.generation.prompt_ids)
        if self._reading is None:
            first = self._begin()  # what there is to run is known before the first chunk
            job.cached = total - first[1]
        assert self._reading is not None and self._session is not None
        if (now := next(self._reading, None)) is not None:
            job.read = job.cached + now[0]
            self._put(Reading(job.read, total, job.cached))
            return
        self._reading, job.read = None, total
        constraint = job.generation.constraint
        self._session.constrain(None if constraint is None else constraint.start())
        job.times.read = time.monotonic()
        self._put(Started())

    def _begin(self) -> tuple[int, int]:
        """A session, with what it may keep of an earlier prompt: tokens run, and to run."""
        job, ids = self.job, self.job.generation.prompt_ids
        job.times.taken, job.sidecars = job.times.taken or time.monotonic(), self._engine.sidecars
        if self._prefixes is None:
            self._session = self._engine.session()
            self._reading = self._session.reading(ids)
        else:
            self._session, _ = self._prefixes.begin(self._engine, ids)
            self._reading = self._prefixes.reading(self._session, ids)
        return next(self._reading, (0, 0))

    def restart(self) -> None:
        """Give back what was read of the prompt, and begin again at the next `read`."""
        self.close(sound=False)
        self.job.read = 0

    def ask(self) -> Ask:
        """What it wants of a pass that others share."""
        assert self._session is not None
        g = self.job.generation
        return Ask(cast("Session", self._session), g.sampling, g.max_tokens - self._text.tokens)

    def draw(self) -> Finished | None:
        """One token, and the answer's end if that ended it.

        Raises:
            Cancelled: nobody wants the answer any more.   CapacityError: there is no room to go on.
        """
        g, text = self.job.generation, self._text
        assert self._session is not None
        token = self._session.next(g.sampling, left=g.max_tokens - text.tokens)
        self.job.drawn.append(token)
        if token == self._engine.config.eos_token_id or token in g.ends:
            return self._finish("stop")
        for delta in text.push(token, self._session.last if g.logprobs else None):
            self._put(delta)
        return self._finish("length") if text.stopped or text.tokens >= g.max_tokens else None

    def _finish(self, reason: str) -> Finished:
        text = self._text
        for delta in text.finish():
            self._put(delta)
        self.job.times.ended = time.monotonic()
        if text.stopped or reason == "stop":
            reason = "tool_calls" if text.called else "stop"
        decode = {} if self._session is None else self._session.report()
        return Finished(reason, text.tokens, text.reasoning_tokens, decode, text.stop, self.job.cached)

    def close(self, *, sound: bool) -> None:
        """It is over. `sound`: nothing went wrong with the session, which may be of use to a later prompt."""
        if self._reading is not None:
            self._reading.close()
        if self._session is not None and self._prefixes is not None:
            self._prefixes.ended(self._session, sound=sound)
        self._session = self._reading = None

    def _put(self, event: Event) -> None:
        if not self.job.outbox.put(event):
            raise Cancelled


def without_frames(error: BaseException | None) -> None:
    """Take the frames off an error and off what led to it: they hold the session, and with it device memory."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
