"""A small form of scores, for archives: the k likeliest tokens of each position and the mass of all others.

The token that does follow is kept too. top-1 and perplexity are exact from it; Sigma-min is known up to the mass that
both models put on the others, so its error is never above the tail mass. Rulers use full rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.errors import FileFormatError, UsageError
from ds4.teacher.files import save_results
from rulers.scores import Meta, Scores, load_arrays, meta_array
from rulers.text import Text

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
NAMES = ("ids", "documents", "windows", "top_ids", "top", "following", "tail", "meta", "vocab")
ROWS = 64  # positions whose full rows are worked on at once


@dataclass(frozen=True)
class Compact:
    """The archive's form of scores.

    Attributes:
        top_ids: i32 [n, k], the likeliest tokens, largest first, ties to the lowest id.
        top: f32 [n, k], natural logarithms of their probabilities.
        following: f32 [n], that of the token that does follow; 0 at a window's last position.
        tail: f32 [n], probability of all other tokens together, summed, not 1 minus the rest.
        vocab: number of tokens.
    """

    text: Text
    meta: Meta
    top_ids: I32
    top: F32
    following: F32
    tail: F32
    vocab: int

    def describe(self) -> str:
        """The error bound, in a line for people."""
        n, k = self.top_ids.shape
        return (
            f"{n:,} positions, the {k} likeliest of {self.vocab:,} tokens each; tail mass {self.tail.mean():.3g} in "
            f"the mean, {self.tail.max():.3g} at most: Sigma-min from these is low by at most that; top-1 and "
            "perplexity are exact"
        )

    def sigma_min(self, ours_RV: F32, rows: NDArray[np.int64]) -> tuple[F64, F64]:
        """(least, most) that sum_v min(p, q) can be at some positions, given our full logits f32 [R, V] of them.

        sum over the top of min(p, q), and that plus min(tail of p, tail of q).
        """
        lq = _log_softmax(ours_RV)
        q = np.exp(np.take_along_axis(lq, self.top_ids[rows].astype(np.int64), axis=1))
        p = np.exp(self.top[rows].astype(np.float64))
        least = np.minimum(p, q).sum(axis=1)
        rest = np.maximum(1.0 - q.sum(axis=1), 0.0)
        return least, least + np.minimum(self.tail[rows].astype(np.float64), rest)

    def save(self, path: str | Path) -> None:
        """Write it, whole or not at all. Raises CapacityError, Ds4Error."""
        text = {"ids": self.text.ids, "documents": self.text.documents, "windows": self.text.windows}
        rows = {"top_ids": self.top_ids, "top": self.top, "following": self.following, "tail": self.tail}
        save_results(path, {**text, **rows, "meta": meta_array(self.meta), "vocab": np.array(self.vocab)})

    @staticmethod
    def load(path: str | Path) -> Compact:
        """Raises FileFormatError: unreadable, or not such a file; names file and array."""
        a = load_arrays(path, NAMES)
        try:
            text = Text(a["ids"], a["documents"], a["windows"])
            meta = a["meta"].tobytes().decode()
        except (FileFormatError, UnicodeDecodeError) as e:
            raise FileFormatError(f"{path}: {e}") from e
        n, k = a["top_ids"].shape if a["top_ids"].ndim == 2 else (0, 0)
        expected = {
            "top_ids": ((n, k), np.int32), "top": ((n, k), np.float32), "following": ((n,), np.float32),
            "tail": ((n,), np.float32),
        }  # fmt: skip
        for name, (shape, dtype) in expected.items():
            if n != len(text) or a[name].shape != shape or a[name].dtype != dtype:
                raise FileFormatError(f"{path}: {name} is {a[name].dtype} {list(a[name].shape)}")
        rows = (a["top_ids"], a["top"], a["following"], a["tail"])
        return Compact(text, Meta.from_json(meta, str(path)), *rows, int(a["vocab"]))


def compact(scores: Scores, k: int) -> Compact:
    """The k likeliest tokens of each position and the mass of the others, summed in float64.

    Raises:
        UsageError: k is not between 1 and the vocabulary's size.
    """
    n, v = len(scores.text), scores.vocab_size
    if not 1 <= k <= v:
        raise UsageError(f"{k} tokens a position: must lie between 1 and the vocabulary of {v}")
    top_ids, top = np.empty((n, k), np.int32), np.empty((n, k), np.float32)
    following, tail = np.zeros(n, np.float32), np.empty(n, np.float32)
    for lo in range(0, n, ROWS):
        rows = slice(lo, min(lo + ROWS, n))
        logits = scores.rows(rows)
        lp = _log_softmax(logits)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        top_ids[rows], top[rows] = order, np.take_along_axis(lp, order, axis=1)
        p = np.exp(lp)
        np.put_along_axis(p, order, 0.0, axis=1)
        tail[rows] = p.sum(axis=1)
        known = scores.text.scored[(scores.text.scored >= lo) & (scores.text.scored < rows.stop)]
        following[known] = lp[known - lo, scores.text.ids[known + 1]]
    return Compact(scores.text, scores.meta, top_ids, top, following, tail, v)


def _log_softmax(logits: F32) -> F64:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    out: F64 = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return out
