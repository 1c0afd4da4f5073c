"""The session's door: what is kept, what is run, what is refused."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ds4.base.reader import Base
from ds4.device import Device
from ds4.engine import Engine, Sampling, prefill, state
from ds4.engine import budget as budget_module
from ds4.engine.layer import Pass
from ds4.engine.weights import LayerWeights, placed_bytes
from ds4.errors import CapacityError, DeviceError, Ds4Error, RequestError, UsageError
from tests.base.toys import toy_base, toy_dir
from tests.engine.conftest import DATA
from tests.engine.drafted import answer
from tests.engine.test_against_teacher import prompt
from tests.engine.test_bits import state_of


def test_a_common_prefix_is_kept(engines: Callable[..., Engine]) -> None:
    session, ids = engines("oracle-a").session(), prompt("oracle-a", 30)
    seen: list[tuple[int, int]] = []
    session.sync(ids[:20], on_progress=lambda done, all_: seen.append((done, all_)))
    session.sync(ids, on_progress=lambda done, all_: seen.append((done, all_)))
    session.sync(ids[:25] + [9, 9], on_progress=lambda done, all_: seen.append((done, all_)))
    session.sync(ids[:25] + [9, 9], on_progress=lambda done, all_: seen.append((done, all_)))
    assert seen == [(20, 20), (10, 10), (2, 2)]


def test_a_pass_stays_within_a_gpus_grid(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever chunk is asked for: more rows than a grid's second axis holds go in several passes."""
    assert prefill.MOST_ROWS == 2**16 - 1
    session, ids = engines("oracle-a").session(), prompt("oracle-a", 12)
    monkeypatch.setattr(prefill, "MOST_ROWS", 5)
    seen: list[int] = []
    session.sync(ids, chunk=100_000, on_progress=lambda done, _: seen.append(done))
    assert seen == [5, 10, 12]


def test_a_discrete_gpus_own_memory_is_what_weights_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory decides only where the device shares it."""
    device = Device.open(simt="fast", workers=1)
    path = toy_base("oracle-a", bits=9)
    device.info = dataclasses.replace(device.info, unified=False)
    monkeypatch.setattr(device, "free_bytes", lambda: 1 << 20)
    with pytest.raises(CapacityError, match="1 MB of memory are available"):
        Engine.open(path, engram_dir=toy_dir("oracle-a"), device=device)
    device.info = dataclasses.replace(device.info, unified=True)
    Engine.open(path, engram_dir=toy_dir("oracle-a"), device=device).close()


def test_memory_that_ends_in_a_growth_costs_that_request_only(
    bases: Callable[[str], Path], fast_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some buffers have moved then and some have not: no captured launch may use an old one."""
    monkeypatch.setattr(state, "LEAST_CAPACITY", 16)
    ids = prompt("oracle-b", 40)
    engine = Engine.open(bases("oracle-b"), engram_dir=DATA / "oracle-b", device=fast_device)
    want = [answer(engine.session(), ids[:n], 8) for n in (5, 12, 30)]
    engine.drop_idle()
    assert answer(engine.session(), ids[:5], 8) == want[0]  # one lane from here on, its graphs captured
    layout = type(engine._idle[0].state.layout)
    real, left = layout.empty_keys, [0]

    def empty_keys(self: object, *args: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            raise CapacityError("no bytes of device memory")
        return real(self, *args)  # type: ignore[arg-type]

    for broken in (1, 2, 3):
        left[0] = broken
        with monkeypatch.context() as patched:
            patched.setattr(layout, "empty_keys", empty_keys)
            session = engine.session()
            if broken <= len(engine.config.kv_source_layer_ids):
                with pytest.raises(CapacityError):
                    session.sync(ids[:30])
                assert session.tokens == [] and session.position == 0
            del session
        for _ in range(2):
            for n, expected in zip((5, 12), want):
                assert answer(engine.session(), ids[:n], 3) == expected[:3]
    assert answer(engine.session(), ids[:30], 8) == want[2]


def test_a_refused_sync_leaves_what_was_there(engines: Callable[..., Engine]) -> None:
    session, ids = engines("oracle-a").session(), prompt("oracle-a", 12)
    session.sync(ids)
    kept = session.snapshot()
    with pytest.raises(RequestError, match="chunk is 0"):
        session.sync(ids[:4], chunk=0)
    assert session.tokens == ids and session.position == 12
    want = [session.next(Sampling()) for _ in range(4)]
    session.restore(kept)
    assert [session.next(Sampling()) for _ in range(4)] == want


def test_drawn_tokens_extend_the_timeline(engines: Callable[..., Engine]) -> None:
    session, ids = engines("oracle-a").session(), prompt("oracle-a", 12)
    session.sync(ids)
    first = session.next(Sampling())
    assert session.tokens == [*ids, first] and session.position == 12
    second = session.next(Sampling())
    assert session.tokens == [*ids, first, second] and session.position == 13
    again = engines("oracle-a").session()
    again.sync(ids, logits="none")
    assert again.next(Sampling()) == first


def test_step_drops_the_pending_tokens_row(engines: Callable[..., Engine]) -> None:
    session, ids = engines("oracle-a").session(), prompt("oracle-a", 12)
    session.sync(ids)
    drawn = session.next(Sampling())
    rows = session.step([7, 8])
    plain = engines("oracle-a").session()
    plain.sync(ids)
    assert rows.shape[0] == 2 and np.array_equal(rows, plain.step([drawn, 7, 8])[1:])


def test_a_seed_reproduces_and_seeds_differ(engines: Callable[..., Engine]) -> None:
    engine, ids = engines("oracle-b"), prompt("oracle-b", 12)

    def draw(seed: int) -> list[int]:
        session = engine.session()
        session.sync(ids)
        return [session.next(Sampling(temperature=1.3, seed=seed)) for _ in range(16)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_greedy_is_the_argmax_and_its_logprob(engines: Callable[..., Engine]) -> None:
    session = engines("oracle-b").session()
    session.sync(prompt("oracle-b", 12))
    logits = session.logits().astype(float)
    assert session.next(Sampling()) == int(logits.argmax())
    want = logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert session.last_logprob == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [([], "at least one"), ([1, 320], "token 1 is 320"), ([-1], "token 0 is -1"), ([1] * 257, "context of 256")],
)
def test_bad_prompts_are_refused(engines: Callable[..., Engine], tokens: list[int], says: str) -> None:
    session = engines("oracle-a").session()
    with pytest.raises(RequestError, match=says):
        session.sync(tokens)
    assert session.tokens == []


def test_the_context_ends(engines: Callable[..., Engine]) -> None:
    session = engines("oracle-a").session()
    session.sync([5] * 255)
    session.next(Sampling())
    with pytest.raises(RequestError, match="context is full"):
        session.next(Sampling())


@pytest.mark.parametrize(
    "kwargs",
    [
        {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1},
        {"min_p": 2.0}, {"seed": 2**65}, {"top_k": True}, {"temperature": "1"},
    ],
)  # fmt: skip
def test_bad_sampling_is_refused(kwargs: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=next(iter(kwargs))):
        Sampling(**kwargs)  # type: ignore[arg-type]


def test_bad_options_are_refused(bases: Callable[[str], Path], fast_device: Device) -> None:
    base = bases("oracle-a")
    for options in (
        {"activations": "fp8"},
        {"kv": "int4"},
        {"prefill": "half"},
        {"index_keys": "mine"},
        {"chunk": 0},
        {"draft": "best"},
    ):
        with pytest.raises(UsageError, match=next(iter(options))):
            Engine.open(base, engram_dir=DATA / "oracle-a", device=fast_device, **options)
    with pytest.raises(CapacityError, match="budget"):
        Engine.open(base, engram_dir=DATA / "oracle-a", device=fast_device, mem_budget_mb=0)
    with pytest.raises(Ds4Error):
        Engine.open(base, engram_dir=DATA / "nowhere", device=fast_device)


def test_the_budget_bounds_the_state_too(bases: Callable[[str], Path], fast_device: Device) -> None:
    """oracle-e: under 2 MB of weights; 640 tokens of context are more state than half a megabyte holds."""
    path = bases("oracle-e")
    weights = placed_bytes(Base.open(path, DATA / "oracle-e"))
    engine = Engine.open(path, engram_dir=DATA / "oracle-e", device=fast_device, mem_budget_mb=(weights >> 20) + 1)
    budget = engine.options.budget
    assert budget is not None and budget.limit is not None and budget.limit < 1 << 20
    state.LEAST_CAPACITY, least = 16, state.LEAST_CAPACITY
    try:
        session = engine.session()
        budget.limit = session.nbytes() + 4096
        with pytest.raises(CapacityError, match="MB of state"):
            session.sync([5] * 600)
        session.sync([5] * 12)
    finally:
        state.LEAST_CAPACITY = least


def test_a_token_reads_its_rows_and_no_more(engines: Callable[..., Engine]) -> None:
    """Two reads a row (codes, scales), one row a column and engram layer: 96 of them at the released sizes."""
    engine = engines("oracle-a")
    session, c = engine.session(), engine.config
    session.sync(prompt("oracle-a", 12))
    before = [store.stats for store in engine.feed.stores]
    session.step([7])
    for was, store in zip(before, engine.feed.stores):
        assert store.stats.rows - was.rows == c.engram_columns
        assert store.stats.reads - was.reads == 2 * c.engram_columns
        assert store.stats.bytes - was.bytes >= c.engram_columns * engine.feed.row_bytes


def test_a_prefill_that_fails_inside_a_chunk_leaves_an_empty_session(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers hold the chunk and some do not: no position is right but 0, and the next sync starts there."""
    engine, ids = engines("oracle-e"), prompt("oracle-e", 170)
    whole = engine.session()
    whole.sync(ids)
    session = engine.session()
    runs: list[int] = []
    real = prefill.run_whole_layer

    def failing(p: Pass, lw: LayerWeights) -> None:
        runs.append(lw.layer)
        if len(runs) == engine.config.num_hidden_layers + 4:  # the second chunk, layer 3
            raise DeviceError("a row could not be read")
        real(p, lw)

    with monkeypatch.context() as patched:
        patched.setattr(prefill, "run_whole_layer", failing)
        with pytest.raises(DeviceError, match="could not be read"):
            session.sync(ids, chunk=80)
    assert (session.position, session.tokens) == (0, [])
    session.sync(ids, chunk=80)
    assert np.array_equal(session.logits(), whole.logits())


def test_the_budget_is_that_of_all_sequences(
    bases: Callable[[str], Path], fast_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one holds another cannot have; what is given back can be had again."""
    monkeypatch.setattr(state, "LEAST_CAPACITY", 16)
    engine = Engine.open(bases("oracle-e"), engram_dir=DATA / "oracle-e", device=fast_device)
    budget = engine.options.budget
    assert budget is not None and budget.limit is None and budget.held == 0
    first = engine.session()
    first.sync([5] * 200)
    assert budget.held == first.nbytes()
    budget.limit = 2 * first.nbytes()
    second = engine.session()
    second.sync([5] * 12)
    with pytest.raises(CapacityError, match="the budget leaves"):
        second.sync([5] * 300)
    del first
    gc.collect()
    with pytest.raises(CapacityError):  # its lane waits for the next session
        second.sync([5] * 300)
    engine.drop_idle()
    second.sync([5] * 300)
    assert budget.held == second.nbytes() <= budget.limit


def test_the_last_of_shared_memory_is_left_to_the_machine(
    bases: Callable[[str], Path], fast_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fast_device.info.unified:
        pytest.skip("a device with memory of its own refuses by itself")
    monkeypatch.setattr(state, "LEAST_CAPACITY", 16)
    engine = Engine.open(bases("oracle-e"), engram_dir=DATA / "oracle-e", device=fast_device)
    session = engine.session()
    session.sync([5] * 20)
    held = state_of(session)
    monkeypatch.setattr(budget_module, "free_bytes", lambda device: budget_module.SPARE_BYTES + 1000)
    with pytest.raises(CapacityError, match="are left to the machine"):
        session.state.reserve(600)
    assert state_of(session) == held
    monkeypatch.setattr(budget_module, "free_bytes", lambda device: None)  # nobody can say
    session.state.reserve(600)
