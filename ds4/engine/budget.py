"""Device memory for the states of all sequences of an engine: who may grow, and who has to be told no.

Two limits. The user's own (`--mem-budget-mb`) counts what states hold. And where host and device share memory, what
the machine has left: there the driver hands out memory until the kernel ends somebody's process, so a sequence that
would take the last of it is refused instead. A device with memory of its own says no by itself.
"""

from __future__ import annotations

import weakref
from pathlib import Path

from ds4.device import Device
from ds4.errors import CapacityError

SPARE_BYTES = 1 << 30  # of shared memory that growth leaves to the machine


class StateBudget:
    """What sequences hold together, by their owners; an owner that is gone holds nothing.

    Args:
        limit: bytes for all states; None: no limit but the memory that is there.
    """

    def __init__(self, device: Device, limit: int | None) -> None:
        self._device, self.limit = device, limit
        self._held: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    @property
    def held(self) -> int:
        """Bytes that states hold."""
        return sum(self._held.values())

    def check(self, owner: object, tokens: int, need: int, fresh: int) -> None:
        """An owner is about to grow to `tokens` tokens: `need` bytes at the peak of it, `fresh` of them new.

        Raises:
            CapacityError: that is more than there is for it.
        """
        if self.limit is not None:
            left = self.limit - sum(n for other, n in self._held.items() if other is not owner)
            if need > left:
                raise CapacityError(
                    f"{tokens} tokens need {need >> 20} MB of state, the budget leaves {max(left, 0) >> 20} MB; "
                    "shorten the context or raise --mem-budget-mb"
                )
        if self._device.info.unified and fresh:
            available = free_bytes(self._device)
            if available is not None and fresh > available - SPARE_BYTES:
                raise CapacityError(
                    f"{tokens} tokens need {fresh >> 20} MB more, {available >> 20} MB of memory are available and "
                    f"{SPARE_BYTES >> 20} MB are left to the machine; shorten the context or free memory"
                )

    def hold(self, owner: object, nbytes: int) -> None:
        """What an owner holds now."""
        self._held[owner] = nbytes


def free_bytes(device: Device) -> int | None:
    """What may be placed in memory now; None: nobody can say. Where host and device share memory it is MemAvailable:
    page cache counts as free there, unlike in the driver's figure.
    """
    return host_available() if device.info.unified else device.free_bytes()


def host_available() -> int | None:
    """MemAvailable of the machine, in bytes; None: nobody can say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
