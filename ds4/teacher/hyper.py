"""Single-pass hyper-connections: mixes, collapse, expand (model-text 5.1 and 5.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds4.model.config import ModelConfig
from ds4.teacher.numerics import F32, Numerics


@dataclass(frozen=True)
class HyperWeights:
    """fn f32 [S(S+2), S*D], scale f32 [3], base f32 [S(S+2)] of one sublayer."""

    fn: F32
    scale: F32
    base: F32


def mixes(nm: Numerics, config: ModelConfig, hyper: HyperWeights, x_RSD: F32) -> tuple[F32, F32, F32]:
    """pre [R, S], post [R, S], comb [R, S, S] of one sublayer, from the streams that enter it."""
    xp = nm.xp
    v = x_RSD.reshape(x_RSD.shape[0], -1)
    mean = xp.mean(v * v, axis=-1, keepdims=True, dtype=xp.float32)
    m = (v @ hyper.fn.T) * (np.float32(1) / xp.sqrt(mean + np.float32(config.rms_norm_eps)))
    return split_mixes(nm, config, m, hyper.scale, hyper.base)


def split_mixes(nm: Numerics, config: ModelConfig, m: F32, scale: F32, base: F32) -> tuple[F32, F32, F32]:
    """pre, post, comb from the S(S+2) normalised products m [R, S(S+2)]: hc_mult pre, post, comb by rows."""
    s, heps = config.hc_mult, np.float32(config.hc_eps)
    pre = sigmoid(nm, m[:, :s] * scale[0] + base[:s]) + heps
    post = np.float32(2) * sigmoid(nm, m[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (m[:, 2 * s :] * scale[2] + base[2 * s :]).reshape(-1, s, s)
    return pre, post, sinkhorn(nm, comb, config.hc_sinkhorn_iters, heps)


def sinkhorn(nm: Numerics, c: F32, iterations: int, heps: np.float32) -> F32:
    """Row softmax, then `iterations` column steps with a row step between each two: a column step ends."""
    xp = nm.xp
    c = xp.exp(c - c.max(axis=2, keepdims=True))
    c = c / c.sum(axis=2, keepdims=True) + heps
    c = c / (c.sum(axis=1, keepdims=True) + heps)
    for _ in range(iterations - 1):
        c = c / (c.sum(axis=2, keepdims=True) + heps)
        c = c / (c.sum(axis=1, keepdims=True) + heps)
    return c


def collapse(nm: Numerics, x_RSD: F32, pre_RS: F32) -> F32:
    """sum_c pre[c] X[c], f32 [R, D]."""
    return nm.bf16((pre_RS[:, :, None] * x_RSD).sum(axis=1))


def expand(nm: Numerics, y_RD: F32, x_RSD: F32, post_RS: F32, comb_RSS: F32) -> F32:
    """X'[k] = post[k] y + sum_j comb[j][k] X[j]: the sum runs over comb's first index."""
    mixed = nm.xp.matmul(comb_RSS.transpose(0, 2, 1), x_RSD)
    return nm.bf16(post_RS[:, :, None] * y_RD[:, None, :] + mixed)


def sigmoid(nm: Numerics, x: F32) -> F32:
    """1 / (1 + exp(-x)), without overflow for very negative x."""
    xp = nm.xp
    e = xp.exp(-xp.abs(x))
    y: F32 = xp.where(x >= 0, np.float32(1), e) / (np.float32(1) + e)
    return y
