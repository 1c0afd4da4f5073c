"""Decisions and slots are the engine's own, by whichever kernels they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds4.device import Device
from ds4.engine import Engine
from ds4.engine.mount import Mounted, mount
from ds4.errors import Ds4Error, UsageError
from ds4.sidecar.files import read_gains
from solvers.margin_capture import MarginReader, Turn
from tests.engine.conftest import bases, engines, fast_device  # noqa: F401 - fixtures
from tests.reference_sidecar import write_sidecar
from tests.solvers.solving import NAME, engine_on


@pytest.fixture(scope="module")
def engine(bases: Callable[[str], Path], fast_device: Device) -> Engine:  # noqa: F811
    return engine_on(bases(NAME), fast_device, prefill="replay")


def some_turns() -> list[Turn]:
    rng = np.random.default_rng(5)
    shapes = ((20, 11, None), (45, 4, 7), (9, 0, 11), (33, 19, None), (12, 9, 200))
    return [
        Turn(tuple(rng.integers(3, 320, p).tolist()), tuple(rng.integers(3, 320, n).tolist()), wanted)
        for p, n, wanted in shapes
    ]


def test_margins_are_those_of_a_session(engine: Engine) -> None:
    """Against logits of a request's own session: prefill as served, then steps."""
    turns = some_turns()
    told: list[tuple[int, int]] = []
    assert engine.bare is not None
    found = MarginReader(engine, turns).decisions(engine.bare, progress=lambda *a: told.append(a))
    assert told == [(i, 5) for i in range(1, 6)] and len(found) == sum(t.n_places for t in turns) == len(found.at_M)
    at = 0
    for number, turn in enumerate(turns):
        session = engine.session()
        session.sync(list(turn.prompt))
        rows = [session.logits(), *(session.step(list(turn.answer)) if turn.answer else ())]
        for place, logits_V in enumerate(rows):
            point = turn.wanted is not None and place == len(turn.answer)
            order = np.argsort(-logits_V, kind="stable")
            a = turn.wanted if point else int(order[0])
            b = int(order[1]) if order[0] == a else int(order[0])
            assert (found.turn_N[at], found.place_N[at], found.a_N[at], found.b_M[at]) == (number, place, a, b)
            assert found.point_N[at] == point
            want = float(logits_V[a]) - float(logits_V[b])
            assert found.margin_M[at] == found.lead_N[at] == pytest.approx(want, abs=1e-6)
            at += 1
    assert found.point_N.sum() == 3


def test_known_pairs_and_rivals(engine: Engine) -> None:
    reader, weights = MarginReader(engine, some_turns()), engine.bare
    assert weights is not None
    first = reader.decisions(weights)
    wanted_N = first.point_N | (first.place_N == 0)
    changed = replace(first, a_N=np.where(wanted_N, (first.a_N + 1) % 320, first.a_N))
    again = reader.decisions(weights, changed)
    np.testing.assert_array_equal(again.b_M, first.b_M)
    np.testing.assert_array_equal(again.margin_M[~wanted_N], first.margin_M[~wanted_N])
    more = again.with_rivals(np.ones(len(again), np.bool_))
    lost_N = (again.lead_N <= 0) & (again.rival_N != again.b_M)
    assert lost_N.any() and len(more.at_M) == len(again.at_M) + int(lost_N.sum())
    assert (np.diff(more.at_M) >= 0).all()
    whole = reader.decisions(weights, more)
    np.testing.assert_array_equal(whole.margin_M, more.margin_M)
    assert len(again.with_rivals(np.zeros(len(again), np.bool_)).at_M) == len(again.at_M)
    assert len(whole.with_rivals(np.ones(len(again), np.bool_)).at_M) == len(whole.at_M)


def test_slots_predict_what_a_table_does(engine: Engine, tmp_path: Path) -> None:
    """Margins and norm held: rows times gains of the last layer give what the engine has with them mounted, up to
    the rounding of what passes between the blocks; and what is mounted below is inside the slots."""
    c = engine.config
    last = c.num_hidden_layers - 1
    write_sidecar(tmp_path / "two", c, 1)
    write_sidecar(tmp_path / "three", c, 2, biases=False)
    for path in (tmp_path / "three").glob("gr_*"):
        if path.name != f"gr_L{last:02d}.bin":
            path.unlink()
    assert engine.bare is not None
    on = [
        mount(engine.bare, Mounted.open(c, tmp_path / "two", post), engine.device)
        for post in (None, tmp_path / "three")
    ]
    reader = MarginReader(engine, some_turns())
    before = reader.decisions(on[0])
    of_N = before.place_N % 2 == 0
    of_N |= before.point_N
    slots = reader.slots(on[0], of_N)
    rows, use_M = reader.rows(before, slots)
    assert len(rows.margin_N) == of_N.sum() == use_M.sum() == len(slots.y_PKD)
    s_ED = read_gains(tmp_path / "three" / f"gr_L{last:02d}.bin", c.n_routed_experts, c.hidden_size)
    after = reader.decisions(on[1], before)
    # the factor of the norm after the change, which is what "held" leaves out
    held = after.factor_N / before.factor_N
    moved_P = np.einsum("pkd,pd,pkd->p", s_ED[rows.picks_PK] - 1, rows.direction_ND, rows.y_PKD)
    want_P = (before.margin_M[use_M] + moved_P) * held[of_N]
    assert np.abs(moved_P).max() > 0.1
    assert np.corrcoef(want_P, after.margin_M[use_M])[0, 1] > 0.9999
    scaled = reader.slots(on[1], of_N)
    np.testing.assert_array_equal(scaled.picks_PK, slots.picks_PK)
    np.testing.assert_allclose(scaled.y_PKD, slots.y_PKD * s_ED[slots.picks_PK], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("split", [5, 14, 10**6])
def test_the_border_between_the_two_paths(engine: Engine, split: int) -> None:
    """A split inside a prompt, inside an answer, beyond everything: what sessions give that read so."""
    turns = some_turns()
    assert engine.bare is not None
    served = MarginReader(engine, turns).decisions(engine.bare)
    found = MarginReader(engine, turns, split).decisions(engine.bare, served)
    full = replace(engine, options=replace(engine.options, prefill="full"), _idle=[])
    for number, turn in enumerate(turns):
        ids, n = [*turn.prompt, *turn.answer], turn.n_places
        session = (full if split > len(turn.prompt) else engine).session()
        cut = min(split, len(ids))
        rows = [session.sync(ids[:cut], logits="all")] + ([session.step(ids[cut:])] if cut < len(ids) else [])
        logits_NV = np.concatenate(rows)[-n:]
        mine = found.turn_N[found.at_M] == number
        want = logits_NV[np.arange(n), found.a_N[found.turn_N == number]].astype(np.float64)
        np.testing.assert_array_equal(found.margin_M[mine], want - logits_NV[np.arange(n), found.b_M[mine]])
    assert len(found) == len(served) and (found.margin_M != served.margin_M).any()


def test_a_long_prompt_keeps_only_rows_that_decide(engine: Engine) -> None:
    """Chunks of 16 of a prompt of 150, read in full: the last rows, in order, whatever the chunks."""
    rng = np.random.default_rng(8)
    turn = Turn(tuple(rng.integers(3, 320, 120).tolist()), tuple(rng.integers(3, 320, 30).tolist()))
    assert engine.bare is not None
    found = []
    for chunk in (16, 512):
        small = replace(engine, options=replace(engine.options, chunk=chunk), _idle=[])
        reader = MarginReader(small, [turn], split=10**6)
        got = reader.decisions(engine.bare)
        found.append((got, reader.slots(engine.bare, np.ones(31, np.bool_))))
    assert found[0][0].factor_N.tobytes() == found[1][0].factor_N.tobytes()
    assert found[0][0].margin_M.tobytes() == found[1][0].margin_M.tobytes()
    assert found[0][1].y_PKD.tobytes() == found[1][1].y_PKD.tobytes() and len(found[0][1].y_PKD) == 31


def test_what_was_not_read_right_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = MarginReader(engine, some_turns())
    monkeypatch.setattr(reader, "_norm_D", reader._norm_D * np.float32(1.2))
    assert engine.bare is not None
    with pytest.raises(Ds4Error, match="was not read right"):
        reader.decisions(engine.bare)


def test_bad_turns(engine: Engine) -> None:
    with pytest.raises(UsageError, match="without a prompt"):
        Turn(())
    with pytest.raises(UsageError, match="no turns"):
        MarginReader(engine, [])
    with pytest.raises(UsageError, match="turn 1 has token 320; ids run from 0 to 319"):
        MarginReader(engine, [Turn((1, 2)), Turn((1, 2), (), 320)])


def test_taps_change_no_bit(engine: Engine) -> None:
    """A step that is looked into launches directly; afterwards graphs are replayed as before."""
    rng = np.random.default_rng(2)
    ids = rng.integers(3, 320, 30).tolist()
    session = engine.session()
    session.sync(ids[:20])
    plain = np.concatenate([session.step([t]) for t in ids[20:26]])
    seen: list[int] = []
    again = engine.session()
    again.sync(ids[:20])
    rows = []
    for i, token in enumerate(ids[20:26]):
        again.lane.step.moe_tap = None if i % 2 else (lambda found: seen.append(found.layer))
        rows.append(again.step([token]))
    again.lane.step.moe_tap = None
    assert np.concatenate(rows).tobytes() == plain.tobytes()
    assert seen == 3 * list(range(engine.config.num_hidden_layers))
