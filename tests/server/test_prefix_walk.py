"""A long walk of requests over kept texts, on sessions that know how each row of theirs was made.

Prompts begin alike, go on, part, are cancelled; answers are drawn; memory and folder are small; servers are
restarted. Under `exact` no session may hold a row that decode made, nor, under bounded replay, logits that saw a
window row of an earlier sync; a state that is restored must be that of its text, row by row.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ds4.engine.keep import Rules
from ds4.engine.session import SessionSnapshot
from ds4.engine.state import SLACK, Snapshot
from ds4.server.prefix_folder import PrefixFolder
from ds4.server.prefixes import Prefixes
from ds4.server.request import ServedEngine, ServedSession
from tests.server.prefixed import FULL, FakeEngine, model

TAINT = 1 << 12  # of a row that is not what one prefill of its text makes


class RowSession:
    """Rows i32: the token, and whether it is tainted. Window rows of the upper layers from `first` on."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.tokens: list[int] = []
        self.rows: list[int] = []
        self.written = self.first = 0
        self.replayed_to = 0
        self.known = False  # its logits
        self.mixed = False  # the last logits saw rows that one sync would not have

    @property
    def position(self) -> int:
        return len(self.rows)

    def snapshot(self) -> SessionSnapshot:
        rows = np.asarray(self.rows, np.int32)
        ring = rows[-(self.rules.window + SLACK) :]
        arrays = {"comp.1": rows.view(np.uint8), "ring.0": np.ascontiguousarray(ring).view(np.uint8)}
        state = Snapshot(self.position, self.written, (0, self.first), None, 1024, dict(arrays))
        logits = np.asarray([self.mixed], np.float32) if self.known else None
        return SessionSnapshot(tuple(self.tokens), len(self.tokens), state, logits, (), None, None)

    def restore(self, snapshot: SessionSnapshot) -> None:
        state = snapshot.state
        self.rows = [int(r) for r in state.arrays["comp.1"].view(np.int32)]
        ring = [int(r) for r in state.arrays["ring.0"].view(np.int32)]
        self.tokens, self.written, self.first = list(snapshot.tokens), state.written, state.first[1]
        assert len(self.rows) == state.position and [r % TAINT for r in self.rows] == self.tokens[: state.position]
        assert ring == self.rows[-len(ring) :]
        self.replayed_to = state.position if self.first else 0
        self.known = snapshot.logits is not None
        self.mixed = snapshot.logits is not None and bool(snapshot.logits[0])

    def reserve(self, tokens: int) -> None:
        pass

    def rollback(self, position: int) -> None:
        assert position == len(self.tokens)

    def draw(self, tokens: Sequence[int]) -> None:
        """Each is run when the next one is asked for."""
        for token in tokens:
            self.rows += [t + TAINT for t in self.tokens[self.position :]]
            self.tokens.append(token)
            self.known = False
            self.written = self.position

    def reading(
        self, tokens: Sequence[int], *, logits: str = "last", part: bool = False
    ) -> Generator[tuple[int, int], None, None]:
        assert part == (logits == "none")
        tokens, keep = list(tokens), 0
        for a, b in zip(self.tokens[: self.position], tokens):
            if a != b:
                break
            keep += 1
        if keep == len(tokens) == self.position and self.known and not part:
            self.tokens = tokens
            return
        keep = min(keep, len(tokens) - 1)
        if not max(self.written - SLACK, self.replayed_to) <= keep:
            keep = self.written = self.first = self.replayed_to = 0
        self.rows, self.known = self.rows[:keep], False
        end, window = len(tokens), self.rules.window
        bounded = self.rules.bounded and (part or end - window > keep)
        self.tokens = tokens
        made: list[int] = []
        try:
            for at in range(keep, end, self.rules.chunk):
                yield at - keep, end - keep
                taint = TAINT if any(r >= TAINT for r in self.rows) else 0
                made += [t + taint for t in tokens[at : min(at + self.rules.chunk, end)]]
                if not bounded:
                    self.rows, made = self.rows + made, []
                    self.written = max(self.written, self.position)
        except GeneratorExit:
            if bounded:
                self.rows, self.written, self.first, self.replayed_to = [], 0, 0, 0
            self.tokens = tokens[: self.position]
            raise
        self.rows, self.known = self.rows + made, not part
        self.written = max(self.written, end)
        fresh = max(0, end - window) if self.rules.bounded else 0
        if bounded:
            self.first = self.replayed_to = end if part else end - window
            self.mixed = part
        else:
            self.mixed = self.rules.bounded and keep > 0 and fresh > self.first
            self.mixed |= self.rules.bounded and self.first > fresh


class RowEngine(FakeEngine):
    def session(self) -> ServedSession:
        return cast(ServedSession, RowSession(self.rules))


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))])
def test_no_walk_leads_to_a_row_that_is_not_the_prompts_own(tmp_path: Path, bounded: bool, seed: int) -> None:
    rng = random.Random(seed)
    rules = replace(FULL, bounded=bounded)
    engine = RowEngine(rules=rules)
    parts = [[rng.randrange(300) for _ in range(n)] for n in (0, 7, 16, 17, 18, 40, 64, 130, 300)]
    texts: list[list[int]] = [[]]
    memory, disk = 25_000, 35_000
    decoded = False

    def opened() -> Prefixes:
        folder = PrefixFolder(tmp_path / "kept", disk) if rng.random() < 0.9 else None
        return Prefixes(memory, folder, decoded=decoded, least=16, model_of=model)

    prefixes, reused, tainted = opened(), 0, 0
    for _ in range(150):
        what = rng.random()
        if what < 0.1:
            prefixes.flush()
            prefixes.close()
            decoded = rng.random() < 0.5
            prefixes = opened()
        elif what < 0.12:
            prefixes.forget()
        before = rng.choice(texts[-4:])
        ids = before[: len(before) - rng.choice((0, 0, 0, 0, 1, 5, 70))] + rng.choice(parts)
        ids = (ids if rng.random() < 0.3 else [*ids, rng.randrange(300)])[:1000] or [1]
        session, cached = prefixes.begin(cast(ServedEngine, engine), ids)
        rows = cast(RowSession, session)
        reading = prefixes.reading(session, ids)
        left = rng.choice((3, 10, 10**9, 10**9, 10**9))
        first: Any = None
        for told in reading:
            first = first or told
            left -= 1
            if rng.random() < 0.02:  # another request comes, and what it shares is read to a point of its own
                wants = ids[: rng.randrange(len(ids))] + rng.choice(parts)
                prefixes.worth_waiting(cast(ServedEngine, engine), session, [*wants, 1])
                texts.append(wants)
            if not left:
                reading.close()
                break
        else:
            assert rows.tokens == ids == [r % TAINT for r in rows.rows]
            assert cached == len(ids) - (first[1] if first else 0), "what it said that it would not run"
            wrong = any(r >= TAINT for r in rows.rows) or rows.mixed
            assert decoded or not wrong
            reused, tainted = reused + cached, tainted + wrong
            answer = [rng.randrange(300) for _ in range(rng.randrange(1, 40))]
            rows.draw(answer)
            prefixes.ended(session)
            texts.append([*ids, *answer] if rng.random() < 0.6 else ids)
            texts = texts if len(ids) < 900 else [[]]
        assert prefixes.stats.memory_bytes <= memory
    prefixes.flush()
    kept = prefixes.stats
    assert kept.disk_bytes <= disk and not {"unfit", "broken", "truncated", "other_text"} & set(+kept.refused)
    prefixes.close()
    assert reused > 3_000 and tainted, "rows that decode made are seen where they may be"
