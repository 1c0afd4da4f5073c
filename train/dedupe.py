"""Near-duplicate text: 50-character shingles, paragraphs that repeat, and how much of one split lies in another."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

SHINGLE = 50
# One shingle in this many stands for its neighbours when paragraphs are compared; leaks are measured on all of them.
SAMPLE = 8
_BASE = np.uint64(0x9E3779B97F4A7C15 | 1)


def normalised(text: str) -> str:
    """Text as it is compared: lower case, every run of white space one blank."""
    return re.sub(r"\s+", " ", text).strip().lower()


def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """base**i and base**-i modulo 2**64, for i below count."""
    inverse = np.uint64(pow(int(_BASE), -1, 1 << 64))
    forward = np.ones(count, np.uint64)
    backward = np.ones(count, np.uint64)
    forward[1:], backward[1:] = _BASE, inverse
    return np.multiply.accumulate(forward), np.multiply.accumulate(backward)


_CACHE: list[tuple[NDArray[np.uint64], NDArray[np.uint64]]] = []


def shingles(text: str) -> NDArray[np.uint64]:
    """Hashes of all runs of SHINGLE UTF-8 bytes of the normalised text: u64 [bytes - SHINGLE + 1]."""
    data = np.frombuffer(normalised(text).encode(), np.uint8)
    count = len(data) - SHINGLE + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    if not _CACHE or len(_CACHE[0][0]) < len(data) + 1:
        _CACHE[:] = [_powers(max(1 << 18, len(data) + 1))]
    forward, backward = _CACHE[0]
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum((data.astype(np.uint64) + np.uint64(1)) * forward[: len(data)], out=sums[1:])
    values = (sums[SHINGLE:] - sums[:-SHINGLE]) * backward[:count]
    values ^= values >> np.uint64(29)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    return values ^ (values >> np.uint64(32))


def sampled(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The shingles whose hash falls on the sample: the same ones wherever the same text lies."""
    return values[values % np.uint64(SAMPLE) == 0]


def repeated_shares(texts: list[str]) -> NDArray[np.float64]:
    """For each text, the share of its sampled shingles that occur in an earlier text: f64 [len(texts)].

    A text too short for a sample has share 1 if an earlier text is the same when normalised, else 0.
    """
    parts = [sampled(shingles(text)) for text in texts]
    sizes = np.array([len(part) for part in parts], np.int64)
    shares = np.zeros(len(texts))
    if sizes.sum():
        values = np.concatenate(parts)
        owner = np.repeat(np.arange(len(texts)), sizes)
        _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
        earlier = owner[first][inverse] < owner
        shares = np.bincount(owner[earlier], minlength=len(texts)) / np.maximum(sizes, 1)
    seen: set[str] = set()
    for at, text in enumerate(texts):
        key = normalised(text)
        if sizes[at] == 0 and len(key) >= 12:
            shares[at] = float(key in seen)
        seen.add(key)
    return shares


class ShingleSet:
    """All shingles of some texts, to ask of others what share of theirs is in it."""

    def __init__(self, texts: list[str]) -> None:
        parts = [shingles(text) for text in texts]
        self.values = np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint64)
        self.found = np.zeros(len(self.values), bool)
        # A table over the low bits answers "surely not here" for nearly all of a large text without a search.
        self._maybe = np.zeros(1 << 24, bool)
        self._maybe[self.values & np.uint64((1 << 24) - 1)] = True

    def mark(self, texts: list[str]) -> None:
        """Note which of the set's shingles occur in these texts (called piecewise over a large text)."""
        if not len(self.values):
            return
        for text in texts:
            values = shingles(text)
            values = values[self._maybe[values & np.uint64((1 << 24) - 1)]]
            at = np.minimum(np.searchsorted(self.values, values), len(self.values) - 1)
            self.found[at[self.values[at] == values]] = True

    def share(self, text: str) -> float:
        """The share of the text's shingles that were marked; they must be the set's own (0 for a short text)."""
        values = shingles(text)
        if not len(values):
            return 0.0
        return float(self.found[np.searchsorted(self.values, values)].mean())


def leak(held_out: list[str], train: list[str]) -> float:
    """The share of all held-out shingles (with repeats) that occur in the training text."""
    sets = ShingleSet(held_out)
    sets.mark(train)
    sizes = [max(len(normalised(text).encode()) - SHINGLE + 1, 0) for text in held_out]
    total = sum(sizes)
    return sum(sets.share(text) * size for text, size in zip(held_out, sizes)) / total if total else 0.0
