"""The one thread that owns the device: it loads the model and runs requests, several at a time (turns.py), and takes
them up first come, first served.

The thread never waits for a socket (outbox.py) and looks for cancellation once a turn: a prefill chunk and a decode
step. A request's tokens do not depend on those beside it (Engine.draw).

When none runs it takes orders (orders.py): other sidecars are mounted, or the engine is closed and the device
lent until its borrower gives it back or is heard of no more. Requests wait meanwhile, also while those under way come
to their end; none is refused because of it.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

from ds4.engine import Cancelled
from ds4.errors import DeviceError, Ds4Error
from ds4.server.errors import HttpError, message_of, overloaded, stopping
from ds4.server.job import Job
from ds4.server.logs import request_id
from ds4.server.memory_watch import no_memory
from ds4.server.orders import Lease, Lend, Reload, lease_over, lent_already, names_of
from ds4.server.outbox import Event, Failed
from ds4.server.request import Card, Progress, ServedEngine
from ds4.server.run import Prefixes, Run
from ds4.server.turns import Relief, Turns

log = logging.getLogger("ds4.server")
FAILING = 3  # device errors, or attempts to take the device back, after which the server calls itself unwell
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0  # between two attempts to take the device back


class _Stopped(Exception):
    """The worker was stopped while it loaded."""


class Worker:
    """Owns the engine.

    Args:
        open_engine: called in the worker's thread with a progress callback.
        queue: requests that may wait while others run.
        sessions: requests that run at a time.
        prefixes: what is kept of prompts.
        on_failed: called in the worker's thread if the model cannot be loaded; `error` says why.
        remount: gives an engine the sidecars that its folders have now; the engine is as it was if that fails.
        settle: gives back device memory that nobody refers to any more.
        step_s: seconds without a step of the running request after which the server calls itself unwell.

    Attributes:
        state: "loading", then "ready" or "failed"; "lent", then "returning" and "ready" again.
        card: what is known of the model, also while there is no engine.
        lease: of the device, while it is away.
        trouble: why the device could not be taken back, while that is so.
        memory: bytes of the device in use, and all, after the last request; None: not known.
        states: bytes that sequences hold, and may hold; None: no limit, or not known.
        turns: of those that run.
        low: why nobody is let in, while memory runs out.
        last_end: when a request ended, or the first began: seconds of a monotonic clock.
        on_end: told of every request that was queued, with its last event, by whichever thread ends it.
    """

    def __init__(
        self,
        open_engine: Callable[[Progress], ServedEngine],
        queue: int,
        on_failed: Callable[[], None] | None = None,
        *,
        remount: Callable[[ServedEngine], None] = lambda engine: None,
        settle: Callable[[], object] = gc.collect,
        step_s: float = 120.0,
        sessions: int = 1,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.turns, self.prefixes = Turns(self, sessions, prefixes), prefixes
        self._open, self._limit, self._on_failed = open_engine, queue, on_failed
        self._remount, self._settle = remount, settle
        self._step_s, self._stepped = step_s, time.monotonic()
        self.memory: tuple[int, int] | None = None
        self.states: tuple[int, int | None] = (0, None)
        self.low: str | None = None
        self.last_end = self._stepped
        self.on_end: Callable[[Job, Event], None] = lambda job, event: None
        # one thread may take its lock twice: a signal's handler asks for a reload, whatever it interrupts
        self._change = threading.Condition(threading.RLock())
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._marks: WeakKeyDictionary[Job, str | None] = WeakKeyDictionary()  # ids of requests that wait
        self._reloads: deque[Reload] = deque()
        self._lend: Lend | None = None  # asked for, not done yet
        self._attempts = 0  # to take the device back, that failed
        self._stopping = False
        self._device_errors = 0
        self.state = "loading"
        self.progress = (0, 0)
        self.engine: ServedEngine | None = None
        self.card: Card | None = None
        self.error: Exception | None = None
        self.lease: Lease | None = None
        self.trouble: str | None = None
        self._thread = threading.Thread(target=self._main, name="ds4-device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def interrupt(self) -> None:
        """Cancel what runs and what waits and take nothing more. Their readers hear of it now, however long the
        device needs to notice."""
        with self._change:
            self._stopping = True
            for job in (*self._running, *self._waiting):
                end = Failed(stopping())
                self.on_end(job, end)
                job.outbox.put(end)
            self._fail_orders(stopping())
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
        return len(self._running)

    @property
    def well(self) -> bool:
        """Whether a request would probably be answered, if only after a while."""
        failed = self._attempts if self.state == "returning" else self._device_errors
        fit = self.state in ("ready", "lent", "returning") and failed < FAILING and not self._stopping
        return fit and not self.stalled

    @property
    def stalled(self) -> bool:
        """Whether a request runs and has made no step for `step_s`."""
        return self.silent_s > self._step_s

    @property
    def silent_s(self) -> float:
        """Seconds since the last step of any running request (a prefill chunk, a token, or its begin); 0: none
        runs.
        """
        return max(0.0, time.monotonic() - self._stepped) if self._running else 0.0

    def served(self) -> Card:
        """What requests are read by.

        Raises:
            HttpError: 503 while the model loads, or if it could not be loaded.
        """
        if self.card is None:
            if self.error is not None:
                raise overloaded(f"the model could not be loaded: {self.error}", "model_failed", 60)
            done, total = self.progress
            raise overloaded(f"the model is loading ({done} of {total or '?'} layers)", "model_loading", 2)
        return self.card

    def check_room(self) -> None:
        """Refuse early: before a prompt is tokenized.

        Raises:
            HttpError: 503, the queue is full, memory runs out or the server is stopping.
        """
        if self._stopping:
            raise stopping()
        if self.low is not None:
            raise no_memory(self.low)
        # as many may run or be about to: they do not count as waiting
        if len(self._waiting) + self.running >= self._limit + self.turns.most:
            raise overloaded(f"{self._limit} requests are waiting already; try again later", "queue_full", 1)

    def submit(self, job: Job) -> None:
        """Queue a job; its events come through its outbox.

        Raises:
            HttpError: as `check_room`.
        """
        with self._change:
            self.check_room()
            self._marks[job] = request_id.get()
            self._waiting.append(job)
            self._change.notify_all()

    def cancel(self, job: Job) -> None:
        """Drop a job wherever it is; one that waits gives its place in the queue free at once."""
        with self._change:
            job.cancelled = True
            if job in self._waiting:
                self._end_waiting(job, Failed(Cancelled()))

    def _end_waiting(self, job: Job, end: Failed) -> None:
        self._waiting.remove(job)
        self.on_end(job, end)
        job.outbox.put(end)

    # ---- memory, from any thread (memory_watch.py) ----

    @property
    def relieving(self) -> bool:
        return self.turns.relief is not None

    def relieve(self, why: str | None) -> None:
        """Have what is kept dropped before the next turn, and with `why` the youngest request that runs ended."""
        with self._change:
            self.turns.relief = Relief(why)
            self._change.notify_all()

    def refuse(self, why: str | None) -> None:
        """Let nobody in, and send away who waits; None: let them in again."""
        with self._change:
            self.low = why
            while why is not None and self._waiting:
                self._end_waiting(self._waiting[0], Failed(no_memory(why)))
            self._change.notify_all()

    # ---- orders, from any thread ----

    def reload(self) -> Reload:
        """Have the folders of the sidecars looked at again, before the next request. What runs ends as it began.

        Raises:
            HttpError: 503, the model could not be loaded, or the server is stopping.
        """
        with self._change:
            self._check_orders()
            order = Reload()
            self._reloads.append(order)
            self._change.notify_all()
        return order

    def lend(self, borrower: str, lease_s: float) -> Lend:
        """Have the device lent, when the requests that came before are answered.

        Raises:
            HttpError: 409, it is lent or promised already; 503 as `reload`.
        """
        with self._change:
            self._check_orders()
            other = self.lease if self._lend is None else self._lend.lease
            if other is not None:
                raise lent_already(other)
            self._lend = order = Lend(Lease(borrower, lease_s), self._waiting)
            self._change.notify_all()
        return order

    def call_off(self, order: Lend) -> bool:
        """Lend nothing after all; False if it is too late: the device is away, or about to be."""
        with self._change:
            if not order.future.cancel():
                return False
            if self._lend is order:
                self._lend = None
            return True

    def keep(self, lease_id: str, lease_s: float | None) -> Lease:
        """The borrower is alive: its lease lasts on, from now.

        Raises:
            HttpError: 404, it is over.
        """
        with self._change:
            lease = self._held(lease_id)
            lease.prolong(lease_s)
            self._change.notify_all()  # it may end sooner now
        return lease

    def give_back(self, lease_id: str) -> None:
        """The borrower is done, and has left the device.

        Raises:
            HttpError: 404, its lease is over.
        """
        with self._change:
            self._held(lease_id).returned = True
            self._change.notify_all()

    def _held(self, lease_id: str) -> Lease:
        """A lease that ran out this moment is good as long as the device has not been taken back."""
        lease = self.lease
        if lease is None or lease.returned or lease.id != lease_id:
            raise lease_over()
        return lease

    def _check_orders(self) -> None:
        if self._stopping:
            raise stopping()
        if self.state == "failed":
            self.served()

    def _fail_orders(self, error: Exception) -> None:
        """Those that were not begun."""
        futures: list[Future[Any]] = [order.future for order in self._reloads]
        if self._lend is not None:
            futures.append(self._lend.future)
        for future in futures:
            if not future.running() and not future.done():
                future.set_exception(error)

    # ---- the worker's thread ----

    def _main(self) -> None:
        try:
            self._opened(self._open(self._loaded))
        except _Stopped:
            return
        except Exception as e:
            if not isinstance(e, Ds4Error):
                log.exception("loading the model failed")
            with self._change:
                self.error, self.state = e, "failed"
                self._fail_orders(overloaded(f"the model could not be loaded: {e}", "model_failed", 60))
            if self._on_failed:
                self._on_failed()
            return
        log.info("model %s is loaded", self.served().name)
        while (order := self._take()) is not None:
            assert self.engine is not None
            if isinstance(order, Reload):
                self._reload(order)
            elif isinstance(order, Lend):
                self._lend_out(order)
            else:
                self.turns.turn(self.engine)
        self.turns.stop(stopping())
        if self.engine is not None:
            self.engine.close()

    def _opened(self, engine: ServedEngine) -> None:
        self._note_memory(engine)
        with self._change:
            self.engine, self.card, self.state = engine, Card.of(engine), "ready"
            self._attempts, self._device_errors, self.trouble = 0, 0, None

    def _loaded(self, done: int, total: int) -> None:
        self.progress = (done, total)
        if self._stopping:
            raise _Stopped

    def _take(self) -> Reload | Lend | Turns | None:
        """What comes next, when those that may begin have begun; None: the end."""
        with self._change:
            while not self._stopping:
                due = self._due()
                while due is None and self._waiting and self.turns.open:
                    self._begin(self._waiting.popleft())
                    due = self._due()
                if self.turns.runs or self.relieving:
                    return self.turns
                if due is not None:
                    if due is not self._lend:
                        self._reloads.popleft()
                    return due
                self._change.wait()
            return None

    def _due(self) -> Reload | Lend | None:
        """The order that is to be carried out before another request begins."""
        if self._reloads:
            return self._reloads[0]
        first = self._waiting[0] if self._waiting else None
        return self._lend if self._lend is not None and self._lend.may_go(first) else None

    def _begin(self, job: Job) -> None:
        assert self.engine is not None
        if not self._running:
            self._stepped = self.last_end = time.monotonic()
        self._running.append(job)
        self.turns.begin(self.engine, job, self._marks.pop(job, None))

    def _reload(self, order: Reload) -> None:
        """Other sidecars, or those of before if that fails; whoever asked hears of it."""
        if not order.future.set_running_or_notify_cancel():
            return
        assert self.engine is not None
        if self.prefixes is not None:
            self.prefixes.forget()
        try:
            self._remount(self.engine)
        except Exception as e:
            if not isinstance(e, Ds4Error):
                log.exception("mounting sidecars failed")
            why = f"what was mounted stays: {message_of(e)}"
            log.error("error: reload: %s", why)
            order.future.set_exception(HttpError(500, why, "reload_failed"))
            return
        with self._change:
            self.card = card = Card.of(self.engine)
        log.info("reloaded: %s", names_of(card.sidecars))
        order.future.set_result(card.sidecars)

    def _lend_out(self, order: Lend) -> None:
        """Close the engine, wait until the device comes back or is to be fetched, open the engine again."""
        if not order.future.set_running_or_notify_cancel():
            return
        self._close()
        lease = order.lease
        with self._change:
            lease.prolong()
            self.lease, self._lend, self.state = lease, None, "lent"
        log.info("the device is lent for %s", lease.borrower)
        order.future.set_result(lease)
        with self._change:
            while not self._stopping and not lease.returned and lease.left_s > 0:
                self._change.wait(lease.left_s)
            self.lease, self.state, self.progress = None, "returning", (0, 0)
        if lease.returned:
            log.info("the device came back from %s", lease.borrower)
        elif not self._stopping:
            log.warning("warning: %s let its lease run out; the device is taken back", lease.borrower)
        self._take_back()

    def _take_back(self) -> None:
        """Open the engine again. Until it works, or the server ends: a borrower that dies may hold memory a while."""
        pause = FIRST_PAUSE_S
        while not self._stopping:
            try:
                self._opened(self._open(self._loaded))
                log.info("the device is back, model %s is loaded", self.served().name)
                return
            except _Stopped:
                return
            except Exception as e:
                if not isinstance(e, Ds4Error):
                    log.exception("taking the device back failed")
                self.trouble = message_of(e)
            self._let_go()  # now that the error is gone, which held what had been placed
            with self._change:
                self._attempts += 1
                log.error(
                    "error: the device cannot be taken back, next attempt in %g s: %s", pause, self.trouble
                )  # fmt: skip
                self._change.wait_for(lambda: self._stopping, pause)
            pause = min(2 * pause, MOST_PAUSE_S)

    def _close(self) -> None:
        engine, self.engine = self.engine, None
        assert engine is not None
        if self.prefixes is not None:
            self.prefixes.forget()
        try:
            engine.close()
        except Exception:
            log.exception("closing the engine failed")
        del engine
        self.memory, self.states = None, (0, None)
        self._let_go()

    def _let_go(self) -> None:
        """Memory back to the device. An error is told when the device is to be used again: it comes up there too."""
        try:
            self._settle()
        except Exception:
            log.exception("giving back device memory failed")

    def stepped(self) -> None:
        """That it is told shows that the device works."""
        self._stepped = time.monotonic()
        if self.engine is not None:
            self.states = self.engine.states()

    def ended(self, run: Run, end: Event) -> None:
        """A run's end, to whoever hears of it."""
        if isinstance(end, Failed):
            self._device_errors += isinstance(end.error, DeviceError)
            if self._stopping and isinstance(end.error, Cancelled):
                end = Failed(stopping())
        else:
            self._device_errors = 0
        job = run.job
        del run  # its session: the memory that is in use is what is left
        assert self.engine is not None
        self._note_memory(self.engine)
        self.on_end(job, end)
        job.outbox.put(end)
        with self._change:
            self._running.remove(job)
            self.last_end = time.monotonic()

    def _note_memory(self, engine: ServedEngine) -> None:
        """Ask the device in the thread that owns it; it may be in no state to answer."""
        try:
            self.memory, self.states = engine.device_memory(), engine.states()
        except Ds4Error:
            self.memory = None
