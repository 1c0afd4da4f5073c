"""What the backbone leaves for the draft head: the means of the streams at the target layers, on every path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ds4.base.reader import Base
from ds4.device import Buffer
from ds4.engine import Engine
from ds4.engine.layer import Pass
from ds4.engine.prefill import Prefill
from ds4.engine.step import StepRunner
from ds4.teacher.dspark import Drafter as TeacherDrafter
from ds4.teacher.run import Teacher, Trace
from ds4.teacher.source import BaseSource
from tests.engine.draft_bench import EXACT, F32, bench_on
from tests.engine.test_against_teacher import distance, prompt

LIMIT = 1e-4
Tapped = list[tuple[int, Buffer]]  # first position and main-hidden rows of every pass, in order


def ask(monkeypatch: pytest.MonkeyPatch, taken: Tapped) -> None:
    """From now on every pass gets a buffer for its main-hidden rows."""

    def asking(owner: type, first: Callable[[Any, tuple[Any, ...]], int]) -> None:
        real = owner._pass  # type: ignore[attr-defined]

        def made(self: Any, *args: Any) -> Pass:
            p: Pass = real(self, *args)
            width = len(p.config.dspark_target_layer_ids) * p.config.hidden_size
            p.main_hidden = p.device.empty((p.R, width), p.numerics.act)
            taken.append((first(self, args), p.main_hidden))
            return p

        monkeypatch.setattr(owner, "_pass", made)

    asking(Prefill, lambda _, args: int(args[0]))
    asking(StepRunner, lambda runner, _: int(runner.state.position))


@pytest.fixture
def tapped(monkeypatch: pytest.MonkeyPatch) -> Tapped:
    """The rows of every pass of this test."""
    taken: Tapped = []
    ask(monkeypatch, taken)
    return taken


def rows_of(engine: Engine, tapped: Tapped, n: int) -> F32:
    """By position; a later pass over the same one has the last word."""
    out = np.full((n, tapped[0][1].shape[1]), np.nan, np.float32)
    for first, rows in tapped:
        out[first : first + rows.shape[0]] = engine.device.download(rows)
    return out


def taught(engine: Engine, ids: list[int]) -> tuple[Teacher, F32]:
    """The teacher, and its main-hidden rows of `ids`."""
    teacher = Teacher(BaseSource(Base.open(engine.base.path, engine.feed.stores[0].path.parent)))
    trace = Trace()
    teacher.forward(teacher.new_state(), np.asarray(ids), trace=trace)
    return teacher, trace.main_hidden[0]


@pytest.mark.parametrize("name", ["oracle-a", "oracle-b", "oracle-e"])
def test_rows_of_prefill_and_steps_are_the_teachers(
    engines: Callable[..., Engine], tapped: Tapped, name: str
) -> None:
    """Chunks, a step of several rows, steps of one; then drafts from them: after the prompt, and after each step."""
    engine, ids = engines(name, activations="f32", kv="f32", prefill="full"), prompt(name, 32)
    teacher, want = taught(engine, ids)
    session, bench = engine.session(), bench_on(engine)
    drafter, judge, at = bench.drafter(EXACT), TeacherDrafter(teacher), 0
    session.sync(ids[:25], chunk=11)
    for first, rows in tapped:
        drafter.seed(rows, first, 25)
    for end in (25, 29, 31, 32):
        if end > 25:
            session.step(ids[at:end])
            engine.device.copy(drafter.state.expect(at, end - at), tapped[-1][1])
            drafter.commit(end - at)
        judge.commit(want[at:end])
        at = end
        found, (drafts, logits, _) = judge.draft(5), bench.draft(drafter, 5)
        assert drafts == found.drafts_B.tolist() and distance(logits, found.logits_BV) <= LIMIT, f"after {end}"
    assert distance(rows_of(engine, tapped, 32), want) <= LIMIT


def test_a_bounded_replay_leaves_the_rows_that_it_ran(engines: Callable[..., Engine], tapped: Tapped) -> None:
    """Layer 4 is where oracle-a's replay begins: its entry is the full pass's, bit for bit. From there on rows are
    the replay's own, as its streams are.
    """
    full, replay = (engines("oracle-a", prefill=mode) for mode in ("full", "replay"))
    c, ids, seen = replay.config, prompt("oracle-a", 40), {}
    assert c.dspark_target_layer_ids == (4, 5, 6) and c.last_kv_source == 4
    full.session().sync(ids)
    want = rows_of(full, tapped, 40)
    tapped.clear()
    replay.session().sync(ids, chunk=16, tap=lambda layer, first, x: seen.update({layer: replay.device.download(x)}))
    rows = rows_of(replay, tapped[-1:], 40)[-c.sliding_window :]  # the decoder half is one pass
    D = c.hidden_size
    assert np.array_equal(rows[:, :D], want[-c.sliding_window :, :D])
    for slot, layer in ((1, 5), (2, 6)):  # no engram stands between their entry and their attention
        x = seen[layer]
        mean = (((x[:, 0] + x[:, 1]) + x[:, 2]) + x[:, 3]) / np.float32(4)
        bits = (mean.view(np.uint32) + 0x7FFF + ((mean.view(np.uint32) >> 16) & 1) >> 16).astype(np.uint16)
        assert np.array_equal(rows[:, slot * D : (slot + 1) * D], bits)


def test_a_pass_without_drafts_launches_what_it_did(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tap is one launch a target layer where it is asked for, none elsewhere, and moves no bit."""
    engine, ids = engines("oracle-b", graphs=False), prompt("oracle-b", 20)

    def run() -> tuple[int, F32]:
        session = engine.session()
        session.sync(ids)
        engine.device.reset_counters()
        logits = session.step([7, 8])
        return engine.device.counters()["launches"], logits

    plain, without = run()
    ask(monkeypatch, [])
    asked, with_ = run()
    assert asked == plain + len(engine.config.dspark_target_layer_ids)
    assert np.array_equal(without, with_)
