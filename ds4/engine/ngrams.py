"""From token ids to n-gram rows on the device: the engine's side of the row store.

Rows are asked for as soon as a token is known and waited for just before the layer that needs them: `announce` starts
the reads of a position, `request` finds them under way when its pass begins, and the reads go on while the layers
before the first n-gram layer compute. The counters tell reads that began in time from those that nobody announced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds4.engram.hash import hash_rows
from ds4.engram.store import RowStore, Ticket
from ds4.engram.tables import EngramTables
from ds4.model.config import ModelConfig

MOST_ANNOUNCED = 64  # positions and tables under way that no pass has asked for; the oldest is forgotten


@dataclass
class FeedCounts:
    """Positions times tables. `announced`: reads begun ahead of their pass; `found`: passes found them under way;
    `late`: begun by the pass itself; `waits`: not there yet when the layer came.
    """

    announced: int = 0
    found: int = 0
    late: int = 0
    waits: int = 0


class Rows:
    """Rows of one table for the positions of a pass, on their way."""

    def __init__(self, tickets: Sequence[Ticket], counts: FeedCounts) -> None:
        self._tickets, self._counts = tickets, counts

    def wait(self) -> NDArray[np.uint8]:
        """u8, flat, position by position.

        Raises:
            Ds4Error: a read failed (Ticket.wait).
        """
        self._counts.waits += sum(not t.done for t in self._tickets)
        return np.concatenate([t.wait().reshape(-1) for t in self._tickets])


class NgramFeed:
    """Rows of every engram layer for runs of positions of one history."""

    def __init__(self, config: ModelConfig, tables: EngramTables, stores: Sequence[RowStore]) -> None:
        self.config, self.tables, self.stores = config, tables, tuple(stores)
        self.row_bytes = config.engram_head_dim + config.engram_head_dim // 32
        self.counts = FeedCounts()
        self._announced: OrderedDict[tuple[int, bytes], Ticket] = OrderedDict()

    def rows(self, tokens: Sequence[int], start: int, count: int) -> NDArray[np.int64]:
        """Table rows i64 [count, G, columns] of positions start .. start + count - 1 of `tokens`."""
        back = min(start, self.config.engram_max_ngram_size - 1)
        ids = np.asarray(tokens[start - back : start + count], np.int64)
        history = self.tables.token_map[ids].astype(np.int64)
        return hash_rows(self.tables, self.config, history, np.arange(back, back + count))

    def read(self, tokens: Sequence[int], start: int, count: int, slots: Sequence[int]) -> dict[int, Ticket]:
        """Start the reads of `slots` for many positions at once; one ticket a slot."""
        if not slots:
            return {}
        rows = self.rows(tokens, start, count)
        return {g: self.stores[g].prefetch(np.ascontiguousarray(rows[:, g]).reshape(-1)) for g in slots}

    def announce(self, tokens: Sequence[int], start: int, count: int) -> None:
        """The next pass will run these positions, or some of them: start their reads, of every table."""
        if not self.stores or count < 1:
            return
        for row in self.rows(tokens, start, count):
            for g, wanted in enumerate(row):
                key = (g, wanted.tobytes())
                if key not in self._announced:
                    self._announced[key] = self.stores[g].prefetch(wanted)
                    self.counts.announced += 1
        while len(self._announced) > MOST_ANNOUNCED:
            self._announced.popitem(last=False)

    def request(self, tokens: Sequence[int], start: int, count: int) -> dict[int, Rows]:
        """The rows of a step, for every table, on their way since they were announced or from now on."""
        if not self.stores:
            return {}
        rows = self.rows(tokens, start, count)
        return {g: Rows([self._take(g, row[g]) for row in rows], self.counts) for g in range(len(self.stores))}

    def _take(self, slot: int, wanted: NDArray[np.int64]) -> Ticket:
        ticket = self._announced.pop((slot, wanted.tobytes()), None)
        if ticket is None:
            self.counts.late += 1
            return self.stores[slot].prefetch(wanted)
        self.counts.found += 1
        return ticket

    def shape(self, count: int) -> tuple[int, int, int]:
        """Shape of one slot's rows on the device, u8."""
        return count, self.config.engram_columns, self.row_bytes

    def close(self) -> None:
        for store in self.stores:
            store.close()
