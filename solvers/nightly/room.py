"""Memory for an engine beside the server that runs: room of its own, or the server's device for a while, or a wait.

    need within the budget and within what is free    an engine of our own, beside the server
    else, with a server to ask                        it lends its device: a running request ends, others wait
    else                                              a look every half minute, for as long as `wait_s`

A borrowed device goes back where work is saved (`breathe`) as soon as somebody waits at the server, but not before it
was ours for as long as opening the engine took, or a busy server would have us open engines all night. After a pause
it is borrowed again. All waiting and pauses together are at most `wait_s`; then the night fails, and can be resumed.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, TypeVar

from ds4.engine import Engine
from ds4.errors import CapacityError

T = TypeVar("T")
LOOK_EVERY_S = 30.0
MB = 1 << 20


class Lease(Protocol):
    """A device that is ours for now. `waiting`: requests that wait for it; `lost`: the server took it back."""

    waiting: int

    @property
    def lost(self) -> bool: ...


class Lender(Protocol):
    """A server that lends its device."""

    def borrow(self) -> AbstractContextManager[Lease]: ...

    def busy(self) -> bool:
        """Whether a request runs or waits there."""
        ...

    def reload(self) -> object: ...


class GiveBack(Exception):
    """Raised by `breathe` where work is saved: somebody waits for the device."""


@dataclass
class Room:
    """Opens the engine where it has room, and closes it when others need the device.

    Args:
        open_engine: with the sidecar mounted.
        need: bytes that the engine and a solve take.
        free: bytes that are free now; None: nobody can say.
        budget: bytes that may be used beside the server; None: whatever is free.
        server: who lends; None: nobody.
        wait_s: seconds of all waiting together.
    """

    open_engine: Callable[[], Engine]
    need: int
    free: Callable[[], int | None]
    budget: int | None
    server: Lender | None
    wait_s: float
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    waited_s: float = 0.0
    pauses: int = 0
    ever_borrowed: bool = False
    _engine: Engine | None = None
    _lent: AbstractContextManager[Lease] | None = None
    _lease: Lease | None = None
    _opened_at: float = field(default=0.0)
    _opening_s: float = field(default=0.0)

    def __enter__(self) -> Room:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if tb is not None:
            traceback.clear_frames(tb)  # a failed step's variables hold the engine, and with it the device's memory
        self._leave()

    def run(self, work: Callable[[Engine], T]) -> T:
        """`work` on the engine; again from where it saved itself, each time that it had to give the device back.

        Raises:
            CapacityError: no room for as long as is waited.
        """
        while True:
            if self._wanted_back():
                self._pause()
            try:
                return work(self._entered())
            except GiveBack:
                pass
            self._pause()

    def breathe(self) -> None:
        """Everything so far is saved: if somebody waits for a borrowed device, it goes back.

        Raises:
            GiveBack: to `run`.
        """
        if self._wanted_back():
            raise GiveBack

    def _wanted_back(self) -> bool:
        lease = self._lease
        if lease is None:
            return False
        return lease.lost or (lease.waiting > 0 and self.clock() - self._opened_at >= self._opening_s)

    def _entered(self) -> Engine:
        if self._engine is None:
            self._make_room()
            begun = self.clock()
            try:
                self._engine = self.open_engine()
            except BaseException:
                self._leave()
                raise
            self._opened_at = self.clock()
            self._opening_s = self._opened_at - begun
        return self._engine

    def _make_room(self) -> None:
        told = False
        while True:
            missing = self._missing()
            if missing is None:
                return
            if self.server is not None:
                self.say(f"{missing}: borrowing the server's device")
                lent = self.server.borrow()
                self._lease, self._lent, self.ever_borrowed = lent.__enter__(), lent, True
                free = self.free()
                if free is not None and free < self.need:
                    self._leave()
                    raise CapacityError(
                        f"the engine and a solve take {self.need // MB:,} MB; with the server's device borrowed "
                        f"{free // MB:,} MB are free: {-(-(self.need - free) // MB):,} MB are missing"
                    )
                return
            if self.budget is not None and self.need > self.budget:
                raise CapacityError(
                    f"{missing}; raise --mem-budget-mb, or name a server that lends its device (--server)"
                )
            if self.waited_s >= self.wait_s:
                raise CapacityError(
                    f"{missing}, after {self.waited_s:.0f} s of waiting; free some, wait longer (--wait), or name a "
                    "server that lends its device (--server)"
                )
            if not told:
                self.say(f"{missing}: waiting for up to {self.wait_s:.0f} s")
                told = True
            self._wait()

    def _missing(self) -> str | None:
        """How much memory is missing for an engine of our own, in words; None: nothing."""
        free = self.free()
        rooms = [r for r in (self.budget, free) if r is not None]
        if not rooms or min(rooms) >= self.need:
            return None
        have = min(rooms)
        which = "the budget has" if have == self.budget else "free are"
        return (
            f"the engine and a solve take {self.need // MB:,} MB, {which} {have // MB:,} MB: "
            f"{-(-(self.need - have) // MB):,} MB are missing"
        )

    def _pause(self) -> None:
        """Give the device back, and wait until nobody needs it.

        Raises:
            CapacityError: that takes too long.
        """
        assert self.server is not None
        self._leave()
        self.pauses += 1
        self.say("requests wait: the device is given back for a while")
        self._wait()
        while self.server.busy():
            if self.waited_s >= self.wait_s:
                raise CapacityError(
                    f"the server was busy for {self.waited_s:.0f} s in which this night waited for its device; what "
                    "is done is kept: run it again when there is less to do, or wait longer (--wait)"
                )
            self._wait()

    def _wait(self) -> None:
        pause = max(0.01, min(LOOK_EVERY_S, self.wait_s - self.waited_s))
        self.sleep(pause)
        self.waited_s += pause

    def _leave(self) -> None:
        """Close the engine, so that its memory is free, then give a borrowed device back."""
        engine, self._engine = self._engine, None
        lent, self._lent, self._lease = self._lent, None, None
        try:
            if engine is not None:
                engine.close()
                del engine
                gc.collect()  # device memory goes with the last reference, and sessions hold circles
        finally:
            if lent is not None:
                lent.__exit__(None, None, None)
