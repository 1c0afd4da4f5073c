"""Routed experts in float64, and index streams packed bit by bit as the specification writes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.reference_dense import F32, F64, U8, clamped_swiglu, e4m3, round_bf16

U16 = NDArray[np.uint16]


def pack_bits(values: U16, first: int, count: int) -> U8:
    """Bits first .. first + count - 1 of u16 [rows, n], one after the other, each row padded to whole bytes."""
    bits = values[:, :, None] >> np.arange(first, first + count) & 1
    return np.packbits(bits.reshape(len(values), -1).astype(np.uint8), axis=1, bitorder="little")


@dataclass(frozen=True)
class Matrix:
    """One quantized matrix: as the file's payload, and as float64."""

    gains: NDArray[np.float16]
    main: U8
    plane: U8 | None
    w: F64


@dataclass(frozen=True)
class Blob:
    """A random layer of E experts; matrices 0 gate [F, D], 1 up [F, D], 2 down [D, F]."""

    codebook: U8
    matrices: list[list[Matrix]]

    def payload(self, expert: int, matrix: int) -> Matrix:
        return self.matrices[expert][matrix]


def random_blob(E: int, F: int, D: int, nc: int, seed: int = 0, gain: float = 0.05) -> Blob:
    """Codes over the whole codebook, its last one included. Codewords of ordinary size, with zeros and subnormals."""
    rng = np.random.default_rng(seed + 1000 * E + F + D + nc)
    codebook = rng.integers(0x28, 0x48, (nc, 8), np.uint8) | rng.integers(0, 2, (nc, 8), np.uint8) << 7
    codebook[rng.random((nc, 8)) < 0.05] = 0
    codebook[rng.random((nc, 8)) < 0.02] = 3  # subnormal
    words = e4m3(codebook)

    def matrix(rows: int, cols: int, e: int) -> Matrix:
        index = rng.integers(0, nc, (rows, cols // 8)).astype(np.uint16)
        index[0, 0], index[-1, -1] = nc - 1, 4095 % nc
        gains = (rng.uniform(0.5, 1.5, rows) * gain * (1 + e)).astype(np.float16)
        plane = pack_bits(index, 12, 1) if nc > 4096 else None
        w = words[index].reshape(rows, cols) * gains.astype(np.float64)[:, None]
        return Matrix(gains, pack_bits(index, 0, 12), plane, w)

    made = [[matrix(F, D, e), matrix(F, D, e), matrix(D, F, e)] for e in range(E)]
    return Blob(codebook, made)


@dataclass(frozen=True)
class Answer:
    """h [R, k, F] before and y [R, k, D] after down, and how far float32 may be off."""

    y: F64
    bound: F64


def experts(
    blob: Blob, x: F64, picks: NDArray[np.int32], weights: F32, limit: float, bf16: bool, gate_steps: int,
    down_steps: int, unit: float,
) -> Answer:  # fmt: skip
    """Reference and first-order error bound.

    Args:
        bf16: h is rounded to bf16 between the products.
        gate_steps, down_steps: roundings on the longest path through one sum; `unit` of float32.

    The bound: |dg| = gate_steps * unit * sum |w||x| (the same for u); silu has a slope of at most 1.1 and the clamps
    at most 1, so |dh| <= weight (1.1 |dg| |u| + |silu| |du| + 40 unit |h|) and, in bf16, one step more where the
    two ends of that interval round apart; then y's own sum on top of sum |w| |dh|.
    """
    R, k = picks.shape
    D = x.shape[1]
    y, bound = np.zeros((R, k, D)), np.zeros((R, k, D))
    for r in range(R):
        for j in range(k):
            w1, w3, w2 = (m.w for m in blob.matrices[picks[r, j]])
            g, u, weight = x[r] @ w1.T, x[r] @ w3.T, float(weights[r, j])
            dg, du = (gate_steps * unit * (np.abs(x[r]) @ np.abs(w).T) for w in (w1, w3))
            h = clamped_swiglu(g, u, limit) * weight
            act, lin = clamped_swiglu(g, np.ones_like(g), limit), np.clip(np.abs(u), 0, limit)
            dh = weight * (1.1 * dg * lin + np.abs(act) * du) + 40 * unit * np.abs(h)
            if bf16:
                dh = dh + 2.0**-7 * (np.abs(h) + dh) * (np.abs(round_bf16(h + dh) - round_bf16(h - dh)) > 0)
                h = round_bf16(h)
            y[r, j] = h @ w2.T
            bound[r, j] = dh @ np.abs(w2).T + down_steps * unit * ((np.abs(h) + dh) @ np.abs(w2).T)
    return Answer(y, bound * 1.01)
