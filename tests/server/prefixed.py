"""Prompts through kept texts, as a job reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ds4.engine import Engine, Sampling, Session
from ds4.server.prefixes import Prefixes
from ds4.server.request import ServedEngine, ServedSession

GREEDY = Sampling()


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
