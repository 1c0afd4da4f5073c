"""The router's bias against the recipe in its plainest words."""

import numpy as np
import pytest

from ds4.errors import UsageError
from solvers.bias import ALPHAS, EVENTS, events, same_set, select, sets, solve_bias

N, E, K = 2000, 10, 3


def made(shift: float = 0.3, noise: float = 0.05, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(our scores, the original's picks, held-out): expert 2 scored too low by `shift`, expert 5 too high."""
    rng = np.random.default_rng(seed)
    original = rng.uniform(0, 2, (N, E)).astype(np.float32)
    picks = np.argsort(-original, axis=1, kind="stable")[:, :K]
    ours = (original + noise * rng.standard_normal((N, E))).astype(np.float32)
    ours[:, 2] -= np.float32(shift)
    ours[:, 5] += np.float32(shift)
    return ours, picks, np.arange(N) // 20 % 4 == 3


def plain_events(scores: np.ndarray, picks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row by row, as the recipe is told."""
    sums, counts = np.zeros(E), np.zeros(E, int)
    for v, original in zip(scores, picks, strict=True):
        ours = sorted(range(E), key=lambda e: (-v[e], e))[:K]
        thr = v[ours[-1]]
        for e in range(E):
            if e in original and e not in ours:
                sums[e] += float(thr) - float(v[e])
                counts[e] += 1
            elif e in ours and e not in original:
                sums[e] -= float(v[e]) - float(thr)
                counts[e] += 1
    return sums, counts


def test_events_are_the_recipes() -> None:
    ours, picks, _ = made()
    sums, counts = events(ours, sets(picks, E))
    want_sums, want_counts = plain_events(ours, picks)
    assert np.array_equal(counts, want_counts)
    assert np.allclose(sums, want_sums, rtol=1e-12, atol=0)


def test_equal_scores_go_to_the_lowest_number() -> None:
    scores = np.array([[1, 2, 2, 2, 0]], np.float32)
    assert np.flatnonzero(select(scores, 2)[0]).tolist() == [1, 2]


def test_a_shifted_expert_is_found() -> None:
    ours, picks, held = made()
    found = solve_bias(ours, picks, held)
    assert found.mounted and found.same_set_after > found.same_set + 0.1
    assert found.delta_E[2] > 0.05 and found.delta_E[5] < -0.05
    assert np.abs(found.delta_E[[0, 1, 3, 4, 6, 7, 8, 9]]).max() < found.delta_E[2] / 2
    original = sets(picks, E)
    assert found.same_set == same_set(ours[held], original[held])
    assert found.same_set_after == same_set(ours[held] + found.delta_E, original[held])
    # alpha is the best of its candidates, by held-out rows
    assert [a for a, _ in found.by_alpha] == list(ALPHAS)
    assert dict(found.by_alpha)[found.alpha] == max(rate for _, rate in found.by_alpha) == found.same_set_after


def test_bias_is_alpha_times_the_mean_of_fitted_rows() -> None:
    ours, picks, held = made()
    found = solve_bias(ours, picks, held)
    sums, counts = plain_events(ours[~held], picks[~held])
    mean = np.where(counts >= EVENTS, sums / np.maximum(counts, 1), 0)
    assert np.allclose(found.delta_E, found.alpha * mean, rtol=1e-6)
    assert found.n_events == counts.sum() and found.n_armed == (counts >= EVENTS).sum()


def test_held_out_rows_are_not_fitted() -> None:
    """Another original on held-out rows changes what alpha is chosen, and no mean."""
    ours, picks, held = made()
    other = picks.copy()
    other[held] = (other[held] + 1) % E
    one, two = solve_bias(ours, picks, held), solve_bias(ours, other, held)
    assert two.n_events == one.n_events and two.same_set != one.same_set


def test_too_few_events_leave_zero() -> None:
    """Seven rows in which expert 0 is missing, then eight."""
    scores = np.tile(np.arange(E, 0, -1, dtype=np.float32), (40, 1))
    picks = np.tile(np.arange(K), (40, 1))
    held = np.arange(40) >= 30
    for n_events in (EVENTS - 1, EVENTS):
        scores[:, 0] = 10
        scores[:n_events, 0] = 0  # below thr; fitted rows
        scores[30:33, 0] = 6.5  # and just below it in some held-out rows, so that a bias is worth mounting
        _, counts = events(scores[~held], sets(picks, E)[~held])
        assert counts[0] == n_events and counts[3] == n_events
        found = solve_bias(scores, picks, held)
        assert found.mounted == (n_events == EVENTS)
        assert (found.delta_E[0] > 0) == (n_events == EVENTS)


def test_nothing_is_written_without_a_strict_gain() -> None:
    """Scores that choose as the original does everywhere but by noise on fitted rows alone."""
    ours, picks, held = made(shift=0.0, noise=0.0)
    found = solve_bias(ours, picks, held)
    assert not found.mounted and not found.delta_E.any() and found.alpha == 0
    assert found.same_set == found.same_set_after == 1.0


def test_more_rounds_never_lower_held_out() -> None:
    ours, picks, held = made(shift=0.6)
    one, many = solve_bias(ours, picks, held), solve_bias(ours, picks, held, max_rounds=8)
    assert many.rounds >= 2 and many.same_set_after > one.same_set_after
    assert many.by_alpha == one.by_alpha


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v, p, h: (v, p[:-1], h), "one row a token"),
        (lambda v, p, h: (v, p, h[:-1]), "one row a token"),
        (lambda v, p, h: (np.where(np.arange(v.size).reshape(v.shape) == 37, np.nan, v), p, h), "expert 7 at row 3"),
        (lambda v, p, h: (v, p + 1, h), "experts 0 to 9"),
        (lambda v, p, h: (v, np.zeros_like(p), h), "twice"),
        (lambda v, p, h: (v, p, np.ones_like(h)), "2000 of 2000"),
        (lambda v, p, h: (v, p, np.zeros_like(h)), "0 of 2000"),
    ],
)
def test_refusals(change: object, message: str) -> None:
    ours, picks, held = made()
    picks[0] = [9, 1, 2]  # so that + 1 leaves the experts
    with pytest.raises(UsageError, match=message):
        solve_bias(*change(ours, picks, held))  # type: ignore[operator]
