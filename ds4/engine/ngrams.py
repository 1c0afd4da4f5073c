"""From token ids to n-gram rows on the device: the engine's side of the row store.

A request is made as soon as its ids are known and waited for just before the layer that needs it, so reads run while
the layers between compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ds4.engram.hash import hash_rows
from ds4.engram.store import RowStore, Ticket
from ds4.engram.tables import EngramTables
from ds4.model.config import ModelConfig


class NgramFeed:
    """Rows of every engram layer for runs of positions of one history."""

    def __init__(self, config: ModelConfig, tables: EngramTables, stores: Sequence[RowStore]) -> None:
        self.config, self.tables, self.stores = config, tables, tuple(stores)
        self.row_bytes = config.engram_head_dim + config.engram_head_dim // 32

    def rows(self, tokens: Sequence[int], start: int, count: int) -> NDArray[np.int64]:
        """Table rows i64 [count, G, columns] of positions start .. start + count - 1 of `tokens`."""
        back = min(start, self.config.engram_max_ngram_size - 1)
        ids = np.asarray(tokens[start - back : start + count], np.int64)
        history = self.tables.token_map[ids].astype(np.int64)
        return hash_rows(self.tables, self.config, history, np.arange(back, back + count))

    def request(self, tokens: Sequence[int], start: int, count: int, slots: Sequence[int]) -> dict[int, Ticket]:
        """Start the reads of `slots` for those positions; one ticket a slot."""
        if not slots:
            return {}
        rows = self.rows(tokens, start, count)
        return {g: self.stores[g].prefetch(np.ascontiguousarray(rows[:, g]).reshape(-1)) for g in slots}

    def shape(self, count: int) -> tuple[int, int, int]:
        """Shape of one slot's rows on the device, u8."""
        return count, self.config.engram_columns, self.row_bytes

    def close(self) -> None:
        for store in self.stores:
            store.close()
