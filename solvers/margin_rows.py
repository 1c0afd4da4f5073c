"""Margin rows: how far one token's logit leads another's, as a linear function of the last layer's gains.

The last block's output z reaches the head through the streams' mixes and the output norm (the last FFN's own `pre`
collapses the streams, so comb's part does not depend on z):

    h = sum_c pre_c (post_c z + sum_j comb_jc X_j)          z = sum_k s_{e_k} * y_k + ysh
    l_v = sum_d head_vd w_d f h_d                           f = 1 / sqrt(mean(h^2) + eps), held fixed

    d(l_a - l_b) / d s_e[d] = y_k[d] * g[d],   g = (sum_c pre_c post_c) f w (head_a - head_b),   for the slot k of e

A row is therefore K slots of D numbers, K of the layer's E experts. It is stored so, sorted by expert, and never as
the E D numbers it stands for: 3,341 rows of the released model are 0.4 GB instead of 26.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.base.codebook import Workers
from ds4.checkpoint.codecs import bf16_to_f32
from ds4.errors import UsageError
from solvers.lattice import BLOCK

Float = NDArray[Any]  # float32 where nights are solved, float64 where a reference is
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
EXPERTS = 16  # of a piece of work; fixed, so that sums have the same order whatever the workers


def direction(
    head_a_ND: Float, head_b_ND: Float, norm_D: Float, pre_NC: Float, post_NC: Float, factor_N: Float
) -> Float:
    """g: what a unit of the block's output adds to each margin, channel by channel.

    Args:
        head_a_ND, head_b_ND: the head's rows of the two tokens.
        norm_D: the output norm's weight.
        pre_NC, post_NC: the last FFN's mixes of the positions, one number a stream.
        factor_N: 1 / sqrt(mean(h^2) + eps) of the positions.

    Returns:
        [N, D], of the head rows' kind.
    """
    reach_N = np.einsum("nc,nc->n", pre_NC, post_NC, dtype=np.float64) * factor_N
    kind = head_a_ND.dtype.type
    return np.asarray((head_a_ND - head_b_ND) * norm_D.astype(kind) * reach_N.astype(kind)[:, None])


@dataclass(frozen=True)
class MarginRows:
    """Margins and what moves them. P positions, N margins (a position may have several), K slots.

    y_PKD: float32, bfloat16 as uint16, or float64 where a reference is made: what a slot adds at a gain of 1 of the
        table that is solved, routing weight and any table below it inside. May be memory-mapped.
    picks_PK: integers, the experts of the slots, all different at a position.
    place_N: integers, a margin's position.
    direction_ND: g, float32 or float64.
    margin_N: l_a - l_b with what is mounted.
    point_N: bool; True: is to reach tau, False: is to stay as it is.
    """

    y_PKD: Float
    picks_PK: NDArray[np.integer]
    place_N: NDArray[np.integer]
    direction_ND: Float
    margin_N: Float
    point_N: NDArray[np.bool_]
    n_experts: int

    def __post_init__(self) -> None:
        """Raises UsageError: no points; shapes or values that do not belong together; something is not finite."""
        if self.y_PKD.ndim != 3 or not all(self.y_PKD.shape):
            raise UsageError(f"slot outputs are {list(self.y_PKD.shape)}; expected [positions, slots, channels]")
        p, k, d = self.y_PKD.shape
        n = len(self.margin_N)
        if d % BLOCK:
            raise UsageError(f"the block is {d} wide; gains are stored in blocks of {BLOCK} channels")
        for name, found, want in (
            ("picks", self.picks_PK, (p, k)),
            ("places", self.place_N, (n,)),
            ("directions", self.direction_ND, (n, d)),
            ("margins", self.margin_N, (n,)),
            ("marks of points", self.point_N, (n,)),
        ):
            if found.shape != want:
                raise UsageError(
                    f"{name}: {list(found.shape)}; {n} margins on slot outputs {[p, k, d]} need {list(want)}"
                )
        if self.point_N.dtype != np.bool_ or not self.point_N.any():
            raise UsageError(f"none of {n} margins is a point: there is nothing to solve for; give decision points")
        if self.place_N.min() < 0 or self.place_N.max() >= p:
            raise UsageError(f"places go from {self.place_N.min()} to {self.place_N.max()}; there are {p} positions")
        low, high = int(self.picks_PK.min()), int(self.picks_PK.max())
        if low < 0 or high >= self.n_experts:
            raise UsageError(f"picks go from {low} to {high}; the layer has experts 0 to {self.n_experts - 1}")
        ordered = np.sort(self.picks_PK, axis=1)
        twice = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if len(twice):
            raise UsageError(f"position {twice[0]} picks {self.picks_PK[twice[0]].tolist()}: an expert twice")
        for name, finite_N in (
            ("margin", np.isfinite(self.margin_N)),
            ("direction", np.isfinite(self.direction_ND).all(axis=1)),
        ):
            if not finite_N.all():
                raise UsageError(
                    f"{name} {int(np.argmin(finite_N))} is not finite; was the engine's output read whole?"
                )

    @property
    def width(self) -> int:
        return int(self.y_PKD.shape[2])


class Margins:
    """R, the rows as an operator on tables [E, D]. S: slots of all margins, sorted by expert, then by margin."""

    def __init__(self, rows: MarginRows, workers: Workers) -> None:
        """Raises UsageError: a slot's output is not finite."""
        self.workers, self.n, self.shape = workers, len(rows.margin_N), (rows.n_experts, rows.width)
        n_slots = rows.picks_PK.shape[1]
        picks_S = np.asarray(rows.picks_PK[rows.place_N], np.int64).reshape(-1)
        order_S = np.argsort(picks_S, kind="stable")
        counts_E = np.bincount(picks_S, minlength=rows.n_experts)
        self.starts_E: I64 = np.concatenate([[0], np.cumsum(counts_E)]).astype(np.int64)
        self.row_S: I64 = order_S // n_slots
        self.kind = np.float64 if np.float64 in (rows.y_PKD.dtype, rows.direction_ND.dtype) else np.float32
        self.a_SD: Float = np.empty((len(order_S), rows.width), self.kind)

        def fill(experts: slice) -> None:
            for e in range(experts.start, experts.stop):
                s = self.slots(e)
                at_S = rows.place_N[self.row_S[s]]
                y_SD = rows.y_PKD[at_S, order_S[s] % n_slots]
                y_SD = bf16_to_f32(y_SD) if y_SD.dtype == np.uint16 else y_SD
                if not np.isfinite(y_SD).all():
                    bad = int(at_S[np.argmin(np.isfinite(y_SD).all(axis=1))])
                    raise UsageError(f"position {bad}, expert {e}: an output is not finite")
                np.multiply(y_SD, rows.direction_ND[self.row_S[s]], out=self.a_SD[s], casting="same_kind")

        workers.map(fill, rows.n_experts, EXPERTS)

    def slots(self, e: int) -> slice:
        return slice(int(self.starts_E[e]), int(self.starts_E[e + 1]))

    def forward(self, x_ED: Float) -> F64:
        """R x, float64 [N]; products of an expert in the rows' kind, sums over experts in float64."""

        def part(experts: slice) -> F64:
            out_N = np.zeros(self.n)
            for e in range(experts.start, experts.stop):
                s = self.slots(e)
                if s.stop > s.start:  # an expert is at most once in a margin
                    out_N[self.row_S[s]] += self.a_SD[s] @ x_ED[e].astype(self.kind, copy=False)
            return out_N

        return np.asarray(np.sum(self.workers.map(part, self.shape[0], EXPERTS), axis=0))

    def backward(self, v_N: Float) -> F64:
        """R^T v, float64 [E, D]."""
        v = v_N.astype(self.kind)
        return self._by_expert(lambda s: v[self.row_S[s]] @ self.a_SD[s])

    def energy(self, weight_N: Float) -> F64:
        """The diagonal of R^T W R, float64 [E, D]."""
        w = weight_N.astype(self.kind)
        return self._by_expert(lambda s: w[self.row_S[s]] @ np.square(self.a_SD[s]))

    def gram(self, some_M: I64) -> F64:
        """R R^T between some margins, float64 [M, M]."""
        place_N = np.full(self.n, -1)
        place_N[some_M] = np.arange(len(some_M))
        out_MM = np.zeros((len(some_M), len(some_M)))
        for e in range(self.shape[0]):
            s = self.slots(e)
            at_S = place_N[self.row_S[s]]
            a_SD = self.a_SD[s][at_S >= 0].astype(np.float64)
            at_S = at_S[at_S >= 0]
            out_MM[np.ix_(at_S, at_S)] += a_SD @ a_SD.T
        return out_MM

    def _by_expert(self, f: Callable[[slice], Float]) -> F64:
        out_ED = np.zeros(self.shape)

        def part(experts: slice) -> None:
            for e in range(experts.start, experts.stop):
                s = self.slots(e)
                if s.stop > s.start:
                    out_ED[e] = f(s)

        self.workers.map(part, self.shape[0], EXPERTS)
        return out_ED
