"""Matrix products with stored weights, the step family and the prefill family."""

from __future__ import annotations

from ds4.device import Buffer, Device
from ds4.device.kernels.linear import PREFILL, ROWS, STEP, split_of
from ds4.engine.ops.placement import Weight, place_weight
from ds4.engine.scratch import Workspace
from ds4.errors import DeviceError

__all__ = ["Weight", "linear", "place_weight"]


def linear(dev: Device, ws: Workspace, family: str, w: Weight, y: Buffer, x: Buffer, R: int, groups: int = 1) -> None:
    """y[r,n] = sum_k x[r, g(n) K + k] w[n,k], g(n) = n // (N / groups).

    Args:
        family: "step" for 1..8 rows, one row alone the same bits as among eight; "prefill" for any number, a row's
            bits independent of it. In bf16 the two sum in different orders; in f32 they are one kernel.
        y: [R, N] bf16 or f32.   x: [R, groups * K], bf16, or f32 with an f32 y.

    Raises:
        DeviceError: more than eight rows in a step; types or groups that no kernel takes.
    """
    N, K = w.rows, w.cols
    if N % groups or (groups > 1 and N // groups % 2):
        raise DeviceError(f"linear: {N} rows do not make {groups} groups of an even number of rows")
    if family == "step" and not 1 <= R <= ROWS:
        raise DeviceError(f"linear: a step has 1 to {ROWS} rows, not {R}")
    if family == "prefill" and x.dtype == "bf16":
        dev.launch(PREFILL[w.format, y.dtype], y, w.codes, w.scales, x, R, N, K, groups)
        return
    kernel = STEP.get((w.format, x.dtype, y.dtype, 1 if R == 1 else ROWS))
    if kernel is None:
        raise DeviceError(f"linear: no kernel from {x.dtype} to {y.dtype}")
    dev.launch(kernel, y, w.codes, w.scales, x, R, N, K, groups, split_of(w.format, N, K))
