"""Snapshots that no device made, for tests of what is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds4.engine.draft_state import DraftSnapshot
from ds4.engine.session import SessionSnapshot
from ds4.engine.state import Snapshot

ROW = 6  # bytes of a compressed row; one a token


def snapshot_of(
    tokens: Sequence[int], *, position: int | None = None, first: int = 0, logits: bool = True, draft: bool = False,
    ring_bytes: int = 40,
) -> SessionSnapshot:  # fmt: skip
    """A state whose bytes say which tokens it is of: compressed rows token by token, the ring by its newest."""
    at = len(tokens) if position is None else position
    rows = np.repeat(np.asarray(tokens[:at], np.int64) % 251, ROW).astype(np.uint8)
    ring = np.resize(np.asarray(tokens[max(0, at - 8) : at], np.int64) % 253, ring_bytes).astype(np.uint8)
    arrays = {"comp.1": rows, "keys.1": rows[: at // 2 * ROW].copy(), "ring.0": ring, "partial.1": ring[:8].copy()}
    state = Snapshot(at, at, (0, first), None, 1024, arrays)
    drafts = None
    if draft:
        drafts = DraftSnapshot(at, at, max(0, at - 9), at - 1, 1, (ring.copy(), ring[::-1].copy()), ring[:4].copy())
    values = np.linspace(-1, 1, 16, dtype=np.float32) + np.float32(sum(tokens[:at]) % 7) if logits else None
    return SessionSnapshot(tuple(tokens), len(tokens), state, values, (), None, drafts)


def same(a: SessionSnapshot, b: SessionSnapshot) -> bool:
    """To the byte."""
    drafts = a.draft is None and b.draft is None
    if a.draft is not None and b.draft is not None:
        numbers = ("position", "written", "first", "start", "pending")
        drafts = all(getattr(a.draft, n) == getattr(b.draft, n) for n in numbers)
        pairs = zip((*a.draft.rings, a.draft.main), (*b.draft.rings, b.draft.main), strict=True)
        drafts = drafts and all(np.array_equal(x, y) for x, y in pairs)
    logits = a.logits is None and b.logits is None
    if a.logits is not None and b.logits is not None:
        logits = a.logits.tobytes() == b.logits.tobytes()
    s, t = a.state, b.state
    numbers_of = [(x.position, x.written, x.first, x.published, x.capacity) for x in (s, t)]
    arrays = s.arrays.keys() == t.arrays.keys() and all(np.array_equal(s.arrays[n], t.arrays[n]) for n in s.arrays)
    return drafts and logits and arrays and numbers_of[0] == numbers_of[1] and a.tokens == b.tokens
