"""The margin solve: gains of the last layer under which given tokens lead where another led.

    minimise  sum_points (m_i - t_i)^2 + rho sum_others (m_j - m0_j)^2 + lambda dbar |s - s0|^2
    m = m0 + R (s - s0)        t_i = max(tau, m0_i) at first        dbar = mean diagonal of R^T W R where it is not 0

s0 is what is mounted, m0 the margins that the engine has with it, R the rows of margin_rows.py. Conjugate gradients
on the normal equations, preconditioned by their diagonal; R^T W R is never formed. The minimum goes to the lattice
that files hold, is encoded and decoded, and margins are predicted anew with what a reader of the file would see.
Points below tau and others that turned over have their target raised by what is missing, and it is solved again, a
bounded number of times: that makes up for rounding and for the ridge's pull alike. The best stored table is kept.

Two points whose rows are opposed, as one position that is to say a rather than b and b rather than a, cannot both be
had; both are left out and named. What contradicts in a less simple way ends short of tau, and is named too.

The norm's factor does move with s, so this is not quite what the engine does: a real forward decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg

from ds4.base.codebook import Workers
from ds4.errors import UsageError
from ds4.sidecar.files import decode_gains, encode_gains
from solvers.lattice import cheapest
from solvers.margin_rows import F64, I64, MarginRows, Margins

F32 = NDArray[np.float32]
Mask = NDArray[np.bool_]
Verdict = Literal["reached", "short", "contradicts", "immovable"]

OPPOSED = 1e-5  # 1 + cosine of two rows below which they are each other's negative; float32 rows are 1e-6 from it
OVER = 1.25  # times what is missing is added to a target: rounding falls anew each time, and 1 creeps up from below
CORRECTION = 0.03  # of a later round's first residual is left: what it adds is small and is rounded anyway
FLOOR = 1e-5  # of the right side: below it float32 rows and the lattice's steps make more work than difference
RESERVE = 0.1  # of its old margin that a position which turned over is to have again


@dataclass(frozen=True)
class MarginRule:
    """How margins are sought.

    tau: what points are to reach, in logits.
    rho: weight of a margin that is to stay, a point's being 1.
    lam: lambda, in mean diagonals; larger changes gains less.
    rounds: solves, at most; the second and later ones with raised targets.
    rtol: residual of the normal equations over their right side at which CG stops in the first round.
    iterations: of CG a round, at most.
    """

    tau: float = 1.0
    rho: float = 1.0
    lam: float = 0.1
    rounds: int = 10
    rtol: float = 1e-4
    iterations: int = 300

    def __post_init__(self) -> None:
        """Raises UsageError: a value under which there is no solution, or none that means anything."""
        for name, value, ok in (
            ("tau", self.tau, self.tau > 0),
            ("rho", self.rho, self.rho >= 0),
            ("lambda", self.lam, self.lam > 0),
            ("tolerance", self.rtol, 0 < self.rtol < 1),
        ):
            if not (ok and np.isfinite(value)):
                least = {"rho": "0 or more", "tolerance": "between 0 and 1"}.get(name, "above 0")
                raise UsageError(f"{name} is {value:g}; expected {least}")
        if self.rounds < 1 or self.iterations < 1:
            raise UsageError(f"{self.rounds} rounds of {self.iterations} iterations; expected at least one of each")


@dataclass(frozen=True)
class Round:
    """One solve. Figures are of the stored table; `residual` is CG's relative one."""

    raised: int  # margins whose target is above the first one
    iterations: int
    residual: float
    reached: int
    kept: int


@dataclass(frozen=True)
class MarginSolution:
    """A table and what it is predicted to do.

    s_ED: on the file's lattice, as a reader of the file sees it.
    before_N, after_N: margins with what is mounted, and predicted with s_ED.
    verdicts: one a point, in order: reached tau; short of it; contradicts another point and was left out; immovable,
        no gain of the layer changes it.
    contradicting: pairs of margins that are opposed.
    """

    s_ED: F32
    before_N: F64
    after_N: F64
    point_N: Mask
    verdicts: tuple[Verdict, ...]
    contradicting: tuple[tuple[int, int], ...]
    rounds: tuple[Round, ...]
    best: int  # the round that s_ED is of

    @property
    def flipped(self) -> float:
        """Share of the points that were not led by their token and are."""
        wrong_N = self.point_N & (self.before_N <= 0)
        return float((self.after_N[wrong_N] > 0).mean()) if wrong_N.any() else 1.0

    @property
    def kept(self) -> float:
        """Share of the other margins above 0 that stay there: their top-1 against their old top-2."""
        led_N = ~self.point_N & (self.before_N > 0)
        return float((self.after_N[led_N] > 0).mean()) if led_N.any() else 1.0


def solve_margins(
    rows: MarginRows,
    rule: MarginRule | None = None,
    mounted_ED: F32 | None = None,
    workers: Workers | None = None,
    keep_N: F64 | None = None,
    pull_ED: F32 | None = None,
) -> MarginSolution:
    """The table of one layer.

    Args:
        rows: margins at the layer's slots.
        rule: MarginRule() without.
        mounted_ED: float32 [E, D], gains under which rows.margin_N was read; 1 without.
        workers: threads; a single one without. Their number does not change a bit of the result.
        keep_N: what margins that are to stay are to be, where they have moved already; rows.margin_N without.
        pull_ED: float32 [E, D], where the ridge pulls to; mounted_ED without.

    Raises:
        UsageError: shapes that do not belong together, or a value that is not finite.
    """
    rule, workers = rule or MarginRule(), workers or Workers(1)
    shape = (rows.n_experts, rows.width)
    for name, table_ED in (("mounted gains", mounted_ED), ("gains to pull to", pull_ED)):
        if table_ED is not None and (table_ED.shape != shape or not np.isfinite(table_ED).all()):
            raise UsageError(f"{name}: {list(table_ED.shape)}; expected finite ones, {list(shape)}")
    start_ED = np.ones(shape, np.float32) if mounted_ED is None else mounted_ED
    margins, m0_N = Margins(rows, workers), rows.margin_N.astype(np.float64)
    stay_N = m0_N if keep_N is None else keep_N.astype(np.float64)
    if stay_N.shape != m0_N.shape or not np.isfinite(stay_N).all():
        raise UsageError(f"margins to keep: {list(stay_N.shape)}; expected finite ones, {list(m0_N.shape)}")
    point_N = rows.point_N
    points_M = np.flatnonzero(point_N)
    gram_MM = margins.gram(points_M)
    contradicting = _contradicting(gram_MM, points_M, rule.tau - m0_N[points_M])
    left_out = {i for pair in contradicting for i in pair}
    still = {int(i) for i, norm in zip(points_M, np.diag(gram_MM), strict=True) if norm == 0}
    weight_N = np.where(point_N, 1.0, rule.rho)
    weight_N[sorted(left_out | still)] = 0
    sought_N = point_N & (weight_N > 0)

    energy_ED = margins.energy(weight_N)
    ridge = ridge_of(energy_ED, rule.lam)
    curvature_ED = energy_ED + ridge
    first_N = np.where(point_N, np.maximum(rule.tau, m0_N), stay_N)
    floor_N = np.where(sought_N, rule.tau, -np.inf)
    led_N = ~point_N & (stay_N > 0) & (weight_N > 0)
    target_N, x_ED = first_N.copy(), np.zeros(shape)
    pull = None if pull_ED is None else pull_ED.astype(np.float64) - start_ED
    rounds: list[Round] = []
    best: tuple[tuple[float, ...], int, F32, F64] | None = None
    for number in range(rule.rounds):
        least, floor = (CORRECTION, FLOOR) if number else (rule.rtol, 0.0)
        wanted_N = target_N - m0_N
        x_ED, iterations, residual = _minimum(
            margins, weight_N, wanted_N, ridge, curvature_ED, x_ED, least, floor, rule.iterations, pull
        )
        s_ED = stored(start_ED + x_ED, curvature_ED)
        after_N = m0_N + margins.forward(s_ED - start_ED.astype(np.float64))
        short_N = np.where(sought_N, np.maximum(floor_N - after_N, 0), 0)
        lost_N = led_N & (after_N <= 0)
        reached, kept = int((sought_N & (short_N == 0)).sum()), int((~point_N & ~lost_N).sum())
        rounds.append(Round(int((target_N > first_N).sum()), iterations, residual, reached, kept))
        # Points and others count alike, as they do in the objective at rho = 1; then what is missing decides.
        mark = (float(reached + kept), -float(short_N.sum() - after_N[lost_N].sum()))
        if best is None or mark > best[0]:
            best = (mark, number, s_ED, after_N)
        if not short_N.any() and not lost_N.any():
            break
        target_N = target_N + OVER * short_N + np.where(lost_N, RESERVE * stay_N - after_N, 0)
    assert best is not None  # rounds >= 1
    _, at, s_ED, after_N = best

    def verdict(i: int) -> Verdict:
        if i in left_out:
            return "contradicts"
        if after_N[i] >= rule.tau:
            return "reached"
        return "immovable" if i in still else "short"

    return MarginSolution(
        s_ED=s_ED,
        before_N=m0_N,
        after_N=after_N,
        point_N=point_N,
        verdicts=tuple(verdict(int(i)) for i in points_M),
        contradicting=contradicting,
        rounds=tuple(rounds),
        best=at,
    )


def minimum(rows: MarginRows, target_N: F64, rule: MarginRule, workers: Workers | None = None) -> F64:
    """s - s0 of one solve with given targets, float64 [E, D]: what `solve_margins` rounds. Nothing is left out."""
    margins = Margins(rows, workers or Workers(1))
    weight_N = np.where(rows.point_N, 1.0, rule.rho)
    energy_ED = margins.energy(weight_N)
    ridge = ridge_of(energy_ED, rule.lam)
    wanted_N = target_N - rows.margin_N
    return _minimum(
        margins,
        weight_N,
        wanted_N,
        ridge,
        energy_ED + ridge,
        np.zeros(margins.shape),
        rule.rtol,
        0.0,
        rule.iterations,
    )[0]


def ridge_of(energy_ED: F64, lam: float) -> float:
    """lambda dbar; lambda itself where no gain moves anything, so that all stay at s0."""
    moved_ED = energy_ED > 0
    return lam * float(energy_ED[moved_ED].mean()) if moved_ED.any() else lam


def stored(s_ED: Any, weight_ED: F64) -> F32:
    """What a reader of the file sees of s, rounded where it costs least by `weight_ED`."""
    delta_ED = cheapest((s_ED - 1).astype(np.float32), weight_ED.astype(np.float32))
    e, d = delta_ED.shape
    return decode_gains(encode_gains(np.float32(1) + delta_ED), e, d, "gains just solved")


def _minimum(
    margins: Margins,
    weight_N: F64,
    wanted_N: F64,
    ridge: float,
    curvature_ED: F64,
    x_ED: F64,
    least: float,
    floor: float,
    most: int,
    pull_ED: F64 | None = None,
) -> tuple[F64, int, float]:
    """(R^T W R + ridge) x = R^T W wanted + ridge pull, from x_ED on.

    CG stops when `least` of the residual that it began with, or `floor` of the right side's length, is left, or after
    `most` iterations. Returns x, iterations, and the residual's length over the right side's.
    """
    b = margins.backward(weight_N * wanted_N).reshape(-1)
    if pull_ED is not None:
        b += ridge * pull_ED.reshape(-1)
    size = float(np.linalg.norm(b))
    if size == 0:
        return np.zeros(margins.shape), 0, 0.0
    done = [0]

    def times(x: F64) -> F64:
        x_ED = x.reshape(margins.shape)
        return np.asarray((margins.backward(weight_N * margins.forward(x_ED)) + ridge * x_ED).reshape(-1))

    def note(_: F64) -> None:
        done[0] += 1

    n, diagonal = b.size, curvature_ED.reshape(-1)
    system = LinearOperator((n, n), matvec=times, dtype=np.float64)
    jacobi = LinearOperator((n, n), matvec=lambda r: r / diagonal, dtype=np.float64)
    start = x_ED.reshape(-1)
    missing = b - times(start) if start.any() else b
    dx, _ = cg(system, missing, rtol=least, atol=floor * size, maxiter=most, M=jacobi, callback=note)
    x = start + dx
    return x.reshape(margins.shape), done[0], float(np.linalg.norm(b - times(x))) / size


def _contradicting(gram_MM: F64, points_M: I64, wanted_M: F64) -> tuple[tuple[int, int], ...]:
    """Pairs of points with opposed rows, whose wants cannot both be met by moving along them."""
    norm_M = np.sqrt(np.diag(gram_MM))
    size_MM = np.outer(norm_M, norm_M)
    opposed_MM = (gram_MM < -(1 - OPPOSED) * size_MM) & (size_MM > 0)
    return tuple(
        (int(points_M[i]), int(points_M[j]))
        for i, j in np.argwhere(np.triu(opposed_MM))
        if wanted_M[i] / norm_M[i] > -wanted_M[j] / norm_M[j]
    )
