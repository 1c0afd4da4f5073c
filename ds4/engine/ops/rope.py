"""Rotary position embedding of the attention's queries."""

from __future__ import annotations

from ds4.device import Buffer, Device
from ds4.device.kernels.rope import ROPE_QUERY


def rope_query(dev: Device, q: Buffer, pos: Buffer, freq: Buffer, R: int) -> None:
    """Rotate the last channels of every head of q A [R, H, K] by its row's position, in place (model-text 5.3).

    pos i32 [R]; freq f32 [r/2], the layer's table.
    """
    dev.launch(ROPE_QUERY[q.dtype], q, pos, freq, q.shape[1], R=R)
