"""Rounds of drafts give the tokens and the state of plain decode, whatever the drafts were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ds4.device import Buffer, Device
from ds4.engine import Engine, Sampling
from ds4.engine.choose import Chooser
from ds4.engine.ngrams import Rows
from ds4.engine.sampling import Penalties
from ds4.engine.scheduler import FixedDrafts, Scheduler
from ds4.errors import DeviceError, Ds4Error, RequestError, UsageError
from tests.conftest import opened
from tests.engine.conftest import DATA
from tests.engine.draft_bench import live_keys
from tests.engine.drafted import GREEDY, Forced, answer, fixed, more, restless, same_as_plain, settled
from tests.engine.test_against_teacher import prompt

ALL_K = {"oracle-a": 4, "oracle-b": 5, "oracle-e": 4}
LENGTHS = (1, 7, 8, 9, 127, 128, 129, 240)  # of prompts; the fixtures' context is 256
SEEDED = (Sampling(0.7, top_p=0.9, seed=11), Sampling(1.3, seed=12))


def text(name: str, n: int) -> list[int]:
    """`n` ids of a fixture's prompt, again and again."""
    ids = prompt(name)
    return (ids * (1 + n // len(ids)))[:n]


@pytest.mark.parametrize("index_keys", ["owner", "released"])
@pytest.mark.parametrize("name", ["oracle-a", "oracle-b"])
def test_every_number_of_drafts(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, name: str, index_keys: str
) -> None:
    engine = engines(name, dspark=True, index_keys=index_keys)
    assert engine.block == ALL_K[name]
    same_as_plain(engine, monkeypatch, text(name, 9), 26, GREEDY)


@pytest.mark.long
@pytest.mark.parametrize("sampling", [GREEDY, *SEEDED], ids=["greedy", "cold", "hot"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("index_keys", ["owner", "released"])
@pytest.mark.parametrize("name", ALL_K)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_of_a_prompt(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, name: str, length: int, index_keys: str,
    graphs: bool, sampling: Sampling,
) -> None:  # fmt: skip
    engine = engines(name, dspark=True, index_keys=index_keys, graphs=graphs)
    same_as_plain(engine, monkeypatch, text(name, length), 16 if length == 240 else 26, sampling)


@pytest.mark.parametrize("sampling", SEEDED, ids=["cold", "hot"])
def test_a_seed_gives_the_same_tokens(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    engine = engines("oracle-e", dspark=True)
    same_as_plain(engine, monkeypatch, text("oracle-e", 8), 26, sampling)


@pytest.mark.parametrize(("length", "sampling"), [(1, GREEDY), (129, SEEDED[1]), (240, GREEDY)])
def test_drafts_of_the_head_itself(engines: Callable[..., Engine], length: int, sampling: Sampling) -> None:
    """Direct, captured, replayed; with the window's rows from a bounded replay, and up to the end of the context."""
    ids, n = text("oracle-a", length), 16
    for prefill in ("full", "replay"):
        want = None
        for policy in (fixed(0), fixed(4), restless):
            for graphs in (True, False):
                engine = engines("oracle-a", dspark=True, graphs=graphs, prefill=prefill)
                got = answer(engine.session(policy), ids, n, sampling)
                want = want or got
                assert got == want


def test_equal_picks_accept_more_than_chance(engines: Callable[..., Engine]) -> None:
    """The head's own draws by the noise of the target: at a high temperature many of 320 tokens are the same."""
    engine = engines("oracle-a", dspark=True)
    session = engine.session(fixed(1))
    answer(session, text("oracle-a", 9), 60, Sampling(3.0, seed=2))
    kept, rounds = session.rounds.accepted[0], session.rounds.verified[1]
    assert 0.05 * rounds < kept < rounds


@pytest.mark.parametrize("taken", [1, 2, 4, 5])
def test_a_round_can_be_left_in_its_middle(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """Snapshot and restore, in the same session and in a new one; other settings; known tokens; a longer prompt."""
    engine, ids = engines("oracle-a", dspark=True), text("oracle-a", 20)
    plain = engine.session(fixed(0))
    want = answer(plain, ids, 26)
    end = settled(plain)
    forced = Forced(monkeypatch, [*ids, *want], always_right=True)
    session = engine.session(fixed(4))
    assert answer(session, ids, 6) == want[:6] and forced.rounds == 1  # one from the prompt, five from a round
    assert [session.next(GREEDY) for _ in range(taken)] == want[6 : 6 + taken] and session.rounds.accepted[3] == 2
    kept = session.snapshot()
    assert len(kept.waiting) == 5 - taken
    rest = 20 - taken
    assert more(session, rest) == want[6 + taken :]
    for resumed in (session, engine.session(fixed(4))):
        resumed.restore(kept)
        assert more(resumed, rest) == want[6 + taken :] and settled(resumed) == end

    judge = engine.session(fixed(0))
    answer(judge, ids, 6 + taken)
    there = judge.snapshot()
    session.restore(kept)
    hot = Sampling(1.3, seed=3)  # what waits was drawn by other settings
    assert session.next(hot) == judge.next(hot)
    for back in (0, 1, 3):
        session.restore(kept)
        session.rollback(len(session.tokens) - back)
        assert more(session, rest + back) == want[6 + taken - back :] and settled(session) == end
    session.restore(kept)
    judge.restore(there)
    following = want[6 + taken : 6 + taken + 3]
    assert np.array_equal(session.step(following), judge.step(following))
    assert more(session, rest - 3) == want[6 + taken + 3 :] and settled(session) == end
    session.restore(kept)
    judge.restore(there)
    for longer in (session, judge):
        longer.sync([*ids, *want[:-4]])
    assert more(session, 4) == more(judge, 4) and settled(session) == settled(judge)


def test_drafts_stop_at_the_last_token_and_at_the_end_of_the_context(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ids = engines("oracle-a", dspark=True), text("oracle-a", 246)
    want = answer(engine.session(fixed(0)), ids, 10)
    Forced(monkeypatch, [*ids, *want], always_right=True)
    session = engine.session(fixed(4))
    session.sync(ids)
    got = []
    with pytest.raises(RequestError, match="context is full"):
        while True:
            got.append(session.next(GREEDY))
    assert got == want and session.position == 255
    assert session.rounds.verified[:5] == [0, 0, 0, 1, 1]  # 1 + 5 + 4 tokens
    session = engine.session(fixed(4))
    assert answer(session, ids, 3) == want[:3]
    assert session.rounds.verified[:5] == [0, 1, 0, 0, 0] and session.position == 248


def test_the_draft_head_gets_the_same_rows_in_rounds_and_in_steps(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of committed positions only, whatever was refused in between."""
    engine, ids = engines("oracle-e", dspark=True), text("oracle-e", 12)

    class Following(FixedDrafts):
        def begin(self, most: int) -> int:
            return 0

    steps = engine.session(lambda: Following(4))
    want = answer(steps, ids, 45)
    Forced(monkeypatch, [*ids, *want])
    rounds = engine.session(fixed(4))
    assert answer(rounds, ids, 45) == want
    keys = []
    for session in (steps, rounds):
        session.rollback(len(session.tokens))
        session.step([7])
        session._rounds.commit()
        assert session._drafter is not None and session._drafter.state.position == session.position
        keys.append(live_keys(session._drafter))
    assert keys[0] == keys[1]


def test_a_pause_leaves_a_gap_and_drafting_goes_on(engines: Callable[..., Engine]) -> None:
    """Passes of a paused scheduler leave no rows: the window begins anew behind them, the tokens stay."""
    engine, ids = engines("oracle-a", dspark=True), text("oracle-a", 9)
    want = answer(engine.session(fixed(0)), ids, 60)

    class Pausing(FixedDrafts):
        rounds = 0

        @property
        def follows(self) -> bool:
            return not 10 <= self.rounds < 30

        def begin(self, most: int) -> int:
            self.rounds += 1
            return super().begin(most) if self.follows else 0

    session = engine.session(lambda: Pausing(2))
    assert answer(session, ids, 60) == want
    counts = session.rounds
    assert counts.verified[0] >= 20 and counts.verified[2] > 20
    assert session._drafter is not None and session._drafter.state.first > 9


def test_a_broken_row_is_an_error_and_the_state_is_as_before(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ids = engines("oracle-a", dspark=True, graphs=False), text("oracle-a", 9)
    want = answer(engine.session(fixed(0)), ids, 20)
    session = engine.session(fixed(4))
    assert answer(session, ids, 5) == want[:5]
    session.rollback(len(session.tokens))
    real = Chooser._choose

    def broken(chooser: Chooser, logits: Buffer, k: int, **how: bool) -> None:
        logits.write(np.full(logits.shape, np.nan, np.float32))
        real(chooser, logits, k, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Chooser, "_choose", broken)
        with pytest.raises(DeviceError, match="hold NaN"):
            session.next(GREEDY)
    assert more(session, 15) == want[5:]


@pytest.mark.parametrize("k", [0, 2])
def test_a_pass_that_failed_can_be_tried_again(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """A read of n-gram rows that fails, in the middle of the layers."""
    engine, ids = engines("oracle-b", dspark=True), text("oracle-b", 12)
    want = answer(engine.session(fixed(0)), ids, 24)
    session = engine.session(fixed(k))
    session.sync(ids)
    got: list[int] = []
    real, left = Rows.wait, [0]

    def wait(rows: Rows) -> object:
        left[0] -= 1
        if left[0] == 0:
            raise Ds4Error("a shard cannot be read")
        return real(rows)

    while len(got) < 20:
        left[0] = 1 + len(got) % 2
        with monkeypatch.context() as patched:
            patched.setattr(Rows, "wait", wait)
            try:
                got.append(session.next(GREEDY))  # the first one, or one that waits
                continue
            except Ds4Error as e:
                assert "a shard" in str(e)
        got.append(session.next(GREEDY))
    assert got == want[:20]
    session.rollback(len(session.tokens))
    assert session.step(want[20:21]).shape[0] == 1


def test_bad_draft_options_are_refused(bases: Callable[[str], Path], fast_device: Device) -> None:
    for options, says in (
        ({"dspark_block": 5}, "dspark_block is 5; this model drafts 1 to 4"),
        ({"dspark_block": 0}, "dspark_block is 0"),
        ({"draft_k": -1}, "draft_k is -1"),
        ({"draft_k": 3, "dspark_block": 2}, "draft_k is 3; a round has 2"),
    ):
        with pytest.raises(UsageError, match=says):
            Engine.open(bases("oracle-a"), engram_dir=DATA / "oracle-a", device=fast_device, dspark=True, **options)


def test_options_of_the_engine(engines: Callable[..., Engine]) -> None:
    """A smaller block, a fixed number of drafts, none at all."""
    ids = text("oracle-a", 9)
    want = None
    for options, k in (({"dspark_block": 2}, None), ({"draft_k": 3}, 3), ({"draft_k": 0}, 0), ({}, None)):
        engine = engines("oracle-a", dspark=True, **options)
        assert (engine.draft is None) == (k == 0)
        session = engine.session()
        got = answer(session, ids, 12)
        want = want or got
        assert got == want
        assert not any(session.rounds.verified[engine.block + 1 :])
        if k is not None:
            assert session.rounds.verified[k] >= 1


def test_what_drafting_lost_outlives_a_request(engines: Callable[..., Engine]) -> None:
    engine = engines("oracle-a", dspark=True)
    first, second = engine.session(), engine.session()
    assert isinstance(first.policy, Scheduler) and isinstance(second.policy, Scheduler)
    assert first.policy is not second.policy and first.policy._ledger is second.policy._ledger
    policy = first.policy
    first.sync(text("oracle-a", 9))
    assert isinstance(first.policy, Scheduler) and first.policy is not policy
    assert first.policy._ledger is policy._ledger


def test_check_build_sees_nothing_wrong(bases: Callable[[str], Path]) -> None:
    engine = Engine.open(
        bases("oracle-a"), engram_dir=DATA / "oracle-a", device=opened("check", "greedy"), dspark=True
    )
    ids = text("oracle-a", 9)
    harsh = Penalties(presence=0.5, repetition=1.2, logit_bias=((3, 1.0),))
    for sampling in (
        GREEDY, Sampling(1.0, seed=1), Sampling(1.0, seed=1, seeded=False),
        Sampling(penalties=harsh, top=3), Sampling(1.0, seed=1, seeded=False, penalties=harsh, top=20),
    ):  # fmt: skip
        session = engine.session(fixed(3))
        answer(session, ids, 9, sampling)
        assert session.rounds.verified[3] >= 1
        answer(engine.session(fixed(0)), ids, 6, sampling)
