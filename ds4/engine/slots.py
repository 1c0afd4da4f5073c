"""Device slots of the next pass: its ids and positions, and what the host knows of them.

A pass that ends in a choice leaves the id and the positions of the next one here, so that a step can start from a
token that the host has not seen yet. What the host would write and the slots hold already is not written again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds4.device import Buffer, Device
from ds4.device.kernels.linear import ROWS

MAX_ROWS = ROWS  # of a step


class Slots:
    """Slots of one sequence.

    Attributes:
        ids, pos: i32 [8].
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.ids = device.zeros((MAX_ROWS,), "i32")
        self.pos = device.zeros((MAX_ROWS,), "i32")
        self._held: list[int] = []  # ids that are known to stand in the first slots
        self._start: int | None = None  # the position in the first slot, if known
        self.written = 0  # times that they were written, by anyone

    def set(self, tokens: Sequence[int], start: int) -> None:
        """The next pass runs `tokens` at the positions from `start` on."""
        if self._held[: len(tokens)] != list(tokens):
            self.ids.write(np.asarray(tokens, np.int32))
            self._held = list(tokens)
            self.written += 1
        self.set_start(start)

    def set_start(self, start: int) -> None:
        """The first position; those that follow it stand in the other slots."""
        if self._start != start:
            self.pos.write(np.arange(start, start + MAX_ROWS, dtype=np.int32))
            self._start = start
            self.written += 1

    def take_drafts(self, drafts: Buffer, ids: Sequence[int]) -> None:
        """Copy drafts i32 [k], whose ids the host knows, behind the first id."""
        if ids:
            self._device.copy(self.ids, drafts, 4 * len(ids), dst_offset=4)
        self._held[1:] = ids
        self.written += 1

    def holds(self, tokens: Sequence[int], start: int) -> bool:
        """Whether `set` would write nothing."""
        return self._held[: len(tokens)] == list(tokens) and self._start == start

    def changed(self) -> None:
        """The device writes here, the host does not know what."""
        self._held, self._start = [], None
        self.written += 1

    def left(self, token: int, position: int) -> None:
        """What a choice left here, now that the host knows it."""
        self._held, self._start = [token], position
