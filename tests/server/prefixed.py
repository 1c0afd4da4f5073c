"""Prompts through kept texts, as a run reads them: on the real engine, and on sessions that no device runs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from ds4.engine import Engine, Sampling, Session
from ds4.engine.keep import Rules
from ds4.engine.session import SessionSnapshot
from ds4.errors import CapacityError
from ds4.server.prefix_folder import PrefixFolder
from ds4.server.prefixes import Model, Prefixes
from ds4.server.request import ServedEngine, ServedSession
from tests.engine.kept import same, snapshot_of

GREEDY = Sampling()
FULL = Rules(window=18, bounded=False, chunk=16, decoded=False)


@dataclass(frozen=True)
class Answered:
    """The answer's tokens, how many of the prompt's were not run again, and the session, which has drawn them."""

    tokens: list[int]
    cached: int
    ran: int
    session: Session


def read(prefixes: Prefixes, engine: Engine, ids: Sequence[int]) -> tuple[Session, int, int]:
    """A session that has read a prompt, tokens that it had already, positions that it ran."""
    session, cached = prefixes.begin(cast(ServedEngine, engine), ids)
    ran = 0
    for _, all_ in prefixes.reading(session, ids):
        ran = all_
    return cast(Session, session), cached, ran


def ask(prefixes: Prefixes, engine: Engine, ids: Sequence[int], n: int, sampling: Sampling = GREEDY) -> Answered:
    """A whole request."""
    session, cached, ran = read(prefixes, engine, ids)
    tokens = [session.next(sampling, left=n - i) for i in range(n)]
    prefixes.ended(cast(ServedSession, session))
    return Answered(tokens, cached, ran, session)


@dataclass(eq=False)
class FakeEngine:
    """Sessions whose state is a function of their text, and that refuse any other."""

    identity: str = "one"
    rules: Rules = FULL
    sidecars: dict[str, object] = field(default_factory=dict)
    ran: list[tuple[int, int, bool]] = field(default_factory=list)  # from, to, part
    room: int = 1 << 20  # tokens of a session
    broken: Exception | None = None  # what the next session says of a snapshot

    def session(self) -> ServedSession:
        return cast(ServedSession, FakeSession(self))


class FakeSession:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.tokens, self.position = engine, list[int](), 0

    def snapshot(self) -> SessionSnapshot:
        bounded = self.engine.rules.bounded
        return snapshot_of(self.tokens, position=self.position, first=max(0, self.position - 18) if bounded else 0)

    def restore(self, snapshot: SessionSnapshot) -> None:
        if (error := self.engine.broken) is not None:
            self.engine.broken = None
            raise error
        at = snapshot.state.position
        want = snapshot_of(list(snapshot.tokens), position=at, first=snapshot.state.first[1])
        assert same(replace(snapshot, logits=None), replace(want, logits=None)), "another text's state"
        self.tokens, self.position = list(snapshot.tokens), at

    def reserve(self, tokens: int) -> None:
        if tokens > self.engine.room:
            raise CapacityError(f"no room for {tokens} tokens")

    def rollback(self, position: int) -> None:
        assert position <= len(self.tokens)
        self.tokens, self.position = self.tokens[:position], min(self.position, position)

    def reading(
        self, tokens: Sequence[int], *, logits: str = "last", part: bool = False
    ) -> Generator[tuple[int, int], None, None]:
        keep = next((i for i, (a, b) in enumerate(zip(self.tokens, tokens)) if a != b), None)
        start = min(len(self.tokens), len(tokens)) if keep is None else keep
        start = start if start == len(tokens) == self.position else min(start, self.position, len(tokens) - 1)
        self.tokens, self.position = list(tokens[:start]), start
        at = start
        try:
            while at < len(tokens):
                yield at - start, len(tokens) - start
                at = min(at + self.engine.rules.chunk, len(tokens))
                self.position = at
        finally:
            self.tokens = list(tokens[: self.position])
        self.engine.ran.append((start, len(tokens), part))


def model(engine: ServedEngine, decoded: bool) -> Model:
    fake = cast(FakeEngine, engine)
    return Model(fake.identity, replace(fake.rules, decoded=decoded))


def kept_texts(memory: int = 1 << 30, folder: PrefixFolder | None = None, decoded: bool = False) -> Prefixes:
    return Prefixes(memory, folder, decoded=decoded, least=16, model_of=model)


def served(prefixes: Prefixes, engine: FakeEngine, ids: Sequence[int], answer: Sequence[int] = ()) -> int:
    """A request; the tokens that were not run again."""
    session, cached = prefixes.begin(cast(ServedEngine, engine), ids)
    for _ in prefixes.reading(session, ids):
        pass
    fake = cast(FakeSession, session)
    fake.tokens += answer
    fake.position = max(fake.position, len(fake.tokens) - 1) if answer else fake.position
    prefixes.ended(session)
    return cached


def text_of(n: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 250, n)]
