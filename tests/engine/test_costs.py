"""The costs of a round, fitted to times."""

from __future__ import annotations

import itertools

import pytest

from ds4.engine.costs import MEMORY, CostFit


def test_the_fit_is_weighted_least_squares() -> None:
    fit = CostFit()
    for n_rows, times in {1: [1.0, 1.2, 1.1], 3: [1.7], 6: [2.0, 2.4]}.items():
        for seconds in times:
            fit.add_pass(n_rows, seconds)
    fit.add_draft(0.5)
    costs = fit.costs()
    assert costs is not None
    points = [(1, 3, 1.1), (3, 1, 1.7), (6, 2, 2.2)]  # rows, weight, median

    def error(pass_s: float, row_s: float) -> float:
        return sum(w * (pass_s + row_s * n - s) ** 2 for n, w, s in points)

    best = error(costs.pass_s, costs.row_s)
    for a, b in itertools.product((-1e-3, 0, 1e-3), repeat=2):
        assert best <= error(costs.pass_s + a, costs.row_s + b)
    assert costs.draft_s == 0.5
    assert costs.plain_s == costs.pass_s + costs.row_s
    assert costs.drafted_s(2) == costs.draft_s + costs.pass_s + costs.row_s * 3


@pytest.mark.parametrize(
    ("long_pass", "want"),
    [(0.5, (4 / 5, 0.0)), (13.0, (0.0, (3 * 1.0 + 2 * 6 * 13.0) / (3 * 1 + 2 * 36)))],
    ids=["longer looks cheaper", "more than in proportion"],
)
def test_no_cost_is_negative(long_pass: float, want: tuple[float, float]) -> None:
    fit = CostFit()
    for _ in range(3):
        fit.add_pass(1, 1.0)
    for _ in range(2):
        fit.add_pass(6, long_pass)
    fit.add_draft(0.1)
    costs = fit.costs()
    assert costs is not None
    assert [costs.pass_s, costs.row_s] == pytest.approx(want)


def test_an_interrupted_pass_moves_little_and_an_old_one_is_forgotten() -> None:
    fit = CostFit()
    fit.add_draft(0.1)
    fit.add_pass(6, 2.0)
    for seconds in (1.0, 1.02, 50.0, 0.98, 1.0):
        fit.add_pass(1, seconds)
    costs = fit.costs()
    assert costs is not None and costs.plain_s == pytest.approx(1.0)
    for _ in range(MEMORY):
        fit.add_pass(1, 1.5)  # the context has grown
    costs = fit.costs()
    assert costs is not None and costs.plain_s == pytest.approx(1.5)


def test_times_that_cannot_be_are_dropped() -> None:
    fit = CostFit()
    fit.add_pass(1, 0.0)
    fit.add_pass(6, -1.0)
    fit.add_draft(-1.0)
    assert not fit.knows_one_row and not fit.knows_drafting and fit.costs() is None
