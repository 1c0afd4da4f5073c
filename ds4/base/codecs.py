"""Tensor types <-> float32 for dense weights: one table. q4_K is in q4k.py, experts in blob.py.

Decoding equals `gguf.quants` for the standard types. Encoders round to nearest even and saturate: no finite
weight becomes infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ds4.base import q4k
from ds4.base.types import BF16, F16, F32, FP4X32, FP8_32X32, I32, I64, Q4_K, Q8_0, TYPES
from ds4.checkpoint.codecs import (
    bf16_to_f32,
    dequant_fp4,
    dequant_fp8,
    f32_to_bf16,
    f32_to_e4m3,
    ue8m0_to_f32,
)

U8 = NDArray[np.uint8]
Floats = NDArray[np.float32]
F16_MAX = 65504.0


def decode(raw: U8, type_id: int, dims: tuple[int, ...]) -> Floats:
    """f32 [rows, cols] (or [n] for one dim) from a tensor's bytes; dims fastest first."""
    cols, rows = dims[0], math.prod(dims[1:])
    out = _DECODERS[type_id](raw, rows, cols)
    return out if len(dims) > 1 else out.reshape(cols)


def encode(x: Floats, type_id: int) -> U8:
    """u8 bytes of f32 [rows, cols] in a type of `_ENCODERS`."""
    return _ENCODERS[type_id](np.ascontiguousarray(x, np.float32))


def _plain(dtype: str) -> Callable[[U8, int, int], Floats]:
    return lambda raw, rows, cols: raw.view(dtype).reshape(rows, cols).astype(np.float32)


def _decode_bf16(raw: U8, rows: int, cols: int) -> Floats:
    return bf16_to_f32(raw.view("<u2")).reshape(rows, cols)


def _decode_q8_0(raw: U8, rows: int, cols: int) -> Floats:
    blocks = raw.reshape(-1, 34)
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    return (blocks[:, 2:].view(np.int8).astype(np.float32) * scale).reshape(rows, cols)


def _decode_fp4x32(raw: U8, rows: int, cols: int) -> Floats:
    blocks = raw.reshape(rows, cols // 32, 17)
    codes = np.ascontiguousarray(blocks[:, :, :16]).reshape(rows, cols // 2)
    return dequant_fp4(codes, np.ascontiguousarray(blocks[:, :, 16]))


def _decode_fp8(raw: U8, rows: int, cols: int) -> Floats:
    n = rows * cols
    return dequant_fp8(raw[:n].reshape(rows, cols), raw[n:].reshape(rows // 32, cols // 32))


_DECODERS: dict[int, Callable[[U8, int, int], Floats]] = {
    F32: _plain("<f4"),
    F16: _plain("<f2"),
    BF16: _decode_bf16,
    Q8_0: _decode_q8_0,
    Q4_K: lambda raw, rows, cols: q4k.decode(raw.reshape(-1, 144)).reshape(rows, cols),
    FP4X32: _decode_fp4x32,
    FP8_32X32: _decode_fp8,
    I32: _plain("<i4"),
    I64: _plain("<i8"),
}


def _encode_bf16(x: Floats) -> U8:
    u = f32_to_bf16(x)
    top = (u & np.uint16(0x7FFF)) == 0x7F80
    u[top & np.isfinite(x)] -= np.uint16(1)  # a finite weight stays finite
    return u.view(np.uint8).reshape(-1)


def _encode_q8_0(x: Floats) -> U8:
    blocks = x.reshape(-1, 32)
    scale = np.minimum(np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127), np.float32(F16_MAX))
    half = scale.astype("<f2")
    step = half.astype(np.float32)
    q = np.rint(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
    out = np.empty((len(blocks), 34), np.uint8)
    out[:, :2] = half.view(np.uint8)
    out[:, 2:] = np.clip(q, -127, 127).astype(np.int8).view(np.uint8)
    return out.reshape(-1)


def _encode_fp8(x: Floats) -> U8:
    """For a source that is not FP8: tile scale 2^ceil(log2(max / 448)). FP8 sources are copied, not encoded."""
    rows, cols = x.shape
    tiles = x.reshape(rows // 32, 32, cols // 32, 32)
    top = np.abs(tiles).max(axis=(1, 3)).astype(np.float64)
    exponent = np.ceil(np.log2(np.maximum(top / 448, 2.0**-127)))
    scale = np.clip(exponent + 127, 0, 254).astype(np.uint8)
    codes = f32_to_e4m3((tiles / ue8m0_to_f32(scale)[:, None, :, None]).reshape(rows, cols))
    return np.concatenate([codes.reshape(-1), scale.reshape(-1)])


_ENCODERS: dict[int, Callable[[Floats], U8]] = {
    F32: lambda x: np.ascontiguousarray(x, "<f4").view(np.uint8).reshape(-1),
    BF16: _encode_bf16,
    Q8_0: _encode_q8_0,
    Q4_K: lambda x: q4k.encode(x.reshape(-1, 256)).reshape(-1),
    FP8_32X32: _encode_fp8,
}
assert set(_DECODERS) <= set(TYPES)
