"""Rows of the embedding into the residual streams."""

from __future__ import annotations

from ds4.device import Buffer, Device
from ds4.device.kernels.linear import EMBED
from ds4.engine.ops.placement import Weight


def embed(dev: Device, w: Weight, x: Buffer, ids: Buffer, R: int, S: int) -> None:
    """x[r,c,:] = row ids[r] of `w`, for every stream c. x: f32 [R, S, D]; ids: i32 [R], each in 0 .. V-1."""
    dev.launch(EMBED[w.format], x, w.codes, w.scales, ids, S, w.cols, R=R)
