"""Attention over window and picked rows with a sink (model-text 5.4), in blocks of queries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds4.model.config import ModelConfig
from ds4.teacher.compressor import CompressorWeights, compress
from ds4.teacher.indexer import (
    IndexerWeights,
    best_mask,
    candidate_blocks,
    index_query,
    index_scores,
    mask_to_candidates,
    publishers,
    rows_of_mask,
)
from ds4.teacher.numerics import F32, I64, Numerics
from ds4.teacher.state import Call, State

NEG_INF = np.float32(-np.inf)
MAX_FLOOR = np.float32(-1e30)
GATHER_CELLS = 1 << 24  # float32 cells of gathered compressed rows held at once
MOST_QUERIES = 64


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's matrices, [out, in]; sink f32 [H]. compressor and indexer only where the layer owns one."""

    sink: F32
    wq_a: F32
    q_norm: F32
    wq_b: F32
    wkv: F32
    kv_norm: F32
    wo_a: F32
    wo_b: F32
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


def attention(
    nm: Numerics,
    config: ModelConfig,
    layer: int,
    w: AttentionWeights,
    x_RD: F32,
    call: Call,
    state: State,
    frequencies: F32,
) -> F32:
    """The attention sublayer on normalised input x; updates the layer's state. f32 [R, D]."""
    xp = nm.xp
    own = state.layers[layer]
    kv = nm.rms_norm(nm.quantised_linear(x_RD, w.wkv), w.kv_norm, config.rms_norm_eps)
    kv = nm.round_window(nm.rope(kv, call.positions, frequencies))
    n_before = own.window.shape[0]
    window = xp.concatenate([own.window, kv])
    if w.compressor is not None:
        compress(nm, config, layer, w.compressor, x_RD, call, own, frequencies)
    qr = nm.rms_norm(nm.quantised_linear(x_RD, w.wq_a), w.q_norm, config.rms_norm_eps)
    if w.indexer is not None:
        pick_rows(nm, config, layer, w.indexer, qr, x_RD, call, state, frequencies)

    owner = config.kv_owner(layer)
    rows = None if owner is None else state.layers[owner].compressed
    picks = None if rows is None or rows.n == 0 else call.picks
    n_picks = 0 if picks is None else picks.shape[1]
    step = max(1, min(MOST_QUERIES, GATHER_CELLS // max(1, n_picks * config.head_dim)))
    out: F32 = xp.empty((call.n, config.hidden_size), dtype=xp.float32)
    for lo in range(0, call.n, step):
        block = slice(lo, min(lo + step, call.n))
        q = nm.quantised_linear(qr[block], w.wq_b).reshape(-1, config.num_attention_heads, config.head_dim)
        q = nm.rope(q, call.positions[block], frequencies)
        # window rows first..last serve this block; row i of `window` is position start - n_before + i
        first = max(0, n_before + block.start - config.sliding_window + 1)
        last = n_before + block.stop
        age = xp.arange(n_before + block.start, last)[:, None] - xp.arange(first, last)[None, :]
        seen = (age >= 0) & (age < config.sliding_window)
        chosen = None if picks is None else picks[block]
        o = attend(nm, q, window[first:last], seen, None if rows is None else rows.view, chosen, w.sink)
        o = nm.rope(o, call.positions[block], frequencies, inverse=True)
        out[block] = project_out(nm, config, w, o)
    own.window = window[max(0, window.shape[0] - config.sliding_window + 1) :].copy()
    return out


def attend(
    nm: Numerics, q_RHK: F32, window_NK: F32, seen_RN: F32, rows_CK: F32 | None, picks_Rk: I64 | None, sink_H: F32
) -> F32:
    """Softmax over the union of window and picked rows; the sink adds to the denominator only. f32 [R, H, K].

    Args:
        seen_RN: which window keys a query sees.
        picks_Rk: rows of rows_CK a query sees, -1 = none; None when the layer has no compressed rows yet.
    """
    xp = nm.xp
    n_window = window_NK.shape[0]
    scale = np.float32(q_RHK.shape[-1] ** -0.5)
    scores = xp.where(seen_RN[:, None, :], xp.matmul(q_RHK, window_NK.T) * scale, NEG_INF)
    picked: F32 | None = None
    if picks_Rk is not None and rows_CK is not None:
        picked = rows_CK[xp.maximum(picks_Rk, 0)]  # [R, k, K]
        s = xp.matmul(q_RHK, picked.transpose(0, 2, 1)) * scale
        scores = xp.concatenate([scores, xp.where((picks_Rk >= 0)[:, None, :], s, NEG_INF)], axis=2)
    top = xp.maximum(scores.max(axis=2, keepdims=True), MAX_FLOOR)
    e = xp.exp(scores - top)
    with np.errstate(over="ignore"):  # a sink far above every key: infinity, and the output is 0
        total = e.sum(axis=2, keepdims=True) + xp.exp(sink_H[None, :, None] - top)
    e = nm.bf16(e)
    o = xp.matmul(e[:, :, :n_window], window_NK)
    if picked is not None:
        o = o + xp.matmul(e[:, :, n_window:], picked)
    return nm.bf16(o / total)


def project_out(nm: Numerics, config: ModelConfig, w: AttentionWeights, o_RHK: F32) -> F32:
    """Grouped low-rank projection: wo_a within each group of heads, wo_b over all. f32 [R, D]."""
    groups, rank = config.o_groups, config.o_lora_rank
    o_GRd = o_RHK.reshape(o_RHK.shape[0], groups, -1).transpose(1, 0, 2)
    wo_a = w.wo_a.reshape(groups, rank, -1)
    u = nm.bf16(nm.xp.matmul(o_GRd, wo_a.transpose(0, 2, 1))).transpose(1, 0, 2)
    return nm.quantised_linear(u.reshape(-1, groups * rank), w.wo_b)


def pick_rows(
    nm: Numerics,
    config: ModelConfig,
    layer: int,
    w: IndexerWeights,
    qr_R: F32,
    x_RD: F32,
    call: Call,
    state: State,
    frequencies: F32,
) -> None:
    """Set call.picks [R, min(topk, visible rows at the call's end)], and call.candidates at their source."""
    xp = nm.xp
    ratio = config.compress_ratios[layer]
    n_rows = call.end // ratio
    width = min(config.index_topk, n_rows)
    call.picks = call.all_picks[layer] = xp.full((call.n, width), -1, dtype=xp.int64)
    makes_candidates = layer == config.candidate_source_layer_id
    if makes_candidates:
        size = config.candidate_block_size
        call.candidates = xp.zeros((call.n, -(-n_rows // size)), dtype=bool)
    if n_rows == 0:
        return
    owner = config.kv_owner(layer)
    assert owner is not None
    sources: list[int | None] = [owner] * call.n
    if call.by_publisher:
        sources = publishers(config, layer, call.start, call.n, state.published)
    lens = (call.positions + 1) // ratio
    step = max(1, GATHER_CELLS // n_rows)
    for lo in range(0, call.n, step):
        block = slice(lo, min(lo + step, call.n))
        q, head_w = index_query(nm, config, w, qr_R[block], x_RD[block], call.positions[block], frequencies)
        scores = xp.full((q.shape[0], n_rows), NEG_INF, dtype=xp.float32)
        for source in {s for s in sources[block] if s is not None}:
            rows = xp.asarray([i for i, s in enumerate(sources[block]) if s == source])
            keys = state.layers[source].index_keys
            assert keys is not None
            scores[rows] = index_scores(nm, q[rows], head_w[rows], keys.view, lens[block][rows], n_rows)
        if makes_candidates:
            assert call.candidates is not None
            call.candidates[block] = candidate_blocks(nm, config, scores, lens[block])
        elif config.uses_candidates(layer):
            assert call.candidates is not None
            scores = mask_to_candidates(nm, config, scores, call.candidates[block])
        call.picks[block] = rows_of_mask(nm, best_mask(nm, scores, width), width)
