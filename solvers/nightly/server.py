"""A running server as a night sees it: lends its device, is busy or not, mounts what was accepted."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from ds4.errors import Ds4Error
from ds4.posttrain.borrow import Lease, Server, ServerAway

LEASE_S = 60.0


@dataclass(frozen=True)
class Neighbour:
    """`wait_s`: how long the requests that came before may take when its device is asked for."""

    server: Server
    wait_s: float

    def borrow(self) -> AbstractContextManager[Lease]:
        return self.server.borrow(LEASE_S, purpose="ds4 nightly", wait_s=self.wait_s)

    def busy(self) -> bool:
        """Whether a request runs or waits, or the server is still opening its engine. Gone is not busy."""
        try:
            told = self.server.health()
        except ServerAway:
            return False
        queue = told["queue"]
        return bool(queue.get("running") or queue.get("waiting")) or told["status"] == "loading"

    def check(self) -> str | None:
        """Before a night: why no server answers now, which a night can do without; None: it answers.

        Raises:
            UsageError: it takes no orders, or not with this key.
        """
        try:
            self.server.check()
        except ServerAway as e:
            return str(e)
        return None

    def reload(self) -> str:
        """What is mounted then, for people.

        Raises:
            Ds4Error: it could not be mounted; what was mounted stays.
        """
        told = self.server.reload()
        mounted = (told.get("sidecars") or {}).get("posttrain")
        if told.get("status") == "lent":
            raise Ds4Error(f"{self.server.url}: its device is lent; it mounts the new night when it has it back")
        return "nothing" if mounted is None else str(mounted.get("name"))
