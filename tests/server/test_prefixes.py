"""Prompts that go on from earlier ones: the same answers to the bit; what is kept, found, refused and thrown away."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ds4.engine import Engine
from ds4.engine.keep import common_prefix
from ds4.engine.session import SessionSnapshot
from ds4.errors import CapacityError, Ds4Error
from ds4.model.chat import render
from ds4.server.prefix_folder import PrefixFolder
from ds4.server.prefix_index import BLOCK
from ds4.server.prefixes import Model, Prefixes
from ds4.server.request import ServedEngine
from tests.base.toys import toy_base, toy_dir
from tests.conftest import opened
from tests.engine.drafted import more, settled
from tests.engine.test_against_teacher import prompt
from tests.server.prefixed import FULL, FakeEngine, FakeSession, ask, kept_texts, model, served, text_of
from tests.server.standin import EOS, TOKENIZER, StandIn, ids_of, serve

# ---- the same bits, on the real engine


def same_answers(prefill: str, dspark: bool, prompts: Sequence[list[int]], want_cached: Sequence[int]) -> None:
    engine = Engine.open(
        toy_base("oracle-e", bits=9), engram_dir=toy_dir("oracle-e"), device=opened("fast", "greedy"),
        prefill=prefill, chunk=16, dspark=dspark,
    )  # fmt: skip
    prefixes = Prefixes(1 << 30, least=16)
    cached = []
    for ids in prompts:
        got = ask(prefixes, engine, ids, 8)
        fresh = engine.session()
        fresh.sync(ids)
        assert got.tokens == more(fresh, 8)
        assert settled(got.session) == settled(fresh)  # what any later token is made of
        assert np.array_equal(got.session.logits(), fresh.logits())
        assert got.cached + got.ran == len(ids)
        cached.append(got.cached)
    assert cached == list(want_cached)
    assert prefixes.stats.reused_tokens == sum(cached) and not prefixes.stats.refused["unfit"]


def conversation() -> list[list[int]]:
    """A prompt, its last token another, a next turn, a turn of a few tokens."""
    ids = prompt("oracle-e", 120)
    return [ids[:50], [*ids[:49], 7], ids[:76], ids[:80]]


def longer() -> list[list[int]]:
    """A prompt, again, its last token another; another question after the same beginning, and one more; a next turn,
    another one; a beginning.
    """
    ids = prompt("oracle-e", 190)
    ids = [*ids, *ids[::-1]]
    shared, first = ids[:140], ids[:190]
    return [
        first, first, [*first[:-1], 7], [*shared, *ids[10:80]], [*shared, *ids[15:90]], ids[:250],
        [*ids[:250], *ids[20:100]], ids[:40],
    ]  # fmt: skip


def test_answers_are_the_same_under_full_prefill() -> None:
    same_answers("full", True, conversation(), [0, 49, 50, 76])


def test_answers_are_the_same_under_bounded_replay() -> None:
    same_answers("replay", True, conversation(), [0, 16, 50, 50])


@pytest.mark.long
@pytest.mark.parametrize("dspark", [True, False])
def test_answers_are_the_same_in_longer_conversations(dspark: bool) -> None:
    same_answers("full", dspark, longer(), [0, 190, 189, 140, 140, 190, 250, 0])
    same_answers("replay", dspark, longer(), [0, 190, 160, 112, 128, 190, 250, 0])


@pytest.mark.parametrize("prefill", ["replay", pytest.param("full", marks=pytest.mark.long)])
def test_decoded_goes_on_as_the_session_itself_would(prefill: str) -> None:
    """From an answer's end, taken up by another session: the bits of the session that gave it and reads on."""
    engine = Engine.open(
        toy_base("oracle-e", bits=9), engram_dir=toy_dir("oracle-e"), device=opened("fast", "greedy"),
        prefill=prefill, chunk=16, dspark=True,
    )  # fmt: skip
    ids, prefixes = prompt("oracle-e", 80), Prefixes(1 << 30, least=16, decoded=True)
    own = ask(prefixes, engine, ids[:40], 6)
    after = [*ids[:40], *own.tokens, *ids[60:65]]
    got = ask(prefixes, engine, after, 4)
    assert got.cached == 45  # the answer's last token was drawn and never run
    own.session.sync(after)
    assert got.tokens == more(own.session, 4) and settled(got.session) == settled(own.session)
    assert ask(prefixes, engine, ids[:40], 6).tokens == own.tokens


# ---- what is kept, on sessions that no device runs


def test_a_conversation_takes_one_entry() -> None:
    """Each turn takes the place of the one before it, with its points, and its rows once."""
    engine, prefixes, ids = FakeEngine(), kept_texts(), text_of(2000)
    assert [served(prefixes, engine, ids[:n]) for n in (100, 300, 301, 1000, 2000)] == [0, 100, 300, 301, 1000]
    stats = prefixes.stats
    assert stats.memory_entries == 1 and stats.memory_bytes < 2000 * (4 + 9) + 8 * 200
    assert (stats.lookups, stats.hits, stats.reused_tokens, stats.asked_tokens) == (5, 4, 1701, 3701)
    assert served(prefixes, engine, [*ids[:1000], *text_of(50, 2)]) == 1000, "an earlier turn asked again"
    assert served(prefixes, engine, ids) == 2000, "and the longer text is there still"
    assert prefixes.stats.memory_entries == 2


def test_a_beginning_that_many_share_is_kept_when_the_second_comes() -> None:
    engine, prefixes, shared = FakeEngine(), kept_texts(), text_of(1000)
    tails = [text_of(800, seed) for seed in range(2, 6)]
    cached = [served(prefixes, engine, [*shared, *tail]) for tail in tails]
    where = 1000 // BLOCK * BLOCK
    assert cached == [0, 768, where, where]
    assert (768, where, True) in engine.ran


def test_a_cancelled_prompt_leaves_what_was_read() -> None:
    engine, prefixes, ids = FakeEngine(), kept_texts(), text_of(500)
    session, _ = prefixes.begin(cast(ServedEngine, engine), ids)
    reading = prefixes.reading(session, ids)
    for _ in range(10):
        told = next(reading)
    assert told == (144, 500)
    reading.close()
    assert served(prefixes, engine, ids) == 144


def test_progress_counts_over_all_legs() -> None:
    engine, prefixes, ids = FakeEngine(), kept_texts(), text_of(500)
    served(prefixes, engine, ids[:200])
    session, cached = prefixes.begin(cast(ServedEngine, engine), ids)
    told = list(prefixes.reading(session, ids))
    assert cached == 200 and {total for _, total in told} == {300}
    assert [done for done, _ in told] == sorted({done for done, _ in told}) and told[0][0] == 0
    assert max(b - a for (a, _), (b, _) in zip(told, [*told[1:], (300, 0)])) <= 16


def test_what_an_answer_left_is_kept_on_request_only() -> None:
    ids, answer, more_ids = text_of(200), text_of(60, 2), text_of(80, 3)
    for decoded, want in ((False, 200), (True, 259)):  # the answer's last token was never run
        engine, prefixes = FakeEngine(), kept_texts(decoded=decoded)
        served(prefixes, engine, ids, answer)
        assert served(prefixes, engine, [*ids, *answer, *more_ids]) == want
        assert served(prefixes, engine, [*ids, *more_ids]) == 200


def test_exact_passes_over_what_another_server_left_of_its_answers(tmp_path: Path) -> None:
    ids, answer = text_of(200), text_of(60, 2)
    for decoded in (True, False):
        prefixes = kept_texts(folder=PrefixFolder(tmp_path, 1 << 30), decoded=decoded)
        if decoded:
            served(prefixes, FakeEngine(), ids, answer)
        else:
            assert served(prefixes, FakeEngine(), [*ids, *answer, 7]) == 200
        prefixes.flush()
        prefixes.close()


def test_exact_takes_no_logits_from_windows_that_went_on_over_a_cut(tmp_path: Path) -> None:
    """Another server's `decoded` read a few tokens on, over the window of an earlier sync: the rows below are good,
    what the prompt's last row said is not.
    """
    ids, engine = text_of(200), FakeEngine(rules=replace(FULL, bounded=True))
    few = [*ids, 1, 2, 3]
    prefixes = kept_texts(folder=PrefixFolder(tmp_path, 1 << 30), decoded=True)
    assert [served(prefixes, engine, asked) for asked in (ids, few, few)] == [0, 200, 200]
    prefixes.flush()
    prefixes.close()
    prefixes = kept_texts(folder=PrefixFolder(tmp_path, 1 << 30))
    assert served(prefixes, engine, few) == 176
    assert served(prefixes, engine, few) == 203, "read by itself"
    prefixes.close()


def test_other_sidecars_share_nothing() -> None:
    engine, prefixes, ids = FakeEngine(), kept_texts(), text_of(100)
    served(prefixes, engine, ids)
    engine.identity, engine.sidecars = "two", {"zchain": "other"}
    assert served(prefixes, engine, ids) == 0
    assert prefixes.stats.refused["foreign"] == 1
    engine.identity, engine.sidecars = "one", {}
    assert served(prefixes, engine, ids) == 100


def test_the_model_is_looked_at_again_only_when_it_is_another() -> None:
    asked: list[str] = []

    def counted(engine: ServedEngine, decoded: bool) -> Model:
        asked.append("")
        return model(engine, decoded)

    prefixes, engine = Prefixes(1 << 30, least=16, model_of=counted), FakeEngine()
    for _ in range(3):
        served(prefixes, engine, text_of(100))
    assert len(asked) == 1
    engine.sidecars = {"zchain": "other"}
    served(prefixes, engine, text_of(100))
    served(prefixes, FakeEngine(), text_of(100))
    prefixes.forget()
    served(prefixes, engine, text_of(100))
    assert len(asked) == 4


def test_a_model_that_cannot_be_kept_is_served_without() -> None:
    engine = FakeEngine()
    prefixes = Prefixes(1 << 30, least=16, model_of=lambda engine, decoded: None)
    assert [served(prefixes, engine, text_of(100)) for _ in range(2)] == [0, 0]
    assert prefixes.stats.memory_entries == 0 and engine.ran == [(0, 100, False)] * 2

    def gone(engine: ServedEngine, decoded: bool) -> Model:
        raise Ds4Error("base.gguf: cannot be read")

    assert served(Prefixes(1 << 30, model_of=gone), engine, text_of(100)) == 0


def test_memory_is_what_it_may_be_and_the_oldest_goes() -> None:
    engine = FakeEngine()
    one = kept_texts()
    served(one, engine, text_of(1000, 1))
    size = one.stats.memory_bytes
    most = 3 * size + 2000  # a point is small, a text is not
    prefixes = kept_texts(memory=most)
    for seed in (1, 2, 3):
        served(prefixes, engine, text_of(1000, seed))
    assert served(prefixes, engine, text_of(1000, 1)) == 1000  # used now: 2 is the oldest
    served(prefixes, engine, text_of(1000, 4))
    assert size * 2 < prefixes.stats.memory_bytes <= most and prefixes.stats.evicted == 1
    assert served(prefixes, engine, [*text_of(1000, 1), 5]) == 1000
    assert served(prefixes, engine, [*text_of(1000, 3), 5]) == 1000
    assert served(prefixes, engine, [*text_of(1000, 4), 5]) == 1000
    assert served(prefixes, engine, [*text_of(1000, 2), 5]) == 0


def test_a_text_larger_than_memory_is_counted_and_not_kept() -> None:
    engine, prefixes = FakeEngine(), kept_texts(memory=1000)
    assert [served(prefixes, engine, text_of(500)) for _ in range(2)] == [0, 0]
    assert prefixes.stats.memory_bytes == 0 and prefixes.stats.refused["too_large"] > 0


def test_a_text_that_has_outgrown_its_room_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prefixes, copies = FakeEngine(), kept_texts(memory=1000), list[int]()
    real = FakeSession.snapshot

    def counted(session: FakeSession) -> SessionSnapshot:
        copies.append(session.position)
        return real(session)

    monkeypatch.setattr(FakeSession, "snapshot", counted)
    served(prefixes, engine, text_of(2000))
    assert len(engine.ran) > 5 and len(copies) == 1


def test_a_prompt_without_room_is_told_before_it_is_read() -> None:
    engine, prefixes = FakeEngine(room=999), kept_texts()
    with pytest.raises(CapacityError):
        served(prefixes, engine, text_of(1000))
    assert engine.ran == []


def test_a_host_without_memory_answers_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(session: FakeSession) -> SessionSnapshot:
        raise MemoryError

    engine, prefixes = FakeEngine(), kept_texts()
    with monkeypatch.context() as patched:
        patched.setattr(FakeSession, "snapshot", none)
        assert served(prefixes, engine, text_of(100)) == 0
    assert prefixes.stats.refused["memory"] > 0 and prefixes.stats.memory_entries == 0
    assert [served(prefixes, engine, text_of(100)) for _ in range(2)] == [0, 100]


def test_forgetting_frees_memory() -> None:
    engine, prefixes = FakeEngine(), kept_texts()
    served(prefixes, engine, text_of(500))
    prefixes.forget()
    assert prefixes.stats.memory_bytes == prefixes.stats.memory_entries == 0
    assert served(prefixes, engine, text_of(500)) == 0


@pytest.mark.parametrize(
    ("error", "reason", "again"), [(Ds4Error("other tensors"), "unfit", 0), (CapacityError("full"), "memory", 100)]
)
def test_a_session_that_refuses_a_text_computes_its_prompt(error: Exception, reason: str, again: int) -> None:
    """A text that does not fit the model is not offered again; one that found no room is."""
    engine, prefixes, ids = FakeEngine(), kept_texts(), text_of(100)
    served(prefixes, engine, ids)
    engine.broken = error
    session, cached = prefixes.begin(cast(ServedEngine, engine), [*ids, 5])
    assert cached == 0 and cast(FakeSession, session).tokens == [] and prefixes.stats.refused[reason] == 1
    assert prefixes.begin(cast(ServedEngine, engine), [*ids, 5])[1] == again


@pytest.mark.parametrize(
    ("reads", "asks", "shared", "waits"),
    [
        (1000, 1000, 1000, True), (1000, 1010, 1000, True), (500, 5000, 480, True),
        (5000, 500, 100, False),  # in turns it is done long before
        (5000, 4000, 3900, True), (5000, 2000, 1900, False), (1000, 1000, 10, False),
    ],
)  # fmt: skip
def test_a_prompt_waits_for_one_that_it_shares_enough_with(reads: int, asks: int, shared: int, waits: bool) -> None:
    for rules in (FULL, replace(FULL, bounded=True)):
        engine, prefixes = FakeEngine(rules=rules), kept_texts()
        served_engine, ids = cast(ServedEngine, engine), text_of(reads)
        asked = [*ids[:shared], *text_of(asks - shared, 2)]
        session, _ = prefixes.begin(served_engine, ids)
        reading = prefixes.reading(session, ids)
        next(reading)
        assert prefixes.worth_waiting(served_engine, session, asked) is waits
        engine.sidecars, engine.identity = {"zchain": "other"}, "two"
        assert not prefixes.worth_waiting(served_engine, session, asked)


@pytest.mark.parametrize("bounded", [False, True])
def test_who_waits_finds_a_point_where_the_prompts_part(bounded: bool) -> None:
    """Also where the other prompt would have left none."""
    engine, prefixes = FakeEngine(rules=replace(FULL, bounded=bounded)), kept_texts()
    served_engine, ids = cast(ServedEngine, engine), text_of(5000)
    asked = [*ids[:3900], *text_of(1000, 2)]
    session, _ = prefixes.begin(served_engine, ids)
    for i, _ in enumerate(prefixes.reading(session, ids)):
        if i == 3:
            assert prefixes.worth_waiting(served_engine, session, asked)
    assert prefixes.begin(served_engine, asked)[1] == 3900 // BLOCK * BLOCK
    assert sum(-(-(b - a) // 16) for a, b, _ in engine.ran) <= -(-5000 // 16) + 1


def test_a_prompt_does_not_wait_for_what_is_there_already() -> None:
    engine, prefixes, ids = FakeEngine(), kept_texts(), text_of(1000)
    served(prefixes, engine, ids[:900])
    served_engine = cast(ServedEngine, engine)
    session, _ = prefixes.begin(served_engine, ids)
    reading = prefixes.reading(session, ids)
    next(reading)
    assert not prefixes.worth_waiting(served_engine, session, [*ids[:910], *text_of(400, 2)])
    assert prefixes.worth_waiting(served_engine, session, [*ids, *text_of(400, 2)])


# ---- what of a prompt is the next one's beginning


@pytest.mark.parametrize(
    ("thinking", "tools", "shared"), [(False, False, "answer"), (True, False, "prompt"), (True, True, "answer")]
)
def test_the_next_turn_begins_with(thinking: bool, tools: bool, shared: str) -> None:
    """Without tools earlier reasoning is dropped, and with it the token that opens it; nothing else."""
    declared = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    system = {"role": "system", "content": "Short.", **({"tools": declared} if tools else {})}
    said = {"role": "assistant", "content": "Rome", "reasoning_content": "Easy."}
    asked: list[dict[str, Any]] = [system, {"role": "user", "content": "The capital?"}]

    def ids(messages: list[dict[str, Any]]) -> list[int]:
        return TOKENIZER.encode_segments(render(messages, thinking=thinking), spell_missing=True)

    before, after = ids(asked), ids([*asked, said, {"role": "user", "content": "And its river?"}])
    drawn = ids_of(("Easy.</think>" if thinking else "") + "Rome") + [EOS]
    whole = np.asarray([*before, *drawn], np.int32)
    assert common_prefix(whole, after) == (len(whole) if shared == "answer" else len(before) - 1)


# ---- in the server


def test_a_server_reads_what_prompts_share_once_and_answers_the_same() -> None:
    """Three completions of one beginning at once, beside sessions that begin anew: whichever comes first reads it."""
    engine = Engine.open(
        toy_base("oracle-e", bits=9), engram_dir=toy_dir("oracle-e"), device=opened("fast", "greedy"),
        prefill="replay", chunk=16, dspark=True,
    )  # fmt: skip
    ids, prefixes, want = prompt("oracle-e", 100), Prefixes(1 << 30, least=16), []
    prompts = [[*ids[:40], *ids[50 + i : 70 + i]] for i in range(3)]
    for p in prompts:
        session = engine.session()
        session.sync(p)
        drawn = more(session, 4)
        end = engine.config.eos_token_id
        want.append(engine.tokenizer.decode(drawn[: drawn.index(end)] if end in drawn else drawn))

    with serve(StandIn(), open_engine=lambda progress: engine, sessions=3, prefixes=prefixes) as server:

        def ask(p: list[int]) -> Any:
            return server.post("/v1/completions", {"prompt": p, "max_tokens": 4, "temperature": 0}).json()

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(ask, prompts))
    assert [a["choices"][0]["text"] for a in found] == want
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in found]
    assert sorted(cached) == [0, 32, 32]
    assert prefixes.stats.hits == 2 and prefixes.stats.reused_tokens == 64
