"""What is scored: windows of documents, as token ids.

A document is cut into windows of at most `length` tokens, each behind a beginning-of-sentence token of its own, so
that a figure does not depend on how long documents are. Windows are taken evenly over all that there are.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ds4.errors import FileFormatError, UsageError

I32 = NDArray[np.int32]
SHORTEST = 16  # tokens of a window that is worth a pass


@dataclass(frozen=True)
class Text:
    """Windows one after the other, arrays over all n positions.

    Attributes:
        ids: i32 [n], the token that is read at a position.
        documents: i32 [n], number of the document that it is from: documents are the clusters of standard errors.
        windows: i32 [n], number of its window, rising by one from 0. A model starts anew in each.
    """

    ids: I32
    documents: I32
    windows: I32

    def __post_init__(self) -> None:
        n = len(self.ids)
        for name in ("ids", "documents", "windows"):
            array = getattr(self, name)
            if array.dtype != np.int32 or array.shape != (n,):
                raise FileFormatError(f"{name} is {array.dtype} {list(array.shape)}; expected int32 [{n}]")
        if n == 0:
            raise FileFormatError("a text without positions")
        steps = np.diff(self.windows)
        if self.windows[0] != 0 or not np.isin(steps, (0, 1)).all():
            raise FileFormatError("windows must be numbered 0, 1, ... in the order in which they stand")
        if (np.diff(self.documents)[steps == 0] != 0).any():
            raise FileFormatError("a window must lie within one document")

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Where each window stands."""
        starts = [0, *(np.flatnonzero(np.diff(self.windows)) + 1).tolist(), len(self)]
        return tuple(slice(a, b) for a, b in itertools.pairwise(starts))

    @cached_property
    def scored(self) -> NDArray[np.int64]:
        """Positions whose next token is known: all but the last of each window."""
        return np.flatnonzero(np.diff(self.windows, append=self.windows[-1] + 1) == 0)

    @property
    def n_documents(self) -> int:
        return len(np.unique(self.documents))

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of ids, documents and windows."""
        h = hashlib.sha256()
        for array in (self.ids, self.documents, self.windows):
            h.update(array.astype("<i4").tobytes())
        return h.hexdigest()

    def and_then(self, other: Text, n_documents: int) -> Text:
        """Both texts' windows, `other`'s last and its documents numbered from `n_documents` on.

        Raises:
            FileFormatError: this text has a document of such a number already.
        """
        if int(self.documents.max()) >= n_documents:
            raise FileFormatError(
                f"a text with document {int(self.documents.max())} has more than {n_documents} of them"
            )
        return Text(
            np.concatenate([self.ids, other.ids]),
            np.concatenate([self.documents, other.documents + np.int32(n_documents)]),
            np.concatenate([self.windows, other.windows + self.windows[-1] + np.int32(1)]),
        )

    @staticmethod
    def of(windows: Sequence[Sequence[int]], documents: Sequence[int]) -> Text:
        """Of token ids a window, and the number of each window's document."""
        sizes = [len(w) for w in windows]
        ids = np.array([i for w in windows for i in w], np.int32)
        return Text(
            ids,
            np.repeat(np.asarray(documents, np.int32), sizes),
            np.repeat(np.arange(len(windows), dtype=np.int32), sizes),
        )

    @staticmethod
    def cut(
        documents: Sequence[str],
        encode: Callable[[str], list[int]],
        bos: int,
        *,
        length: int,
        tokens: int | None = None,
    ) -> Text:
        """Windows of at most `length` tokens, evenly over all that there are, about `tokens` in all (None: all).

        Raises:
            UsageError: a length or number of tokens that makes no window, or no document that is long enough.
        """
        if length < SHORTEST:
            raise UsageError(f"windows of {length} tokens are too short to judge by; at least {SHORTEST}")
        if tokens is not None and tokens < SHORTEST:
            raise UsageError(f"{tokens} tokens are too few to judge by; at least {SHORTEST}")
        pieces: list[list[int]] = []
        owners: list[int] = []
        for number, document in enumerate(documents):
            ids = encode(document)
            parts = [ids[i : i + length - 1] for i in range(0, len(ids), length - 1)]
            found = [[bos, *part] for part in parts if len(part) >= SHORTEST - 1]
            pieces += found
            owners += [number] * len(found)
        n = len(pieces)
        if n == 0:
            raise UsageError(f"{len(documents)} documents, none of at least {SHORTEST} tokens: nothing to judge by")
        count = n
        if tokens is not None:
            count = min(n, max(1, round(n * tokens / sum(map(len, pieces)))))
        chosen = [(2 * i + 1) * n // (2 * count) for i in range(count)]
        return Text.of([pieces[i] for i in chosen], [owners[i] for i in chosen])
