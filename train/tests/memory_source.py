"""Released float32 weights in memory as a source of the teacher: the two forwards read identical numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ds4.engram.tables import EngramTables
from ds4.model.config import ModelConfig

F32 = NDArray[np.float32]


class MemorySource:
    """`ds4.teacher.source.Source` over a dictionary of released names."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, F32], tables: EngramTables) -> None:
        self.config, self._weights, self._tables = config, weights, tables

    def has(self, name: str) -> bool:
        return name in self._weights

    def dense(self, name: str) -> F32:
        return self._weights[name]

    def rows(self, name: str, ids: NDArray[np.int64]) -> F32:
        return self._weights[name][ids]

    def blocks(self, name: str) -> Iterator[F32]:
        yield self._weights[name]

    def expert(self, prefix: str, e: int) -> tuple[F32, F32, F32]:
        w1, w3, w2 = (self._weights[f"{prefix}.ffn.experts.{e}.{m}.weight"] for m in ("w1", "w3", "w2"))
        return w1, w3, w2

    def engram_rows(self, layer: int, rows: NDArray[np.int64]) -> F32:
        return self._weights[f"layers.{layer}.engram.embed.weight"][rows]

    def engram_tables(self) -> EngramTables:
        return self._tables
