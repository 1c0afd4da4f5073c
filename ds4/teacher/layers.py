"""The forward pass in the specification's order and words (model-text 5), one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ds4.model.config import ModelConfig
from ds4.teacher.attention import AttentionWeights
from ds4.teacher.engram import EngramWeights
from ds4.teacher.hyper import HyperWeights, collapse, expand, mixes
from ds4.teacher.moe import Expert, MoeWeights, moe
from ds4.teacher.numerics import F32, Mask, Numerics


@dataclass(frozen=True)
class LayerWeights:
    """The dense part of one layer; experts are asked for one by one."""

    attn_norm: F32
    ffn_norm: F32
    hc_attn: HyperWeights
    hc_ffn: HyperWeights
    attention: AttentionWeights
    moe: MoeWeights
    engram: EngramWeights | None


def enter(nm: Numerics, config: ModelConfig, embeds_RD: F32) -> tuple[F32, F32]:
    """Equal streams X [R, S, D] and the one-hot pre [R, S] that the first attention collapses with."""
    xp = nm.xp
    streams = xp.repeat(nm.bf16(embeds_RD)[:, None, :], config.hc_mult, axis=1)
    pre = xp.zeros((embeds_RD.shape[0], config.hc_mult), dtype=np.float32)
    pre[:, 0] = 1
    return streams, pre


def block(
    nm: Numerics,
    config: ModelConfig,
    w: LayerWeights,
    attend: Callable[[F32], F32],
    load_expert: Callable[[int], Expert],
    x_RSD: F32,
    pre_RS: F32,
    image_R: Mask | None,
    n_used: int,
) -> tuple[F32, F32]:
    """Attention and FFN of one layer or draft stage: (X, pre) in, (X, pre for the next attention) out.

    Args:
        attend: the attention sublayer on its normalised input f32 [R, D].
        n_used: experts a token.
    """
    f = to_ffn(nm, config, w, attend, x_RSD, pre_RS)
    z = moe(nm, config, w.moe, load_expert, f.z_RD, image_R, n_used)
    return expand(nm, z, f.x_RSD, f.post_RS, f.comb_RSS), f.pre_RS


@dataclass(frozen=True)
class FfnCall:
    """Between a layer's two sublayers: the FFN's input, and what carries its output on.

    Attributes:
        z_RD: what router and experts read.
        x_RSD: the streams after attention.
        pre_RS: what the next attention collapses with.
        post_RS, comb_RSS: how the FFN's output enters the streams: `expand(nm, y, x_RSD, post_RS, comb_RSS)`.
    """

    z_RD: F32
    x_RSD: F32
    pre_RS: F32
    post_RS: F32
    comb_RSS: F32


def to_ffn(
    nm: Numerics, config: ModelConfig, w: LayerWeights, attend: Callable[[F32], F32], x_RSD: F32, pre_RS: F32
) -> FfnCall:
    """The attention half of `block`."""
    eps = config.rms_norm_eps
    a_pre, a_post, a_comb = mixes(nm, config, w.hc_attn, x_RSD)
    y = attend(nm.rms_norm(collapse(nm, x_RSD, pre_RS), w.attn_norm, eps))
    x_RSD = expand(nm, y, x_RSD, a_post, a_comb)
    f_pre, f_post, f_comb = mixes(nm, config, w.hc_ffn, x_RSD)
    z = nm.rms_norm(collapse(nm, x_RSD, a_pre), w.ffn_norm, eps)  # attention's own pre feeds the FFN
    return FfnCall(z, x_RSD, f_pre, f_post, f_comb)
