"""Where the teacher's weights come from: a checkpoint, or a base's dequantised weights.

Both speak released tensor names and hand out float32; packed bytes stay mapped, and nothing here keeps a
dequantised array. Base names are translated by the planner's own table, so the recipe is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ds4.base.codecs import decode
from ds4.base.plan import plan
from ds4.base.reader import Base
from ds4.base.types import FP8_32X32
from ds4.checkpoint import codecs
from ds4.checkpoint.reader import Checkpoint
from ds4.engram.hash import EngramTables, derive_tables
from ds4.errors import MissingTensorError
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
HEAD_BLOCK_ROWS = 8192


class Source(Protocol):
    """Weights under their released names."""

    @property
    def config(self) -> ModelConfig: ...

    def has(self, name: str) -> bool: ...

    def dense(self, name: str) -> F32:
        """The whole tensor, f32 [O, I] or [n]."""
        ...

    def rows(self, name: str, ids: I64) -> F32:
        """Chosen rows of a matrix that is never dequantised whole (embedding), f32 [n, I]."""
        ...

    def blocks(self, name: str) -> Iterator[F32]:
        """A matrix in slices of whole rows, in order (output head)."""
        ...

    def expert(self, prefix: str, e: int) -> tuple[F32, F32, F32]:
        """w1 [F, D], w3 [F, D], w2 [D, F] of routed expert e under `layers.N` or `mtp.T`."""
        ...

    def engram_rows(self, layer: int, rows: I64) -> F32:
        """Rows [n] of that layer's table, f32 [n, head_dim]."""
        ...

    def engram_tables(self) -> EngramTables:
        """Asked for only where the model has engram layers."""
        ...


class CheckpointSource:
    """A checkpoint in the released layout."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.config: ModelConfig = checkpoint.config

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def dense(self, name: str) -> F32:
        return self._checkpoint.tensor(name)

    def rows(self, name: str, ids: I64) -> F32:
        return _to_f32(self._checkpoint.raw(name)[ids])

    def blocks(self, name: str) -> Iterator[F32]:
        raw = self._checkpoint.raw(name)
        for lo in range(0, raw.shape[0], HEAD_BLOCK_ROWS):
            yield _to_f32(raw[lo : lo + HEAD_BLOCK_ROWS])

    def expert(self, prefix: str, e: int) -> tuple[F32, F32, F32]:
        w1, w3, w2 = (self._checkpoint.tensor(f"{prefix}.ffn.experts.{e}.{m}.weight") for m in ("w1", "w3", "w2"))
        return w1, w3, w2

    def engram_rows(self, layer: int, rows: I64) -> F32:
        return self._checkpoint.engram_rows(layer, rows)

    def engram_tables(self) -> EngramTables:
        return derive_tables(self.config, Tokenizer.from_file(Path(self._checkpoint.path) / "tokenizer.json"))


class BaseSource:
    """A base file: q4_K and friends dequantised, experts from codebook and indices."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self.config: ModelConfig = base.config
        self._names = {p.source: p.name for p in plan(base.config)}

    def _name(self, name: str) -> str:
        if not self.has(name):
            raise MissingTensorError(f"{self._base.path}: the base has no tensor for {name}")
        return self._names[name]

    def has(self, name: str) -> bool:
        return name in self._names and self._names[name] in self._base.tensors

    def dense(self, name: str) -> F32:
        return self._base.tensor(self._name(name))

    def rows(self, name: str, ids: I64) -> F32:
        table = self._table(name)
        return self.dense(name)[ids] if table is None else self._decode(name, table[ids])

    def blocks(self, name: str) -> Iterator[F32]:
        table = self._table(name)
        if table is None:
            yield self.dense(name)
            return
        for lo in range(0, table.shape[0], HEAD_BLOCK_ROWS):
            yield self._decode(name, table[lo : lo + HEAD_BLOCK_ROWS])

    def _table(self, name: str) -> NDArray[np.uint8] | None:
        """Packed rows [O, bytes a row], mapped; None for the one type whose rows are not apart in the file."""
        packed = self._base.tensors[self._name(name)]
        if packed.type_id == FP8_32X32:
            return None
        return self._base.raw(packed.name).reshape(packed.dims[1], -1)

    def _decode(self, name: str, rows: NDArray[np.uint8]) -> F32:
        packed = self._base.tensors[self._name(name)]
        return decode(np.ascontiguousarray(rows).reshape(-1), packed.type_id, (packed.dims[0], rows.shape[0]))

    def expert(self, prefix: str, e: int) -> tuple[F32, F32, F32]:
        blob = self._base.experts(prefix.replace("layers.", "blk."))
        return blob.dequant(e, 0), blob.dequant(e, 1), blob.dequant(e, 2)

    def engram_rows(self, layer: int, rows: I64) -> F32:
        slot = self.config.engram_slot(layer)
        assert slot is not None
        table = self._base.engram_table(slot)
        width = table.head_dim
        codes = np.memmap(table.path, np.uint8, "r", table.weight_offset, (table.rows, width))
        scales = np.memmap(table.path, np.uint8, "r", table.scale_offset, (table.rows, width // 32))
        return codecs.dequant_engram(codes[rows], scales[rows])

    def engram_tables(self) -> EngramTables:
        t = self._base.engram_tensors()
        return EngramTables(t.token_map, t.multipliers, t.primes, t.offsets)


def _to_f32(raw: NDArray[Any]) -> F32:
    """BF16 bits or float32 as they lie in a checkpoint."""
    return codecs.bf16_to_f32(raw) if raw.dtype == np.uint16 else np.asarray(raw, dtype=np.float32)


def open_source(path: str | Path, engram_dir: str | Path | None = None) -> Source:
    """A checkpoint folder or a base file. `engram_dir` is where a base's engram shards lie.

    Raises FileFormatError and its kin for what cannot be read.
    """
    p = Path(path)
    if p.is_dir():
        return CheckpointSource(Checkpoint.open(p))
    return BaseSource(Base.open(p, engram_dir=engram_dir))
