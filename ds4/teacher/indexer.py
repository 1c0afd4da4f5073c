"""Index keys, scores, candidate blocks and exact top-k (model-text 5.6 and 6).

Ties go to the lowest row everywhere; a row whose score is -inf is never picked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds4.model.config import ModelConfig
from ds4.teacher.numerics import F32, I64, Mask, Numerics

NEG_INF = np.float32(-np.inf)
SCORE_CELLS = 1 << 24  # dots held at once: queries are taken in blocks of this many heads x rows


@dataclass(frozen=True)
class IndexerWeights:
    """wq_b f32 [Hi*I, q_lora_rank], weights_proj f32 [Hi, D]: present at every index source."""

    wq_b: F32
    weights_proj: F32


def best_mask(nm: Numerics, scores_RC: F32, k: int) -> Mask:
    """True at each row's k largest scores, ties to the lowest column, -inf never."""
    xp = nm.xp
    n_columns = scores_RC.shape[1]
    visible: Mask = scores_RC > NEG_INF
    if k >= n_columns:
        return visible
    if k == 0:
        nothing: Mask = xp.zeros_like(visible)
        return nothing
    kth = xp.partition(scores_RC, n_columns - k, axis=1)[:, n_columns - k, None]
    above = scores_RC > kth
    tied = scores_RC == kth
    room = k - above.sum(axis=1, keepdims=True)
    chosen: Mask = (above | (tied & (xp.cumsum(tied, axis=1) <= room))) & visible
    return chosen


def rows_of_mask(nm: Numerics, mask_RC: Mask, width: int) -> I64:
    """Each row's true columns, ascending, padded at the end with -1 to `width`."""
    xp = nm.xp
    picks: I64 = xp.full((mask_RC.shape[0], width), -1, dtype=xp.int64)
    rows, columns = xp.nonzero(mask_RC)
    slots = (xp.cumsum(mask_RC, axis=1) - 1)[rows, columns]
    picks[rows, slots] = columns
    return picks


def index_query(
    nm: Numerics, config: ModelConfig, w: IndexerWeights, qr_R: F32, x_RD: F32, positions_R: I64, frequencies: F32
) -> tuple[F32, F32]:
    """Queries f32 [R, Hi, I] and head weights f32 [R, Hi]."""
    heads, width = config.index_n_heads, config.index_head_dim
    q = nm.quantised_linear(qr_R, w.wq_b).reshape(-1, heads, width)
    q = nm.round_index(nm.rope(q, positions_R, frequencies))
    scale = np.float32(width**-0.5 * heads**-0.5)
    return q, nm.bf16(nm.linear(x_RD, w.weights_proj) * scale)


def index_scores(nm: Numerics, q_RHI: F32, w_RH: F32, keys_CI: F32, lens_R: I64, n_columns: int) -> F32:
    """score[j] = sum_h w[h] max(0, q_h . k_j) for j < lens, else -inf; f32 [R, n_columns].

    A key list shorter than n_columns leaves the rest at -inf.
    """
    xp = nm.xp
    n_rows, n_heads, _ = q_RHI.shape
    scores: F32 = xp.full((n_rows, n_columns), NEG_INF, dtype=xp.float32)
    keys_CI = keys_CI[:n_columns]
    n_keys = keys_CI.shape[0]
    if n_keys == 0:
        return scores
    step = max(1, SCORE_CELLS // (n_heads * n_keys))
    for lo in range(0, n_rows, step):
        rows = slice(lo, lo + step)
        dots = nm.bf16(xp.matmul(q_RHI[rows], keys_CI.T))
        dots = xp.maximum(dots, np.float32(0), out=dots)
        total = nm.bf16(xp.matmul(w_RH[rows, None, :], dots)[:, 0])
        hidden = xp.arange(n_keys)[None, :] >= lens_R[rows, None]
        scores[rows, :n_keys] = xp.where(hidden, NEG_INF, total)
    return scores


def candidate_blocks(nm: Numerics, config: ModelConfig, scores_RC: F32, lens_R: I64) -> Mask:
    """The blocks that later index sources may pick from, bool [R, n_blocks].

    Best candidate_topk_blocks blocks by their largest score; the block of the newest visible row is always in.
    """
    xp = nm.xp
    size = config.candidate_block_size
    n_rows, n_columns = scores_RC.shape
    n_blocks = -(-n_columns // size)
    padded = xp.full((n_rows, n_blocks * size), NEG_INF, dtype=xp.float32)
    padded[:, :n_columns] = scores_RC
    blocks = padded.reshape(n_rows, n_blocks, size).max(axis=2)
    newest = (lens_R - 1) // size
    seen = xp.nonzero(lens_R > 0)[0]
    blocks[seen, newest[seen]] = np.float32(np.inf)
    return best_mask(nm, blocks, min(config.candidate_topk_blocks, n_blocks))


def mask_to_candidates(nm: Numerics, config: ModelConfig, scores_RC: F32, blocks: Mask) -> F32:
    """Scores with everything outside a query's candidate blocks at -inf."""
    xp = nm.xp
    inside = xp.repeat(blocks, config.candidate_block_size, axis=1)[:, : scores_RC.shape[1]]
    masked: F32 = xp.where(inside, scores_RC, NEG_INF)
    return masked


def publishers(config: ModelConfig, layer: int, start: int, n: int, held: int | None) -> list[int | None]:
    """Whose index keys each decoded row start..start+n-1 scores at `layer`, in `released` mode.

    Owner l publishes at position p iff (p + 1) mod R_l == 0. A row takes the latest publisher in (position,
    layer) order up to itself, worked out from positions alone: a log kept while layers run would have the
    owners above `layer` of earlier rows in the wrong order. `held` is what the call found.
    """
    result: list[int | None] = []
    before = held
    for p in range(start, start + n):
        own = [owner for owner in _closing(config, p) if owner <= layer]
        result.append(own[-1] if own else before)
        before = _latest(config, p, before)
    return result


def published_after(config: ModelConfig, start: int, n: int, held: int | None, *, decode: bool) -> int | None:
    """The published-keys pointer after a call: of a prefill, the last owner in layer order that closed a group."""
    if decode:
        for p in range(start, start + n):
            held = _latest(config, p, held)
        return held
    ratios = config.compress_ratios
    closed = [k for k in config.kv_source_layer_ids if (start + n) // ratios[k] > start // ratios[k]]
    return closed[-1] if closed else held


def _closing(config: ModelConfig, p: int) -> list[int]:
    return [owner for owner in config.kv_source_layer_ids if (p + 1) % config.compress_ratios[owner] == 0]


def _latest(config: ModelConfig, p: int, held: int | None) -> int | None:
    closing = _closing(config, p)
    return closing[-1] if closing else held
