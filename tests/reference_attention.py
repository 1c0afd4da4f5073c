"""Float64 references of rope, compressor, indexer and attention (model-text 5.3 to 5.6): plain, no engine code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]

UNIT = 2.0**-24  # unit roundoff of float32
BF16_UNIT = 2.0**-8  # of bfloat16


def frequencies(rope: int, base: float = 10000.0) -> NDArray[np.float32]:
    """f_i of a window-only layer, as the kernels get them."""
    return (base ** (-2.0 * np.arange(rope // 2) / rope)).astype(np.float32)


def rope(x: F64, pos: Sequence[int] | I32, freq: NDArray[np.float32], inverse: bool = False) -> F64:
    """Rotate the last 2 len(freq) channels of x [R, ..., n] by e^(+-i pos f).

    The angle is the float32 product that the kernel is specified to form; everything after it is float64.
    """
    out = x.astype(np.float64).copy()
    n = 2 * len(freq)
    for r, p in enumerate(pos):
        angle = (np.float32(p) * freq).astype(np.float64)
        turn = np.exp(1j * angle * (-1 if inverse else 1))
        part = out[r, ..., -n:]
        z = (part[..., 0::2] + 1j * part[..., 1::2]) * turn
        part[..., 0::2], part[..., 1::2] = z.real, z.imag
    return out


def rms_norm(x: F64, w: F64, eps: float) -> F64:
    """x [.., n] * w / sqrt(mean x^2 + eps)."""
    return x * w / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def pool(a: F64, g: F64 | None, ratio: int) -> F64:
    """One vector a whole group of a [T, K]: softmax over the group's gates, per channel; [T // ratio, K]."""
    if g is None:
        return a.copy()
    groups = a.shape[0] // ratio
    a3, g3 = (x[: groups * ratio].reshape(groups, ratio, x.shape[1]) for x in (a, g))
    w = np.exp(g3 - g3.max(1, keepdims=True))
    return (w * a3).sum(1) / w.sum(1)


def index_scores(q: F64, w: F64, keys: F64, factor: float) -> F64:
    """sum_h w[h] factor relu(q[h] . keys[j]) for one row: q [Hi, I], w [Hi], keys [n, I] -> [n]."""
    return (w * factor) @ np.maximum(q @ keys.T, 0.0)


def best(values: F64, k: int) -> list[int]:
    """Indices of the k largest values above -inf, the lowest index first among equals, rising."""
    order = sorted((i for i in range(len(values)) if values[i] > -np.inf), key=lambda i: (-values[i], i))
    return sorted(order[:k])


def candidate_blocks(scores: F64, size: int, k: int) -> list[int]:
    """The k best blocks of one row's visible scores, the last visible one forced (model-text 5.6)."""
    if len(scores) == 0:
        return []
    values = np.array([scores[i : i + size].max() for i in range(0, len(scores), size)])
    values[(len(scores) - 1) // size] = np.inf
    return best(values, k)


def attention_row(q: F64, keys: F64, sink: F64, scale: float) -> tuple[F64, F64]:
    """Softmax of one row with a sink, before the inverse rotation: q [H, K], keys [n, K], sink [H] -> out [H, K].

    Also sum_j p_j |K_j| [H, K], what a bound on the error is made of.
    """
    if len(keys) == 0:
        return np.zeros_like(q), np.zeros_like(q)
    s = q @ keys.T * scale
    m = np.maximum(s.max(1, keepdims=True), -1e30)
    with np.errstate(over="ignore"):
        e = np.exp(s - m)
        p = e / (e.sum(1, keepdims=True) + np.exp(sink[:, None] - m))
    return p @ keys, p @ np.abs(keys)


def same_bits(got: NDArray[np.generic], want: NDArray[np.generic]) -> None:
    """Assert equality bit for bit; a failure names the first difference and both bit patterns."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{got.dtype}{got.shape} {want.dtype}{want.shape}"
    g, w = np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(want).view(np.uint8)
    if np.array_equal(g, w):
        return
    raw = np.uint32 if got.dtype.itemsize == 4 else got.dtype
    bad = np.argwhere(np.ascontiguousarray(got).view(raw) != np.ascontiguousarray(want).view(raw))
    at = tuple(int(i) for i in bad[0])
    raise AssertionError(f"{len(bad)} of {got.size} differ, first at {at}: {got[at]!r} != {want[at]!r}")


def within(got: NDArray[np.generic], want: F64, bound: F64 | float) -> None:
    """Assert |got - want| <= bound, NaN never passing; a failure names the worst place."""
    error = np.abs(got.astype(np.float64) - want)
    if error.size == 0:
        return
    excess = np.where(np.isnan(error), np.inf, error - bound)
    at = tuple(int(i) for i in np.unravel_index(excess.argmax(), excess.shape))
    limit = np.broadcast_to(bound, want.shape)[at]
    assert excess[at] <= 0, f"at {at}: {got[at]!r}, expected {want[at]!r} within {limit:.3g}, off by {error[at]:.3g}"
