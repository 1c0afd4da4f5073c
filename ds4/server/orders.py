"""What the worker is asked to do between two requests: mount other sidecars, lend the device."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime

from ds4.server.errors import HttpError
from ds4.server.job import Job


class Reload:
    """Look at the folders again. `future` gets what is mounted then, or why nothing changed."""

    def __init__(self) -> None:
        self.future: Future[Mapping[str, object]] = Future()


@dataclass
class Lease:
    """The device, lent.

    Attributes:
        borrower: who has it, as it called itself.
        lease_s: how long it lasts after a sign of life.
        id: what the borrower shows.
        since: when it was lent.
        until: end of the lease on the monotonic clock.
        returned: the borrower said that it is done.
    """

    borrower: str
    lease_s: float
    id: str = field(default_factory=lambda: "lease-" + secrets.token_hex(12), repr=False)
    since: datetime = field(default_factory=lambda: datetime.now().astimezone())
    until: float = 0.0
    returned: bool = False

    def prolong(self, lease_s: float | None = None) -> None:
        """It lasts `lease_s` from now on, or as long as last time."""
        self.lease_s = lease_s or self.lease_s
        self.until = time.monotonic() + self.lease_s

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def told(self) -> dict[str, object]:
        """For /health, which needs no key: without its id, by which it could be ended."""
        since = self.since.isoformat(timespec="seconds")
        return {"for": self.borrower, "since": since, "left_s": round(max(self.left_s, 0.0), 1)}


class Lend:
    """Lend the device once the requests that came before (`ahead`) are answered.

    `future` gets the lease. It can be cancelled until the worker takes the order up.
    """

    def __init__(self, lease: Lease, ahead: Iterable[Job]) -> None:
        self.lease, self._ahead = lease, tuple(ahead)
        self.future: Future[Lease] = Future()

    def may_go(self, first: Job | None) -> bool:
        """Whether it is its turn when `first` is the first one that waits."""
        return all(first is not job for job in self._ahead)


def lease_over() -> HttpError:
    """What a borrower is told that has no lease, or none any more."""
    why = "it ran out or was returned, or this server has been started since; the server has its device back"
    return HttpError(404, f"there is no such lease: {why}", "lease_over")


def lent_already(lease: Lease) -> HttpError:
    """What a second borrower is told."""
    return HttpError(
        409, f"the device is lent to {lease.borrower} already; try again later", "lent_already",
        headers={"Retry-After": "60"},
    )  # fmt: skip


def names_of(sidecars: Mapping[str, object]) -> str:
    """What is mounted, for the log."""
    return ", ".join(f"{key} {one['name'] if isinstance(one, dict) else 'none'}" for key, one in sidecars.items())
