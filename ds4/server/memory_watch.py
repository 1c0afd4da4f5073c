"""What stands between the server and the kernel's killer: a look at MemAvailable every few seconds.

Below a floor it acts in steps, each said in the log, /health and /metrics, and each only if those before were not
enough by the next look:

    1  what is kept goes: states of earlier prompts, memory and graphs of sequences that are gone
    2  nobody new comes in, and who waits is sent away (503 `no_memory`); below half of the floor at once
    3  below half of the floor the youngest request that runs is ended with that reason, one a look

It is over when there is a quarter more than the floor. Where host and device share memory, sequences are refused
before that (ds4/engine/budget.py); what is watched here is all that the machine's programs take.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from ds4.engine.budget import host_available
from ds4.server.errors import HttpError, overloaded

EVERY_S = 2.0
OK, LOW, REFUSING = "ok", "low", "refusing"
STATES = (OK, LOW, REFUSING)
STEPS = DROP, REFUSE, END = "drop", "refuse", "end"
RETRY_S = 10

log = logging.getLogger("ds4.server")


def no_memory(why: str) -> HttpError:
    """What a client is told."""
    return overloaded(why, "no_memory", RETRY_S)


def trim() -> None:
    """Memory that was freed back to the machine. The C library keeps blocks of up to 32 MB for later, once a block of
    that size was freed (mallopt(3), M_MMAP_THRESHOLD): without this, what is dropped is available to nobody else.
    """
    with contextlib.suppress(AttributeError):  # C libraries that keep nothing have no such function
        ctypes.CDLL(None).malloc_trim(0)


class Relieved(Protocol):
    """Who can give memory back; see worker.py."""

    @property
    def relieving(self) -> bool:
        """What `relieve` asked for is not done yet."""

    def relieve(self, why: str | None) -> None:
        """Have what is kept dropped, and with `why` the youngest request ended."""

    def refuse(self, why: str | None) -> None:
        """Refuse whoever comes or waits, until it is called with None."""


class MemoryWatch:
    """Watches memory for a server.

    Args:
        floor: bytes that should be available.
        available: bytes that are; None: nobody can say, and nothing is done.
        every_s: seconds between two looks.

    Attributes:
        state: "ok", "low" or "refusing".
        seen: bytes that were available at the last look; None: not known.
        done: how often which step was taken.
    """

    def __init__(
        self, server: Relieved, floor: int, *, available: Callable[[], int | None] = host_available,
        every_s: float = EVERY_S,
    ) -> None:  # fmt: skip
        self._server, self.floor, self._available, self._every_s = server, floor, available, every_s
        self.state = OK
        self.seen: int | None = None
        self.done: Counter[str] = Counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._main, name="ds4-memory", daemon=True)

    def start(self) -> None:
        if self._available() is None:
            log.warning("warning: MemAvailable cannot be read: nobody watches memory")
            return
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def told(self) -> dict[str, object]:
        """What /health says."""
        return {"state": self.state, "available_bytes": self.seen, "floor_bytes": self.floor}

    def _main(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self.look()
            except Exception:  # a watch that ends is worse than one that fails once
                log.exception("looking at memory failed")

    def look(self) -> None:
        """Look once, and do what is to be done."""
        self.seen = seen = self._available()
        if seen is None:
            return
        if seen >= self.floor:
            if self.state != OK and seen >= self.floor + self.floor // 4:
                log.info("%s are available again", _mb(seen))
                self.state = OK
                self._server.refuse(None)
            return
        much_less = seen < self.floor // 2
        before, self.state = self.state, LOW if self.state == OK and not much_less else REFUSING
        why = (
            f"memory runs out: {_mb(seen)} are available, {_mb(self.floor)} should be (--memory-floor-mb); "
            "try again later"
        )
        if before == OK:
            log.warning("warning: memory runs out, %s are available: what is kept is dropped", _mb(seen))
        if self.state == REFUSING:
            if before != REFUSING:
                log.warning("warning: memory runs out, %s are available: requests are refused", _mb(seen))
                self.done[REFUSE] += 1
            self._server.refuse(why)
        if self._server.relieving:
            return  # the device is in the middle of something
        ends = before == REFUSING and much_less
        self.done[DROP] += 1
        self.done[END] += ends
        self._server.relieve(why if ends else None)


def _mb(nbytes: int) -> str:
    return f"{nbytes >> 20} MB"
