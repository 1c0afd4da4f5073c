"""Which rows a solver never fits: every fourth window of 128 tokens, of every source alike.

Lambda, alpha and whether anything is mounted at all are chosen on these rows. A window and not a row, because
neighbouring tokens share their experts and their words: a row between two fitted ones is not unseen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ds4.errors import UsageError

WINDOW = 128
EVERY = 4

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


def held_out(documents_T: NDArray[np.integer], sources_T: NDArray[np.integer]) -> Mask:
    """bool [T], True on the rows of every fourth window.

    Rows stand in text order. A window is 128 consecutive rows of one document; what is left of a document is a
    shorter one. Windows are counted source by source (in the order of their numbers) and on from one source to the
    next, so a source has a quarter of its windows held out to within one window, and sources too small for a window
    of their own still have their share together.

    Args:
        documents_T, sources_T: integers [T]; equal numbers are one document, one source.

    Raises:
        UsageError: fewer than four windows, or a document in two pieces or two sources.
    """
    n = len(documents_T)
    if documents_T.shape != (n,) or sources_T.shape != (n,):
        raise UsageError(
            f"documents are {list(documents_T.shape)} and sources {list(sources_T.shape)}; expected one of each a row"
        )
    starts = np.flatnonzero(np.diff(documents_T, prepend=documents_T[:1] - 1)) if n else np.zeros(0, np.int64)
    if len(np.unique(documents_T[starts])) != len(starts):
        raise UsageError("rows of a document do not stand together; rows must stand in text order")
    lengths = np.diff(starts, append=n)
    document_T = np.repeat(np.arange(len(starts)), lengths)
    if not np.array_equal(sources_T, sources_T[starts][document_T]):
        raise UsageError("a document belongs to two sources; expected one source a document")
    within_T = np.arange(n) - starts[document_T]
    opens_T = within_T % WINDOW == 0
    window_T = np.cumsum(opens_T) - 1
    sources_W = sources_T[opens_T]
    if len(sources_W) < EVERY:
        raise UsageError(
            f"{n} rows make {len(sources_W)} windows of at most {WINDOW}; at least {EVERY} are needed to hold one out"
        )
    rank_W = np.empty(len(sources_W), np.int64)
    rank_W[np.argsort(sources_W, kind="stable")] = np.arange(len(sources_W))
    return np.asarray(rank_W[window_T] % EVERY == EVERY - 1)
