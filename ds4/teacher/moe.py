"""Router and experts (model-text 7). Experts are visited one by one; each is dequantised only while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ds4.model.config import ModelConfig
from ds4.teacher.hyper import sigmoid
from ds4.teacher.indexer import best_mask
from ds4.teacher.numerics import F32, I64, Mask, Numerics

Expert = tuple[F32, F32, F32]  # w1 [F, D], w3 [F, D], w2 [D, F]
SOFTPLUS_LINEAR_ABOVE = np.float32(20)


class RouterError(ArithmeticError):
    """Scores of a row are not finite, so no expert can be chosen. The caller knows layer and position."""

    def __init__(self, row: int) -> None:
        super().__init__(f"router scores of row {row} are not finite")
        self.row = row


@dataclass(frozen=True)
class MoeWeights:
    """gate f32 [E, D]; bias, bias_vl f32 [E] (bias_vl may be absent in a base); the shared expert."""

    gate: F32
    bias: F32
    bias_vl: F32 | None
    shared: Expert


def router_scores(nm: Numerics, u: F32) -> F32:
    """sqrt(softplus(u)), softplus linear above 20."""
    xp = nm.xp
    soft = xp.log1p(xp.exp(xp.minimum(u, SOFTPLUS_LINEAR_ABOVE)))
    scores: F32 = xp.sqrt(xp.where(u > SOFTPLUS_LINEAR_ABOVE, u, soft))
    return scores


def route(
    nm: Numerics, config: ModelConfig, moe: MoeWeights, x_RD: F32, image_R: Mask | None, n_used: int
) -> tuple[I64, F32]:
    """Experts of each row, rising ids [R, k], and their mixing weights [R, k].

    The bias chooses and does not weigh. Ties go to the lowest id.
    """
    xp = nm.xp
    scores = router_scores(nm, (x_RD @ moe.gate.T) / np.float32(config.gate_temp))
    finite_R = xp.isfinite(scores).all(axis=1)
    if not bool(finite_R.all()):
        raise RouterError(int(nm.to_host(finite_R).argmin()))
    bias = moe.bias[None, :]
    if image_R is not None and moe.bias_vl is not None:
        bias = xp.where(image_R[:, None], moe.bias_vl[None, :], bias)
    chosen = best_mask(nm, scores + bias, n_used)
    picks: I64 = xp.nonzero(chosen)[1].reshape(-1, n_used)
    weights = xp.take_along_axis(scores, picks, axis=1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
    return picks, weights * np.float32(config.routed_scaling_factor)


def expert(nm: Numerics, weights: Expert, x_RD: F32, limit: float, mix_R: F32 | None) -> F32:
    """Clamped SwiGLU; the mixing weight stands before w2, as released."""
    w1, w3, w2 = weights
    g = nm.xp.minimum(nm.quantised_linear(x_RD, w1), np.float32(limit))
    u = nm.xp.clip(nm.quantised_linear(x_RD, w3), np.float32(-limit), np.float32(limit))
    a = g * sigmoid(nm, g) * u
    if mix_R is not None:
        a = a * mix_R[:, None]
    return nm.quantised_linear(nm.bf16(a), w2)


def moe(
    nm: Numerics,
    config: ModelConfig,
    weights: MoeWeights,
    load_expert: Callable[[int], Expert],
    x_RD: F32,
    image_R: Mask | None,
    n_used: int,
) -> F32:
    """Route, then `mix`: f32 [R, D]."""
    picks_Rk, mix_Rk = route(nm, config, weights, x_RD, image_R, n_used)
    return mix(nm, config, weights, load_expert, x_RD, picks_Rk, mix_Rk)


def mix(
    nm: Numerics,
    config: ModelConfig,
    weights: MoeWeights,
    load_expert: Callable[[int], Expert],
    x_RD: F32,
    picks_Rk: I64,
    mix_Rk: F32,
) -> F32:
    """Routed experts in rising id, then the shared one; the sum is float32, rounded once."""
    total = nm.xp.zeros_like(x_RD)
    for e in np.unique(nm.to_host(picks_Rk)).tolist():
        rows, slots = nm.xp.nonzero(picks_Rk == e)
        total[rows] += expert(nm, load_expert(e), x_RD[rows], config.swiglu_limit, mix_Rk[rows, slots])
    return nm.bf16(total + expert(nm, weights.shared, x_RD, config.swiglu_limit, None))
