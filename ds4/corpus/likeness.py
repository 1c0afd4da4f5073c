"""Which documents share text: those that are equal when normalised, or have PASSAGE bytes in a row in common.

Exact up to a collision of 64-bit hashes, which would only keep two strangers on one side: every run of PASSAGE bytes
of the normalised text has a hash, none is sampled. A large corpus is looked at in passes, each over the runs whose
hashes fall into its part, so that memory stays bounded. What a document shorter than PASSAGE shares with a longer one
is not seen, unless the two are equal.

    h_i = (sum_{j < n} (b_{i+j} + 1) B^{i+j}) B^{-i}   mod 2^64     for runs of n bytes, from running sums
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

PASSAGE = 300  # bytes: about 60 English words or 100 Chinese characters; a common phrase or a citation is shorter
RUNS_A_PASS = 1 << 24  # hashes held at once
_BASE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

U64 = NDArray[np.uint64]


def normalised(text: str) -> str:
    """Text as it is compared: lower case, every run of white space one blank."""
    return re.sub(r"\s+", " ", text).strip().lower()


class Runs:
    """Hashes of the runs of PASSAGE bytes of normalised texts, each at most `longest` bytes long."""

    def __init__(self, longest: int) -> None:
        inverse = pow(_BASE, -1, 1 << 64)
        self._forward, self._backward = _powers(_BASE, longest + 1), _powers(inverse, longest + 1)

    def of(self, data: bytes) -> U64:
        """u64 [bytes - PASSAGE + 1], in order; empty for a shorter text."""
        count = len(data) - PASSAGE + 1
        if count <= 0:
            return np.empty(0, np.uint64)
        sums = np.zeros(len(data) + 1, np.uint64)
        values = np.frombuffer(data, np.uint8).astype(np.uint64) + np.uint64(1)
        np.cumsum(values * self._forward[: len(data)], out=sums[1:])
        h: U64 = (sums[PASSAGE:] - sums[:-PASSAGE]) * self._backward[:count]
        h ^= h >> np.uint64(29)  # the low bits of a product know nothing of the high ones
        h *= np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> np.uint64(32)
        return h


def _powers(base: int, count: int) -> U64:
    out = np.full(count, base & _MASK, np.uint64)
    out[0] = 1
    return np.multiply.accumulate(out)


def shared(texts: Sequence[bytes], runs_a_pass: int = RUNS_A_PASS) -> Iterator[tuple[int, int, int]]:
    """(a, b, at): documents a < b share text; `at` is where in a (normalised bytes) the shared run begins.

    Every two documents that share text are connected by the pairs, though not each by a pair of its own.

    Args:
        texts: normalised texts in UTF-8.
    """
    first: dict[bytes, int] = {}
    for i, data in enumerate(texts):
        if data in first:
            yield first[data], i, 0
        first.setdefault(data, i)
    long = [i for i, data in enumerate(texts) if len(data) >= PASSAGE and first[data] == i]
    total = sum(len(texts[i]) - PASSAGE + 1 for i in long)
    runs = Runs(max((len(texts[i]) for i in long), default=0))
    n_passes = max(1, -(-total // runs_a_pass))
    for part in range(n_passes):
        yield from _shared_of_pass(texts, long, runs, part, n_passes)


def _shared_of_pass(
    texts: Sequence[bytes], long: Sequence[int], runs: Runs, part: int, n_passes: int
) -> Iterator[tuple[int, int, int]]:
    values, places, owners = [], [], []
    for i in long:
        h = runs.of(texts[i])
        distinct, at = np.unique(h, return_index=True)
        mine = slice(None) if n_passes == 1 else (distinct >> np.uint64(40)) % np.uint64(n_passes) == part
        values.append(distinct[mine])
        places.append(at[mine])
        owners.append(np.full(len(values[-1]), i, np.int64))
    if not values:
        return
    value, place, owner = (np.concatenate(parts) for parts in (values, places, owners))
    order = np.argsort(value, kind="stable")  # owners rise within equal values
    value, place, owner = value[order], place[order], owner[order]
    again = np.flatnonzero(value[1:] == value[:-1])
    again = again[np.argsort(place[again], kind="stable")]  # each pair shows where its passage begins
    pairs = np.stack([owner[again], owner[again + 1]], axis=1)
    _, chosen = np.unique(pairs, axis=0, return_index=True)
    for k in chosen:
        a, b = int(pairs[k, 0]), int(pairs[k, 1])
        yield a, b, int(place[again[k]])


def groups(n: int, links: Iterator[tuple[int, int]]) -> NDArray[np.int64]:
    """The group of each of n documents, named after its first member: i64 [n]."""
    parent = list(range(n))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for a, b in links:
        ra, rb = root(a), root(b)
        parent[max(ra, rb)] = min(ra, rb)
    return np.array([root(i) for i in range(n)], np.int64)
