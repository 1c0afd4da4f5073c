"""Operators of the hyper-connections: sizes to launches (model-text 5.1, 5.2; kernels in hyper.cu)."""

from __future__ import annotations

from dataclasses import dataclass

from ds4.device import Buffer, Device
from ds4.device.kernels.hyper import HYPER_COLLAPSE, HYPER_DOTS, HYPER_EXPAND, HYPER_MIX, SLICE
from ds4.engine.scratch import Workspace


@dataclass(frozen=True)
class HyperParams:
    """One mixing site (attention's or the FFN's): fn f32 [M, S*D], scale f32 [3], base f32 [M], and its constants."""

    fn: Buffer
    scale: Buffer
    base: Buffer
    iters: int
    eps: float
    hc_eps: float


def mixes(
    dev: Device, ws: Workspace, hp: HyperParams, x: Buffer, pre: Buffer, post: Buffer, comb: Buffer, R: int
) -> None:
    """pre f32 [R, S], post f32 [R, S], comb f32 [R, S, S] of streams x f32 [R, S, D]."""
    _, S, D = x.shape
    width = S * D
    n_slices = -(-width // SLICE)
    M = S * (S + 2)
    part = ws.get("hyper_part", (R, n_slices, M + 1), "f32")
    dev.launch(HYPER_DOTS, part, x, hp.fn, R, width, R=R, S=S, D=D, P=n_slices, M=M)
    dev.launch(
        HYPER_MIX, pre, post, comb, part, hp.scale, hp.base, n_slices, width, hp.iters, hp.eps, hp.hc_eps,
        R=R, S=S, P=n_slices, M=M,
    )  # fmt: skip


def collapse_norm(dev: Device, y: Buffer, x: Buffer, pre: Buffer, w: Buffer, R: int, eps: float) -> None:
    """y A [R, D] = rms_norm(sum_c pre[c] x[c]) * w."""
    dev.launch(HYPER_COLLAPSE[y.kind], y, x, pre, w, x.shape[2], eps, R=R, S=x.shape[1], D=x.shape[2])


def expand(dev: Device, x: Buffer, y: Buffer, post: Buffer, comb: Buffer, R: int) -> None:
    """x[k] <- post[k] y + sum_j comb[j, k] x[j], in place."""
    dev.launch(HYPER_EXPAND[y.kind], x, y, post, comb, x.shape[2], R=R, S=x.shape[1], D=x.shape[2])
