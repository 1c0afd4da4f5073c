"""Bit-equality: chunking, graphs, rows, snapshots. No tolerances here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ds4.engine import Cancelled, Engine, Sampling, Session
from ds4.engine.score import score
from ds4.errors import Ds4Error
from tests.engine.test_against_teacher import prompt

MODES = [
    {"activations": "bf16", "kv": "fp4"},
    {"activations": "f32", "kv": "f32"},
]


def state_of(session: Session) -> dict[str, bytes]:
    """What a later token can see: live compressed rows, and the rings' and open groups' visible slots."""
    state, c = session.state, session.config
    arrays = state.snapshot().arrays
    out = {}
    for name, raw in arrays.items():
        kind, _, index = name.partition(".")
        if kind == "ring":
            rows = raw.reshape(state.rings[int(index)].shape[0], -1)
            seen = [p % rows.shape[0] for p in range(max(0, state.position - c.sliding_window), state.position)]
            out[name] = rows[seen].tobytes()
        elif kind == "partial":
            source = state.sources[int(index)]
            assert source.partial is not None
            slots = source.partial.shape[1]
            rows = raw.reshape(2, slots, -1)
            first = state.position - state.position % source.ratio
            out[name] = rows[:, [p % slots for p in range(first, state.position)]].tobytes()
        else:
            out[name] = raw.tobytes()
    return out


@pytest.mark.parametrize("mode", MODES, ids=["default", "f32"])
@pytest.mark.parametrize("prefill", ["full", "replay"])
@pytest.mark.parametrize("name", ["oracle-a", "oracle-e"])
def test_any_chunking_of_one_sync_is_the_whole(
    engines: Callable[..., Engine], name: str, prefill: str, mode: dict[str, str]
) -> None:
    engine = engines(name, prefill=prefill, **mode)
    ids = prompt(name, 29)
    whole = engine.session()
    want = whole.sync(ids, logits="all", chunk=64)
    for chunk in (1, 3, 16):
        session = engine.session()
        got = session.sync(ids, logits="all", chunk=chunk)
        assert np.array_equal(got, want, equal_nan=True), f"logits at chunk {chunk}"
        assert state_of(session) == state_of(whole), f"state at chunk {chunk}"
    if prefill == "replay":
        window = engine.config.sliding_window
        assert np.isnan(want[:-window]).all() and np.isfinite(want[-window:]).all()


def test_several_syncs_equal_one_under_full(engines: Callable[..., Engine]) -> None:
    engine = engines("oracle-b")
    ids = prompt("oracle-b", 40)
    whole, parts = engine.session(), engine.session()
    whole.sync(ids)
    for end in (7, 8, 30, 40):
        parts.sync(ids[:end])
    assert state_of(whole) == state_of(parts)
    assert np.array_equal(whole.logits(), parts.logits())


def test_streams_of_a_bounded_replay_are_those_of_the_rows_that_ran(engines: Callable[..., Engine]) -> None:
    """Up to the split's entry every row and the full pass's bits; from there on the last window, NaN before it."""
    ids = prompt("oracle-e", 47)
    full, replay = engines("oracle-e"), engines("oracle-e", prefill="replay")
    want, got = (score(e, ids, split=45, streams=True)["streams_LTSD"] for e in (full, replay))
    split, ran = full.config.last_kv_source, 45 - full.config.sliding_window
    assert got.shape == want.shape
    assert np.array_equal(got[: split + 1, :45], want[: split + 1, :45])
    assert np.isnan(got[split + 1 :, :ran]).all() and np.isfinite(got[split + 1 :, ran:]).all()
    assert not np.array_equal(got[split + 1 :, ran:45], want[split + 1 :, ran:45])


def test_short_replay_is_full(engines: Callable[..., Engine]) -> None:
    """A sync no longer than the window replays everything: the same bits as the full pass."""
    ids = prompt("oracle-e", 18)
    full, replay = engines("oracle-e").session(), engines("oracle-e", prefill="replay").session()
    assert np.array_equal(full.sync(ids, logits="all"), replay.sync(ids, logits="all"))


@pytest.mark.parametrize("mode", MODES, ids=["default", "f32"])
@pytest.mark.parametrize("name", ["oracle-a", "oracle-b", "oracle-e"])
def test_a_row_alone_is_the_row_among_eight(engines: Callable[..., Engine], name: str, mode: dict[str, str]) -> None:
    engine = engines(name, **mode)
    ids = prompt(name, 44)
    one, many = engine.session(), engine.session()
    one.sync(ids[:20])
    many.sync(ids[:20])
    alone = np.concatenate([one.step([t]) for t in ids[20:]])
    among = np.concatenate([many.step(ids[20:28]), many.step(ids[28:31]), many.step(ids[31:39]), many.step(ids[39:])])
    assert np.array_equal(alone, among)
    assert state_of(one) == state_of(many)


def test_direct_launches_equal_capture_and_replays(engines: Callable[..., Engine]) -> None:
    ids = prompt("oracle-a", 40)
    engines("oracle-a").drop_idle()  # another test's lane has its graphs already
    direct, graph = engines("oracle-a", graphs=False).session(), engines("oracle-a").session()
    for session in (direct, graph):
        session.sync(ids[:20])
    for token in ids[20:]:
        assert np.array_equal(direct.step([token]), graph.step([token]))
    assert direct.counts["captures"] == 0 and direct.counts["direct"] == 20
    assert graph.counts["captures"] == 1 and graph.counts["replays"] == 19


def test_greedy_tokens_are_stable(engines: Callable[..., Engine]) -> None:
    engine, ids = engines("oracle-b"), prompt("oracle-b", 20)
    runs = []
    for chunk in (3, 64):
        session = engine.session()
        session.sync(ids, chunk=chunk)
        runs.append([session.next(Sampling()) for _ in range(12)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["oracle-a", "oracle-e"])
def test_restored_is_uninterrupted(engines: Callable[..., Engine], name: str) -> None:
    engine = engines(name)
    session, ids = engine.session(), prompt(name, 29)
    session.sync(ids)
    session.next(Sampling())
    kept = session.snapshot()
    want = [session.next(Sampling()) for _ in range(9)]
    end = state_of(session)
    session.sync(ids[:4] + ids[10:20])  # something else in between
    session.restore(kept)
    assert [session.next(Sampling()) for _ in range(9)] == want
    assert state_of(session) == end
    fresh = engine.session()
    fresh.restore(kept)
    assert [fresh.next(Sampling()) for _ in range(9)] == want


@pytest.mark.parametrize("back", [1, 2, 3, 8, 21])
def test_rolled_back_is_uninterrupted(engines: Callable[..., Engine], back: int) -> None:
    """Over a wrapped ring, closed groups and other tokens: then the true ones again."""
    engine, ids = engines("oracle-a"), prompt("oracle-a", 45)
    plain, session = engine.session(), engine.session()
    plain.sync(ids[:20])
    session.sync(ids[:20])
    want = np.concatenate([plain.step([t]) for t in ids[20:]])
    session.step(ids[20:42])
    session.rollback(42 - back)
    session.step([3] * back)
    session.rollback(42 - back)
    got = session.step(ids[42 - back :])
    assert np.array_equal(got, want[len(want) - len(got) :])
    assert state_of(plain) == state_of(session)


def test_rollback_too_far_is_refused(engines: Callable[..., Engine]) -> None:
    session = engines("oracle-e").session()
    session.sync(load_long())
    with pytest.raises(Ds4Error, match="at most 64"):
        session.rollback(100)


def test_going_back_twice_reaches_no_further_than_once(engines: Callable[..., Engine]) -> None:
    """What later positions wrote over stays lost, however the way back is cut; going on from there is exact."""
    ids = load_long()
    plain, session = engines("oracle-e").session(), engines("oracle-e").session()
    plain.sync(ids[:140])
    session.sync(ids)
    session.rollback(150)
    with pytest.raises(Ds4Error, match="at most 64 positions below 190"):
        session.rollback(125)
    session.rollback(140)
    kept = session.snapshot()
    assert state_of(session) == state_of(plain)
    session.sync(ids[:125])  # read again from the start
    plain.sync(ids[:125])
    assert state_of(session) == state_of(plain)
    session.restore(kept)
    with pytest.raises(Ds4Error, match="at most 64 positions below 190"):
        session.rollback(125)


def load_long() -> list[int]:
    return prompt("oracle-e", 190)


def test_state_grows_with_use(engines: Callable[..., Engine]) -> None:
    """Past the first capacity: graphs are captured again, and the same tokens come out as from a large start."""
    from ds4.engine import state

    engine, ids = engines("oracle-b"), prompt("oracle-b", 24)
    large = engine.session()
    large.sync(ids)
    want = [large.next(Sampling()) for _ in range(20)]
    least = state.LEAST_CAPACITY
    state.LEAST_CAPACITY = 16
    engine.drop_idle()
    try:
        small = engine.session()
        small.sync(ids)
        assert [small.next(Sampling()) for _ in range(20)] == want
        assert small.state.capacity == 64 and small.counts["captures"] == 2
    finally:
        state.LEAST_CAPACITY = least


def test_cancelled_prefill_leaves_what_was_finished(engines: Callable[..., Engine]) -> None:
    engine, ids = engines("oracle-a"), prompt("oracle-a", 40)
    session = engine.session()
    asked = iter([False, False, True])
    with pytest.raises(Cancelled):
        session.sync(ids, chunk=8, cancelled=lambda: next(asked))
    assert session.position == 16 and session.tokens == ids[:16]
    session.sync(ids, chunk=8)
    whole = engine.session()
    whole.sync(ids)
    assert np.array_equal(whole.logits(), session.logits())
    replay = engines("oracle-a", prefill="replay").session()
    asked = iter([False, False, True])
    with pytest.raises(Cancelled):
        replay.sync(ids, chunk=8, cancelled=lambda: next(asked))
    assert replay.position == 0 and replay.tokens == []
