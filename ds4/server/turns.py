"""The runs under way, and whose turn it is.

A turn is one chunk of one prompt, then a token for every run that answers: those in one pass, where there are several
(Engine.draw). So a long prompt holds an answer up by no more than a chunk a token, and prompts take turns among
themselves, so that a short one does not wait for a long one.

Memory decides who may go on. A run that finds no room waits for another one to end, a prompt gives back what it has
read; meanwhile nobody new begins. A run that has the device to itself and still finds no room fails, and says so.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ds4.engine import Cancelled
from ds4.errors import CapacityError, Ds4Error
from ds4.server.errors import HttpError
from ds4.server.job import Job
from ds4.server.logs import request_id
from ds4.server.memory_watch import no_memory, trim
from ds4.server.outbox import Event, Failed, Finished
from ds4.server.request import ServedEngine
from ds4.server.run import Prefixes, Run, without_frames

log = logging.getLogger("ds4.server")


class Desk(Protocol):
    """Whom the turns belong to; see worker.py."""

    def stepped(self) -> None:
        """The device has done something."""

    def ended(self, run: Run, end: Event) -> None:
        """A run is over."""


@dataclass(frozen=True)
class Relief:
    """Memory is wanted back: what is kept goes, and with `why` the youngest run."""

    why: str | None


class Turns:
    """Runs on one engine, at most `most` at a time.

    Attributes:
        runs: in the order in which they began.
        shared: passes that several runs shared, by how many these were.
        relief: is asked for by any thread, and None again when it was given.
    """

    def __init__(self, desk: Desk, most: int, prefixes: Prefixes | None = None) -> None:
        self._desk, self.most, self._prefixes = desk, most, prefixes
        self.runs: list[Run] = []
        self.shared: Counter[int] = Counter()
        self.relief: Relief | None = None
        self._begun = 0
        self._last = 0  # number of the run whose prompt had the last turn

    @property
    def open(self) -> bool:
        """Whether one more may begin: nobody overtakes a run that waits for room."""
        return len(self.runs) < self.most and not any(run.waits for run in self.runs)

    def begin(self, engine: ServedEngine, job: Job, mark: str | None) -> None:
        """A job joins; its first turn comes with the others'."""
        self._begun += 1
        self.runs.append(Run(job, mark, engine, self._prefixes, self._begun))

    def turn(self, engine: ServedEngine) -> None:
        """Everyone's turn once. Ends are told to the desk."""
        if self.relief is not None:
            self._relieve(engine, self.relief)
            self.relief = None
        for run in [r for r in self.runs if r.job.cancelled]:
            self._end(run, Failed(Cancelled()))
        self._read(engine)
        self._draw(engine)

    def stop(self, error: Exception) -> None:
        """End all."""
        for run in list(self.runs):
            self._end(run, Failed(error))

    def _relieve(self, engine: ServedEngine, relief: Relief) -> None:
        """Memory back to the machine. A run that holds none is not worth ending."""
        if relief.why is not None and self.runs:
            last = next((run for run in reversed(self.runs) if run.holds), self.runs[-1])
            request_id.set(last.mark)
            log.warning("warning: ended to make room: %s", relief.why)
            request_id.set(None)
            self._end(last, Failed(no_memory(relief.why)))
        if self._prefixes is not None:
            self._prefixes.forget()
        engine.drop_idle()
        trim()
        self._desk.stepped()

    def _read(self, engine: ServedEngine) -> None:
        """A chunk of one prompt: the one after that which had the last turn. A run whose prompt begins like one that
        an older run reads lets that be done first, if it gains by it.
        """
        reading: list[Run] = []
        for run in self.runs:
            if run.reads and not run.waits and not any(run.better_after(other) for other in reading):
                reading.append(run)
        if reading:
            run = next((r for r in reading if r.number > self._last), reading[0])
            self._last = run.number
            self._try(engine, run, run.read)

    def _draw(self, engine: ServedEngine) -> None:
        """A token for each run that answers; what a round drew at once is given at once."""
        drawing = [run for run in self.runs if not run.reads and not run.waits]
        together = [run for run in drawing if not run.ready]
        if len(together) > 1:
            for run, error in zip(together, self._pass(engine, together)):
                if error is not None:
                    self._went_wrong(engine, run, error)
        for run in drawing:
            if run in self.runs and not run.waits:
                self._try(engine, run, run.draw)
            while run in self.runs and run.ready:
                self._try(engine, run, run.draw)

    def _pass(self, engine: ServedEngine, runs: Sequence[Run]) -> Sequence[Exception | None]:
        try:
            errors = engine.draw([run.ask() for run in runs])
        except Exception as e:
            return [e] * len(runs)
        else:
            shared = sum(run.ready for run in runs)  # others needed no pass, or one of their own
            if shared > 1:
                self.shared[shared] += 1
            return errors
        finally:
            self._desk.stepped()

    def _try(self, engine: ServedEngine, run: Run, work: Callable[[], Finished | None]) -> None:
        request_id.set(run.mark)  # of this thread: its lines say which request they are about
        try:
            end = work()
        except Exception as e:
            self._went_wrong(engine, run, e)
        else:
            run.tried = False
            if end is not None:
                self._end(run, end)
        request_id.set(None)
        self._desk.stepped()

    def _went_wrong(self, engine: ServedEngine, run: Run, error: Exception) -> None:
        if isinstance(error, CapacityError):
            self._no_room(engine, run, error)
            return
        if not isinstance(error, (Ds4Error, Cancelled)):
            log.exception("a request failed", exc_info=error)
        self._end(run, Failed(error))

    def _no_room(self, engine: ServedEngine, run: Run, error: CapacityError) -> None:
        """The run waits for another one's end. If all wait, the oldest tries once more, and if that fails the
        youngest that holds anything has to go.
        """
        without_frames(error)
        if run.reads:
            run.restart()
        engine.drop_idle()
        run.waits = True
        if not all(r.waits for r in self.runs):
            return
        first = self.runs[0]
        if not (run is first and run.tried):
            first.waits, first.tried = False, True
            return
        last = next((r for r in reversed(self.runs) if not r.reads), run)
        self._end(last, Failed(error if last is run else no_room(error)))

    def _end(self, run: Run, end: Event) -> None:
        self.runs.remove(run)
        error = end.error if isinstance(end, Failed) else None
        without_frames(error)
        run.close(sound=error is None or isinstance(error, Cancelled))
        for other in self.runs:
            other.waits = False
        self._desk.ended(run, end)


def no_room(error: CapacityError) -> HttpError:
    """What a client is told whose answer had to make room for an older one."""
    return no_memory(f"no memory to go on beside other requests ({error}); try again later")
