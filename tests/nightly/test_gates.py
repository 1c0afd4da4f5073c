"""Gates: each can fail, says what was measured, against what, and why; without figures it is left out."""

from __future__ import annotations

from typing import Any

import pytest

from ds4.errors import UsageError
from solvers.nightly import gates
from solvers.nightly.gates import Thresholds, Verdict


def mean(value: float, se: float | None) -> dict[str, Any]:
    return {"mean": value, "se": se}


def test_flipped_counts_only_points_that_were_wrong() -> None:
    before, after = [-1.0, -2.0, -0.1, 3.0], [1.0, 0.5, -0.2, -9.0]
    v = gates.flipped(before, after, 0.85)
    assert (v.passed, v.measured, v.threshold) == (False, 2 / 3, 0.85)
    assert v.reason == "2 of 3 points that were decided wrong are right, 66.7%; at least 85.0% must be"
    assert gates.flipped(before, after, 2 / 3).passed
    assert gates.flipped([0.0], [0.0], 0.5).passed is False  # a tie is not led by its token
    assert gates.flipped([1.0], [1.0], 1.0).passed


def test_kept_needs_its_share_to_the_position() -> None:
    assert gates.kept(995, 1000, 0.995).passed
    v = gates.kept(994, 1000, 0.995)
    assert (v.passed, v.measured) == (False, 0.994)
    assert v.reason == (
        "6 of 1,000 other positions changed their likeliest token, 99.40% kept it; at least 99.50% must"
    )
    assert gates.kept(0, 0, 0.995).passed is None


def test_correlation_and_the_second_reading() -> None:
    assert gates.correlation(0.99, 0.0, 0.99).passed
    v = gates.correlation(0.98, 0.0, 0.99)
    assert not v.passed and v.reason == "predicted and real margins correlate by 0.9800; at least 0.99 is needed"
    other = gates.correlation(0.9999, 0.5, 0.99)
    assert other.passed is False and "0.500 from what the solve read" in other.reason
    assert gates.correlation(float("nan"), 0.0, 0.99).passed is False
    assert gates.correlation(0.9999, float("nan"), 0.99).passed is False
    assert gates.correlation(None, 0.0, 0.99).passed is None


@pytest.mark.parametrize(
    ("sigma", "kl", "passed"),
    [
        (mean(-0.001, 0.001), mean(0.001, 0.001), [True, True]),
        (mean(-0.0011, 0.001), mean(0.001, 0.001), [False, True]),
        (mean(0.5, 0.001), mean(0.0011, 0.001), [True, False]),
        (mean(0.0, 0.0), mean(0.0, 0.0), [True, True]),
        (mean(-1e-9, 0.0), mean(1e-9, 0.0), [False, False]),
        (mean(-1.0, None), mean(1.0, None), [None, None]),
        (mean(float("nan"), 0.1), mean(float("nan"), 0.1), [False, False]),
    ],
)
def test_a_ruler_may_be_worse_by_a_standard_error(sigma: Any, kl: Any, passed: list[bool | None]) -> None:
    found = gates.ruler("law", {"sigma_min": sigma, "kl": kl}, 1.0)
    assert [v.passed for v in found] == passed
    assert [v.gate for v in found] == ["ruler law Sigma-min", "ruler law KL"]


def test_what_a_ruler_says() -> None:
    fell, rose = gates.ruler("law", {"sigma_min": mean(-0.004, 0.001), "kl": mean(0.003, 0.002)}, 1.0)
    assert fell.reason == "Sigma-min fell by 0.00400, 4.0 standard errors; at most 1 (0.00100) is allowed"
    assert rose.reason == "KL rose by 0.00300, 1.5 standard errors; at most 1 (0.00200) is allowed"
    assert (fell.measured, fell.threshold, rose.measured, rose.threshold) == (-0.004, -0.001, 0.003, 0.002)
    assert all(v.passed for v in gates.ruler("law", {"sigma_min": mean(-0.004, 0.001), "kl": mean(0, 1)}, 4.0))


def test_endings_fewer_by_more_than_chance() -> None:
    assert gates.endings((12, 12), (12, 12), 1.0).passed
    assert gates.endings((6, 12), (12, 12), 1.0).passed
    # 18 of 24 against 16 of 24: pooled share 17/24, standard error of the difference sqrt(2 * .2066 / 24) = .131
    assert gates.endings((18, 24), (16, 24), 1.0).passed
    v = gates.endings((18, 24), (14, 24), 1.0)  # 4/24 = .167 fewer, standard error .136
    assert v.passed is False and v.reason.startswith(
        "14 of 24 answers end by themselves, 18 of 24 without it: 0.167 fewer, 1.2 standard errors"
    )
    assert gates.endings((18, 24), (14, 24), 2.0).passed
    assert gates.endings((0, 0), (0, 0), 1.0).passed is None


def test_what_passes_as_a_whole() -> None:
    good, bad = Verdict("a", True, 1.0, 1.0), Verdict("b", False, 0.0, 1.0, "too low")
    out = Verdict.left_out("c", "no teacher")
    assert gates.passes([good, out]) and not gates.passes([good, bad, out])
    assert not gates.passes([out, out]), "nothing was measured, and that is no reason to mount anything"
    assert gates.reasons([good, bad, out]) == "b: too low"
    assert gates.reasons([out]) == "no gate had anything to measure"


@pytest.mark.parametrize(
    ("name", "value"),
    [("flipped", 1.1), ("kept", -0.1), ("correlation", 1.5), ("ruler_errors", -1.0), ("ending_errors", float("inf"))],
)
def test_thresholds_that_nothing_can_be_held_against(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"--gate-{name.replace('_', '-')} is"):
        Thresholds(**{name: value})
    assert Thresholds(correlation=-1.0, ruler_errors=0.0).to_json()["correlation"] == -1.0


def test_a_solve_that_pulls_must_have_more_points_right() -> None:
    assert gates.more_right([-1.0, -2.0, 1.0], [0.5, -1.0, 1.0]).passed
    same = gates.more_right([-1.0, -2.0, 1.0], [0.5, -1.0, -0.1])
    assert not same.passed and same.reason == "1 of 3 trained points are right, 1 were without it; there must be more"
    assert gates.more_right([1.0], [1.0]).passed, "nothing was wrong"
