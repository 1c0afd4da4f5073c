"""Compressed rows and index keys of the kv sources (model-text 5.5, keys of 5.6)."""

from __future__ import annotations

from dataclasses import dataclass

from ds4.model.config import ModelConfig
from ds4.teacher.numerics import F32, Numerics
from ds4.teacher.state import Call, LayerState


@dataclass(frozen=True)
class CompressorWeights:
    """wkv f32 [K, D], wgate the same (None at ratio 1), norm [K]; the index key's wk [I, K] and k_norm [I]."""

    wkv: F32
    wgate: F32 | None
    norm: F32
    wk: F32
    k_norm: F32


def compress(
    nm: Numerics,
    config: ModelConfig,
    layer: int,
    w: CompressorWeights,
    x_RD: F32,
    call: Call,
    state: LayerState,
    frequencies: F32,
) -> None:
    """Run the compressor over the call's tokens and append the rows of every group that closes.

    The index key comes from the unrotated latent; the cached row is its rotated, rounded copy. Both stand at
    the position of their group's first token.
    """
    xp = nm.xp
    ratio = config.compress_ratios[layer]
    assert state.compressed is not None and state.index_keys is not None and state.partial_a is not None
    first_row = state.compressed.n
    if w.wgate is None:
        pooled = nm.bf16(x_RD @ w.wkv.T)
    else:
        # float32 throughout, also in the vendor's arithmetic: only the pool is rounded
        assert state.partial_g is not None
        a = xp.concatenate([state.partial_a, x_RD @ w.wkv.T])
        g = xp.concatenate([state.partial_g, x_RD @ w.wgate.T])
        n_closed = a.shape[0] // ratio
        state.partial_a, state.partial_g = a[n_closed * ratio :].copy(), g[n_closed * ratio :].copy()
        if n_closed == 0:
            return
        a = a[: n_closed * ratio].reshape(n_closed, ratio, -1)
        g = g[: n_closed * ratio].reshape(n_closed, ratio, -1)
        share = xp.exp(g - g.max(axis=1, keepdims=True))
        share = share / share.sum(axis=1, keepdims=True)
        pooled = nm.bf16((share * a).sum(axis=1))
    latent = nm.rms_norm(pooled, w.norm, config.rms_norm_eps)
    at = ratio * (first_row + xp.arange(latent.shape[0], dtype=xp.int64))
    key = nm.rms_norm(nm.linear(latent, w.wk), w.k_norm, config.rms_norm_eps)
    state.index_keys.append(nm.round_index(nm.rope(key, at, frequencies)))
    state.compressed.append(nm.round_compressed(nm.rope(latent, at, frequencies)))
    assert state.compressed.n == call.end // ratio
