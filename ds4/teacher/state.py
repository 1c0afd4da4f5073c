"""All that resumes a sequence (model-text 8): window keys, compressed rows, index keys, partial groups, the
compressed-id history and the published-keys pointer. Index lists and candidate blocks belong to one call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ds4.model.config import ModelConfig
from ds4.teacher.numerics import F32, I64, Mask, Numerics


class Rows:
    """A growing [n, width] float32 array; `view` is what is filled."""

    def __init__(self, nm: Numerics, width: int) -> None:
        self._xp = nm.xp
        self._data: F32 = nm.xp.empty((0, width), dtype=np.float32)
        self.n = 0

    @property
    def view(self) -> F32:
        return self._data[: self.n]

    def append(self, rows: F32) -> None:
        need = self.n + rows.shape[0]
        if need > self._data.shape[0]:
            grown = self._xp.empty((max(need, 2 * self.n), self._data.shape[1]), dtype=np.float32)
            grown[: self.n] = self.view
            self._data = grown
        self._data[self.n : need] = rows
        self.n = need


@dataclass
class LayerState:
    """One layer's part. Only kv sources have the last four."""

    window: F32  # [<= W-1, K]: the newest positions' keys, oldest first
    compressed: Rows | None = None  # [C, K], rotated
    index_keys: Rows | None = None  # [C, I], rotated
    partial_a: F32 | None = None  # [< R, K]: values of an unfinished group
    partial_g: F32 | None = None  # [< R, K]: their gate logits; None at ratio 1


@dataclass
class State:
    """One sequence. `position` tokens have been processed."""

    layers: list[LayerState]
    position: int = 0
    history: I64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # compressed ids, DEAD = -1
    published: int | None = None  # the layer whose index keys were published last

    @staticmethod
    def empty(nm: Numerics, config: ModelConfig) -> State:
        layers = []
        for layer in range(config.num_hidden_layers):
            state = LayerState(window=nm.xp.empty((0, config.head_dim), dtype=np.float32))
            if layer in config.kv_source_layer_ids:
                state.compressed = Rows(nm, config.head_dim)
                state.index_keys = Rows(nm, config.index_head_dim)
                state.partial_a = nm.xp.empty((0, config.head_dim), dtype=np.float32)
                if config.compress_ratios[layer] > 1:
                    state.partial_g = nm.xp.empty((0, config.head_dim), dtype=np.float32)
            layers.append(state)
        return State(layers)


@dataclass
class Call:
    """What the layers of one forward call share. Rows are positions start .. start + n - 1.

    `by_publisher` (released index keys on decode) makes an index source score the keys that the vendor's one
    slot would hold, else every row scores its own kv owner's.
    """

    start: int
    n: int
    positions: I64
    image: Mask | None
    by_publisher: bool
    picks: I64 | None = None  # of the last index source that ran
    candidates: Mask | None = None  # of the candidate source
    all_picks: dict[int, I64] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.n
