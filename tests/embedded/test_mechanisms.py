"""Every mechanism of the embedded model is live: what a random or half-trained model would leave idle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4 import embedded
from ds4.checkpoint.reader import Checkpoint
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer
from ds4.teacher import attention as teacher_attention
from ds4.teacher import engram as teacher_engram
from ds4.teacher import moe as teacher_moe
from ds4.teacher.indexer import best_mask, mask_to_candidates
from ds4.teacher.run import Teacher, Trace
from tests.embedded.conftest import judge_ids

LONG = 1000
SHARE = 512  # tokens of a domain, for what is counted over all of them
MOST_LOAD = 2.0  # of an even share


@dataclass
class Seen:
    """What one run of the teacher passed through."""

    ids: NDArray[np.int64]
    logits_TV: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    trace: Trace = field(default_factory=Trace)
    gates: list[NDArray[np.float32]] = field(default_factory=list)  # an engram layer, [R, S]
    picked: list[NDArray[np.int64]] = field(default_factory=list)  # a layer, [R, k] experts
    candidates: list[tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=list)  # all scores, the masked ones


def watched(teacher: Teacher, ids: NDArray[np.int64]) -> Seen:
    """Run the teacher with its own functions, and note what goes in and out of them."""
    seen = Seen(ids)

    def sigmoid(nm: Any, x: Any) -> Any:
        seen.gates.append(given[0](nm, x))
        return seen.gates[-1]

    def route(*args: Any) -> Any:
        out = given[1](*args)
        seen.picked.append(out[0])
        return out

    def masked(nm: Any, config: ModelConfig, scores: Any, blocks: Any) -> Any:
        out = given[2](nm, config, scores, blocks)
        seen.candidates.append((scores, out))
        return out

    given = (teacher_engram.sigmoid, teacher_moe.route, mask_to_candidates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_engram, "sigmoid", sigmoid)
        patch.setattr(teacher_moe, "route", route)
        patch.setattr(teacher_attention, "mask_to_candidates", masked)
        seen.logits_TV = teacher.forward(teacher.new_state(), ids, trace=seen.trace)
    return seen


@pytest.fixture(scope="module")
def long(teacher: Teacher, tokenizer: Tokenizer) -> Seen:
    """A thousand tokens of prose."""
    return watched(teacher, judge_ids(tokenizer, "general", LONG))


@pytest.fixture(scope="module")
def mixed(teacher: Teacher, tokenizer: Tokenizer) -> list[Seen]:
    """A piece of every domain."""
    return [watched(teacher, judge_ids(tokenizer, domain, SHARE)) for domain in embedded.domains()]


def test_the_structure_is_the_released_one(config: ModelConfig) -> None:
    layers = range(config.num_hidden_layers)
    assert {config.compress_ratios[i] for i in layers} == {0, 1, 2}
    assert len(config.kv_source_layer_ids) >= 3 and len(config.index_source_layer_ids) >= 3
    assert any(i not in config.kv_source_layer_ids and config.kv_owner(i) is not None for i in layers)
    assert any(config.uses_candidates(i) for i in layers)
    assert len(config.engram_layer_ids) == 2 and config.num_nextn_predict_layers == 3
    assert config.rope_frequencies(1) != config.rope_frequencies(0)  # YaRN on compressed layers only
    assert config.max_position_embeddings >= 4096


def test_index_lists_are_shorter_than_what_is_visible(long: Seen, config: ModelConfig) -> None:
    """At 300 tokens, at every index source; and they are neither the newest rows nor the oldest."""
    (picks,) = long.trace.picks
    at = 299
    assert set(picks) == set(config.index_source_layer_ids)
    for layer, rows in picks.items():
        visible = (at + 1) // config.compress_ratios[layer]
        chosen = rows[at][rows[at] >= 0]
        assert len(chosen) == config.index_topk < visible
        newest = np.arange(visible - len(chosen), visible)
        for dull in (newest, np.arange(len(chosen))):
            assert len(np.intersect1d(chosen, dull)) < 0.9 * len(chosen), layer


def test_index_sources_choose_for_themselves(long: Seen, config: ModelConfig) -> None:
    """Two sources over the same rows do not give the same list."""
    (picks,) = long.trace.picks
    first, second = (layer for layer in config.index_source_layer_ids if config.compress_ratios[layer] == 1)
    shared = [len(np.intersect1d(picks[first][t], picks[second][t])) for t in range(500, LONG, 50)]
    assert np.mean(shared) < 0.9 * config.index_topk


def test_candidates_cut(long: Seen, teacher: Teacher, config: ModelConfig) -> None:
    """At a thousand tokens the pool is smaller than what is visible, and rows that would be picked are outside."""
    scores = np.concatenate([s for s, _ in long.candidates])[-100:]
    masked = np.concatenate([m for _, m in long.candidates])[-100:]
    pool = config.candidate_topk_blocks * config.candidate_block_size
    assert (np.isfinite(scores).sum(axis=1) > LONG - 101).all() and (np.isfinite(masked).sum(axis=1) <= pool).all()
    free, held = (best_mask(teacher.nm, s, config.index_topk) for s in (scores, masked))
    lost = (free & ~held).sum(axis=1)
    assert (lost > 0).mean() > 0.5
    # but the blocks were chosen by a layer that looks for the same: more is kept than a blind choice of blocks keeps
    kept = 1 - lost.mean() / config.index_topk
    assert kept > 1.2 * pool / LONG


def test_experts_are_used_evenly(mixed: list[Seen], config: ModelConfig) -> None:
    """No expert has more than twice its share of the tokens of all domains, and none is idle."""
    for layer in range(config.num_hidden_layers):
        picked = np.concatenate([s.picked[layer] for s in mixed])
        load = np.bincount(picked.ravel(), minlength=config.n_routed_experts) / picked.size * config.n_routed_experts
        assert load.max() <= MOST_LOAD and load.min() > 0, (layer, load.round(2))


def test_experts_depend_on_the_domain(mixed: list[Seen], config: ModelConfig) -> None:
    """Loads of two domains differ more than those of the halves of one: the router tells texts apart."""
    last = config.num_hidden_layers - 1

    def load(picked: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.bincount(picked.ravel(), minlength=config.n_routed_experts) / picked.size

    names = embedded.domains()
    code, law = (mixed[names.index(d)].picked[last] for d in ("code", "law"))
    between = np.abs(load(code) - load(law)).sum()
    within = np.mean([np.abs(load(p[::2]) - load(p[1::2])).sum() for p in (code, law)])
    assert between > 1.5 * within


def test_biases_and_sinks_are_trained(config: ModelConfig) -> None:
    checkpoint = Checkpoint.open(embedded.checkpoint())
    for layer in range(config.num_hidden_layers):
        assert np.ptp(checkpoint.tensor(f"layers.{layer}.ffn.gate.bias")) > 1e-3
        assert np.ptp(checkpoint.tensor(f"layers.{layer}.attn.attn_sink")) > 1e-3


def test_engram_gates_open_and_close(long: Seen, config: ModelConfig) -> None:
    assert len(long.gates) == len(config.engram_layer_ids)
    for gate_RS in long.gates:
        assert gate_RS.std(axis=0).max() > 0.02
        assert np.quantile(gate_RS, 0.95) - np.quantile(gate_RS, 0.05) > 0.05


def test_the_engram_helps(long: Seen, teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both gates shut the text is harder to predict."""
    monkeypatch.setattr(teacher_engram, "sigmoid", lambda nm, x: nm.xp.zeros_like(x))
    assert nll(teacher.run(long.ids)["logits_TV"], long.ids) > 1.01 * nll(long.logits_TV, long.ids)


def test_rows_beyond_the_window_help(long: Seen, teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the window alone the text is harder to predict."""
    attend = teacher_attention.attend

    def window_only(nm: Any, q: Any, window: Any, seen: Any, rows: Any, picks: Any, sink: Any) -> Any:
        return attend(nm, q, window, seen, None, None, sink)

    monkeypatch.setattr(teacher_attention, "attend", window_only)
    assert nll(teacher.run(long.ids)["logits_TV"], long.ids) > 1.01 * nll(long.logits_TV, long.ids)


@pytest.mark.parametrize("domain", ["code", "law", "medicine", "science", "general"])
def test_it_has_learned_its_text(mixed: list[Seen], tokenizer: Tokenizer, domain: str) -> None:
    """Far below what a byte costs without a model; the figures proper are in docs/embedded-model.md."""
    seen = mixed[embedded.domains().index(domain)]
    n_bytes = sum(len(tokenizer.token_bytes(int(i))) for i in seen.ids[1:])
    assert nll(seen.logits_TV, seen.ids) * (len(seen.ids) - 1) / np.log(2) / n_bytes < 2.3


def nll(logits_TV: NDArray[np.float32], ids_T: NDArray[np.int64]) -> float:
    """Nats a token, of every token but the first."""
    x = logits_TV[:-1].astype(np.float64)
    top = x.max(axis=1, keepdims=True)
    log_sum = top[:, 0] + np.log(np.exp(x - top).sum(axis=1))
    return float((log_sum - x[np.arange(len(x)), ids_T[1:]]).mean())
