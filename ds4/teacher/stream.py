"""A layer in, a layer out: the teacher's weights as fields, fetched when their layer runs.

At any time the dense part of one layer and one dequantised expert are in memory. A model so small that all
of it stays under RESIDENT_BYTES keeps what it loaded: decoding a toy would otherwise dequantise it at every
token. At released sizes not even one expert fits under that bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ds4.errors import FileFormatError
from ds4.teacher.attention import AttentionWeights
from ds4.teacher.compressor import CompressorWeights
from ds4.teacher.engram import EngramWeights
from ds4.teacher.hyper import HyperWeights
from ds4.teacher.indexer import IndexerWeights
from ds4.teacher.layers import LayerWeights
from ds4.teacher.moe import Expert, MoeWeights
from ds4.teacher.numerics import F32, Numerics
from ds4.teacher.source import Source

RESIDENT_BYTES = 64 << 20
T = TypeVar("T")


@dataclass
class Stream:
    """Weights of `source` as xp arrays."""

    nm: Numerics
    source: Source
    _kept: dict[object, Any] = field(default_factory=dict)
    _kept_bytes: int = 0

    def layer(self, prefix: str) -> LayerWeights:
        """The dense part under `layers.N` or `mtp.T`."""
        if prefix in self._kept:
            kept: LayerWeights = self._kept[prefix]
            return kept
        return self._keep(prefix, self._load(prefix))

    def expert(self, prefix: str, e: int) -> Expert:
        key = (prefix, e)
        if key in self._kept:
            kept: Expert = self._kept[key]
            return kept
        w1, w3, w2 = self.source.expert(prefix, e)
        return self._keep(key, (self._place(w1), self._place(w3), self._place(w2)))

    def dense(self, name: str) -> F32:
        return self._place(self.source.dense(name))

    def embeds(self, ids: NDArray[np.int64]) -> F32:
        return self._place(self.source.rows("embed.weight", ids))

    def head_blocks(self) -> Iterator[F32]:
        for rows in self.source.blocks("head.weight"):
            yield self._place(rows)

    def _load(self, prefix: str) -> LayerWeights:
        def get(name: str) -> F32:
            return self.dense(f"{prefix}.{name}")

        def maybe(name: str) -> F32 | None:
            return get(name) if self.source.has(f"{prefix}.{name}") else None

        def hyper(which: str) -> HyperWeights:
            return HyperWeights(get(f"hc_{which}_fn"), get(f"hc_{which}_scale"), get(f"hc_{which}_base"))

        compressor = indexer = engram = None
        if self.source.has(f"{prefix}.attn.compressor.wkv.weight"):
            compressor = CompressorWeights(
                get("attn.compressor.wkv.weight"), maybe("attn.compressor.wgate.weight"),
                get("attn.compressor.norm.weight"), get("attn.indexer.wk.weight"), get("attn.indexer.k_norm.weight"),
            )  # fmt: skip
        if self.source.has(f"{prefix}.attn.indexer.wq_b.weight"):
            indexer = IndexerWeights(get("attn.indexer.wq_b.weight"), get("attn.indexer.weights_proj.weight"))
        if self.source.has(f"{prefix}.engram.wkv.weight"):
            engram = EngramWeights(get("engram.wkv.weight"), get("engram.q_weight"), get("engram.k_weight"))
        attention = AttentionWeights(
            get("attn.attn_sink"), get("attn.wq_a.weight"), get("attn.q_norm.weight"), get("attn.wq_b.weight"),
            get("attn.wkv.weight"), get("attn.kv_norm.weight"), get("attn.wo_a.weight"), get("attn.wo_b.weight"),
            compressor, indexer,
        )  # fmt: skip
        moe = MoeWeights(
            get("ffn.gate.weight"), get("ffn.gate.bias"), maybe("ffn.gate.bias_vl"),
            (get("ffn.shared_experts.w1.weight"), get("ffn.shared_experts.w3.weight"),
             get("ffn.shared_experts.w2.weight")),
        )  # fmt: skip
        return LayerWeights(
            get("attn_norm.weight"), get("ffn_norm.weight"), hyper("attn"), hyper("ffn"), attention, moe, engram
        )

    def _place(self, x: F32) -> F32:
        if x.dtype != np.float32:
            raise FileFormatError(f"a weight was dequantised to {x.dtype}, not float32")
        y: F32 = self.nm.to_xp(x)
        return y

    def _keep(self, key: object, value: T) -> T:
        n_bytes = _n_bytes(value)
        if self._kept_bytes + n_bytes <= RESIDENT_BYTES:
            self._kept[key] = value
            self._kept_bytes += n_bytes
        return value


def _n_bytes(value: Any) -> int:
    """Bytes of every array inside a tree of tuples and dataclasses."""
    if is_dataclass(value):
        return sum(_n_bytes(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, tuple):
        return sum(_n_bytes(v) for v in value)
    return 0 if value is None else int(value.nbytes)
