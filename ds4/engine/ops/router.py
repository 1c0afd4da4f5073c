"""Selection of routed experts."""

from __future__ import annotations

from ds4.device import Buffer, Device
from ds4.device.kernels.router import ROUTE
from ds4.engine.scratch import Workspace
from ds4.model.config import ModelConfig


def route(
    dev: Device,
    ws: Workspace,
    logits: Buffer,
    bias: Buffer,
    picks: Buffer,
    weights: Buffer,
    R: int,
    config: ModelConfig,
    delta: Buffer | None = None,
) -> None:
    """The k experts of each row with the largest sqrt(softplus(logit / gate_temp)) + bias (+ delta); their weights.

    Args:
        logits: f32 [R, E].   bias, delta (a mounted sidecar's): f32 [E], for the selection only.
        picks: i32 [R, k] out, by falling selection score, ties lowest expert first; k is its last axis.
        weights: f32 [R, k] out: unbiased scores, normalised over the picks if the config says so, times its factor.
    """
    E, k = bias.shape[0], picks.shape[-1]
    scale, norm = config.routed_scaling_factor, int(config.norm_topk_prob)
    dev.launch(ROUTE, picks, weights, logits, bias, delta, E, k, config.gate_temp, scale, norm, R=R)
