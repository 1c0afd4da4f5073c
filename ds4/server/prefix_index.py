"""Which kept text begins like a prompt: found by hashes of its blocks, before any token is compared.

A text's chain has 8 bytes for each whole block of `BLOCK` tokens, each hash going over the one before it, so that one
of them stands for all of the text up to there. A point is found under the hash of the last whole block that a prompt
must share with it. Chains sorted by their bytes have the text that shares most with a prompt beside the place where
the prompt would stand. Both take microseconds with a thousand texts of 100,000 tokens.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.engine.keep import Mark, Saved
from ds4.engine.state import SLACK

BLOCK = 128  # tokens
_HASH = 8  # bytes


def chain_of(tokens: NDArray[np.int32], identity: str) -> bytes:
    """8 bytes a whole block; two models' chains share nothing."""
    data, out = np.ascontiguousarray(tokens, "<i4").tobytes(), []
    before = hashlib.blake2b(identity.encode(), digest_size=_HASH).digest()
    for at in range(0, len(tokens) // BLOCK * BLOCK * 4, BLOCK * 4):
        before = hashlib.blake2b(before + data[at : at + BLOCK * 4], digest_size=_HASH).digest()
        out.append(before)
    return b"".join(out)


@dataclass(eq=False)
class Entry:
    """A kept text: in memory, in a file, or on its way into one.

    Attributes:
        marks: of its points; none: a file that is of no use here and only takes room.
        saved: the text itself, while it is in memory.   path, file_bytes: its file, when it is written.
        writing: it will have a file.   used: when it was used last, in ns of the clock of files.
    """

    identity: str
    chain: bytes
    marks: tuple[Mark, ...]
    saved: Saved | None = None
    nbytes: int = 0
    path: Path | None = None
    file_bytes: int = 0
    writing: bool = False
    used: int = 0
    under: list[tuple[str, bytes]] = field(default_factory=list)  # keys of the index


@dataclass(frozen=True)
class Candidate:
    """A point that may serve a prompt; its tokens are not compared yet."""

    entry: Entry
    point: int

    @property
    def mark(self) -> Mark:
        return self.entry.marks[self.point]


class PrefixIndex:
    """Entries by what they begin with. Not thread-safe."""

    def __init__(self) -> None:
        self._under: dict[tuple[str, bytes], list[Candidate]] = {}
        self._chains: list[tuple[bytes, int]] = []  # sorted; the number makes equal chains comparable
        self._entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: Entry) -> bool:
        return id(entry) in self._entries

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def add(self, entry: Entry) -> None:
        """Find it from now on, if it has points."""
        self._entries[id(entry)] = entry
        for i, mark in enumerate(entry.marks):
            reach = max(1, min(mark.position, mark.written - SLACK))  # the least that Rules.kept can do with
            for blocks in {reach // BLOCK, mark.position // BLOCK}:
                key = (entry.identity, _last(entry.chain, blocks))
                self._under.setdefault(key, []).append(Candidate(entry, i))
                entry.under.append(key)
        if entry.marks:
            bisect.insort(self._chains, (entry.chain, id(entry)))

    def remove(self, entry: Entry) -> None:
        """Find it no longer."""
        if self._entries.pop(id(entry), None) is None:
            return
        for key in entry.under:
            left = [c for c in self._under.get(key, ()) if c.entry is not entry]
            if left:
                self._under[key] = left
            else:
                self._under.pop(key, None)
        entry.under = []
        i = bisect.bisect_left(self._chains, (entry.chain, id(entry)))
        if i < len(self._chains) and self._chains[i] == (entry.chain, id(entry)):
            del self._chains[i]

    def find(self, chain: bytes, identity: str) -> Iterator[Sequence[Candidate]]:
        """Points that may serve a prompt with this chain, those that it shares more blocks with first; in each group
        the deepest first, and of these one in memory.
        """
        for blocks in range(len(chain) // _HASH, -1, -1):
            group = self._under.get((identity, _last(chain, blocks)))
            if group:
                yield sorted(group, key=lambda c: (-c.mark.position, c.entry.saved is None))

    def shared(self, chain: bytes) -> int:
        """Tokens, in whole blocks, that a prompt shares with the text that shares most with it."""
        i = bisect.bisect_left(self._chains, (chain, 0))
        beside = [self._chains[j][0] for j in (i - 1, i) if 0 <= j < len(self._chains)]
        return max((common_blocks(chain, other) for other in beside), default=0) * BLOCK


def _last(chain: bytes, blocks: int) -> bytes:
    """The hash that stands for so many blocks; nothing for none, or for more than there are."""
    return chain[(blocks - 1) * _HASH : blocks * _HASH] if blocks else b""


def common_blocks(a: bytes, b: bytes) -> int:
    """Whole blocks that the texts of two chains share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(np.frombuffer(a[:n], np.uint64) != np.frombuffer(b[:n], np.uint64))
    return int(different[0]) if len(different) else n // _HASH
