"""Sessions whose drafts a test decides, for the tests of rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ds4.device import Buffer
from ds4.engine import Engine, Sampling, Session
from ds4.engine.draft import Drafter
from ds4.engine.rounds import RoundCounts
from ds4.engine.scheduler import FixedDrafts, Scheduler
from tests.engine.test_bits import state_of

GREEDY = Sampling()
Policy = Callable[[], FixedDrafts | Scheduler]


class Forced:
    """Overwrites the drafts of every round on the device with the text's own next tokens, some of them changed.

    Round by round: all right, the first wrong, the second wrong, ..., any tokens at all, and again.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: Sequence[int], *, always_right: bool = False) -> None:
        self.text, self.rounds = list(text), 0
        rng, real = random.Random(5), Drafter.draft

        def draft(drafter: Drafter, token: Buffer) -> None:
            real(drafter, token)
            at, B, V = drafter.state.position + 1, drafter.B, drafter.config.vocab_size
            ids = [*self.text[at : at + B], *[0] * B][:B]
            kind = 0 if always_right else self.rounds % (B + 2)
            if kind == B + 1:
                ids = [rng.randrange(V) for _ in range(B)]
            elif kind:
                ids[kind - 1] = (ids[kind - 1] + 1) % V
            self.rounds += 1
            drafter.drafts.write(np.asarray(ids, np.int32))

        monkeypatch.setattr(Drafter, "draft", draft)


def fixed(k: int) -> Policy:
    return lambda: FixedDrafts(k)


def restless() -> Scheduler:
    """A scheduler on a clock that says anything: every decision that it can take is taken."""
    rng, now = random.Random(3), [0.0]

    def clock() -> float:
        now[0] += rng.random() ** 4
        return now[0]

    return Scheduler(clock)


def answer(session: Session, ids: Sequence[int], n: int, sampling: Sampling = GREEDY) -> list[int]:
    """The `n` tokens after the prompt `ids`."""
    session.sync(ids)
    return more(session, n, sampling)


def more(session: Session, n: int, sampling: Sampling = GREEDY) -> list[int]:
    return [session.next(sampling, left=n - i) for i in range(n)]


def settled(session: Session) -> dict[str, bytes]:
    """The state as plain decode has it after as many tokens: what was drawn ahead is taken back."""
    session.rollback(len(session.tokens))
    return state_of(session)


def same_as_plain(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, ids: list[int], n: int, sampling: Sampling,
    ks: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Fixed k (every one) and the scheduler, on drafts that are right, wrong at each position, and anything."""
    add = RoundCounts.add
    kept: set[tuple[int, int]] = set()

    def record(counts: RoundCounts, drawn: bool, verified: int, accepted: int) -> None:
        kept.add((verified, accepted))
        add(counts, drawn, verified, accepted)

    monkeypatch.setattr(RoundCounts, "add", record)
    plain = engine.session(fixed(0))
    want = answer(plain, ids, n, sampling)
    end = settled(plain)
    for k in (*(ks or range(1, engine.block + 1)), None):
        with monkeypatch.context() as patched:
            Forced(patched, [*ids, *want])
            kept.clear()
            session = engine.session(restless if k is None else fixed(k))
            assert answer(session, ids, n, sampling) == want, f"k {k}"
            assert settled(session) == end, f"state at k {k}"
            assert session.rounds.tokens == n - 1
            if n >= 26:
                # rejects at every position, and bonus tokens
                assert kept >= {(k, j) for j in range(k + 1)} if k else sum(session.rounds.accepted) > 0, f"k {k}"
