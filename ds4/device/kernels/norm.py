"""Launch table of norm.cu."""

from __future__ import annotations

from ds4.device.kernels import Kernel
from ds4.device.kernels.linear import ITEM

RMS_NORM: dict[tuple[str, str], Kernel] = {
    (x, y): Kernel(
        name=f"rms_norm_{x}_{y}",
        source="norm.cu",
        grid=lambda R: (R, 1, 1),
        block=256,
        args=(f"y: {y}[R,width]", f"x: {x}[R,width]", "w: f32[width]", "width: i32", "eps: f32"),
        weights=("w",),
        traffic=lambda R, width, x=x, y=y: (R * width * (2 * ITEM[x] + 4), R * width * ITEM[y]),
        released={"R": 1, "width": 5120},
        in_flight=256 * 8,
        reason="one row: a block reads its 20 KB at once, and a row is too short to share",
    )
    for x in ("f32", "bf16")
    for y in ("f32", "bf16")
}
