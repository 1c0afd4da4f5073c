"""n-grams to row numbers (model-text.md 9.2). Host work: a few array operations whatever the number of positions.

t_s   = history[p - s], or the pad id at and beyond the first position that is absent or DEAD
r_n   = t_0 m_0 ^ ... ^ t_{n-1} m_{n-1}
row   = r_n mod prime[n, head] + offset[n, head]
"""

from __future__ import annotations

import numpy as np

from ds4.engram.tables import I64, EngramTables, derive_tables
from ds4.model.config import ModelConfig

__all__ = ["DEAD", "EngramTables", "derive_tables", "hash_rows"]

DEAD = -1  # history entry of an image position: no n-gram looks through it


def hash_rows(tables: EngramTables, config: ModelConfig, history: I64, positions: I64, start: int = 0) -> I64:
    """Table rows of every engram layer at the given positions.

    Args:
        tables: as `derive_tables` or a base file gives them.
        history: i64 [n_history], compressed ids (`EngramTables.compress`) of positions start, start + 1, ...; DEAD
            where an image is.
        positions: i64 [n], each inside the history.
        start: position of `history[0]`. The `max_ngram - 1` tokens before every position must be there, or the
            history must begin at 0.

    Returns:
        i64 [n, G, columns], row numbers inside each layer's table.

    Raises:
        ValueError: a position whose n-grams reach outside the history.
    """
    n_back = config.engram_max_ngram_size
    place = np.asarray(positions, np.int64).reshape(-1) - start
    n = len(place)
    if n and (place.max() >= len(history) or place.min() < (n_back - 1 if start else 0)):
        raise ValueError(f"positions {place.min() + start}..{place.max() + start} need a history they are not in")
    back = place[:, None] - np.arange(n_back)
    token = np.asarray(history, np.int64)[np.maximum(back, 0)]
    blocked = np.logical_or.accumulate((back < 0) | (token == DEAD), axis=1)
    token = np.where(blocked, tables.pad(config), token)
    # [n, G, n_back]; ids times multipliers stay below 2^63, so signed and unsigned agree
    mixed = np.bitwise_xor.accumulate(token[:, None, :] * tables.multipliers, axis=2)
    rows = mixed[:, :, 1:, None] % tables.primes
    return rows.reshape(n, len(tables.multipliers), config.engram_columns) + tables.offsets
