"""One layer's routed experts: the pool that its codebook is trained on, and one matrix into indices and gains.

    x = w / g0, g0 = f16(rms of the row)     idx = nearest codeword     q = C[idx]

| gain | g |
|------|---|
| rms  | g0 |
| ls   | <w, q> / <q, q>: least squares; then idx is chosen once more for w / g |
| norm | |w| / |q|: keeps the row's length |

Gains are rounded to f16 and codewords to E4M3 before the last assignment, so the error is what the engine
sees. f16 ends at 65504 and 6e-8: a row beyond saturates (or becomes zero) and is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ds4.base.blob import DIM, MATRICES, Shapes
from ds4.base.codebook import POOL_PER_CODEWORD, Assigner, codewords
from ds4.base.source import matrix_rows
from ds4.checkpoint.reader import Checkpoint

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Gain = Literal["ls", "rms", "norm"]
GAINS: tuple[Gain, ...] = ("ls", "rms", "norm")
DEFAULT_GAIN: Gain = "norm"  # measured on the embedded model: docs/embedded-model.md
_F16_MAX = 65504.0
MOST = 63.0  # of a normalised weight in the pool: a row of one spike among 4,096 zeros; keeps integer sums in range


@dataclass(frozen=True)
class QuantizedMatrix:
    """Gains f16 [rows], indices u16 [rows, cols/8], and squared sums over all weights in float64."""

    gains: NDArray[np.float16]
    indices: NDArray[np.uint16]
    error: float
    energy: float
    saturated: int  # rows whose gain f16 cannot hold


def layer_pool(checkpoint: Checkpoint, prefix: str, n_expert: int, shapes: Shapes, nc: int) -> F32:
    """Vectors f32 [n, 8] of equidistant rows over all experts and matrices, each row divided by its RMS.

    n is at least 1,024 a codeword where the layer has as many; a smaller layer gives all of its vectors. Rows
    of zeros are left out.
    """
    total = n_expert * sum(rows * cols // DIM for rows, cols in shapes)
    stride = max(total // (POOL_PER_CODEWORD * nc), 1)
    parts, at = [], 0
    for e in range(n_expert):
        for m, (rows, _) in zip(MATRICES, shapes, strict=True):
            w = matrix_rows(checkpoint, f"{prefix}{e}.{m}.weight", slice(-at % stride, rows, stride))
            at += rows
            rms = row_rms(w)
            live = rms > 0
            parts.append(divide_rows(w[live], rms[live]).clip(-MOST, MOST).reshape(-1, DIM))
    return np.concatenate(parts)


def quantize_matrix(w: F32, codebook: NDArray[np.uint8], assigner: Assigner, gain: Gain) -> QuantizedMatrix:
    """f32 [rows, cols] against an E4M3 codebook u8 [nc, 8] that the assigner has loaded."""
    rows, cols = w.shape
    book = codewords(codebook)
    rms = row_rms(w)
    gains = to_f16(rms)
    indices = _assign(w, gains, rms, assigner)
    if gain != "rms":
        gains = to_f16(_fitted_gain(w, book, indices, gain))
        if gain == "ls":
            indices = _assign(w, gains, rms, assigner)
    error = energy = 0.0
    for part in _row_parts(rows, cols):
        x = w[part].astype(np.float64)
        y = book[indices[part]].reshape(len(x), cols) * gains[part].astype(np.float64)[:, None]
        error += float(np.square(x - y).sum())
        energy += float(np.square(x).sum())
    lost = (rms > 0) & ((gains == 0) | (rms > _F16_MAX))
    return QuantizedMatrix(gains, indices, error, energy, int(lost.sum()))


def row_rms(w: F32) -> F64:
    """f64 [rows]; sums in float64, so that no scale of the release overflows."""
    if not w.size:
        return np.zeros(len(w))
    out: F64 = np.sqrt(np.einsum("rc,rc->r", w, w, dtype=np.float64) / w.shape[1])
    return out


def divide_rows(w: F32, by: F64) -> F32:
    out = np.empty_like(w)
    np.divide(w, by[:, None], out=out, casting="same_kind")
    return out


def to_f16(v: F64) -> NDArray[np.float16]:
    """Nearest, saturating at the largest finite f16."""
    return np.minimum(v, _F16_MAX).astype(np.float16)


def _assign(w: F32, gains: NDArray[np.float16], rms: F64, assigner: Assigner) -> NDArray[np.uint16]:
    """Nearest codewords of w / gain; where f16 does not hold the gain, of w / rms."""
    g = gains.astype(np.float64)
    usable = (g > 0) & (g < _F16_MAX)
    by = np.where(usable, g, np.where(rms > 0, rms, 1.0))
    return assigner.assign(divide_rows(w, by).reshape(-1, DIM)).reshape(len(w), -1)


def _fitted_gain(w: F32, book: F32, indices: NDArray[np.uint16], gain: Gain) -> F64:
    rows, cols = w.shape
    out = np.zeros(rows)
    for part in _row_parts(rows, cols):
        q = book[indices[part]].reshape(-1, cols)
        qq = np.einsum("rc,rc->r", q, q, dtype=np.float64)
        if gain == "ls":
            top, safe = np.einsum("rc,rc->r", w[part], q, dtype=np.float64), qq
        else:
            top, safe = np.sqrt(np.einsum("rc,rc->r", w[part], w[part], dtype=np.float64)), np.sqrt(qq)
        out[part] = np.divide(top, safe, out=np.zeros_like(top), where=safe > 0)
    return np.maximum(out, 0)


def _row_parts(rows: int, cols: int) -> list[slice]:
    step = max((1 << 20) // cols, 1)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]
