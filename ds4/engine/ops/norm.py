"""RMSNorm."""

from __future__ import annotations

from ds4.device import Buffer, Device
from ds4.device.kernels.norm import RMS_NORM


def rms_norm(dev: Device, y: Buffer, x: Buffer, weight: Buffer, R: int, width: int, eps: float) -> None:
    """y[r,d] = x[r,d] w[d] / sqrt(mean_d(x[r,d]^2) + eps) over R rows of `width`; x, y f32 or bf16, weight f32."""
    dev.launch(RMS_NORM[x.dtype, y.dtype], y, x, weight, width, eps, R=R)
