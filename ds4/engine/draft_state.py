"""What the draft head keeps of a sequence: rings of main-stream keys, and main rows that are not in them yet.

Per stage a ring like a layer's, longer than the window by the same slack, so that taking tokens back needs no
copies. Only committed positions are written. `main` holds the main-hidden rows of the last decode pass (dspark 3):
those of its tokens that are accepted become keys, the others are forgotten with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer, Device
from ds4.device.kernels.linear import ROWS
from ds4.engine.ops.kv import KvLayout
from ds4.engine.state import SLACK
from ds4.errors import Ds4Error
from ds4.model.config import ModelConfig


@dataclass(frozen=True)
class DraftSnapshot:
    """A draft state on the host; `main` are the bytes of the `pending` rows."""

    position: int
    written: int
    first: int
    start: int
    pending: int
    rings: tuple[NDArray[np.uint8], ...]
    main: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.main.nbytes + sum(r.nbytes for r in self.rings)


@dataclass
class DraftState:
    """Device state of one sequence's drafts.

    Attributes:
        act: dtype of main-hidden rows, "bf16" or "f32".
        rings: one a stage, window rows [window + SLACK].   main: A [8, targets * D].
        position: positions below it are in the rings, from `first` on.   written: its highest value so far.
        start, pending: the position of `main`'s first row, and how many rows there are that may still be committed.
    """

    device: Device
    config: ModelConfig
    layout: KvLayout
    act: str
    rings: list[Buffer] = field(default_factory=list)
    position: int = 0
    written: int = 0
    first: int = 0
    start: int = 0
    pending: int = 0

    def __post_init__(self) -> None:
        c, dev = self.config, self.device
        slots = c.sliding_window + SLACK
        self.rings = [self.layout.empty_window(dev, slots) for _ in range(c.num_nextn_predict_layers)]
        self.main = dev.empty((ROWS, len(c.dspark_target_layer_ids) * c.hidden_size), self.act)
        self.first_slot = dev.zeros((1,), "i32")

    @property
    def reach(self) -> int:
        """Where keys and rows that may still be committed end: a round can only start from this position."""
        return self.start + self.pending if self.pending else self.position

    def expect(self, start: int, count: int) -> Buffer:
        """Where a decode pass of `count` rows at the positions from `start` on leaves its main-hidden rows
        (Pass.main_hidden); rows of the pass before it that were not committed are forgotten.

        Raises:
            Ds4Error: more rows than a pass has.
        """
        if not 1 <= count <= ROWS:
            raise Ds4Error(f"a decode pass has 1 to {ROWS} rows, not {count}")
        self.start, self.pending = start, count
        return self.main.view(0, (count, self.main.shape[1]), self.act)

    def forget_rows(self) -> None:
        """The pass that was to leave rows in `main` failed."""
        self.pending = 0

    def begin(self, start: int) -> None:
        """Keys from `start` on are about to be written; where keys before it are missing (passes that left no rows, a
        bounded replay), the window begins here.

        Raises:
            Ds4Error: keys of `start` stand already: roll back first.
        """
        if start < self.position:
            raise Ds4Error(f"draft keys stand up to position {self.position}: roll back before writing at {start}")
        if start > self.position or start < self.first:
            self._set_first(start)

    def end(self, position: int) -> None:
        """Keys below `position` are written."""
        self.position, self.pending = position, 0
        self.written = max(self.written, position)

    def _set_first(self, first: int) -> None:
        self.first = first
        self.first_slot.write(np.array([first], np.int32))

    def rollback(self, position: int) -> None:
        """Forget keys and main rows from `position` on.

        Raises:
            Ds4Error: more than `SLACK` positions below the highest one written.
        """
        if position < min(self.position, self.written - SLACK) or position < 0:
            raise Ds4Error(
                f"draft keys cannot go back from position {self.position} to {position}: at most {SLACK} positions "
                f"below {self.written}"
            )
        self.position = min(self.position, position)
        self.pending = min(self.pending, max(position - self.start, 0))

    def clear(self) -> None:
        """Back to an empty sequence; buffers stay."""
        self.position = self.written = self.pending = 0
        self._set_first(0)

    def snapshot(self) -> DraftSnapshot:
        """Everything that `restore` needs, copied to the host."""
        rings = tuple(self.device.download(r.view(0, (r.nbytes,), "u8")) for r in self.rings)
        n = self.pending * (self.main.nbytes // ROWS)
        main = self.device.download(self.main.view(0, (n,), "u8")) if n else np.zeros(0, np.uint8)
        return DraftSnapshot(self.position, self.written, self.first, self.start, self.pending, rings, main)

    def restore(self, snapshot: DraftSnapshot) -> None:
        """Become that sequence again.

        Raises:
            Ds4Error: the snapshot has other rings or rows than this state.
        """
        wanted = [r.nbytes for r in self.rings], snapshot.pending * (self.main.nbytes // ROWS)
        found = [r.nbytes for r in snapshot.rings], snapshot.main.nbytes
        if wanted != found:
            raise Ds4Error(f"the snapshot's draft state has {found} bytes, {wanted} expected: another model's")
        for ring, data in zip(self.rings, snapshot.rings):
            ring.view(0, (ring.nbytes,), "u8").write(data)
        if snapshot.main.nbytes:
            self.main.view(0, (snapshot.main.nbytes,), "u8").write(snapshot.main)
        self.position, self.written = snapshot.position, snapshot.written
        self.start, self.pending = snapshot.start, snapshot.pending
        self._set_first(snapshot.first)

    def nbytes(self) -> int:
        """Device bytes held."""
        return self.main.nbytes + sum(r.nbytes for r in self.rings)
