"""Numerics: where the teacher rounds, and the three formulas that every file here uses.

Owns the array module (numpy, or cupy: the same code), the switch for each family of rounding points
(model-text 10) and RMSNorm, RoPE and linear. All arithmetic is float32; the modes are

    none     nothing is rounded: the float32 oracle
    kv       window keys Q8, compressed rows Q4kv, index queries and keys Q4idx; all else float32
    vendor   those, the inputs of FP8 and FP4 linears Q8, and bfloat16 at the boundaries of model-text 4
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint import codecs
from ds4.errors import UsageError

F32 = NDArray[np.float32]  # a cupy array where xp is cupy
I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

ARITHMETICS = ("none", "kv", "vendor")


@dataclass(frozen=True)
class Numerics:
    """The array module and which families of values are rounded. `Numerics.of` names the three modes."""

    xp: ModuleType
    linear_inputs: bool  # Q8 before FP8 and FP4 weights
    window_kv: bool
    compressed_kv: bool
    index_qk: bool
    boundaries: bool  # bfloat16 between sublayers

    @staticmethod
    def of(arith: str, xp: ModuleType = np) -> Numerics:
        """Raises UsageError for a name that is not in ARITHMETICS."""
        if arith not in ARITHMETICS:
            raise UsageError(f"arithmetic {arith!r} is unknown; choose one of {', '.join(ARITHMETICS)}")
        cache, vendor = arith != "none", arith == "vendor"
        return Numerics(xp, vendor, cache, cache, cache, vendor)

    def bf16(self, x: F32) -> F32:
        """`x` rounded to bfloat16 (nearest, ties to even) where the mode has such boundaries."""
        return round_bf16(self.xp, x) if self.boundaries else x

    def linear(self, x: F32, w: F32) -> F32:
        """x [R, I] @ w [O, I]^T for weights whose input the vendor leaves alone (BF16, wo_a)."""
        return self.bf16(x @ w.T)

    def quantised_linear(self, x: F32, w: F32) -> F32:
        """The same for FP8 and FP4 weights: the vendor rounds their input to Q8 first."""
        if self.linear_inputs:
            x = codecs.q8(x)
        return self.bf16(x @ w.T)

    def round_window(self, kv: F32) -> F32:
        return codecs.q8(kv) if self.window_kv else kv

    def round_compressed(self, row: F32) -> F32:
        return codecs.q4kv(row) if self.compressed_kv else row

    def round_index(self, qk: F32) -> F32:
        return codecs.q4idx(qk) if self.index_qk else qk

    def rms_norm(self, x: F32, w: F32, eps: float) -> F32:
        """w * x / sqrt(mean(x^2) + eps) over the last axis, w included before the rounding."""
        xp = self.xp
        mean = xp.mean(x * x, axis=-1, keepdims=True, dtype=xp.float32)
        return self.bf16(x * (np.float32(1) / xp.sqrt(mean + np.float32(eps))) * w)

    def rope(self, x: F32, positions: I64, frequencies: F32, *, inverse: bool = False) -> F32:
        """Turn the last 2 * len(frequencies) entries of each vector, pairs (2i, 2i+1), by p * f_i.

        Args:
            x: f32 [R, ..., K], one leading row a position; not changed.
            positions: i64 [R].
            frequencies: f32 [r/2].

        The angle is one float32 product, as released; sine and cosine of it are exact to float32.
        """
        xp = self.xp
        half = frequencies.shape[0]
        angle = (positions.astype(xp.float32)[:, None] * frequencies[None, :]).astype(xp.float64)
        shape = (angle.shape[0],) + (1,) * (x.ndim - 2) + (half,)
        cos = xp.cos(angle).astype(xp.float32).reshape(shape)
        sin = xp.sin(angle).astype(xp.float32).reshape(shape)
        if inverse:
            sin = -sin
        y = x.copy()
        even, odd = x[..., -2 * half :: 2], x[..., -2 * half + 1 :: 2]
        y[..., -2 * half :: 2] = even * cos - odd * sin
        y[..., -2 * half + 1 :: 2] = even * sin + odd * cos
        return self.bf16(y)

    def to_xp(self, x: NDArray[Any]) -> Any:
        """A host array on the device that xp computes on; no copy for numpy."""
        return x if self.xp is np else self.xp.asarray(x)

    def to_host(self, x: Any) -> NDArray[Any]:
        return np.asarray(x) if self.xp is np else self.xp.asnumpy(x)


def round_bf16(xp: ModuleType, x: F32) -> F32:
    """Nearest bfloat16, ties to even, as float32; NaN stays NaN."""
    bits = xp.ascontiguousarray(x).view(xp.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    y: F32 = rounded.view(xp.float32)
    return xp.where(xp.isnan(x), x, y) if bool(xp.isnan(x).any()) else y
