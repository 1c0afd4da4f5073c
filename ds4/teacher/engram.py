"""The engram gate (model-text 9.3). Row numbers come from ds4.engram.hash, row values from the source."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds4.model.config import ModelConfig
from ds4.teacher.hyper import sigmoid
from ds4.teacher.numerics import F32, Mask, Numerics

DOT_FLOOR = np.float32(1e-6)


@dataclass(frozen=True)
class EngramWeights:
    """wkv f32 [(S+1)*D, columns*head_dim]; q, k f32 [S, D]."""

    wkv: F32
    q: F32
    k: F32


def engram(nm: Numerics, config: ModelConfig, w: EngramWeights, x_RSD: F32, rows_RE: F32, shut_R: Mask | None) -> F32:
    """X[c] += sigmoid(copysign(sqrt(max(|dot_c|, 1e-6)), dot_c)) * value, per stream.

    Args:
        x_RSD: the streams.
        rows_RE: the looked-up rows in column order, f32 [R, columns * head_dim].
        shut_R: rows whose gate is forced to 0 (image spans); None for text.
    """
    xp = nm.xp
    s, d = config.hc_mult, config.hidden_size
    kv = nm.quantised_linear(nm.bf16(rows_RE), w.wkv)
    key_RSD, value_RD = kv[:, : s * d].reshape(-1, s, d), kv[:, s * d :]
    eps = np.float32(config.rms_norm_eps)

    def inverse_rms(v: F32) -> F32:
        mean = xp.mean(v * v, axis=-1, dtype=xp.float32)
        y: F32 = np.float32(1) / xp.sqrt(mean + eps)
        return y

    # the norms are folded in first: streams of 1e-10 against keys of 1e-9 would leave float32 otherwise
    x_hat = x_RSD * inverse_rms(x_RSD)[:, :, None]
    key_hat = key_RSD * inverse_rms(key_RSD)[:, :, None]
    dot = (x_hat * w.q * w.k * key_hat).sum(axis=-1) * np.float32(d**-0.5)
    gate = sigmoid(nm, xp.copysign(xp.sqrt(xp.maximum(xp.abs(dot), DOT_FLOOR)), dot))
    if shut_R is not None:
        gate = xp.where(shut_R[:, None], np.float32(0), gate)
    return nm.bf16(x_RSD + gate[:, :, None] * value_RD[:, None, :])
