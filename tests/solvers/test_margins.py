"""The margin solve against dense mathematics and against a model's head computed by hand, and its verdicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds4.base.codebook import Workers
from ds4.checkpoint.codecs import bf16_to_f32, f32_to_bf16
from ds4.errors import UsageError
from ds4.sidecar.files import decode_gains, encode_gains
from solvers.margin_rows import MarginRows, Margins, direction
from solvers.margins import MarginRule, minimum, ridge_of, solve_margins

E, D, K = 10, 64, 3


def made(n_points: int = 6, n_others: int = 20, seed: int = 0, kind: Any = np.float64) -> MarginRows:
    """Independent rows; a position may have a point and a margin to keep."""
    rng = np.random.default_rng(seed)
    n, p = n_points + n_others, n_others + 2
    y_PKD: np.ndarray = rng.standard_normal((p, K, D)).astype(kind)
    picks_PK = np.argsort(rng.random((p, E)), axis=1)[:, :K]
    margin_N = np.concatenate([-rng.uniform(0.5, 2, n_points), rng.uniform(0.1, 4, n_others)])
    direction_ND: np.ndarray = (0.3 * rng.standard_normal((n, D))).astype(kind)
    return MarginRows(y_PKD, picks_PK, np.arange(n) % p, direction_ND, margin_N, np.arange(n) < n_points, E)


def dense(rows: MarginRows) -> np.ndarray:
    """R [N, E D], as its definition has it."""
    out_NED = np.zeros((len(rows.margin_N), rows.n_experts, rows.width))
    for n, p in enumerate(rows.place_N):
        for k, e in enumerate(rows.picks_PK[p]):
            out_NED[n, e] += rows.y_PKD[p, k] * rows.direction_ND[n]
    return out_NED.reshape(len(rows.margin_N), -1)


@pytest.mark.parametrize("lam", [0.01, 1.0])
@pytest.mark.parametrize("rho", [0.0, 0.3, 5.0])
def test_minimum_meets_the_normal_equations(lam: float, rho: float) -> None:
    rows = made()
    target_N = np.where(rows.point_N, 1.0, rows.margin_N)
    found_ED = minimum(rows, target_N, MarginRule(rho=rho, lam=lam, rtol=1e-12, iterations=2000))
    r, w = dense(rows), np.where(rows.point_N, 1.0, rho)
    diagonal = w @ np.square(r)
    ridge = lam * diagonal[diagonal > 0].mean()
    direct = np.linalg.solve(r.T @ (w[:, None] * r) + ridge * np.eye(E * D), r.T @ (w * (target_N - rows.margin_N)))
    assert np.abs(direct).max() > 1e-3
    np.testing.assert_allclose(found_ED.reshape(-1), direct, atol=1e-6 * np.abs(direct).max(), rtol=0)


def test_operator_is_its_definition() -> None:
    rows = made()
    r, margins, rng = dense(rows), Margins(rows, Workers(1)), np.random.default_rng(1)
    x_ED, v_N = rng.standard_normal((E, D)), rng.standard_normal(len(r))
    np.testing.assert_allclose(margins.forward(x_ED), r @ x_ED.reshape(-1), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(margins.backward(v_N).reshape(-1), r.T @ v_N, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(margins.energy(v_N**2).reshape(-1), v_N**2 @ r**2, rtol=1e-12, atol=1e-12)
    some = np.array([1, 4, 17])
    np.testing.assert_allclose(margins.gram(some), r[some] @ r[some].T, rtol=1e-12, atol=1e-12)


def test_prediction_is_the_head_computed_by_hand() -> None:
    """Streams, mixes, norm and head written out; the norm's factor held, margins move exactly as predicted."""
    rng = np.random.default_rng(3)
    n, n_streams, vocab = 8, 4, 50
    head_VD, norm_D = rng.standard_normal((vocab, D)), rng.uniform(0.5, 1.5, D)
    streams_NCD, comb_NCC = rng.standard_normal((n, n_streams, D)), rng.random((n, n_streams, n_streams))
    pre_NC, post_NC = rng.random((n, n_streams)), 2 * rng.random((n, n_streams))
    y_NKD, ysh_ND = rng.standard_normal((n, K, D)), rng.standard_normal((n, D))
    picks_NK = np.argsort(rng.random((n, E)), axis=1)[:, :K]
    a_N, b_N = rng.permutation(vocab)[:n], rng.permutation(vocab)[:n]
    a_N = np.where(a_N == b_N, (a_N + 1) % vocab, a_N)

    def hidden(s_ED: np.ndarray) -> np.ndarray:
        z_ND = (s_ED[picks_NK] * y_NKD).sum(axis=1) + ysh_ND
        x_NCD = post_NC[:, :, None] * z_ND[:, None] + np.einsum("njc,njd->ncd", comb_NCC, streams_NCD)
        return np.asarray(np.einsum("nc,ncd->nd", pre_NC, x_NCD))

    def margin(h_ND: np.ndarray, factor_N: np.ndarray) -> np.ndarray:
        logits_NV = (h_ND * factor_N[:, None] * norm_D) @ head_VD.T
        return np.asarray(logits_NV[np.arange(n), a_N] - logits_NV[np.arange(n), b_N])

    one_ED = np.ones((E, D))
    factor_N = 1 / np.sqrt(np.square(hidden(one_ED)).mean(axis=1) + 1e-20)
    before_N = margin(hidden(one_ED), factor_N)
    g_ND = direction(head_VD[a_N], head_VD[b_N], norm_D, pre_NC, post_NC, factor_N)
    rows = MarginRows(y_NKD, picks_NK, np.arange(n), g_ND, before_N, np.arange(n) < 5, E)
    found = solve_margins(rows, MarginRule(tau=0.5, lam=0.01))
    np.testing.assert_allclose(found.after_N, margin(hidden(found.s_ED), factor_N), atol=1e-9)
    assert np.abs(found.after_N - before_N).max() > 0.1
    # The factor does move, a little: what a real forward is asked for.
    real_N = margin(hidden(found.s_ED), 1 / np.sqrt(np.square(hidden(found.s_ED)).mean(axis=1) + 1e-20))
    assert np.corrcoef(real_N, found.after_N)[0, 1] > 0.99


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_points_are_reached_and_others_stay(kind: Any) -> None:
    rows = made(kind=kind)
    found = solve_margins(rows)
    assert found.verdicts == ("reached",) * 6 and found.flipped == 1 and found.kept == 1
    assert (found.after_N[rows.point_N] >= 1).all()
    others_N = ~rows.point_N
    unheld = solve_margins(rows, MarginRule(rho=0))
    assert (
        np.abs(found.after_N - rows.margin_N)[others_N].mean()
        < np.abs(unheld.after_N - rows.margin_N)[others_N].mean()
    )


def test_what_is_judged_is_what_is_written() -> None:
    rows = made(kind=np.float32)
    found = solve_margins(rows)
    assert np.array_equal(decode_gains(encode_gains(found.s_ED), E, D, "test"), found.s_ED)
    np.testing.assert_allclose(
        found.after_N, rows.margin_N + dense(rows) @ (found.s_ED.astype(np.float64) - 1).reshape(-1), atol=1e-5
    )


def test_raised_targets_rescue_points_that_rounding_and_the_ridge_left_short() -> None:
    rows, rule = made(), MarginRule(lam=1.0)
    once, often = solve_margins(rows, replace(rule, rounds=1)), solve_margins(rows, replace(rule, rounds=30))
    assert once.verdicts.count("short") > 0
    assert often.verdicts == ("reached",) * 6
    assert 1 < len(often.rounds) <= 30 and often.rounds[0].raised == 0 and often.rounds[1].raised > 0


def test_a_raised_target_makes_up_for_rounding_alone() -> None:
    """A ridge that hardly pulls: without a lattice tau is met to 1e-3, on it points fall short by more."""
    rows, rule = made(n_points=8), MarginRule(lam=1e-5, rho=0.1, rtol=1e-10, iterations=3000)
    free_ED = minimum(rows, np.where(rows.point_N, 1.0, rows.margin_N), rule)
    free_N = rows.margin_N + dense(rows) @ free_ED.reshape(-1)
    assert np.abs(free_N[rows.point_N] - 1).max() < 1e-3
    once = solve_margins(rows, replace(rule, rounds=1))
    assert (once.after_N[rows.point_N] < 1 - 1e-2).any()
    assert solve_margins(rows, replace(rule, rounds=8)).verdicts == ("reached",) * 8


def test_points_that_contradict_each_other_are_named_and_the_others_reached() -> None:
    rows = made()
    g, place = rows.direction_ND.copy(), rows.place_N.copy()
    g[3], place[3] = -2 * g[1], place[1]  # where one wants a over b and the other b over a
    margin = rows.margin_N.copy()
    margin[3] = -2 * margin[1]
    found = solve_margins(replace(rows, direction_ND=g, place_N=place, margin_N=margin))
    assert found.contradicting == ((1, 3),)
    assert found.verdicts == ("reached", "contradicts", "reached", "contradicts", "reached", "reached")
    assert len(found.rounds) < MarginRule().rounds  # what cannot be had does not keep the others waiting


def test_opposed_points_that_are_both_met_do_not_contradict() -> None:
    rows = made(n_points=2)
    g, place, margin = rows.direction_ND.copy(), rows.place_N.copy(), rows.margin_N.copy()
    g[1], place[1], margin[:2] = -g[0], place[0], (3.0, 2.0)
    found = solve_margins(replace(rows, direction_ND=g, place_N=place, margin_N=margin))
    assert not found.contradicting and found.verdicts == ("reached", "reached")


def test_a_contradiction_of_three_ends_short_within_its_rounds() -> None:
    """a over b, b over c, c over a at one position: no pair is opposed, all together cannot be had."""
    rows = made(n_points=3)
    g, place, margin = rows.direction_ND.copy(), rows.place_N.copy(), rows.margin_N.copy()
    g[2], place[:3], margin[:3] = -g[0] - g[1], place[0], (-1.0, -1.0, 2.0)
    found = solve_margins(replace(rows, direction_ND=g, place_N=place, margin_N=margin))
    assert not found.contradicting and "short" in found.verdicts
    assert len(found.rounds) == MarginRule().rounds
    assert np.isfinite(found.s_ED).all()


def test_a_point_that_nothing_moves_is_named() -> None:
    rows = made()
    g = rows.direction_ND.copy()
    g[2] = 0
    found = solve_margins(replace(rows, direction_ND=g))
    assert found.verdicts[2] == "immovable" and found.verdicts.count("reached") == 5
    alone = solve_margins(replace(rows, direction_ND=0 * g))
    assert alone.verdicts == ("immovable",) * 6 and (alone.s_ED == 1).all()


def test_the_ridge_pulls_towards_what_is_mounted() -> None:
    rows = made()
    picked = np.isin(np.arange(E), rows.picks_PK[rows.place_N])
    mounted_ED = np.full((E, D), 1.125, np.float32)
    r = dense(rows)
    found = solve_margins(rows, mounted_ED=mounted_ED)
    assert found.verdicts == ("reached",) * 6
    assert (found.s_ED[~picked] == 1.125).all()
    assert abs(float(np.median(found.s_ED)) - 1.125) < 0.05
    moved = found.s_ED.astype(np.float64) - mounted_ED
    np.testing.assert_allclose(found.after_N, rows.margin_N + r @ moved.reshape(-1), atol=1e-9)
    tight = solve_margins(rows, MarginRule(lam=1e6, rounds=1), mounted_ED)
    assert (tight.s_ED == 1.125).all()


def test_bfloat16_slots_are_read_as_their_values() -> None:
    rows = made(kind=np.float32)
    coded = f32_to_bf16(rows.y_PKD)
    a, b = solve_margins(replace(rows, y_PKD=coded)), solve_margins(replace(rows, y_PKD=bf16_to_f32(coded)))
    assert a.s_ED.tobytes() == b.s_ED.tobytes()


def test_bytes_do_not_depend_on_workers() -> None:
    rng = np.random.default_rng(5)
    rows, many = made(n_points=12, n_others=200, kind=np.float32), 70  # five pieces of work
    picks = np.argsort(rng.random((len(rows.picks_PK), many)), axis=1)[:, :K]
    rows = replace(rows, picks_PK=picks, n_experts=many)
    found = []
    for count in (1, 2, 5):
        with Workers(count) as workers:
            found.append(solve_margins(rows, workers=workers))
    assert len({f.s_ED.tobytes() for f in found}) == 1
    assert len({f.after_N.tobytes() for f in found}) == 1


def test_bad_input_is_one_clear_error() -> None:
    rows = made()
    with pytest.raises(UsageError, match="none of 26 margins is a point"):
        replace(rows, point_N=np.zeros(26, np.bool_))
    with pytest.raises(UsageError, match="experts 0 to 4"):
        replace(rows, n_experts=5)
    with pytest.raises(UsageError, match="there are 22 positions"):
        replace(rows, place_N=rows.place_N + 1)
    with pytest.raises(UsageError, match=r"directions: \[26, 32\]"):
        replace(rows, direction_ND=rows.direction_ND[:, :32])
    with pytest.raises(UsageError, match="an expert twice"):
        replace(rows, picks_PK=np.zeros_like(rows.picks_PK))
    with pytest.raises(UsageError, match="margin 7 is not finite"):
        replace(rows, margin_N=np.where(np.arange(26) == 7, np.nan, rows.margin_N))
    y = rows.y_PKD.copy()
    y[4, 1, 9] = np.inf
    with pytest.raises(UsageError, match=f"position 4, expert {rows.picks_PK[4, 1]}: an output is not finite"):
        solve_margins(replace(rows, y_PKD=y))
    with pytest.raises(UsageError, match="mounted gains"):
        solve_margins(rows, mounted_ED=np.ones((E, D + 1), np.float32))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tau": 0.0}, "tau is 0; expected above 0"),
        ({"rho": -1.0}, "rho is -1; expected 0 or more"),
        ({"lam": 0.0}, "lambda is 0; expected above 0"),
        ({"lam": float("nan")}, "lambda is nan"),
        ({"rtol": 1.0}, "tolerance is 1; expected between 0 and 1"),
        ({"rounds": 0}, "0 rounds"),
    ],
)
def test_rules_without_a_solution_are_refused(values: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        MarginRule(**values)  # type: ignore[arg-type]


def test_ridge_without_energy() -> None:
    assert ridge_of(np.zeros((2, 32)), 0.5) == 0.5
    assert ridge_of(np.array([[0.0, 2.0, 4.0]]), 0.5) == 1.5


def test_what_is_to_stay_and_where_the_ridge_pulls_to_may_be_elsewhere_than_where_it_begins() -> None:
    """From a table that moved already, the first one's margins kept and its gains pulled to: the minimum that a solve
    from the first table has, since margins are linear here."""
    rows, rule = made(), MarginRule(tau=0.5, lam=0.5, rounds=1, rtol=1e-10, iterations=3000)
    first = solve_margins(rows, rule)
    moved_ED = first.s_ED * np.float32(0.5) + np.float32(0.5)
    moved_N = rows.margin_N + Margins(rows, Workers(1)).forward(moved_ED.astype(np.float64) - 1)
    target_N = np.where(rows.point_N, np.maximum(rule.tau, moved_N), rows.margin_N)
    again = solve_margins(
        replace(rows, margin_N=moved_N), rule, moved_ED, keep_N=rows.margin_N, pull_ED=np.ones((E, D), np.float32)
    )
    # first one's targets: points that were above tau there stay where they were, which none was
    assert (rows.margin_N[rows.point_N] < rule.tau).all() and (target_N[rows.point_N] == rule.tau).all()
    np.testing.assert_allclose(again.after_N, first.after_N, atol=0.02)
    assert np.abs(again.s_ED - first.s_ED).max() < 0.1 * np.abs(first.s_ED - 1).max()
    with pytest.raises(UsageError, match=r"gains to pull to: \[10, 32\]"):
        solve_margins(rows, rule, pull_ED=np.ones((E, 32), np.float32))
    with pytest.raises(UsageError, match=r"margins to keep: \[3\]"):
        solve_margins(rows, rule, keep_N=np.ones(3))
