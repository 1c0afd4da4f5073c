"""Every row's logits of one token sequence, through prefill, decode or both; streams for comparison runs.

Row t predicts token t + 1. With `split` P the first P tokens go through prefill and the rest through decode steps,
one at a time, which is the path a served answer takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer
from ds4.engine.engine import Engine
from ds4.errors import UsageError


def score(
    engine: Engine,
    ids: Sequence[int],
    *,
    split: int | None = None,
    streams: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, NDArray[np.float32] | NDArray[np.int64]]:
    """Arrays of an OUT.npz: `logits_TV` f32; with `streams` also `streams_LTSD` f32 (L + 1 entries: entering each
    layer before its engram, then after the last) and `hash_rows_TGN` i64.

    Rows that a bounded replay does not compute are NaN, in the logits and in the streams from the split on.

    Raises:
        UsageError: `split` outside 1..T.
    """
    c, n = engine.config, len(ids)
    split = n if split is None else split
    if not 1 <= split <= n:
        raise UsageError(f"--split is {split}; it must be between 1 and the {n} tokens given")
    taken = np.full((c.num_hidden_layers + 1 if streams else 0, n, c.hc_mult, c.hidden_size), np.nan, np.float32)

    def tap(layer: int, first: int, x: Buffer) -> None:
        taken[layer, first : first + x.shape[0]] = engine.device.download(x)

    session = engine.session()
    rows = [session.sync(ids[:split], logits="all", on_progress=on_progress, tap=tap if streams else None)]
    for i in range(split, n):
        rows.append(session.step([ids[i]], tap=tap if streams else None))
        if on_progress:
            on_progress(i + 1, n)
    out: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {
        "logits_TV": np.concatenate([r for r in rows if r is not None])
    }
    if streams:
        out["streams_LTSD"] = taken
        out["hash_rows_TGN"] = engine.feed.rows(list(ids), 0, n)
    return out
