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

    Raises:
        UsageError: `split` outside 1..T, or streams under bounded replay, which has no rows for most positions.
    """
    c, n = engine.config, len(ids)
    split = n if split is None else split
    if not 1 <= split <= n:
        raise UsageError(f"--split is {split}; it must be between 1 and the {n} tokens given")
    if streams and engine.options.prefill == "replay":
        raise UsageError("--streams needs --prefill full: a bounded replay computes only the last window of rows")
    taken: list[list[NDArray[np.float32]]] = [[] for _ in range(c.num_hidden_layers + 1)]

    def tap(layer: int, x: Buffer) -> None:
        taken[layer].append(engine.device.download(x))

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
        out["streams_LTSD"] = np.stack([np.concatenate(layer) for layer in taken])
        out["hash_rows_TGN"] = engine.feed.rows(list(ids), 0, n)
    return out
