"""Router bias: moves an expert's selection score where we and the original choose differently.

For a row where the original picked e and we did not, the score lacks thr - v_e; where we picked it and the original
did not, it is v_e - thr too high (thr: the K-th largest of our scores v). An expert's bias is alpha times the mean of
these events, thr - v_e in both cases:

    b_e = alpha * mean over events of (thr - v_e)        with at least 8 events, else 0

alpha is chosen on held-out rows by the share whose set of experts equals the original's, and nothing is written that
does not strictly raise it. A layer's own bias does not change its router's input, so the scores of one capture judge
every candidate exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds4.errors import UsageError

ALPHAS = (0.5, 1.0, 1.5, 2.5)
EVENTS = 8  # fewer, and the mean says more about the rows than about the expert

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class BiasSolution:
    """A layer's bias and what its choice rests on."""

    delta_E: F32  # all zero where not mounted
    alpha: float  # of the last round; 0 where not mounted
    rounds: int
    same_set: float  # held-out share of rows with the original's set, before
    same_set_after: float
    by_alpha: tuple[tuple[float, float], ...]  # first round: (alpha, held-out share)
    n_armed: int
    n_events: int

    @property
    def mounted(self) -> bool:
        return self.rounds > 0


def select(scores_TE: F32, n_used: int) -> Mask:
    """bool [T, E]: the n_used largest of each row; of equals the lowest expert number first, as the kernel has it."""
    order = np.argsort(-scores_TE, axis=1, kind="stable")[:, :n_used]
    chosen = np.zeros(scores_TE.shape, np.bool_)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen


def sets(picks_TK: NDArray[np.integer], n_experts: int) -> Mask:
    """Picks [T, K] as bool [T, E].

    Raises:
        UsageError: an expert that the layer does not have, or one twice in a row.
    """
    if picks_TK.size and not 0 <= picks_TK.min() <= picks_TK.max() < n_experts:
        raise UsageError(
            f"picks go from {picks_TK.min()} to {picks_TK.max()}; the layer has experts 0 to {n_experts - 1}"
        )
    chosen = np.zeros((len(picks_TK), n_experts), np.bool_)
    np.put_along_axis(chosen, np.asarray(picks_TK, np.int64), True, axis=1)
    wrong = np.flatnonzero(chosen.sum(axis=1) != picks_TK.shape[1])
    if len(wrong):
        raise UsageError(f"row {wrong[0]} picks {picks_TK[wrong[0]].tolist()}: an expert twice")
    return chosen


def events(scores_TE: F32, original_TE: Mask) -> tuple[NDArray[np.float64], I64]:
    """Sum of thr - v_e and number of events of each expert, over all rows; float64 [E], int64 [E]."""
    n_used = int(original_TE[0].sum()) if len(original_TE) else 0
    ours_TE = select(scores_TE, n_used)
    threshold_T1 = np.where(ours_TE, scores_TE, np.float32(np.inf)).min(axis=1, keepdims=True, initial=np.inf)
    differs_TE = ours_TE != original_TE
    lacks_TE = np.where(differs_TE, threshold_T1.astype(np.float64) - scores_TE, 0.0)
    return lacks_TE.sum(axis=0), differs_TE.sum(axis=0)


def same_set(scores_TE: F32, original_TE: Mask) -> float:
    """Share of rows whose chosen set is the original's."""
    n_used = int(original_TE[0].sum()) if len(original_TE) else 0
    return float(np.mean((select(scores_TE, n_used) == original_TE).all(axis=1)))


def solve_bias(
    scores_TE: F32, original_TK: NDArray[np.integer], held_out_T: Mask, max_rounds: int = 1
) -> BiasSolution:
    """The bias of one layer.

    Args:
        scores_TE: f32 [T, E], our selection scores, the base's own bias included.
        original_TK: integers [T, K], the experts that the original chose at the same positions.
        held_out_T: bool [T], rows to choose on; the others are fitted.
        max_rounds: 1 is the recipe. More repeat it on the scores as biased so far, as long as held-out rises.

    Raises:
        UsageError: shapes do not belong together, scores are not finite, picks are not sets, or there are no rows
            to fit or to choose on.
    """
    n, n_experts = scores_TE.shape
    if original_TK.ndim != 2 or len(original_TK) != n or held_out_T.shape != (n,):
        raise UsageError(
            f"scores are {list(scores_TE.shape)}, the original's picks {list(original_TK.shape)} and the held-out "
            f"mask {list(held_out_T.shape)}; expected one row a token in each"
        )
    if not np.isfinite(scores_TE).all():
        row, expert = np.argwhere(~np.isfinite(scores_TE))[0]
        raise UsageError(f"the selection score of expert {expert} at row {row} is not finite")
    if held_out_T.all() or not held_out_T.any():
        raise UsageError(f"{int(held_out_T.sum())} of {n} rows are held out; some must be, and some must not")
    original_TE = sets(original_TK, n_experts)
    fitted = scores_TE[~held_out_T], original_TE[~held_out_T]
    held = scores_TE[held_out_T], original_TE[held_out_T]
    before = best = same_set(*held)
    delta_E = np.zeros(n_experts, np.float32)
    alpha, rounds, armed, n_events = 0.0, 0, 0, 0
    by_alpha: list[tuple[float, float]] = []
    for turn in range(max_rounds):
        sums_E, counts_E = events(fitted[0] + delta_E, fitted[1])
        mean_E = np.where(counts_E >= EVENTS, sums_E / np.maximum(counts_E, 1), 0.0)
        steps = [(a, delta_E + (a * mean_E).astype(np.float32)) for a in ALPHAS]
        found = [(a, same_set(held[0] + step, held[1])) for a, step in steps]
        if turn == 0:
            by_alpha, armed, n_events = found, int((counts_E >= EVENTS).sum()), int(counts_E.sum())
        at = int(np.argmax([rate for _, rate in found]))  # the smallest alpha of equals
        if found[at][1] <= best:
            break
        (alpha, delta_E), best, rounds = steps[at], found[at][1], turn + 1
    return BiasSolution(delta_E, alpha, rounds, before, best, tuple(by_alpha), armed, n_events)
