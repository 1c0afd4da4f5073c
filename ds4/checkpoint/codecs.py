"""Number formats of the release: BF16, E4M3, E8M0 and E2M1 to float32 and back, exactly; no files here.

Everything is vectorised numpy without loops over elements. Rounding is to nearest, ties to even, and
saturates (E4M3 at +-448, E2M1 at +-6): nothing overflows into NaN or infinity. Decoding goes through
tables of at most 256 entries; the activation quantisers use plain arithmetic on the array's own kind,
so that they also run on arrays of numpy's look-alikes. Layouts: model-text 3 and 10.

byte layouts
    E4M3     s eeee mmm, bias 7, no infinity, 0x7F and 0xFF are NaN, largest 448
    UE8M0    2^(b - 127); 255 is NaN
    E2M1     s ee m: 0 0.5 1 1.5 2 3 4 6; two a byte, the even column in the low nibble
    FP8      w u8 [O, I], scale u8 [ceil(O/32), ceil(I/32)], one a 32x32 tile
    FP4      w u8 [O, I/2], scale u8 [O, ceil(I/32)], one a row and 32 columns
    engram   w u8 [n, hd], scale u8 [n, hd/32], one a row and 32 columns
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

BLOCK = 32  # columns (and rows, for FP8 tiles) under one scale
KV_BLOCK = 16  # columns under one E4M3 scale of the compressed cache
E4M3_MAX = 448.0
E2M1_MAX = 6.0


def _e4m3_table() -> F32:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).astype(np.float64)
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[(code & 127) == 127] = np.nan
    return np.copysign(value, np.where(code < 128, 1.0, -1.0)).astype(np.float32)


def _ue8m0_table() -> F32:
    value = np.ldexp(np.float64(1), np.arange(256) - 127)
    value[255] = np.nan
    return value.astype(np.float32)  # 2^-127 is a float32 subnormal, exactly


E4M3_VALUES = _e4m3_table()
UE8M0_VALUES = _ue8m0_table()
E2M1_VALUES: F32 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# both values of a packed byte at once: entry b is the float32 pair (low nibble, high nibble) as eight bytes
_PAIRS = np.stack([np.tile(E2M1_VALUES, 16), np.repeat(E2M1_VALUES, 16)], axis=1).view(np.uint64)[:, 0]


# ---- float formats ----


def bf16_to_f32(u: U16) -> F32:
    """u16 [...] -> f32 [...], exact."""
    return (np.asarray(u, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: F32) -> U16:
    """f32 [...] -> u16 [...], nearest even; overflow to infinity as the format has it, NaN stays NaN."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (u + (np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (u >> np.uint32(16)) | np.uint32(0x40)
    return np.where((u & np.uint32(0x7FFFFFFF)) > 0x7F800000, quiet, rounded).astype(np.uint16)


def e4m3_to_f32(codes: U8) -> F32:
    """u8 [...] -> f32 [...]; 0x7F and 0xFF give NaN."""
    return np.take(E4M3_VALUES, codes)


def f32_to_e4m3(x: F32) -> U8:
    """f32 [...] -> u8 [...], nearest even, saturating at +-448 (infinity too); NaN becomes 0x7F."""
    x = np.ascontiguousarray(x, np.float32)
    a = np.minimum(np.abs(x), np.float32(E4M3_MAX))
    u = a.view(np.uint32)
    # keep 3 of 23 mantissa bits, then move the bias from 127 to 7
    normal = ((u + (np.uint32(0x7FFFF) + ((u >> np.uint32(20)) & np.uint32(1)))) >> np.uint32(20)) - np.uint32(960)
    small = a < np.float32(2.0**-6)
    code = np.where(small, np.rint(np.where(small, a, 0) * np.float32(512)).astype(np.uint32), normal)
    code = np.where(np.isnan(x), np.uint32(0x7F), code | (np.signbit(x).astype(np.uint32) << np.uint32(7)))
    return code.astype(np.uint8)


def ue8m0_to_f32(codes: U8) -> F32:
    """u8 [...] -> f32 [...]: 2^(b-127); 255 gives NaN."""
    return np.take(UE8M0_VALUES, codes)


def e2m1_to_f32(codes: U8) -> F32:
    """u8 [...] codes 0..15, one a byte, -> f32 [...]."""
    return np.take(E2M1_VALUES, codes)


def f32_to_e2m1(x: F32) -> U8:
    """f32 [...] -> u8 [...] codes 0..15, nearest, ties to the even code, saturating at +-6. NaN has no code: 0."""
    x = np.asarray(x, np.float32)
    a = np.abs(x)
    code = (a > 0.25).astype(np.uint8)
    for edge, closed in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (a >= edge) if closed else (a > edge)
    return np.where(np.isnan(x), np.uint8(0), code | (np.signbit(x).astype(np.uint8) << np.uint8(3))).astype(np.uint8)


def unpack_fp4(packed: U8) -> U8:
    """u8 [..., n/2] -> codes u8 [..., n]; the low nibble is the even column."""
    packed = np.asarray(packed, np.uint8)
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(*packed.shape[:-1], -1)


def pack_fp4(codes: U8) -> U8:
    """Codes u8 [..., n], n even, -> u8 [..., n/2]."""
    codes = np.asarray(codes, np.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


# ---- weights ----


def dequant_fp8(w: U8, s: U8) -> F32:
    """E4M3 [O, I] under UE8M0 tiles [ceil(O/32), ceil(I/32)] -> f32 [O, I].

    Raises:
        ValueError: the scale's shape does not belong to the weight's.
    """
    rows, cols = w.shape
    _need_scale(s, (-(-rows // BLOCK), -(-cols // BLOCK)), w)
    out = np.take(E4M3_VALUES, w)
    _scale_columns(out, np.repeat(np.take(UE8M0_VALUES, s), BLOCK, axis=0)[:rows])
    return out


def dequant_fp4(w: U8, s: U8) -> F32:
    """Packed E2M1 [O, I/2] under UE8M0 [O, ceil(I/32)] -> f32 [O, I].

    One table look-up gives two values, which makes this the speed of a streamed teacher.

    Raises:
        ValueError: the scale's shape does not belong to the weight's.
    """
    rows, cols = w.shape[0], w.shape[1] * 2
    _need_scale(s, (rows, -(-cols // BLOCK)), w)
    out: F32 = np.take(_PAIRS, w).view(np.float32)
    _scale_columns(out, np.take(UE8M0_VALUES, s))
    return out


def dequant_engram(rows: U8, s: U8) -> F32:
    """E4M3 [n, hd] under UE8M0 [n, hd/32] -> f32 [n, hd].

    Raises:
        ValueError: the scale's shape does not belong to the rows'.
    """
    _need_scale(s, (rows.shape[0], -(-rows.shape[1] // BLOCK)), rows)
    out = np.take(E4M3_VALUES, rows)
    _scale_columns(out, np.take(UE8M0_VALUES, s))
    return out


def _need_scale(s: U8, want: tuple[int, int], w: U8) -> None:
    if s.shape != want:
        raise ValueError(f"scale is {list(s.shape)} for a weight of {list(w.shape)} bytes; expected {list(want)}")


def _scale_columns(out: F32, scale: F32) -> None:
    """out[o, i] *= scale[o, i // 32] in place; the last group may be short."""
    rows, cols = out.shape
    whole = cols // BLOCK * BLOCK
    groups = out[:, :whole].reshape(rows, whole // BLOCK, BLOCK) if whole == cols else None
    if groups is not None:
        np.multiply(groups, scale[:, :, None], out=groups)  # a view: out is contiguous
        return
    out *= np.repeat(scale, BLOCK, axis=1)[:, :cols]


# ---- activation quantisers (model-text 10) ----
#
# All in float32. v = amax * float32(1/MAX); a power-of-two scale is P2(v) read from v's bits; x / s and the
# cache's amax / 6 are true divisions. Blocks run along the last axis, whose length they divide.


def q8(x: F32) -> F32:
    """Q8: blocks of 32, UE8M0 scale, E4M3 values; f32 [..., n] -> the same, rounded."""
    blocks, scale = _q8_scale(x)
    return _back(_round_to(blocks / scale, E4M3_MAX, 2.0**-6, 8.0), scale, x)


def q4idx(x: F32) -> F32:
    """Q4idx: blocks of 32, UE8M0 scale, E2M1 values; f32 [..., n] -> the same, rounded."""
    blocks, scale = _q4idx_scale(x)
    return _back(_round_to(blocks / scale, E2M1_MAX, 1.0, 2.0), scale, x)


def q4kv(x: F32) -> F32:
    """Q4kv: blocks of 16, E4M3 scale, E2M1 values; f32 [..., n] -> the same, rounded."""
    blocks, scale = _q4kv_scale(x)
    return _back(_round_to(blocks / scale, E2M1_MAX, 1.0, 2.0), scale, x)


def pack_q8(x: F32) -> tuple[U8, U8]:
    """Q8 as stored: (E4M3 codes u8 [..., n], UE8M0 scales u8 [..., n/32])."""
    blocks, scale = _q8_scale(x)
    return f32_to_e4m3(blocks / scale).reshape(x.shape), _exponent_byte(scale[..., 0])


def pack_q4idx(x: F32) -> tuple[U8, U8]:
    """Q4idx as stored: (packed E2M1 u8 [..., n/2], UE8M0 scales u8 [..., n/32])."""
    blocks, scale = _q4idx_scale(x)
    return pack_fp4(f32_to_e2m1(blocks / scale).reshape(x.shape)), _exponent_byte(scale[..., 0])


def pack_q4kv(x: F32) -> tuple[U8, U8]:
    """Q4kv as stored: (packed E2M1 u8 [..., n/2], E4M3 scales u8 [..., n/16])."""
    blocks, scale = _q4kv_scale(x)
    return pack_fp4(f32_to_e2m1(blocks / scale).reshape(x.shape)), f32_to_e4m3(scale[..., 0])


def unpack_q8(codes: U8, scales: U8) -> F32:
    """Inverse of `pack_q8`: equals q8(x)."""
    return _times(e4m3_to_f32(codes), ue8m0_to_f32(scales))


def unpack_q4idx(codes: U8, scales: U8) -> F32:
    """Inverse of `pack_q4idx`: equals q4idx(x)."""
    return _times(e2m1_to_f32(unpack_fp4(codes)), ue8m0_to_f32(scales))


def unpack_q4kv(codes: U8, scales: U8) -> F32:
    """Inverse of `pack_q4kv`: equals q4kv(x)."""
    return _times(e2m1_to_f32(unpack_fp4(codes)), e4m3_to_f32(scales))


def _times(values: F32, scale: F32) -> F32:
    blocks = values.reshape(*scale.shape, -1)
    return np.asarray(blocks * scale[..., None], np.float32).reshape(values.shape)


def _blocks(x: Any, width: int) -> Any:
    if x.dtype != np.float32 or x.shape[-1] % width:
        raise ValueError(f"expected float32 with a last axis divisible by {width}, got {x.dtype} {list(x.shape)}")
    return x.reshape(*x.shape[:-1], -1, width)


def _amax(blocks: Any, floor: float) -> Any:
    return np.maximum(np.abs(blocks).max(axis=-1, keepdims=True), np.float32(floor))


def _q8_scale(x: Any) -> tuple[Any, Any]:
    blocks = _blocks(x, BLOCK)
    return blocks, _power_of_two_at_least(_amax(blocks, 1e-4) * np.float32(1 / E4M3_MAX))


def _q4idx_scale(x: Any) -> tuple[Any, Any]:
    blocks = _blocks(x, BLOCK)
    return blocks, _power_of_two_at_least(_amax(blocks, 6 * 2.0**-126) * np.float32(1 / E2M1_MAX))


def _q4kv_scale(x: Any) -> tuple[Any, Any]:
    blocks = _blocks(x, KV_BLOCK)
    return blocks, _round_to(_amax(blocks, 6 * 2.0**-9) / np.float32(E2M1_MAX), E4M3_MAX, 2.0**-6, 8.0)


def _power_of_two_at_least(v: Any) -> Any:
    """2^ceil(log2 v) of normal float32 v > 0, from its bits: the exponent, plus 1 if any mantissa bit is set."""
    u = v.view(np.uint32)
    up = ((u & np.uint32(0x7FFFFF)) != 0).astype(np.uint32)
    return (((u >> np.uint32(23)) + up) << np.uint32(23)).view(np.float32)


def _exponent_byte(scale: F32) -> U8:
    return (np.ascontiguousarray(scale).view(np.uint32) >> np.uint32(23)).astype(np.uint8)


def _round_to(y: Any, top: float, least_normal: float, steps: float) -> Any:
    """Nearest value of a small float format (`steps` values an octave from `least_normal` on), ties to even."""
    y = np.clip(y, np.float32(-top), np.float32(top))
    octave = (np.abs(y).view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)  # 2^floor(log2 |y|)
    step = np.maximum(octave, np.float32(least_normal)) / np.float32(steps)
    return np.copysign(np.rint(y / step) * step, y)


def _back(rounded: Any, scale: Any, x: Any) -> F32:
    out: F32 = (rounded * scale).reshape(x.shape)
    return out
