"""What a gain file can hold of s - 1: E2M1 values under one power of two per 32 channels.

    lattice = { c * 2^p : c in 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, p >= -22 }, one p a block

Solvers work on delta = s - 1 and put every candidate on this lattice while they solve, so that what is judged is what
is written. `nearest` is the file writer's own rule (Q4idx: the least p that holds the block's largest value);
`cheapest` chooses p by what the block costs. Below p = -22 the format goes on, but 1 + delta would not be exact in
float32, and a reader would see another number than the solver did. The writer, given 1 + delta of a lattice point,
may write a smaller p with larger codes, and always the same values: every c is also a lattice value at 2c, 4c or 8c
as far as Q4idx moves it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
LEAST_EXPONENT = -22
FINER = 3  # powers of two that `cheapest` tries below Q4idx's: there a quarter of the range saturates at once
_TOP = 6.0  # largest E2M1 value
_LEAST_TOP = _TOP * 2.0**LEAST_EXPONENT

Float = NDArray[Any]  # float32 where files are made, float64 where a reference is


def nearest(delta_xD: Float) -> Float:
    """The lattice point that the gain file's writer makes of delta.

    Args:
        delta_xD: float32 or float64 [..., D], finite, D a multiple of 32.

    Returns:
        The same shape and kind.
    """
    blocks = _blocks(delta_xD)
    scale = _scale(np.abs(blocks).max(axis=-1, keepdims=True))
    return np.reshape(_round(blocks / scale) * scale, delta_xD.shape)


def cheapest(delta_xD: Float, weight_xD: Float) -> Float:
    """The lattice point that costs least, sum_d weight_d (q_d - delta_d)^2, over Q4idx's scale and three finer ones.

    A finer scale saturates a block's largest values and resolves the others: worth it where the largest belong to
    channels that hardly matter. A coarser scale than Q4idx's has no point nearer to any value of the block. Of equal
    costs the coarsest scale is taken.

    Args:
        delta_xD: as for `nearest`.
        weight_xD: the same shape and kind, not negative.
    """
    blocks, weights = _blocks(delta_xD), _blocks(weight_xD)
    kind = delta_xD.dtype.type
    scale = _scale(np.abs(blocks).max(axis=-1, keepdims=True))
    factors = np.ldexp(kind(1), -np.arange(FINER + 1)).astype(kind).reshape(-1, *[1] * blocks.ndim)
    scales = np.maximum(scale * factors, kind(2.0**LEAST_EXPONENT))
    points = _round(blocks / scales) * scales
    cost = np.einsum("...d,...d->...", np.square(points - blocks), weights)
    best = cost.argmin(axis=0)[None, ..., None]
    return np.reshape(np.take_along_axis(points, best, axis=0)[0], delta_xD.shape)


def _blocks(x: Float) -> Float:
    if x.shape[-1] % BLOCK:
        raise ValueError(f"expected a last axis divisible by {BLOCK}, got {list(x.shape)}")
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def _scale(top: Float) -> Float:
    """The least power of two, not under 2^-22, that times 6 reaches `top`."""
    kind = top.dtype.type
    mantissa, exponent = np.frexp(np.maximum(top, kind(_LEAST_TOP)) * kind(1 / _TOP))
    return np.asarray(np.ldexp(kind(1), exponent - (mantissa == 0.5)), kind)


def _round(y: Float) -> Float:
    """Nearest E2M1 value, ties to the even code, saturating: steps of 0.5 below 2, of 1 below 4, of 2 above."""
    kind = y.dtype.type
    a = np.minimum(np.abs(y), kind(_TOP))
    step = np.where(a < 2, kind(0.5), np.where(a < 4, kind(1), kind(2)))
    return np.asarray(np.copysign(np.rint(a / step) * step, y))
