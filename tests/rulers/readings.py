"""Readings made of numbers: for tests of what is done with a reading."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rulers.numbers import position_figures
from rulers.reading import Reading
from rulers.scores import Meta
from rulers.text import Text

TEACHER = Meta("0123456789abcdef", "code", "judge", 64, "f32 none", "prefill", "original 00")
OURS = replace(TEACHER, arithmetic="bf16 fp4", weights="base 11")
VOCAB = 50


def text(seed: int = 0, windows: int = 12, documents: int = 5) -> Text:
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, VOCAB, n).tolist() for n in rng.integers(17, 40, windows)]
    return Text.of(parts, sorted(rng.integers(0, documents, windows).tolist()))


def reading(noise: float, seed: int = 1, *, of: Text | None = None, floor: float = 0.0, experts: int = 0) -> Reading:
    """An engine whose logits are the original's plus N(0, noise); the other path adds N(0, floor) to two windows."""
    t = text() if of is None else of
    rng = np.random.default_rng(77)
    original = (2 * rng.standard_normal((len(t), VOCAB))).astype(np.float32)
    rng = np.random.default_rng(seed)
    ours = (original + noise * rng.standard_normal(original.shape)).astype(np.float32)
    other = (ours + floor * rng.standard_normal(ours.shape)).astype(np.float32)
    at = t.scored
    figures = position_figures(original[at], ours[at], t.ids[at + 1])
    again = position_figures(original[at], other[at], t.ids[at + 1])
    positions = np.flatnonzero(np.isin(t.windows[at], (2, 9))) if floor else np.zeros(0, np.int64)
    same = (rng.random((experts, len(at))) < 0.8).astype(np.uint8)
    return Reading(t, figures, again[:, positions], positions.astype(np.int64), same, TEACHER, OURS)
