"""Sessions that share passes: each draws what it would have drawn alone, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from ds4.engine import Ask, Engine, Sampling, Session
from ds4.engine.choose import Drawn
from ds4.engine.sampling import Penalties
from ds4.engine.together import MOST_KINDS
from ds4.errors import CapacityError, DeviceError, RequestError
from tests.engine.test_against_teacher import prompt
from tests.engine.test_bits import MODES, state_of

GREEDY = Sampling(temperature=0.0)
SETTINGS = [
    GREEDY,
    Sampling(temperature=0.9, top_p=0.95, seed=7, seeded=True),
    Sampling(temperature=0.0, top=3),
    Sampling(temperature=1.1, min_p=0.02, seed=11, seeded=True, top=2),
    Sampling(temperature=0.7, seed=3, seeded=True, penalties=Penalties(presence=0.4, frequency=0.2)),
    Sampling(temperature=0.0, penalties=Penalties(repetition=1.3, logit_bias=((5, 2.0),))),
    GREEDY,
    Sampling(temperature=1.0, top_k=20, seed=5, seeded=True),
]


@dataclass
class Run:
    """A session under way among others."""

    session: Session
    sampling: Sampling
    count: int
    drawn: list[Drawn]

    @property
    def done(self) -> bool:
        return len(self.drawn) >= self.count


def text(name: str, i: int) -> list[int]:
    """The prompt of session i: of 18 to 39 tokens."""
    return prompt(name)[i : i + 18 + 3 * i]


def begin(engine: Engine, name: str, i: int, count: int) -> Run:
    """Session i: its own prompt, length and settings."""
    session = engine.session()
    session.sync(text(name, i))
    return Run(session, SETTINGS[i], count, [])


def draw(engine: Engine, runs: Sequence[Run]) -> list[Exception | None]:
    """A token for each."""
    asks = [Ask(r.session, r.sampling, r.count - len(r.drawn)) for r in runs]
    errors = engine.draw(asks)
    for run, ask, error in zip(runs, asks, errors):
        if error is None:
            run.session.next(run.sampling, left=ask.left)
            run.drawn.append(run.session.last)
    return errors


def alone(engine: Engine, name: str, i: int, count: int) -> Run:
    run = begin(engine, name, i, count)
    while not run.done:
        run.session.next(run.sampling, left=run.count - len(run.drawn))
        run.drawn.append(run.session.last)
    return run


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("oracle-a", MODES[0]), ("oracle-e", MODES[1]),
        pytest.param("oracle-a", MODES[1], marks=pytest.mark.long),
        pytest.param("oracle-e", MODES[0], marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_session_draws_the_same_whoever_its_neighbours_are(
    engines: Callable[..., Engine], name: str, mode: dict[str, str]
) -> None:
    """Eight sessions that begin and end at different times, so that passes have 2 to 8 rows of changing sessions, at
    different positions, with different settings: tokens, log-probabilities, likeliest tokens and states are those of
    each alone.
    """
    engine = engines(name, sessions=8, **mode)
    counts = [9, 14, 5, 12, 16, 7, 11, 4]
    want = [alone(engine, name, i, n) for i, n in enumerate(counts)]
    runs: list[Run] = []
    for step in itertools.count():
        if step < len(counts):
            runs.append(begin(engine, name, step, counts[step]))
        going = [r for r in runs if not r.done]
        if not going:
            break
        assert draw(engine, going) == [None] * len(going)
    for i, (got, one) in enumerate(zip(runs, want)):
        assert got.drawn == one.drawn, f"session {i}"
        assert state_of(got.session) == state_of(one.session), f"session {i}"
    assert engine._together is not None
    assert engine._together.counts.passes >= 12  # of several rows


def test_direct_launches_equal_capture_and_replay(engines: Callable[..., Engine]) -> None:
    drawn = {}
    for graphs in (False, True):
        engine = engines("oracle-a", sessions=3, graphs=graphs)
        engine.drop_idle()
        runs = [begin(engine, "oracle-a", i, 8) for i in range(3)]
        while not runs[0].done:
            draw(engine, runs)
        drawn[graphs] = [r.drawn for r in runs], [state_of(r.session) for r in runs]
        assert engine._together is not None
        counts = engine._together.counts  # the first tokens need no pass
        assert (counts.passes, counts.replays) == ((7, 6) if graphs else (7, 0))
        assert counts.captures == int(graphs)
    assert drawn[False] == drawn[True]


@pytest.mark.parametrize("draft_k", [3, pytest.param(1, marks=pytest.mark.long), None])
def test_with_a_draft_head(engines: Callable[..., Engine], draft_k: int | None) -> None:
    """Alone, two, three and alone again, with as many drafts as the rows allow: the tokens of plain decode."""
    plain = engines("oracle-e", sessions=3)
    drafting = engines("oracle-e", sessions=3, dspark=True, draft_k=draft_k)
    counts = [40, 24, 12]
    want = [alone(plain, "oracle-e", i, n).drawn for i, n in enumerate(counts)]
    runs = [begin(drafting, "oracle-e", i, n) for i, n in enumerate(counts)]
    shared = 0
    while not runs[0].done:
        going = [r for i, r in enumerate(runs) if len(runs[0].drawn) >= 5 * i and not r.done]
        assert not any(draw(drafting, going))
        shared += len(going) > 1
    assert [r.drawn for r in runs] == want
    assert [state_of(r.session) for r in runs[1:]] == [
        state_of(alone(plain, "oracle-e", i, counts[i]).session) for i in (1, 2)
    ]
    together = drafting._together
    assert together is not None and shared > 10
    if draft_k is not None:  # a pass of two has rows for three drafts each, one of three for one
        kinds = {tuple(m[2] for m in key) for key in together._passes}
        assert (1 + draft_k, 1 + draft_k) in kinds and (2, 2, 2) in kinds


def test_a_round_that_drew_several_serves_several_next(engines: Callable[..., Engine]) -> None:
    """Drafts that stand wait: the pass after is not before all of them are given."""
    engine = engines("oracle-e", sessions=2, dspark=True, draft_k=3)
    runs = [begin(engine, "oracle-e", i, 30) for i in (0, 6)]
    while not all(r.done for r in runs):
        draw(engine, [r for r in runs if not r.done])
    for run in runs:
        rounds = run.session.rounds
        assert rounds.tokens == 29  # the first one needs no pass
        assert rounds.rounds == 29 - sum(rounds.accepted)


def test_a_chunk_of_a_prompt_between_two_tokens(engines: Callable[..., Engine]) -> None:
    """Prefill of one session and decode of others take turns in one scratch, two prompts too: no bit changes."""
    for prefill in ("full", "replay"):
        engine = engines("oracle-e", sessions=4, prefill=prefill)
        want = [alone(engine, "oracle-e", i, 10) for i in range(4)]
        runs = [begin(engine, "oracle-e", i, 10) for i in range(2)]
        late = [Run(engine.session(), SETTINGS[i], 10, []) for i in (2, 3)]
        prompts = [text("oracle-e", i) for i in (2, 3)]
        readings = [run.session.reading(ids, chunk=5) for run, ids in zip(late, prompts)]
        while readings:
            for reading in list(readings):
                if next(reading, None) is None:
                    readings.remove(reading)
            if not runs[0].done:
                draw(engine, runs)
        runs += late
        while going := [r for r in runs if not r.done]:
            draw(engine, going)
        assert [r.drawn for r in runs] == [r.drawn for r in want]
        assert [state_of(r.session) for r in runs] == [state_of(r.session) for r in want]


def test_a_session_whose_row_is_no_distribution_fails_alone(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("oracle-a", sessions=3)
    want = [alone(engine, "oracle-a", i, 9).drawn for i in range(3)]
    runs = [begin(engine, "oracle-a", i, 9) for i in range(3)]
    for _ in range(3):
        draw(engine, runs)
    chooser = runs[1].session._rounds.chooser
    real = chooser.chosen

    def broken(k: int, first: int) -> list[Drawn]:
        real(k, first)
        raise DeviceError("the logits hold NaN")

    monkeypatch.setattr(chooser, "chosen", broken)
    errors = draw(engine, runs)
    assert [type(e) for e in errors] == [type(None), DeviceError, type(None)]
    monkeypatch.undo()
    assert runs[1].session.position == len(runs[1].session.tokens) - 1  # as before: it may try again
    while going := [r for r in runs if not r.done]:
        assert not any(draw(engine, going))
    for got, one in zip(runs, want):
        assert [d.token for d in got.drawn] == [d.token for d in one]
    assert [r.drawn for r in runs] == want


def test_a_pass_that_fails_takes_all_its_sessions_back(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("oracle-a", sessions=2)
    want = [alone(engine, "oracle-a", i, 9).drawn for i in range(2)]
    runs = [begin(engine, "oracle-a", i, 9) for i in range(2)]
    draw(engine, runs)
    draw(engine, runs)
    shared: Any = engine._together
    monkeypatch.setattr(shared._segments, "run", lambda *a, **kw: (_ for _ in ()).throw(DeviceError("gone")))
    errors = draw(engine, runs)
    assert [str(e) for e in errors] == ["gone", "gone"]
    monkeypatch.undo()
    while not runs[0].done:
        draw(engine, runs)
    assert [r.drawn for r in runs] == want


def test_a_session_without_room_fails_alone(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines("oracle-a", sessions=3)
    runs = [begin(engine, "oracle-a", i, 4) for i in range(3)]
    draw(engine, runs)

    def full(tokens: int) -> None:
        raise CapacityError("no room")

    monkeypatch.setattr(runs[2].session.state, "reserve", full)
    errors = draw(engine, runs)
    assert [type(e) for e in errors] == [type(None), type(None), CapacityError]
    assert [len(r.drawn) for r in runs] == [2, 2, 1]


def test_settings_that_no_session_takes_are_that_session_s_error(engines: Callable[..., Engine]) -> None:
    engine = engines("oracle-a", sessions=2)
    runs = [begin(engine, "oracle-a", i, 4) for i in range(2)]
    bad = replace(GREEDY, penalties=Penalties(logit_bias=((10**6, 1.0),)))
    errors = engine.draw([Ask(runs[0].session, bad), Ask(runs[1].session, runs[1].sampling)])
    assert isinstance(errors[0], RequestError) and errors[1] is None


def test_graphs_of_sets_that_cannot_come_again_are_dropped(engines: Callable[..., Engine]) -> None:
    engine = engines("oracle-a", sessions=3)
    engine.drop_idle()
    runs = [begin(engine, "oracle-a", i, 99) for i in range(3)]
    for _ in range(4):
        draw(engine, runs)
    shared = engine._together
    assert shared is not None and len(shared._segments._graphs) > 0
    del runs[2]
    engine._idle.clear()
    before = dict(shared._segments._graphs)
    for _ in range(4):
        draw(engine, runs)
    assert before.keys().isdisjoint(shared._segments._graphs)  # its third lane is gone
    for _ in range(MOST_KINDS + 3):
        runs[1] = begin(engine, "oracle-a", 1, 99)
        engine._idle.clear()
        for _ in range(3):
            draw(engine, runs)
    assert len(shared._passes) <= MOST_KINDS
    assert len({key[0] for key in shared._segments._graphs}) <= MOST_KINDS


def test_old_weights_are_not_shared(engines: Callable[..., Engine]) -> None:
    """After a remount sessions of before go on with what they began with, each alone."""
    engine = engines("oracle-a", sessions=2)
    want = [alone(engine, "oracle-a", i, 8).drawn for i in range(2)]
    runs = [begin(engine, "oracle-a", i, 8) for i in range(2)]
    draw(engine, runs)
    weights = engine.weights
    try:
        engine.weights = replace(weights)
        while not runs[0].done:
            draw(engine, runs)
        assert engine._together is None or engine._together.counts.passes == 0
    finally:
        engine.weights = weights
    assert [r.drawn for r in runs] == want


def test_more_than_eight_sessions(engines: Callable[..., Engine]) -> None:
    engine = engines("oracle-a", sessions=10)
    want = [alone(engine, "oracle-a", i % 8, 4).drawn for i in range(10)]
    runs = [begin(engine, "oracle-a", i % 8, 4) for i in range(10)]
    while not runs[0].done:
        assert not any(draw(engine, runs))
    assert [r.drawn for r in runs] == want


def test_logits_after_a_shared_pass_are_the_session_s_own(engines: Callable[..., Engine]) -> None:
    engine = engines("oracle-a", sessions=2)
    one = alone(engine, "oracle-a", 0, 5)
    runs = [begin(engine, "oracle-a", i, 5) for i in range(2)]
    while not runs[0].done:
        draw(engine, runs)
    assert np.array_equal(runs[0].session.logits(), one.session.logits())


class OnlyThese:
    """A constraint by hand: tokens whose id leaves `rest` modulo `of` after an even number of tokens, else any."""

    def __init__(self, vocab: int, of: int, rest: int) -> None:
        self.vocab, self.of, self.rest, self.count = vocab, of, rest, 0

    def rows(self, ahead: Sequence[int]) -> np.ndarray:
        bits = np.zeros((1 + len(ahead), -(-self.vocab // 32) * 32), np.uint32)
        for i in range(1 + len(ahead)):
            step = self.of if (self.count + i) % 2 == 0 else 1
            bits[i, self.rest % step : self.vocab : step] = 1
        words = bits.reshape(1 + len(ahead), -1, 32) << np.arange(32, dtype=np.uint32)
        return words.sum(axis=2, dtype=np.uint32)

    def valid(self, ahead: Sequence[int]) -> int:
        for i, token in enumerate(ahead):
            if (self.count + i) % 2 == 0 and token % self.of != self.rest:
                return i
        return len(ahead)

    def advance(self, token: int) -> None:
        self.count += 1

    def rollback(self, count: int) -> None:
        self.count -= count


def test_each_row_has_its_own_mask(engines: Callable[..., Engine]) -> None:
    engine = engines("oracle-e", sessions=3)
    V = engine.config.vocab_size
    masks: list[Callable[[], OnlyThese | None]] = [
        lambda: OnlyThese(V, 7, 3), lambda: None, lambda: OnlyThese(V, 5, 1)
    ]  # fmt: skip

    def masked(i: int) -> Run:
        run = begin(engine, "oracle-e", i, 9)
        run.session.constrain(masks[i]())
        return run

    want = []
    for i in range(3):
        run = masked(i)
        while not run.done:
            run.session.next(run.sampling, left=run.count - len(run.drawn))
            run.drawn.append(run.session.last)
        want.append(run.drawn)
    assert [d.token % 7 for d in want[0][::2]] == [3] * 5 and [d.token % 5 for d in want[2][::2]] == [1] * 5
    runs = [masked(i) for i in range(3)]
    while not runs[0].done:
        assert draw(engine, runs) == [None] * 3
    assert [r.drawn for r in runs] == want


@dataclass
class Noting:
    """A policy that drafts all it may and writes down what its clock says at begin, choose and settle."""

    clock: Callable[[], float]
    told: list[tuple[float, ...]]
    follows: bool = True

    def begin(self, most: int) -> int:
        self.at = [self.clock()]
        return most

    def extend(self, confidences: Sequence[float]) -> bool:
        return True

    def choose(self, confidences: Sequence[float]) -> int:
        self.at.append(self.clock())
        return len(confidences)

    def settle(self, accepted: int, *, first_hit: bool | None = None, warm_up: bool = False) -> None:
        self.told.append((*self.at, self.clock()))


def test_a_session_is_charged_its_drafts_and_its_share_of_the_pass(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("oracle-e", sessions=2, dspark=True, draft_k=3)
    engine.drop_idle()
    runs = [begin(engine, "oracle-e", i, 20) for i in (0, 6)]
    draw(engine, runs)
    told: list[tuple[float, ...]] = []
    shared: Any = engine._together
    monkeypatch.setattr(shared, "_new_policy", lambda n, clock: Noting(clock, told))
    ticks = itertools.count(0.0, 8.0)
    monkeypatch.setattr(shared, "_now", lambda: next(ticks))  # a pass takes eight seconds
    while not runs[0].done:
        draw(engine, [r for r in runs if not r.done])
        if len(told) >= 6:
            break
    assert len(told) >= 6
    for began, drafted, ended in (t for t in told if len(t) == 3):
        assert 0 <= began < drafted < 4 < ended < 8  # and none of the other one's drafts
        assert ended - drafted == pytest.approx(4, abs=0.5)
