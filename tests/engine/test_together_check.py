"""A pass that sessions share in the check build: nothing unordered, nothing outside its rows, the same bits whichever
branch runs first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ds4.engine import Ask, Engine, Sampling
from ds4.engine.scratch import Workspace
from ds4.errors import DeviceError
from tests.engine.test_against_teacher import prompt
from tests.engine.test_beside import REPLAYS, engine_of, only_simt

GREEDY = Sampling(temperature=0.0, top=2)
TOKENS = 5


def answers(engine: Engine, *, together: bool) -> list[list[object]]:
    sessions = [engine.session() for _ in range(3)]
    for i, session in enumerate(sessions):
        session.sync(prompt("oracle-a")[i : i + 7 + i])
    drawn: list[list[object]] = [[] for _ in sessions]
    for at in range(TOKENS):
        if together:
            assert engine.draw([Ask(s, GREEDY, TOKENS - at) for s in sessions]) == [None] * 3
        for session, said in zip(sessions, drawn):
            session.next(GREEDY, left=TOKENS - at)
            said.append(session.last)
    return drawn


def test_a_shared_pass_is_ordered(bases: Callable[[str], Path]) -> None:
    base = bases("oracle-a")
    want = answers(engine_of(base, "oracle-a", graphs=False), together=False)
    for replay in REPLAYS:
        engine = engine_of(base, "oracle-a", replay, sessions=3)
        only_simt(engine)
        assert answers(engine, together=True) == want, replay
        assert engine._together is not None
        counts = engine._together.counts
        assert counts.captures == 1 and counts.replays == TOKENS - 2


def test_sessions_in_one_scratch_are_noticed(bases: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They run beside each other: with the same names for their temporaries the check build says so."""
    engine = engine_of(bases("oracle-a"), "oracle-a", sessions=3)
    only_simt(engine)
    monkeypatch.setattr(Workspace, "part", lambda self, index: self)
    sessions = [engine.session() for _ in range(2)]
    for session in sessions:
        session.sync(prompt("oracle-a", 40))
        session.next(GREEDY)
    errors = engine.draw([Ask(s, GREEDY) for s in sessions])
    assert all(isinstance(e, DeviceError) for e in errors), errors
