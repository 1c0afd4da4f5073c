"""Gains against plain float64 mathematics, the recipe's promises, and what guards the choices."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds4.base.codebook import Workers
from ds4.checkpoint.codecs import bf16_to_f32, f32_to_bf16
from ds4.errors import UsageError
from ds4.sidecar.files import encode_gains, gain_path, read_gains
from solvers import gains
from solvers.gains import (
    BEST,
    DECADES,
    FEWEST,
    RECIPE,
    THIRDS,
    GainSolution,
    Rule,
    order_of,
    pull_of,
    ridge_of,
    solve_gains,
)
from solvers.lattice import BLOCK, nearest
from solvers.rows import BlockRows, Slice, Slots, read_slice
from solvers.sweeps import keep, normal_equations, residual_of, sweep, to_cheapest, to_nearest
from tests.solvers.synthetic import error, made

RULES = {
    "recipe": RECIPE,
    "best": BEST,
    "own": Rule(ridge="own"),
    "rounded": Rule(free_sweeps=3, lattice_sweeps=0),
    "own level": Rule(own_level=True),
    "refit": Rule(refit=True),
    "level": Rule(level=1.0),
}


def whole(rows: BlockRows) -> Slice:
    return read_slice(rows, Slots.of(rows, np.ones(len(rows.y_TKD), bool)), slice(0, rows.width))


def objective(part: Slice, delta_EC: np.ndarray, ridge_EC: np.ndarray) -> float:
    residual = residual_of(part, delta_EC)
    return float(np.square(residual).sum() + (ridge_EC * np.square(delta_EC)).sum())


@pytest.mark.parametrize("lam", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("rule", [RECIPE, Rule(ridge="own"), Rule(own_level=True)], ids=["mean", "own", "level"])
def test_iterated_sweeps_meet_the_normal_equations(lam: float, rule: Rule) -> None:
    """Without a lattice, in float64, iterated until nothing moves by 1e-8."""
    part = whole(made(n=400, kind=np.float64).rows)
    ridge, pull, order = ridge_of(part, lam, rule), pull_of(part, rule), order_of(part.slots)
    delta, residual = np.zeros_like(part.energy_EC), part.residual_TC.copy()
    for _ in range(500):
        if sweep(part, delta, residual, ridge, pull, order, keep) < 1e-8:
            break
    else:
        pytest.fail("500 sweeps did not converge")
    direct = normal_equations(part, ridge, pull, order)
    assert np.abs(delta - direct).max() < 1e-7
    assert np.abs(residual - residual_of(part, delta)).max() < 1e-10 * np.abs(part.residual_TC).max()


def test_the_objective_is_the_issues() -> None:
    """The normal equations' point has the least of the formula as written, row by row, in every direction tried."""
    m = made(n=200, n_experts=6, width=32, kind=np.float64)
    part, lam = whole(m.rows), 3.0
    best = 1 + normal_equations(part, ridge_of(part, lam, RECIPE), np.zeros(6), range(6))
    everything = np.ones(200, bool)
    energy = np.zeros((6, 32))
    for i in range(200):
        for j, e in enumerate(m.rows.picks_TK[i]):
            energy[e] += m.rows.y_TKD[i, j] ** 2
    dbar = energy.sum(axis=0) / 6

    def formula(s: np.ndarray) -> float:
        return error(m.rows, s, everything) + lam * float((dbar * np.square(s - 1).sum(axis=0)).sum())

    rng = np.random.default_rng(0)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(10):
            assert formula(best + size * rng.standard_normal(best.shape)) > formula(best)


def test_recipe_step_by_step() -> None:
    """Three sweeps written out again, one expert and channel at a time: the same lattice points but for ties."""
    m = made(n=300, n_experts=8, width=64, kind=np.float64)
    part, lam = whole(m.rows), 1.0
    ridge = ridge_of(part, lam, RECIPE)
    delta, residual = np.zeros((8, 64)), part.residual_TC.copy()
    for _ in range(3):
        sweep(part, delta, residual, ridge, np.zeros(8), order_of(part.slots), to_nearest)
    y, picks = m.rows.y_TKD, m.rows.picks_TK
    plain = np.zeros((8, 64))
    dbar = sum(np.square(y[:, j]) for j in range(3)).sum(axis=0) / 8
    for _ in range(3):
        for e in range(8):
            t = np.zeros(64)
            for d in range(64):
                u = np.where(picks == e, y[:, :, d], 0).sum(axis=1)
                out = (y[:, :, d] * (1 + plain[picks, d])).sum(axis=1) + m.rows.ysh_TD[:, d]
                without = m.rows.target_TD[:, d] - out + u * plain[e, d]
                t[d] = (u @ without) / (u @ u + lam * dbar[d])
            plain[e] = nearest(t)
    assert (delta != plain).mean() < 0.01


@pytest.mark.parametrize("name", RULES)
def test_what_is_reported_is_what_the_gains_do(name: str) -> None:
    m = made()
    found = solve_gains(m.rows, m.held_out_T, RULES[name])
    ones = np.ones_like(found.s_ED)
    assert np.isclose(found.held_out_before, error(m.rows, ones, m.held_out_T), rtol=1e-5)
    if not RULES[name].again:
        assert np.isclose(found.held_out_after, error(m.rows, found.s_ED, m.held_out_T), rtol=1e-5)
        fitted = error(m.rows, found.s_ED, ~m.held_out_T) / error(m.rows, ones, ~m.held_out_T)
        assert np.isclose(next(c.fitted for c in found.candidates if c.lam == found.lam), fitted, rtol=1e-5)
    assert found.mounted and found.held_out_gain > 0.05
    best = min(found.candidates, key=lambda c: c.held_out)
    assert best.lam == found.lam and np.isclose(1 - best.held_out, found.held_out_gain)


@pytest.mark.parametrize("name", RULES)
def test_what_is_written_decodes_to_what_was_solved(name: str, tmp_path: Path) -> None:
    m = made()
    found = solve_gains(m.rows, m.held_out_T, RULES[name])
    path = gain_path(tmp_path, 0)
    path.write_bytes(encode_gains(found.s_ED))
    assert np.array_equal(read_gains(path, *found.s_ED.shape), found.s_ED)
    assert len(np.unique(found.s_ED)) > 10


def test_held_out_rows_choose_and_are_not_fitted() -> None:
    m = made()
    one = solve_gains(m.rows, m.held_out_T, Rule(lambdas=(1.0,)))
    other = m.rows.target_TD.copy()
    other[m.held_out_T] *= -1
    two = solve_gains(replace(m.rows, target_TD=other), m.held_out_T, Rule(lambdas=(1.0,)))
    assert np.array_equal(one.s_ED, two.s_ED) and two.held_out_gain < 0 < one.held_out_gain
    assert not two.mounted
    refitted = solve_gains(replace(m.rows, target_TD=other), m.held_out_T, Rule(lambdas=(1.0,), refit=True))
    assert not np.array_equal(refitted.s_ED, one.s_ED)
    assert np.array_equal(refitted.first_ED, one.s_ED) and np.array_equal(one.first_ED, one.s_ED)
    assert refitted.held_out_gain == two.held_out_gain  # judged before the refit


def test_a_refit_keeps_the_ridge_of_the_search() -> None:
    """All rows, lambda less in proportion: dbar has grown with the rows, the ridge has not."""
    m = made()
    found = solve_gains(m.rows, m.held_out_T, Rule(lambdas=(10.0,), refit=True))
    part = whole(m.rows)
    ridge = ridge_of(part, 10.0 * (~m.held_out_T).mean(), RECIPE)
    delta, residual = np.zeros_like(part.energy_EC), part.residual_TC.copy()
    for _ in range(3):
        sweep(part, delta, residual, ridge, np.zeros(len(delta), np.float32), order_of(part.slots), to_nearest)
    assert np.array_equal(found.s_ED, 1 + delta)
    fitted = read_slice(m.rows, Slots.of(m.rows, ~m.held_out_T), slice(0, m.rows.width))
    assert np.allclose(ridge, ridge_of(fitted, 10.0, RECIPE), rtol=0.1)


def test_a_second_solve_is_as_loud_as_it_should_be() -> None:
    """Noise makes the least error quieter than what is wanted; level 1 restores the loudness, level 1/2 half of it.

    The direction stays: what is added correlates with what is wanted as before, but for the lattice.
    """
    m = made(noise=2.0)
    fitted = ~m.held_out_T
    picks, u = m.rows.picks_TK[fitted], m.rows.y_TKD[fitted]
    wanted = (m.rows.target_TD - m.rows.ysh_TD)[fitted].astype(np.float64)
    loudness, alike = [], []
    for level in (0.0, 0.5, 1.0):
        found = solve_gains(m.rows, m.held_out_T, Rule(free_sweeps=20, level=level))
        added = (u * found.s_ED[picks]).sum(axis=1, dtype=np.float64)
        loudness.append(float(np.sqrt(np.square(added).sum() / np.square(wanted).sum())))
        alike.append(float((added * wanted).sum() / np.sqrt(np.square(added).sum() * np.square(wanted).sum())))
        assert np.isclose(found.louder, loudness[0] ** -level, rtol=1e-5)
    assert loudness[0] < 0.9
    # a factor of 1.5 lies between two values of the lattice, which no single step leaves
    assert np.allclose(loudness[1:], [loudness[0] ** 0.5, 1.0], rtol=0.03)
    assert np.allclose(alike, alike[0], rtol=0.01)


def test_a_block_that_is_too_loud_is_not_made_louder() -> None:
    assert gains._louder(1.0, 4.0) == 1.0 and gains._louder(4.0, 1.0) == 2.0 and gains._louder(1.0, 0.0) == 1.0


def test_nothing_to_gain_is_not_mounted() -> None:
    """Targets that gains of 1 give, and noise: the ridge is chosen large, and half a percent is not reached."""
    m = made(spread=0.0, noise=1.0)
    found = solve_gains(m.rows, m.held_out_T)
    assert found.lam >= 100 and not found.mounted and found.held_out_gain < gains.LEAST_GAIN


def few(count: int) -> BlockRows:
    """Expert 11 is picked on `count` fitted rows and on many held-out ones."""
    m = made()
    picks = m.rows.picks_TK.copy()
    picks[picks == 11] = 12
    picks[np.flatnonzero(~m.held_out_T)[:count], 0] = 11
    picks[m.held_out_T, 0] = 11
    return replace(m.rows, picks_TK=picks, n_experts=13)


@pytest.mark.parametrize("name", RULES)
def test_too_few_rows_leave_exactly_one(name: str) -> None:
    rule = replace(RULES[name], refit=False)  # a refit counts held-out rows too
    held = made().held_out_T
    short = solve_gains(few(FEWEST - 1), held, rule)
    assert (short.s_ED[11] == 1).all() and short.n_untouched == 1
    enough = solve_gains(few(FEWEST), held, rule)
    assert (enough.s_ED[11] != 1).any() and enough.n_untouched == 0
    never = replace(few(0), n_experts=14)
    assert (solve_gains(never, held, rule).s_ED[13] == 1).all()


def test_dbar_against_an_experts_own_energy() -> None:
    """The guard: a ridge by each expert's own energy fits what it was shown better and the rest worse.

    Unequally popular experts, and noise as loud as an expert. Compared at each lambda of weight, and at the choice.
    """
    for seed in range(3):
        m = made(n=768, n_experts=32, skew=1.5, noise=1.0, seed=seed)
        mean = solve_gains(m.rows, m.held_out_T, RECIPE)
        own = solve_gains(m.rows, m.held_out_T, Rule(ridge="own"))
        at = DECADES.index(1.0)
        assert own.candidates[at].fitted < mean.candidates[at].fitted
        assert own.candidates[at].held_out > mean.candidates[at].held_out
        assert own.held_out_gain < 0.9 * mean.held_out_gain


def test_solving_on_the_lattice_beats_rounding_afterwards() -> None:
    """Few experts, large gains and no noise, so that rounding is what is left; both at the same lambda."""
    lost = {}
    for name, rule in (
        ("direct", Rule(lambdas=(0.01,), free_sweeps=3, lattice_sweeps=3)),
        ("rounded", Rule(lambdas=(0.01,), free_sweeps=3, lattice_sweeps=0)),
        ("cheapest", Rule(lambdas=(0.01,), free_sweeps=3, lattice_sweeps=3, scale="cheapest")),
    ):
        m = made(n=512, n_experts=16, k=6, width=128, noise=0.0, skew=0.0)
        # experts of a row that say much the same: one can mend what another's rounding left
        shared = np.random.default_rng(9).standard_normal((512, 1, 128)).astype(np.float32)
        y = m.rows.y_TKD * np.float32(0.3) + shared
        target = (y * m.s_ED.astype(np.float32)[m.rows.picks_TK]).sum(axis=1) + m.rows.ysh_TD
        found = solve_gains(replace(m.rows, y_TKD=y, target_TD=target), m.held_out_T, rule)
        lost[name] = 1 - found.held_out_gain
    assert lost["direct"] < 0.9 * lost["rounded"]
    assert lost["cheapest"] < lost["direct"]


def test_cheapest_scale_never_raises_the_objective() -> None:
    """With the weight of the parabola, projecting is a step down once a sweep has put everything on the lattice."""
    part = whole(made(n=300).rows)
    ridge, order = ridge_of(part, 1.0, BEST), order_of(part.slots)
    delta, residual = np.zeros_like(part.energy_EC), part.residual_TC.copy()
    zero = np.zeros(len(delta), np.float32)
    seen = []
    for _ in range(6):
        sweep(part, delta, residual, ridge, zero, order, to_cheapest)
        seen.append(objective(part, delta, ridge))
    assert seen[1] < seen[0] and all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(seen))


def same(a: GainSolution, b: GainSolution) -> bool:
    tables = all(np.array_equal(x, y) for x, y in ((a.s_ED, b.s_ED), (a.first_ED, b.first_ED)))
    return tables and replace(a, s_ED=b.s_ED, first_ED=b.first_ED) == b


@pytest.mark.parametrize("name", ["recipe", "best", "refit", "level"])
def test_same_bytes_for_any_number_of_workers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gains, "CHANNELS", 32)
    m = made(width=160)
    seen: list[tuple[int, int]] = []
    one = solve_gains(m.rows, m.held_out_T, RULES[name], progress=lambda *a: seen.append(a))
    n_slices = 10 if RULES[name].again else 5
    assert seen == [(i + 1, n_slices) for i in range(n_slices)]
    for count in (2, 3):
        with Workers(count) as workers:
            assert same(one, solve_gains(m.rows, m.held_out_T, RULES[name], workers))


def test_slices_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrower slices give the same gains, where experts have no level of their own."""
    m, rule = made(width=160), replace(BEST, own_level=False)
    one = solve_gains(m.rows, m.held_out_T, rule)
    monkeypatch.setattr(gains, "CHANNELS", BLOCK)
    assert np.array_equal(one.s_ED, solve_gains(m.rows, m.held_out_T, rule).s_ED)


def test_mapped_files_and_bfloat16(tmp_path: Path) -> None:
    """From memory-mapped files the same bytes; bfloat16 as its float32 values."""
    m = made()
    for name in ("y_TKD", "ysh_TD", "target_TD"):
        np.save(tmp_path / name, getattr(m.rows, name))
    mapped = replace(
        m.rows,
        **{n: np.load(tmp_path / f"{n}.npy", mmap_mode="r") for n in ("y_TKD", "ysh_TD", "target_TD")},
    )
    assert same(solve_gains(m.rows, m.held_out_T), solve_gains(mapped, m.held_out_T))
    packed = {n: f32_to_bf16(getattr(m.rows, n)) for n in ("y_TKD", "ysh_TD", "target_TD")}
    wide = replace(m.rows, **{n: bf16_to_f32(v) for n, v in packed.items()})
    assert same(solve_gains(wide, m.held_out_T), solve_gains(replace(m.rows, **packed), m.held_out_T))


def test_an_experts_level_is_the_best_single_factor() -> None:
    """Against the normal equations of one unknown an expert, over rows and channels together."""
    m = made(n=400, kind=np.float64, width=32)
    part = whole(m.rows)
    found = pull_of(part, BEST)
    a = np.zeros((400, 32, 12))
    for j in range(3):
        a[np.arange(400), :, m.rows.picks_TK[:, j]] = m.rows.y_TKD[:, j]
    direct = np.linalg.lstsq(a.reshape(-1, 12), part.residual_TC.reshape(-1), rcond=None)[0]
    assert np.abs(found - direct).max() < 1e-3 * np.abs(direct).max()


def test_a_level_serves_where_rows_are_few() -> None:
    """Experts that are all too loud by a fifth, and sixteen rows of each: pulling to 1 misses what they share."""
    m = made(n=256, n_experts=24, spread=0.05, noise=1.0)
    target = m.rows.target_TD - 0.2 * m.rows.y_TKD.sum(axis=1)
    rows = replace(m.rows, target_TD=target)
    one, level = (
        solve_gains(rows, m.held_out_T, Rule(THIRDS)),
        solve_gains(rows, m.held_out_T, replace(BEST, refit=False)),
    )
    assert level.held_out_gain > 1.1 * one.held_out_gain > 0


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"y_TKD": np.zeros((8, 2, 40), np.float32)}, "40 wide"),
        ({"y_TKD": np.zeros((8, 64), np.float32)}, "expected \\[rows, slots, channels\\]"),
        ({"picks_TK": np.zeros((8, 3), int)}, "picks"),
        ({"ysh_TD": np.zeros((8, 32), np.float32)}, "shared"),
        ({"target_TD": np.zeros((7, 64), np.float32)}, "original"),
        ({"target_TD": np.zeros((8, 64), np.float16)}, "float16"),
        ({"picks_TK": np.full((8, 2), 4)}, "from 4 to 4"),
        ({"picks_TK": np.full((8, 2), -1)}, "from -1 to -1"),
        ({"picks_TK": np.full((8, 2), 3)}, "row 0 picks .* twice"),
    ],
)
def test_rows_that_do_not_belong_together(edit: dict[str, np.ndarray], message: str) -> None:
    good = {
        "y_TKD": np.zeros((8, 2, 64), np.float32),
        "picks_TK": np.tile([0, 3], (8, 1)),
        "ysh_TD": np.zeros((8, 64), np.float32),
        "target_TD": np.zeros((8, 64), np.float32),
    }
    BlockRows(**good, n_experts=4)
    with pytest.raises(UsageError, match=message):
        BlockRows(**{**good, **edit}, n_experts=4)


def test_a_value_that_is_not_finite_is_named() -> None:
    m = made()
    y = m.rows.y_TKD.copy()
    y[77, 1, 40] = np.nan
    with pytest.raises(UsageError, match="row 77, channel 40"):
        solve_gains(replace(m.rows, y_TKD=y), m.held_out_T)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.zeros(1024, bool), "0 of 1024"),
        (np.ones(1024, bool), "1024 of 1024"),
        (np.zeros(1023, bool), r"bool \[1023\]"),
        (np.zeros(1024, int), "int64"),
    ],
)
def test_masks_that_choose_nothing(mask: np.ndarray, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        solve_gains(made().rows, mask)
