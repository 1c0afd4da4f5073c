"""A table of the last layer that carries over: corrections of many days as a force, other text as what resists it.

A point of the margin solve asks for a margin, and the table that gives exactly that to every point leans on what
these points have by chance. Here points only pull, and text says what that costs:

    M = mean over text of J^T F J  +  beside * the same over the requests' other decisions  +  lam dbar 1
    x_0 = M^-1 mean over text of J^T H^T (p_original - p)          towards the original's logits
    x_n = x_(n-1) + step M^-1 mean over points of c J^T H^T (e_a - q)     towards the wanted tokens

x = s - 1; J the derivative of the norm's output by x (last_layer.py), H the head, F the Fisher matrix H^T (diag p -
p p^T) H, so that x^T J^T F J x / 2 is the KL that x costs (Amari 1998, "Natural Gradient Works Efficiently in
Learning", with a ridge). F is never formed: it is the mean of (H_v - H^T p)(...)^T over tokens v drawn from p, and a
few draws a position do. q is the softmax of `sharp` times the logits without a: the strongest others, all of them. c
falls from 1 to 0 as a point's margin comes from tau - 1 to tau.

x_0 takes text nearer to the original, and the steps spend that. After every step the table as a file holds it is
held against text that neither M nor x_0 has seen; the last one whose Sigma-min there is better than without it by
`least` standard errors is taken. So other text pays nothing, as far as this text can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg

from ds4.base.codebook import Workers
from ds4.errors import UsageError
from rulers.numbers import Mean, clustered_mean
from solvers.last_layer import BLOCK, Head, Places, softmax
from solvers.margin_rows import MarginRows, Margins
from solvers.margins import stored

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class CarryRule:
    """step: length of a step, in nats of the mean point. steps: at most. tau, sharp, lam, beside, least: see above.
    draws: tokens drawn a position. held: every so many-th document is held out of the text. rtol: of CG.
    """

    step: float = 0.004
    steps: int = 12
    tau: float = 2.0
    sharp: float = 4.0
    lam: float = 1.5
    beside: float = 0.3
    least: float = 0.25
    draws: int = 1
    held: int = 4
    rtol: float = 1e-3

    def __post_init__(self) -> None:
        """Raises UsageError: a value that gives no table."""
        for name in ("step", "tau", "sharp", "lam"):
            if not 0 < getattr(self, name) < np.inf:
                raise UsageError(f"{name} is {getattr(self, name):g}; expected above 0")
        if not 0 <= self.beside < np.inf or not np.isfinite(self.least) or not 0 < self.rtol < 1:
            raise UsageError("beside must be 0 or more, least a number, rtol between 0 and 1")
        if self.steps < 1 or self.draws < 1 or self.held < 2:
            raise UsageError("expected at least one step, one draw, and every second document held out at most")


@dataclass(frozen=True)
class TextPlaces:
    """Positions of text. logits_PV: the engine's there without the table; original_PV: what they should be (None: as
    they are); documents_P: which document each is of.
    """

    places: Places
    logits_PV: F32
    original_PV: F32 | None
    documents_P: NDArray[np.integer]

    @staticmethod
    def join(parts: Sequence[TextPlaces]) -> TextPlaces:
        """One after the other, documents numbered through; all with the original's logits or all without."""
        firsts = np.cumsum([0, *(int(p.documents_P.max()) + 1 for p in parts)])
        originals = [p.original_PV for p in parts if p.original_PV is not None]
        return TextPlaces(
            Places.join([p.places for p in parts]),
            np.concatenate([p.logits_PV for p in parts]),
            np.concatenate(originals) if originals else None,
            np.concatenate([p.documents_P + first for p, first in zip(parts, firsts, strict=False)]),
        )

    def take(self, which: NDArray[np.bool_]) -> TextPlaces:
        original = None if self.original_PV is None else self.original_PV[which]
        return TextPlaces(self.places.take(which), self.logits_PV[which], original, self.documents_P[which])


@dataclass(frozen=True)
class Step:
    """After n steps: points led by their token by hand, and what Sigma-min gained on the held-out text."""

    number: int
    led: int
    held_out: Mean


@dataclass(frozen=True)
class Carried:
    """s_ED: as a reader of the file sees it, 1 everywhere if no step was worth it (`taken` is None then)."""

    s_ED: F32
    taken: int | None
    steps: tuple[Step, ...]


class Resistance:
    """The quadratic form of some text, a mean over its positions, and its pull on x, both at x = 0."""

    def __init__(self, text: TextPlaces, head: Head, n_experts: int, draws: int, workers: Workers) -> None:
        self.n, p, D = len(text.places), text.places, text.places.h_PD.shape[1]
        rng = np.random.default_rng(0)  # the same text gives the same table
        pull_PD = np.zeros((self.n, D), np.float32)
        drawn_PSD = np.empty((self.n, draws, D), np.float32)
        for first in range(0, self.n, BLOCK):
            part = slice(first, first + BLOCK)
            h_PD, prob_PV = p.h_PD[part].astype(np.float64), softmax(text.logits_PV[part])
            here, mean_PD = p.take(part), prob_PV @ head.rows_VD
            if text.original_PV is not None:
                force_PD = (softmax(text.original_PV[part]) - prob_PV) @ head.rows_VD
                pull_PD[part] = here.directions(head, h_PD, force_PD)
            below_PV = np.cumsum(prob_PV, axis=1, dtype=np.float64)
            for s in range(draws):
                drawn_P1 = rng.random((len(here), 1)) * below_PV[:, -1:]
                v_P = np.minimum((below_PV <= drawn_P1).sum(axis=1), prob_PV.shape[1] - 1)
                force_PD = head.rows_VD[v_P] - mean_PD
                drawn_PSD[part, s] = here.directions(head, h_PD, force_PD)
        self._drawn = _margins(p, np.repeat(np.arange(self.n), draws), drawn_PSD.reshape(-1, D), n_experts, workers)
        self._scale = 1 / (self.n * draws)
        self.diagonal_ED = self._drawn.energy(np.full(self.n * draws, self._scale))
        pulls = _margins(p, np.arange(self.n), pull_PD, n_experts, workers)
        self.pull_ED = pulls.backward(np.full(self.n, 1 / self.n))

    def times(self, x_ED: F64) -> F64:
        return self._drawn.backward(self._scale * self._drawn.forward(x_ED))


def _margins(p: Places, place_N: I64, g_ND: F32, n_experts: int, workers: Workers) -> Margins:
    zero_N, all_N = np.zeros(len(place_N)), np.ones(len(place_N), bool)
    return Margins(MarginRows(p.y_PKD, p.picks_PK, place_N, g_ND, zero_N, all_N, n_experts), workers)


class Carry:
    """Text to solve on: what stays from night to night.

    Args:
        text: with the original's logits; its documents are held out as the rule says.

    Raises:
        UsageError: too few documents to hold any out.
    """

    def __init__(
        self, text: TextPlaces, head: Head, n_experts: int, rule: CarryRule | None = None,
        workers: Workers | None = None,
    ) -> None:  # fmt: skip
        self.rule, self.head, self.n_experts = rule or CarryRule(), head, n_experts
        self.workers = workers or Workers(1)
        if text.original_PV is None:
            raise UsageError("text to carry by needs the original's logits")
        documents, number_P = np.unique(text.documents_P, return_inverse=True)
        out_P = number_P.reshape(-1) % self.rule.held == self.rule.held - 1
        if len(documents) < 2 * self.rule.held:
            raise UsageError(
                f"{len(documents)} documents of text; at least {2 * self.rule.held} are needed, as every "
                f"{self.rule.held}th is held out"
            )
        self._held = text.take(out_P)
        original = softmax(self._held.original_PV)  # type: ignore[arg-type]
        self._original_PV = original
        self._before_P = _agreement(original, self._held.logits_PV)
        self._text = Resistance(text.take(~out_P), head, n_experts, self.rule.draws, self.workers)

    def solve(self, points: Places, a_P: I64, others: Sequence[TextPlaces] = ()) -> Carried:
        """The table for these points.

        Args:
            a_P: the wanted token of each.
            others: decisions of the requests that are to stay.

        Raises:
            UsageError: no points.
        """
        rule, shape = self.rule, (self.n_experts, points.h_PD.shape[1])
        if not len(points) or len(a_P) != len(points):
            raise UsageError(f"{len(points)} points with {len(a_P)} wanted tokens: nothing to solve for")
        beside = [Resistance(o, self.head, self.n_experts, rule.draws, self.workers) for o in others if len(o.places)]
        n_beside = sum(b.n for b in beside)
        parts = [(self._text, 1.0), *((b, rule.beside * b.n / n_beside) for b in beside)]
        ridge = rule.lam * float(self._text.diagonal_ED.mean())
        diagonal_ED: F64 = np.full(shape, ridge)
        for part, weight in parts:
            diagonal_ED += weight * part.diagonal_ED

        def times(x: F64) -> F64:
            x_ED = x.reshape(shape)
            return np.asarray(sum(w * part.times(x_ED) for part, w in parts) + ridge * x_ED).reshape(-1)

        def solved(b_ED: F64, start_ED: F64 | None) -> F64:
            n = b_ED.size
            jacobi = LinearOperator((n, n), matvec=lambda r: r / diagonal_ED.reshape(-1), dtype=np.float64)
            system = LinearOperator((n, n), matvec=times, dtype=np.float64)
            start = None if start_ED is None else start_ED.reshape(-1)
            x, _ = cg(system, b_ED.reshape(-1), x0=start, rtol=rule.rtol, maxiter=300, M=jacobi)
            return np.asarray(x).reshape(shape)

        x_ED, added_ED = solved(self._text.pull_ED, None), None
        found, best = [], None
        for number in range(rule.steps + 1):
            s_ED = stored(1 + x_ED, diagonal_ED)
            gain = self.held_out(s_ED)
            led, pull_ED = self._pull(points, a_P, s_ED, x_ED)
            found.append(Step(number, led, gain))
            if gain.value > rule.least * (gain.se or 0.0):
                best = (number, s_ED)
            elif number:
                break
            if number == rule.steps or not pull_ED.any():
                break
            added_ED = solved(pull_ED, added_ED)
            x_ED = x_ED + rule.step * added_ED
        taken, s_ED = best if best is not None else (None, np.ones(shape, np.float32))
        return Carried(s_ED, taken, tuple(found))

    def held_out(self, s_ED: F32) -> Mean:
        """What a table does to Sigma-min on the held-out text, by document."""
        delta_ED, places = s_ED.astype(np.float64) - 1, self._held.places
        after_P = np.concatenate(
            [
                _agreement(self._original_PV[i : i + BLOCK], self._logits(places.take(slice(i, i + BLOCK)), delta_ED))
                for i in range(0, len(places), BLOCK)
            ]
        )
        return clustered_mean(after_P - self._before_P, self._held.documents_P.astype(np.int64))

    def _pull(self, points: Places, a_P: I64, s_ED: F32, x_ED: F64) -> tuple[int, F64]:
        """Points led by their token with s as stored; the mean pull of all at x."""
        rule, each = self.rule, np.arange(len(points))
        led = int((self._logits(points, s_ED.astype(np.float64) - 1).argmax(axis=1) == a_P).sum())
        h_PD = points.moved(x_ED)
        logits_PV = self.head.logits(h_PD)
        own_P = logits_PV[each, a_P].copy()
        logits_PV[each, a_P] = -np.inf
        c_P = np.clip(rule.tau - (own_P - logits_PV.max(axis=1)), 0, 1)
        others_PV = softmax(np.float32(rule.sharp) * logits_PV)
        force_PD = c_P[:, None].astype(np.float32) * (self.head.rows_VD[a_P] - others_PV @ self.head.rows_VD)
        g_PD = points.directions(self.head, h_PD, force_PD)
        pulls = _margins(points, each, g_PD, self.n_experts, self.workers)
        return led, pulls.backward(np.full(len(points), 1 / len(points)))

    def _logits(self, places: Places, delta_ED: F64) -> F32:
        return self.head.logits(places.moved(delta_ED))


def _agreement(original_PV: F32, logits_PV: F32) -> F64:
    """Sigma-min of each position."""
    return np.asarray(1 - 0.5 * np.abs(softmax(logits_PV) - original_PV).sum(axis=1), np.float64)
