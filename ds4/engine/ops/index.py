"""The indexer: which compressed rows each row attends to (model-text 5.6)."""

from __future__ import annotations

from ds4.device import Buffer, Device
from ds4.device.kernels.index import INDEX_QUERY, INDEX_SCORES, INDEX_SCORES_MMA
from ds4.device.kernels.topk import SMALL_CAPACITY, TOPK_BLOCKS, TOPK_BLOCKS_SMALL, TOPK_ROWS, TOPK_ROWS_SMALL
from ds4.engine.ops.kv import mode_of
from ds4.engine.scratch import Workspace

SCORES_ELEMENTS = 1 << 24  # scores held at a time: 64 MB, or eight rows if those are longer
LEAST_ROWS = 8
PREFILL_ROWS = 8  # queries that share a tile of keys

Candidates = tuple[str, Buffer]  # "make" or "use", and the mask


def mask_words(capacity: int, block_size: int) -> int:
    """u32 words a row of a candidate mask: a bit a block."""
    n_blocks = -(-capacity // block_size)
    return -(-n_blocks // 32)


def index_query(dev: Device, q: Buffer, pos: Buffer, freq: Buffer, R: int, kv: str) -> None:
    """Rope q f32 [R, Hi, I] at its positions and round it to Q4idx unless kv is "f32"; in place."""
    dev.launch(INDEX_QUERY[kv], q, pos, freq, R, q.shape[1])


def index_select(
    dev: Device, ws: Workspace, family: str, picks: Buffer, q: Buffer, w: Buffer, keys: Buffer, pos: Buffer, R: int,
    *, ratio: int, capacity: int, factor: float, candidates: Candidates | None = None, block_size: int = 1,
    topk_blocks: int = 1,
) -> None:  # fmt: skip
    """picks[r] = the best rows j < lens of score[r, j] = sum_h w[r,h] factor relu(q[r,h] . keys[j]).

    Rising, -1 padded; ties take the lowest row, rows of -inf are dropped. lens = (pos[r] + 1) // ratio. Scores are
    held for a bounded number of rows at a time; a row's picks do not depend on how many that is.

    Args:
        family: "step" (1..8 rows) or "prefill": the same bits; in prefill eight queries share a tile of keys, and
            packed keys meet them on tensor cores, so q must be as index_query left it.
        picks: i32 [R, topk].   q: f32 [R, Hi, I].   w: f32 [R, Hi].   keys: index keys, at least `capacity` rows.
        candidates: ("make", mask): keep the topk_blocks best blocks of block_size rows a row, the last visible one
            always, as bits in mask u32 [R, mask_words(capacity, block_size)]; ("use", mask): only rows inside them.
    """
    topk, n_heads, width = picks.shape[1], q.shape[1], q.shape[2]
    kind, mask = candidates if candidates else (None, None)
    words = mask_words(capacity, block_size)
    small = capacity <= SMALL_CAPACITY
    held = min(R, max(LEAST_ROWS, SCORES_ELEMENTS // capacity))
    scores = ws.get("index_scores", (held, capacity), "f32")
    prefill = family == "prefill"
    kernel = INDEX_SCORES_MMA if prefill and mode_of(keys) == "fp4" else INDEX_SCORES[mode_of(keys)]
    for r in range(0, R, held):
        n = min(held, R - r)
        some_pos = pos.view(4 * r, (n,), "i32")
        some_mask = mask.view(4 * r * words, (n, words), "u32") if mask is not None else None
        dev.launch(
            kernel, scores, q.view(4 * r * n_heads * width, (n, n_heads, width), "f32"),
            w.view(4 * r * n_heads, (n, n_heads), "f32"), keys, some_pos, some_mask if kind == "use" else None, n,
            n_heads, ratio, capacity, PREFILL_ROWS if prefill else 1, block_size, words, factor,
        )  # fmt: skip
        if kind == "make":
            dev.launch(
                TOPK_BLOCKS_SMALL if small else TOPK_BLOCKS, some_mask, scores, some_pos, ratio, capacity,
                block_size, topk_blocks, words, R=n,
            )  # fmt: skip
        dev.launch(
            TOPK_ROWS_SMALL if small else TOPK_ROWS, picks.view(4 * r * topk, (n, topk), "i32"), scores, some_pos,
            ratio, capacity, topk, R=n,
        )  # fmt: skip
