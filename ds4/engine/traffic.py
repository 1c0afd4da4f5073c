"""Stored weight bytes that a sequence's decode passes read, counted from what they did.

A pass reads every dense matrix once, whatever its rows, and each distinct expert of a layer once with its codebook; a
round of drafts likewise, with the output head and a Markov head a draft. Rows of embeddings, keys, n-gram rows and
what kernels read again out of a cache are left out.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np

from ds4.device import Buffer
from ds4.engine.lane import Lane
from ds4.engine.ops.experts import ExpertWeights
from ds4.engine.ops.linear import Weight
from ds4.engine.weights import LayerWeights


def weight_bytes(lane: Lane) -> int:
    """Bytes since the lane was cleared."""
    steps, touched = lane.step.counts, lane.step.device.download(lane.touched).astype(np.int64)
    k = lane.step.config.num_experts_per_tok
    total = steps.passes * (_dense(lane.weights.norm) + _dense(lane.weights.head))
    for lw in lane.weights.layers:
        picked = int(touched[lw.layer]) + k * steps.one_row
        total += steps.passes * _dense(lw) + _experts(lw, picked, steps.passes)
    if lane.drafter is None or lane.draft is None:
        return total
    drafter, draft = lane.drafter, lane.draft
    once = (draft.model.norm, draft.model.head, draft.confidence)
    total += drafter.rounds * (sum(map(_dense, once)) + drafter.B * _dense(draft.markov_head))
    total += drafter.commits * (_dense(draft.main_proj) + _dense(draft.main_norm))
    for lw in draft.model.layers:
        picked = int(touched[lw.layer])
        if drafter.B == 1:
            picked = drafter.rounds * drafter.config.num_experts_per_tok
        total += drafter.rounds * _dense(lw) + drafter.commits * (_dense(lw.kv) + _dense(lw.kv_norm))
        total += _experts(lw, picked, drafter.rounds)
    return total


def _experts(lw: LayerWeights, picked: int, passes: int) -> int:
    book = lw.experts.codebook.nbytes
    return picked * ((lw.experts.nbytes - book) // lw.experts.n_expert) + passes * book


def _dense(part: object) -> int:
    """Bytes of all buffers of a part of the weights but its experts."""
    if isinstance(part, Buffer | Weight):  # a weight's scales may be its codes
        return part.nbytes
    if is_dataclass(part) and not isinstance(part, ExpertWeights):
        return sum(_dense(getattr(part, f.name)) for f in fields(part))
    return 0
