"""Places by hand against the engine, forces against differences; and what carries over does so at nobody's cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds4.base.codebook import Workers
from ds4.device import Device
from ds4.engine.mount import Mounted, mount
from ds4.errors import UsageError
from ds4.sidecar.files import FINGERPRINT, decode_gains, encode_gains, gain_path
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from solvers.carry import Carry, CarryRule, Resistance, TextPlaces
from solvers.last_layer import Head, Places, read_places, softmax
from solvers.margin_capture import Turn
from tests.engine.conftest import bases, engines, fast_device  # noqa: F401 - fixtures
from tests.solvers.solving import NAME, engine_on

E, D, K, V = 8, 64, 2, 50


@pytest.mark.parametrize("split", [None, 1000])
def test_by_hand_is_what_the_engine_does(
    tmp_path: Path, bases: Callable[[str], Path], fast_device: Device, split: int | None  # noqa: F811
) -> None:  # fmt: skip
    """A table mounted: logits of every decision, by decode and by prefill, from what was read without it."""
    engine = engine_on(bases(NAME), fast_device, prefill="replay")
    assert engine.bare is not None
    c, rng = engine.config, np.random.default_rng(3)
    turn = Turn(tuple(rng.integers(3, 320, 40).tolist()), tuple(rng.integers(3, 320, 9).tolist()))
    places, before_PV = read_places(engine, engine.bare, turn, split)
    assert len(places) == turn.n_places == 10
    table_ED = (1 + 0.5 * rng.standard_normal((c.n_routed_experts, c.hidden_size))).astype(np.float32)
    s_ED = decode_gains(encode_gains(table_ED), *table_ED.shape, "a table")
    gain_path(tmp_path, c.num_hidden_layers - 1).write_bytes(encode_gains(table_ED))
    mark = format_fingerprint(*sidecar_fingerprint(None, c.num_hidden_layers))
    (tmp_path / FINGERPRINT).write_text(mark)
    weights = mount(engine.bare, Mounted.open(c, None, tmp_path), engine.device)
    _, after_PV = read_places(engine, weights, turn, split)
    head = Head.of(engine)
    moved = np.abs(after_PV - before_PV).max()
    off = np.abs(head.logits(places.moved(s_ED.astype(np.float64) - 1)) - after_PV).max()
    assert moved > 0.3 and off < 0.03 * moved + 0.02  # the block's output and the head's input are rounded to bf16


def toy_head() -> Head:
    rng = np.random.default_rng(11)
    norm_D = (1 + 0.2 * rng.standard_normal(D)).astype(np.float32)
    return Head((0.4 * rng.standard_normal((V, D))).astype(np.float32), norm_D, 1e-6)


def made(n: int, seed: int) -> Places:
    rng = np.random.default_rng(seed)
    return Places(
        rng.standard_normal((n, K, D)).astype(np.float32),
        np.argsort(rng.random((n, E)), axis=1)[:, :K].astype(np.int32),
        (2 * rng.standard_normal((n, D))).astype(np.float32), rng.uniform(0.2, 0.6, n).astype(np.float32),
    )  # fmt: skip


def text_of(n: int, seed: int, documents: int = 16, off: float = 1.0) -> TextPlaces:
    """Whose original is a model with another table, and a little noise: there is something to gain."""
    places, head, rng = made(n, seed), toy_head(), np.random.default_rng(seed + 1)
    theirs_ED = off * np.random.default_rng(99).standard_normal((E, D))
    original_PV = head.logits(places.moved(theirs_ED)) + 0.1 * rng.standard_normal((n, V)).astype(np.float32)
    ours_PV = head.logits(places.moved(np.zeros((E, D))))
    return TextPlaces(places, ours_PV, original_PV.astype(np.float32), np.arange(n) * documents // n)


def test_the_pull_is_the_slope_of_the_divergence() -> None:
    head, text = toy_head(), text_of(40, 1)
    found = Resistance(text, head, E, 1, Workers(1))
    assert text.original_PV is not None
    target_PV = softmax(text.original_PV).astype(np.float64)

    def divergence(x_ED: np.ndarray) -> float:
        p_PV = softmax(head.logits(text.places.moved(x_ED))).astype(np.float64)
        return float((target_PV * (np.log(target_PV) - np.log(p_PV))).sum(axis=1).mean())

    rng = np.random.default_rng(2)
    for _ in range(4):
        step_ED = rng.standard_normal((E, D))
        slope = (divergence(1e-2 * step_ED) - divergence(-1e-2 * step_ED)) / 2e-2
        assert -float((found.pull_ED * step_ED).sum()) == pytest.approx(slope, rel=0.02, abs=2e-4)


def test_resistance_is_what_a_step_costs() -> None:
    """x^T A x / 2 is the KL from what the model says to what it says with x, as far as draws tell."""
    head, text = toy_head(), text_of(60, 5)
    found = Resistance(replace(text, original_PV=None), head, E, 64, Workers(1))
    assert not found.pull_ED.any()
    x_ED = 0.03 * np.random.default_rng(6).standard_normal((E, D))
    p_PV, q_PV = (softmax(head.logits(text.places.moved(x))).astype(np.float64) for x in (0 * x_ED, x_ED))
    cost = float((p_PV * (np.log(p_PV) - np.log(q_PV))).sum(axis=1).mean())
    assert float((x_ED * found.times(x_ED)).sum()) / 2 == pytest.approx(cost, rel=0.1)
    unit_ED = np.zeros((E, D))
    unit_ED[3, 7] = 1
    assert found.diagonal_ED[3, 7] == pytest.approx(found.times(unit_ED)[3, 7], rel=1e-5)


def facts(n: int, seed: int, spread: float = 0.3) -> tuple[Places, np.ndarray]:
    """Four subjects; every asking of one is near the others."""
    rng, centres = np.random.default_rng(seed), made(4, 77)
    which = np.arange(n) % 4
    noise = lambda x: (x[which] + spread * rng.standard_normal((n, *x.shape[1:]))).astype(np.float32)  # noqa: E731
    places = Places(noise(centres.y_PKD), centres.picks_PK[which], noise(centres.h_PD), centres.reach_P[which])
    return places, np.array([5, 17, 29, 41])[which]


def test_what_is_learnt_is_there_in_other_words_and_text_pays_nothing() -> None:
    head, rule = toy_head(), CarryRule(steps=30, step=0.003, lam=0.3, least=2, beside=0.1, draws=2)
    carry = Carry(text_of(1200, 20), head, E, rule)
    points, a_P = facts(24, 30)
    others = text_of(40, 50)
    found = carry.solve(points, a_P, [replace(others, original_PV=None)])
    assert found.taken is not None and found.taken >= 1
    later, b_P = facts(200, 31)
    right = [
        float((head.logits(later.moved(x)).argmax(axis=1) == b_P).mean())
        for x in (np.zeros((E, D)), found.s_ED - 1.0)
    ]
    assert right[0] < 0.1 and right[1] > right[0] + 0.3, found
    assert found.steps[found.taken].led > found.steps[0].led
    # another text, which it has not seen: no worse
    unseen = text_of(1200, 60)
    assert unseen.original_PV is not None
    original_PV = softmax(unseen.original_PV)
    before, after = (
        np.abs(softmax(head.logits(unseen.places.moved(x))) - original_PV).sum(axis=1).mean()
        for x in (np.zeros((E, D)), found.s_ED - 1.0)
    )
    assert after < before
    # a file holds exactly this table, and the number of workers changes nothing
    np.testing.assert_array_equal(decode_gains(encode_gains(found.s_ED), E, D, "it"), found.s_ED)
    again = Carry(text_of(1200, 20), head, E, rule, Workers(3)).solve(
        points, a_P, [replace(others, original_PV=None)]
    )
    np.testing.assert_array_equal(again.s_ED, found.s_ED)


def test_no_table_where_text_would_pay() -> None:
    """The original says what we say: nothing can be gained, so nothing can be spent."""
    text = text_of(600, 20)
    carry = Carry(replace(text, original_PV=text.logits_PV), toy_head(), E, CarryRule(step=0.01))
    points, a_P = facts(24, 30)
    found = carry.solve(points, a_P)
    assert found.taken is None and (found.s_ED == 1).all()


def test_what_cannot_be_solved_is_said() -> None:
    text, head = text_of(64, 3), toy_head()
    with pytest.raises(UsageError, match="the original's logits"):
        Carry(replace(text, original_PV=None), head, E)
    with pytest.raises(UsageError, match="6 documents of text; at least 8"):
        Carry(text_of(64, 3, documents=6), head, E)
    points, a_P = facts(4, 1)
    with pytest.raises(UsageError, match="0 points"):
        Carry(text, head, E).solve(points.take(slice(0, 0)), a_P[:0])
    for bad in ({"step": 0}, {"steps": 0}, {"beside": -1}, {"held": 1}, {"lam": float("nan")}):
        with pytest.raises(UsageError):
            CarryRule(**bad)  # type: ignore[arg-type]
