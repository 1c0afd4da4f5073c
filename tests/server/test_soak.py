"""A short soak (bench/soak.py): requests of all APIs, from clients that stay, leave, dawdle or talk nonsense."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4.engine import Sampling
from tests.server.standin import StandInConfig, StandInSession

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def benches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Benches are programs: they import each other as such."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "path", list(sys.path))  # a bench puts this repository on it
    yield


def test_nothing_breaks_and_nothing_stays() -> None:
    import soak

    engine = soak.TellsBack(config=StandInConfig(100_000))
    run = soak.soak(engine, 90, 16, seed=3, growth_mb=64, longest=200, most=400, parts=2)
    assert not run.wrong
    ways = {end.split(":")[0] for end in run.ends}
    assert ways == set(soak.WAYS) and sum(run.ends.values()) == 90
    assert {"stay: 200 stop", "stay: 200 completed", "nonsense: 400"} <= set(run.ends)
    assert all(state.sessions == 0 for state in run.states)


def test_a_soak_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is another one, a session that somebody holds on to, a process that grows."""
    import soak

    held: list[StandInSession] = []

    class Odd(soak.Told):  # type: ignore[name-defined, misc]
        def next(self, sampling: Sampling, *, left: int | None = None) -> int:
            held[:] = [self]
            token: int = super().next(sampling, left=left)
            return token + 1 if self.drawn == 1 and self.constraint is None else token

    monkeypatch.setattr(soak, "Told", Odd)
    monkeypatch.setattr(soak, "SETTLE_S", 0.1)
    run = soak.soak(
        soak.TellsBack(config=StandInConfig(100_000)), 12, 8, seed=1, growth_mb=-1e6, longest=20, most=50, parts=2
    )
    said = "\n".join(run.wrong)
    assert " is not " in said and "1 sessions" in said and "the process grew" in said
    held.clear()
