"""The one thread that owns the device: it loads the model and runs requests, first come, first served.

The thread never waits for a socket (outbox.py) and looks for cancellation between prefill chunks and before every
decode step. Each request starts from an empty timeline, so its tokens do not depend on those before it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ds4.engine import Cancelled, Sampling
from ds4.engine.sampling import Penalties
from ds4.errors import DeviceError, Ds4Error
from ds4.server.errors import overloaded, stopping
from ds4.server.outbox import Event, Failed, Finished, Outbox, Started
from ds4.server.request import Generation, Progress, ServedEngine
from ds4.server.stream import TextStream

log = logging.getLogger("ds4.server")
WARM_TOKENS, WARM_DRAWS = 40, 4
FAILING = 3  # device errors in a row after which the server calls itself unwell


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
    """A request on its way. `cancel` may come from any thread, at any time.

    Attributes:
        drawn: tokens of the answer so far, the one that ended it too.
        times: how far it came when.
    """

    def __init__(self, generation: Generation, outbox: Outbox) -> None:
        self.generation, self.outbox = generation, outbox
        self.cancelled = False
        self.drawn: list[int] = []
        self.times = Times()


def warm_up(engine: ServedEngine) -> None:
    """Read a few tokens and draw a few: kernels are built and steps captured before the first request has to wait
    for it, and a device that does not work is found out now.

    Raises:
        Ds4Error: it does not work.
    """
    session, bos = engine.session(), engine.config.bos_token_id
    most = engine.config.max_position_embeddings - 2 * WARM_DRAWS
    session.sync([bos] * max(1, min(WARM_TOKENS, most)), cancelled=lambda: False)
    plain = Sampling(temperature=1.0, top_p=0.9, seeded=False)  # this way all kernels of drafts run
    penalties = Penalties(presence=0.1, logit_bias=((bos, 0.1),))
    for sampling in (plain, replace(plain, penalties=penalties, top=1)):
        for _ in range(WARM_DRAWS):
            session.next(sampling)


class _Stopped(Exception):
    """The worker was stopped while it loaded."""


class Worker:
    """Owns the engine.

    Args:
        open_engine: called in the worker's thread with a progress callback.
        queue: requests that may wait while one runs.
        on_failed: called in the worker's thread if the model cannot be loaded; `error` says why.
    """

    def __init__(
        self,
        open_engine: Callable[[Progress], ServedEngine],
        queue: int,
        on_failed: Callable[[], None] | None = None,
    ) -> None:
        self._open, self._limit, self._on_failed = open_engine, queue, on_failed
        self._change = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._stopping = False
        self._device_errors = 0
        self.state = "loading"  # then "ready", or "failed"
        self.progress = (0, 0)
        self.engine: ServedEngine | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._main, name="ds4-device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def interrupt(self) -> None:
        """Cancel what runs and what waits and take nothing more. Their readers hear of it now, however long the
        device needs to notice."""
        with self._change:
            self._stopping = True
            for job in (self._running, *self._waiting):
                if job is not None:
                    job.outbox.put(Failed(stopping()))
            self._change.notify_all()

    def stop(self, timeout_s: float = 10.0) -> None:
        """`interrupt`, close the engine, end the thread."""
        self.interrupt()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return int(self._running is not None)

    @property
    def well(self) -> bool:
        """Whether a request would probably be answered."""
        return self.state == "ready" and self._device_errors < FAILING and not self._stopping

    def served(self) -> ServedEngine:
        """The engine.

        Raises:
            HttpError: 503 while it loads, or if it could not be loaded.
        """
        if self.engine is None:
            if self.error is not None:
                raise overloaded(f"the model could not be loaded: {self.error}", "model_failed", 60)
            done, total = self.progress
            raise overloaded(f"the model is loading ({done} of {total or '?'} layers)", "model_loading", 2)
        return self.engine

    def check_room(self) -> None:
        """Refuse early: before a prompt is tokenized.

        Raises:
            HttpError: 503, the queue is full or the server is stopping.
        """
        if self._stopping:
            raise stopping()
        # one may run or be about to: it does not count as waiting
        if len(self._waiting) + self.running >= self._limit + 1:
            raise overloaded(f"{self._limit} requests are waiting already; try again later", "queue_full", 1)

    def submit(self, job: Job) -> None:
        """Queue a job; its events come through its outbox.

        Raises:
            HttpError: as `check_room`.
        """
        with self._change:
            self.check_room()
            self._waiting.append(job)
            self._change.notify_all()

    def cancel(self, job: Job) -> None:
        """Drop a job wherever it is; one that waits gives its place in the queue free at once."""
        with self._change:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)
                job.outbox.put(Failed(Cancelled()))

    # ---- the worker's thread ----

    def _main(self) -> None:
        try:
            self.engine = self._open(self._loaded)
        except _Stopped:
            return
        except Exception as e:
            if not isinstance(e, Ds4Error):
                log.exception("loading the model failed")
            self.error, self.state = e, "failed"
            if self._on_failed:
                self._on_failed()
            return
        self.state = "ready"
        log.info("model %s is loaded", self.engine.name)
        while (job := self._take()) is not None:
            self._run(self.engine, job)
            with self._change:
                self._running = None
        self.engine.close()

    def _loaded(self, done: int, total: int) -> None:
        self.progress = (done, total)
        if self._stopping:
            raise _Stopped

    def _take(self) -> Job | None:
        with self._change:
            while not self._waiting and not self._stopping:
                self._change.wait()
            if self._stopping:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _run(self, engine: ServedEngine, job: Job) -> None:
        """One request to its end; whatever happens, its outbox hears of it."""
        end: Event
        try:
            end = self._answer(engine, job)
            self._device_errors = 0
        except Cancelled:
            end = Failed(stopping() if self._stopping else Cancelled())
        except Exception as e:
            self._device_errors += isinstance(e, DeviceError)
            if not isinstance(e, Ds4Error):
                log.exception("a request failed")
            e.__traceback__ = None  # it holds the session, and with it device memory
            end = Failed(e)
        job.outbox.put(end)

    def _answer(self, engine: ServedEngine, job: Job) -> Finished:
        """Prefill and decode.

        Raises:
            Cancelled: by the client, by a reader that is too slow, or because the server stops.
        """
        g = job.generation

        def cancelled() -> bool:
            return job.cancelled or self._stopping

        def put(event: Event) -> None:
            if not job.outbox.put(event):
                raise Cancelled

        job.times.taken = time.monotonic()
        if cancelled():
            raise Cancelled
        session = engine.session()
        session.sync(g.prompt_ids, cancelled=cancelled)
        job.times.read = time.monotonic()
        put(Started())
        text = TextStream(engine.tokenizer, in_reasoning=g.in_reasoning, stops=g.stops)
        reason = "length"
        while text.tokens < g.max_tokens:
            if cancelled():
                raise Cancelled
            token = session.next(g.sampling, left=g.max_tokens - text.tokens)
            job.drawn.append(token)
            if token == engine.config.eos_token_id or token in g.ends:
                reason = "stop"
                break
            for delta in text.push(token, session.last if g.logprobs else None):
                put(delta)
            if text.stopped:
                break
        for delta in text.finish():
            put(delta)
        job.times.ended = time.monotonic()
        return Finished(
            "stop" if text.stopped else reason, text.tokens, text.reasoning_tokens, session.report()
        )  # fmt: skip
