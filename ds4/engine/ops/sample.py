"""Sampling on the device: a request's settings packed for the kernel, and its 16 bytes a row unpacked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer, Device
from ds4.device.kernels.sample import SAMPLE


def pack_params(
    rows: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> NDArray[np.int32]:
    """i32 [rows, 8] as sample.cu reads it: the same settings for every row."""
    out = np.zeros((rows, 8), np.int32)
    out[:, 0] = np.float32(temperature).view(np.int32)
    out[:, 1] = top_k
    out[:, 2] = np.float32(top_p).view(np.int32)
    out[:, 3] = np.float32(min_p).view(np.int32)
    out[:, 4:6] = np.array([seed & (2**64 - 1)], np.uint64).view(np.int32)
    return out


def sample(dev: Device, out: Buffer, logits: Buffer, params: Buffer, pos: Buffer, R: int) -> None:
    """out i32 [R, 4]: token, log-probability bits, tokens kept, 0."""
    dev.launch(SAMPLE, out, logits, params, pos, logits.shape[1], R=R, V=logits.shape[1])
