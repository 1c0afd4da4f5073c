"""The whole step as graphs: captures, what goes over the bus for a token, lanes used again, segments run ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ds4.engine import Engine, Sampling, Session, state
from ds4.engine.scheduler import FixedDrafts
from ds4.engine.step import StepRunner
from tests.engine.drafted import GREEDY, answer, fixed, more, settled
from tests.engine.test_against_teacher import prompt

SEEDED = Sampling(1.3, top_k=40, seed=3)


def test_a_long_decode_captures_once_a_capacity(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of it changes a bit beside direct launches, greedy or drawn: settings are words on the device."""
    monkeypatch.setattr(state, "LEAST_CAPACITY", 16)
    want = None
    for graphs in (False, True):
        engine = engines("oracle-b", graphs=graphs)
        engine.drop_idle()
        session = engine.session()
        got = [*answer(session, prompt("oracle-b", 12), 60), *more(session, 60, SEEDED)]
        want = want or (got, settled(session))
        assert (got, settled(session)) == want
        engine.drop_idle()
    # 16, 32, 64, 128, 256: at each the first step runs directly, the second is captured, the others replay it
    assert session.state.capacity == 256 and session.counts["captures"] == 5
    assert session.counts["direct"] == 5 and session.counts["replays"] == session.counts["passes"] - 5


class Bus:
    """Counts driver calls that move data or submit graphs, in order."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        context = engine.device.context
        real = context.call

        def call(name: str, *args: Any) -> Any:
            if name in ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuGraphLaunch", "cuEventSynchronize"):
                self.calls.append(f"{name} {args[2]}" if "Memcpy" in name else name)
            return real(name, *args)

        monkeypatch.setattr(context, "call", call)


def test_a_token_costs_its_ngram_rows_one_way_and_32_bytes_the_other(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Id and position of the next step are on the device already; 16 bytes a row and 16 of the round come back."""
    engine = engines("oracle-b")
    session = engine.session()
    answer(session, prompt("oracle-b", 12), 6)
    bus = Bus(engine, monkeypatch)
    more(session, 11)
    assert session.counts["ahead_used"] >= 10
    tables = len(engine.config.engram_layer_ids)
    rows = engine.feed.row_bytes * engine.config.engram_columns
    assert tables and Counter(bus.calls) == {
        f"cuMemcpyHtoDAsync {rows}": 11 * tables,
        "cuMemcpyDtoHAsync 32": 11,
        "cuEventSynchronize": 11,
        "cuGraphLaunch": 11 * (1 + tables),
    }


def test_a_token_is_read_while_the_next_step_has_begun(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("oracle-b")
    session = engine.session()
    answer(session, prompt("oracle-b", 12), 6)
    bus = Bus(engine, monkeypatch)
    session.next(GREEDY)
    back = bus.calls.index("cuMemcpyDtoHAsync 32")
    assert bus.calls[back:] == ["cuMemcpyDtoHAsync 32", "cuGraphLaunch", "cuEventSynchronize"]


def test_a_lane_used_again_captures_nothing(engines: Callable[..., Engine]) -> None:
    engine, ids = engines("oracle-a", dspark=True), prompt("oracle-a", 15)
    engine.drop_idle()
    reports = []
    first = None
    for policy in [fixed(0), fixed(2)] * 3:  # scratch that grows has graphs captured once more
        session = engine.session(policy)
        got = answer(session, ids, 20), more(session, 10, SEEDED), settled(session)
        first = first or got
        assert got == first
        reports.append(session.report())
        lane = session.lane
        del session
        assert engine._idle == [lane]
    assert reports[0]["captures"] and reports[1]["captures"]
    assert reports[4]["captures"] == reports[5]["captures"] == 0
    assert reports[4]["tokens_per_round"] == 1.0
    held = [engine.session() for _ in range(3)]
    assert len({id(s.lane) for s in held}) == 3
    assert [answer(s, ids, 20) for s in held] == [first[0]] * 3 if first else False
    held.clear()
    assert len(engine._idle) == 3  # whoever let go of them dropped nothing
    one = engine.session()
    assert engine._idle == []
    del one
    assert len(engine._idle) == 1


def interrupted(session: Session, other: Session, ids: list[int], how: str) -> list[int]:
    """Something else happens where a segment has run ahead."""
    kept = session.snapshot()
    if how == "another sequence":
        answer(other, ids[3:], 8)
    elif how == "known tokens":
        session.step([5, 6, 7])
        session.rollback(len(session.tokens) - 3)
    elif how == "other settings":
        session.next(Sampling(2.0, seed=9))
        session.rollback(len(session.tokens) - 1)
    elif how == "restored":
        more(session, 3)
        session.restore(kept)
    elif how == "a longer prompt":
        session.sync([*session.tokens, 9, 9])
        session.rollback(len(session.tokens) - 2)
    elif how == "rolled back":
        session.rollback(len(session.tokens) - 4)
    elif how == "restored elsewhere":
        other.restore(kept)
        return more(other, 12)
    return more(session, 12)


@pytest.mark.parametrize(
    "how",
    [
        "another sequence", "known tokens", "other settings", "restored", "a longer prompt", "rolled back",
        "restored elsewhere",
    ],
)  # fmt: skip
@pytest.mark.parametrize("index_keys", ["owner", "released"])
def test_a_segment_run_ahead_is_dropped_where_it_is_not_the_next_one(
    engines: Callable[..., Engine], index_keys: str, how: str
) -> None:
    engine, ids = engines("oracle-b", index_keys=index_keys), prompt("oracle-b", 20)
    want = answer(engine.session(), ids, 40)
    session, other = engine.session(), engine.session()
    answer(other, ids, 6)
    assert answer(session, ids, 10) == want[:10]
    ahead = session.counts["ahead"]
    assert session.next(GREEDY) == want[10] and session.counts["ahead"] >= ahead
    got = interrupted(session, other, ids, how)
    at = 7 if how == "rolled back" else 11
    assert got == want[at : at + 12]


def test_running_ahead_changes_nothing(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = engines("oracle-e"), prompt("oracle-e", 20)
    session = engine.session()
    got = answer(session, ids, 70, SEEDED), settled(session), session.counts["ahead_used"]
    assert got[2] > 60
    monkeypatch.setattr(StepRunner, "run_ahead", lambda self: None)
    plain = engine.session()
    assert (answer(plain, ids, 70, SEEDED), settled(plain)) == got[:2] and plain.counts["ahead"] == 0


def test_a_plain_step_of_a_session_that_follows_runs_ahead_too(engines: Callable[..., Engine]) -> None:
    """Its keys for the draft head go first; the segment is used."""

    class Following(FixedDrafts):
        def begin(self, most: int) -> int:
            return 0

    engine, ids = engines("oracle-e", dspark=True), prompt("oracle-e", 12)
    session = engine.session(lambda: Following(3))
    got = answer(session, ids, 40)
    assert session.counts["ahead_used"] >= 35
    assert got == answer(engine.session(fixed(0)), ids, 40)
    assert got == answer(engine.session(fixed(3)), ids, 40)


def test_a_tap_sees_every_layer_of_a_step_that_ran_ahead(engines: Callable[..., Engine]) -> None:
    engine, ids = engines("oracle-b"), prompt("oracle-b", 12)
    session = engine.session()
    answer(session, ids, 8)
    session.next(GREEDY)
    seen: list[int] = []
    session.step([5], tap=lambda layer, at, x: seen.append(layer))
    assert sorted(set(seen)) == list(range(engine.config.num_hidden_layers + 1))
    session.next(GREEDY, left=5)
    session.next(GREEDY, left=4)
    assert session._step._ahead is not None
    seen.clear()
    session._rounds.pass_over(session.tokens, 1, lambda layer, at, x: seen.append(layer), follow=False)
    assert seen == list(range(engine.config.num_hidden_layers + 1))


def test_rows_of_a_token_are_asked_for_when_it_is_known(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without drafts no pass asks for rows that could have been asked for earlier; without the announcements
    all of them do.
    """
    for policy in (fixed(0), fixed(3)):
        engine = engines("oracle-a", dspark=True)
        session = engine.session(policy)
        counts = engine.feed.counts
        session.sync(prompt("oracle-a", 12))
        late, found = counts.late, counts.found
        answer(session, prompt("oracle-a", 12), 40)
        session.step(prompt("oracle-a", 30))
        assert counts.late == late and counts.found >= found + 39
        with monkeypatch.context() as patched:
            patched.setattr(engine.feed, "announce", lambda *args: None)
            more(session, 10)
        assert counts.late > late


def test_reads_begin_before_anything_else_is_submitted(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a round: the token comes back, its reads begin, and only then the device gets more work."""
    engine = engines("oracle-a", dspark=True)
    session = engine.session(fixed(2))
    answer(session, prompt("oracle-a", 12), 30)
    session.rollback(len(session.tokens))
    bus = Bus(engine, monkeypatch)
    for g, store in enumerate(engine.feed.stores):
        real = store.prefetch

        def prefetch(rows: Any, real: Any = real, g: int = g) -> Any:
            bus.calls.append(f"read {g}")
            return real(rows)

        monkeypatch.setattr(store, "prefetch", prefetch)
    more(session, 12)
    calls = [c.split()[0] for c in bus.calls]
    waits = [i for i, c in enumerate(calls) if c == "cuEventSynchronize"]
    assert len(waits) >= 4
    for i in waits[:-1]:  # nobody needs the last token's
        assert calls[i + 1] == "read", calls[i : i + 4]
    reads = [i for i, c in enumerate(calls) if c == "read"]
    drafted = [i for i, c in enumerate(calls) if c == "cuMemcpyDtoHAsync" and i + 1 in reads]
    assert drafted  # drafts came back, and their reads were the next thing


def test_weight_bytes_are_those_of_the_picked_experts(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device counts against the picks themselves, layer by layer."""
    from ds4.engine import layer

    engine = engines("oracle-e", dspark=True, graphs=False)
    assert engine.draft is not None
    picked: Counter[int] = Counter()
    layer_of = {id(lw.experts): lw.layer for lw in (*engine.weights.layers, *engine.draft.model.layers)}
    real = layer.experts

    def watched(dev: Any, ws: Any, fam: Any, ew: Any, slots: Any, z: Any, chosen: Any, *rest: Any, **kw: Any) -> None:
        picked[layer_of[id(ew)]] += len(np.unique(dev.download(chosen)))
        real(dev, ws, fam, ew, slots, z, chosen, *rest, **kw)

    for k in (0, 1, 3):
        session = engine.session(fixed(k))
        session.sync(prompt("oracle-e", 15))
        picked.clear()

        with monkeypatch.context() as patched:
            patched.setattr(layer, "experts", watched)
            more(session, 25)
        counts = session.counts
        touched = session.device.download(session.lane.touched)
        for lw in engine.weights.layers:
            one = counts["one_row"] * engine.config.num_experts_per_tok
            assert touched[lw.layer] + one == picked[lw.layer]
        for lw in engine.draft.model.layers:
            assert touched[lw.layer] == picked[lw.layer] and (k > 0) == (touched[lw.layer] > 0)
        report = session.report()
        assert isinstance(report["weight_bytes_per_token"], int)
        engram = report["engram"]
        assert isinstance(engram, dict) and engram["found"] > 0 and engram["reads"] > 0 and engram["late"] == 0
