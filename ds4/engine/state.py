"""All that resumes a sequence, on the device: one object, one layout; snapshot and restore are its methods.

Per layer a ring of window rows; per kv source the compressed rows, the index keys and the open group. Rings and open
groups are longer than the model needs by `SLACK` positions, so that the newest tokens can be taken back without
copies: what a later position wrote over is older than anything that the earlier one can see. How far back that is
counts from the highest position ever written, `written`: going back does not bring back what was written over.
Compressed rows beyond a position's count are masked by every reader and rewritten when the group closes again.

`first` holds two device slots: the lowest position whose window row exists, for the layers below the last kv source
and for those from it on (they differ after a bounded replay, model-text 8.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer, Device
from ds4.engine.budget import StateBudget
from ds4.engine.ops.kv import KvLayout
from ds4.errors import CapacityError, Ds4Error
from ds4.model.config import ModelConfig

SLACK = 64  # positions below the highest one written that can be taken back exactly
LEAST_CAPACITY = 1024  # tokens of compressed rows at the start


@dataclass(frozen=True)
class Snapshot:
    """A sequence on the host: arrays by name and the numbers that say what they mean."""

    position: int
    written: int
    first: tuple[int, int]
    published: int | None
    capacity: int
    arrays: dict[str, NDArray[np.uint8]]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())


@dataclass
class SourceRows:
    """A kv source's compressed rows, index keys and open group."""

    ratio: int
    comp: Buffer
    keys: Buffer
    partial: Buffer | None


@dataclass(eq=False)
class SequenceState:
    """Device state of one sequence. `position` counts the tokens that it holds; `written`: rows of positions below it
    may have been written since the sequence was empty.
    """

    device: Device
    config: ModelConfig
    layout: KvLayout
    rings: list[Buffer] = field(default_factory=list)
    sources: dict[int, SourceRows] = field(default_factory=dict)
    capacity: int = 0
    position: int = 0
    written: int = 0
    first: tuple[int, int] = (0, 0)
    published: int | None = None
    replayed_to: int = 0  # window rows before this position cannot be brought back by `rollback`
    version: int = 0  # rises where the sequence changes otherwise than by passes
    generation: int = 0  # rises with every buffer that moves, also where a growth fails half way
    budget: StateBudget | None = None  # of device memory for this state and others; None: as much as there is
    beside: int = 0  # bytes of the sequence that are not in this state, but count

    def __post_init__(self) -> None:
        c, dev = self.config, self.device
        self.first_slots = dev.upload(np.zeros(2, np.int32))
        slots = c.sliding_window + SLACK
        self.rings = [self.layout.empty_window(dev, slots) for _ in range(c.num_hidden_layers)]
        for source in c.kv_source_layer_ids:
            ratio = c.compress_ratios[source]
            partial = None
            if ratio > 1:
                groups = 1 + -(-SLACK // ratio)
                partial = dev.zeros((2, groups * ratio, c.head_dim), "f32")
            self.sources[source] = SourceRows(
                ratio, self.layout.empty_compressed(dev, 1), self.layout.empty_keys(dev, 1), partial
            )
        self.reserve(1)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens: doubles until they fit. Captured graphs of another `generation` are stale.

        Raises:
            CapacityError: more than the context, the budget or the memory; what the sequence holds stays.
        """
        limit = self.config.max_position_embeddings
        if tokens > limit:
            raise CapacityError(f"{tokens} tokens do not fit the model's context of {limit}")
        if tokens <= self.capacity:
            return
        capacity = max(self.capacity, LEAST_CAPACITY)
        while capacity < tokens:
            capacity *= 2
        self._check_budget(tokens, capacity)
        for rows in self.sources.values():
            count = -(-capacity // rows.ratio)
            for name, make in (("comp", self.layout.empty_compressed), ("keys", self.layout.empty_keys)):
                old: Buffer = getattr(rows, name)
                new = make(self.device, count)
                self.device.copy(new, old, min(old.nbytes, new.nbytes))
                setattr(rows, name, new)
                self.generation += 1
                self.device.sync()
        self.capacity = capacity
        self._hold()

    def _check_budget(self, tokens: int, capacity: int) -> None:
        """While it grows a source holds its old rows and its new ones; the largest source decides the peak."""
        if self.budget is None:
            return
        per_row = self.layout.compressed_bytes + self.layout.key_bytes
        grown = sum(-(-capacity // rows.ratio) * per_row for rows in self.sources.values())
        fixed = sum(b.nbytes for name, b in self._named().items() if not name.startswith(("comp.", "keys.")))
        fresh = grown if capacity > self.capacity else 0
        self.budget.check(self, tokens, fixed + grown + self.beside, fresh)

    def take_from_budget(self, nbytes: int) -> None:
        """Something else of this sequence takes a part of the budget.

        Raises:
            CapacityError: what is left does not hold what there is already.
        """
        self.beside += nbytes
        self._check_budget(self.capacity, self.capacity)
        self._hold()

    def _hold(self) -> None:
        if self.budget is not None:
            self.budget.hold(self, self.nbytes() + self.beside)

    def set_first(self, below: int, above: int) -> None:
        """Lowest existing window row of the layers below, and from, the last kv source."""
        self.first = (below, above)
        self.first_slots.write(np.array([below, above], np.int32))

    def first_slot(self, layer: int) -> Buffer:
        """The device slot, i32 [1], that attention of `layer` reads."""
        return self.first_slots.view(4 * (layer >= self.config.last_kv_source >= 0), (1,), "i32")

    def can_roll_back(self, position: int) -> bool:
        """Whether `rollback(position)` would be exact."""
        return max(self.written - SLACK, self.replayed_to) <= position <= self.position

    def advance(self, position: int) -> None:
        """Rows below `position` are written, or on their way."""
        self.position = position
        self.will_write(position)

    def will_write(self, position: int) -> None:
        """Rows below `position` are about to be written, whether they will count or not."""
        self.written = max(self.written, position)

    def rollback(self, position: int) -> None:
        """Forget the tokens from `position` on.

        Raises:
            Ds4Error: more than `SLACK` positions below the highest one written, or behind a bounded replay.
        """
        if not self.can_roll_back(position):
            raise Ds4Error(
                f"cannot go back from position {self.position} to {position}: at most {SLACK} positions below "
                f"{self.written}, and not before {self.replayed_to}; sync from the start instead"
            )
        self.position = position
        self.version += 1

    def clear(self) -> None:
        """Back to an empty sequence; buffers stay."""
        self.position = self.written = self.replayed_to = 0
        self.version += 1
        self.published = None
        self.set_first(0, 0)

    def _named(self) -> dict[str, Buffer]:
        out = {f"ring.{i}": ring for i, ring in enumerate(self.rings)}
        for source, rows in self.sources.items():
            out[f"comp.{source}"], out[f"keys.{source}"] = rows.comp, rows.keys
            if rows.partial is not None:
                out[f"partial.{source}"] = rows.partial
        return out

    def _live_bytes(self, name: str, buffer: Buffer) -> int:
        """Compressed rows are kept as far as they count; everything else whole."""
        kind, _, source = name.partition(".")
        if kind not in ("comp", "keys"):
            return buffer.nbytes
        rows = self.position // self.sources[int(source)].ratio
        return buffer.nbytes // buffer.shape[0] * rows

    def snapshot(self) -> Snapshot:
        """Everything that `restore` needs, copied to the host."""
        self.device.sync()
        arrays = {}
        for name, buffer in self._named().items():
            n = self._live_bytes(name, buffer)
            raw = buffer.view(0, (n,), "u8")
            arrays[name] = self.device.download(raw) if n else np.zeros(0, np.uint8)
        return Snapshot(self.position, self.written, self.first, self.published, self.capacity, arrays)

    def restore(self, snapshot: Snapshot) -> None:
        """Become that sequence again.

        Raises:
            Ds4Error: the snapshot has other tensors or sizes than this state.
        """
        self.reserve(max(snapshot.position, 1))
        named = self._named()
        if set(named) != set(snapshot.arrays):
            raise Ds4Error("the snapshot belongs to another model: its tensors differ")
        self.position, self.written = snapshot.position, snapshot.written
        self.version += 1
        for name, buffer in named.items():
            data = snapshot.arrays[name]
            if data.nbytes != self._live_bytes(name, buffer):
                raise Ds4Error(
                    f"the snapshot's {name} has {data.nbytes} bytes, {self._live_bytes(name, buffer)} expected"
                )
            if data.nbytes:
                buffer.view(0, (data.nbytes,), "u8").write(data)
        self.published = snapshot.published
        self.replayed_to = snapshot.position if snapshot.first[1] else 0
        self.set_first(*snapshot.first)

    def nbytes(self) -> int:
        """Device bytes held."""
        return sum(b.nbytes for b in self._named().values())
