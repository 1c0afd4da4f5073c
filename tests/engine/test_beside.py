"""A step's two branches in the check build: the same bits whichever runs first, and a missing order is noticed.
Launches ahead: how many of a step's, and the same bits without them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4.device import Device
from ds4.device.context import Context
from ds4.engine import Engine, Session
from ds4.errors import DeviceError
from tests.engine.conftest import DATA
from tests.engine.test_against_teacher import prompt

REPLAYS = ("recorded", "falling", "turns")
PROMPT, STEPS = 8, 6  # groups close, the capacity is outgrown


@functools.cache
def checked(replay: str) -> Device:
    return Device.open(simt="check", order="greedy", workers=1, replay=replay)


def engine_of(base: Path, name: str, replay: str = "recorded", **options: Any) -> Engine:
    return Engine.open(base, engram_dir=DATA / name, device=checked(replay), **options)


def only_simt(engine: Engine) -> None:
    if engine.device.info.driver != "simt":
        pytest.skip("the CPU driver's check build looks for it")


def steps(session: Session, ids: list[int], rows: int) -> np.ndarray:
    session.sync(ids[:PROMPT])
    done = [session.step(ids[at : at + rows]) for at in range(PROMPT, PROMPT + STEPS * rows, rows)]
    return np.concatenate(done)


@pytest.mark.parametrize("rows", [1, 3])
def test_branches_in_any_order_give_the_bits_of_direct_launches(bases: Callable[[str], Path], rows: int) -> None:
    base, ids = bases("oracle-a"), prompt("oracle-a", PROMPT + STEPS * rows)
    want = steps(engine_of(base, "oracle-a", graphs=False).session(), ids, rows)
    for replay in REPLAYS:
        session = engine_of(base, "oracle-a", replay).session()
        assert np.array_equal(steps(session, ids, rows), want), replay
        assert session.counts["captures"] > 0 and session.counts["replays"] >= STEPS - 2


def test_a_step_has_the_branches(bases: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forks a layer, keys and the shared expert; without them the test above shows nothing."""
    opened: list[int] = []
    beside = Context.beside

    def counting(self: Context, work: Callable[[], None]) -> Any:
        opened.append(1)
        return beside(self, work)

    monkeypatch.setattr(Context, "beside", counting)
    engine = engine_of(bases("oracle-a"), "oracle-a", graphs=False)
    session, ids = engine.session(), prompt("oracle-a", PROMPT + 1)
    session.sync(ids[:PROMPT])
    assert not opened  # a prefill's launches fill the device
    session.step(ids[PROMPT:])
    assert len(opened) == 2 * engine.config.num_hidden_layers


def without(mark: str) -> Callable[[Context, Callable[[], None]], contextlib.AbstractContextManager[None]]:
    """`Context.beside` that leaves out the wait at the fork or at the join."""

    @contextlib.contextmanager
    def beside(self: Context, work: Callable[[], None]) -> Iterator[None]:
        branch, outer = self._branches[0], self.stream
        branch.fork.record(outer)
        if mark != "fork":
            branch.stream.wait(branch.fork)
        self.stream = branch.stream
        try:
            work()
        finally:
            self.stream = outer
        yield
        branch.join.record(branch.stream)
        if mark != "join":
            outer.wait(branch.join)

    return beside


@pytest.mark.parametrize("mark", ["fork", "join"])
def test_a_step_without_an_order_is_caught(
    bases: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    engine = engine_of(bases("oracle-a"), "oracle-a", graphs=False)
    only_simt(engine)
    session, ids = engine.session(), prompt("oracle-a", PROMPT + 1)
    session.sync(ids[:PROMPT])
    engine.device.sync()
    monkeypatch.setattr(Context, "beside", without(mark))
    with pytest.raises(DeviceError, match=r"race between streams: byte \d+ of allocation #\d+ is \w+ by \w+ \(param"):
        session.step(ids[PROMPT:])
    engine.device.sync()


def test_a_captured_step_without_a_join_is_caught(
    bases: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver takes a capture only if every stream comes back; the last join is there, those before it are not."""
    engine = engine_of(bases("oracle-a"), "oracle-a")
    only_simt(engine)
    session, ids = engine.session(), prompt("oracle-a", PROMPT + 2)
    session.sync(ids[:PROMPT])
    session.step(ids[PROMPT : PROMPT + 1])
    engine.device.sync()
    monkeypatch.setattr(Context, "beside", without("join"))
    call = Context.call

    def joining(self: Context, name: str, *args: Any) -> Any:
        if name == "cuStreamEndCapture":
            self.stream.wait(self._branches[0].join)
        return call(self, name, *args)

    monkeypatch.setattr(Context, "call", joining)
    with pytest.raises(DeviceError, match="race between streams"):
        session.step(ids[PROMPT + 1 :])
    assert not engine.device.capturing
    engine.device.sync()


def test_launches_ahead_change_no_bit(
    bases: Callable[[str], Path], fast_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a captured step most launches that read weights go ahead; before sm_90 none do."""
    base, ids, rows = bases("oracle-a"), prompt("oracle-a", PROMPT + STEPS), []
    context, api = fast_device.context, fast_device.context.driver.api
    launch, gone = api.cuLaunchKernelEx, [0]

    def counting(*args: Any) -> Any:
        gone[0] += context.capturing
        return launch(*args)

    monkeypatch.setattr(api, "cuLaunchKernelEx", counting)
    for cc in ((9, 0), (8, 9)):
        monkeypatch.setattr(context, "info", dataclasses.replace(context.info, cc=cc))
        device = Device.open(simt="fast", workers=1)  # its launches are prepared anew
        session = Engine.open(base, engram_dir=DATA / "oracle-a", device=device).session()
        rows.append(steps(session, ids, 1))
        layers = session.config.num_hidden_layers
        assert gone[0] >= 12 * layers if cc >= (9, 0) else gone[0] == 0
        gone[0] = 0
    assert np.array_equal(rows[0], rows[1])
