"""The numeric vectors of model-text 14 and the formulas of single operators, each against plain float64."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ds4.errors import UsageError
from ds4.model.config import ModelConfig
from ds4.teacher.attention import attend
from ds4.teacher.engram import EngramWeights, engram
from ds4.teacher.hyper import HyperWeights, collapse, expand, mixes, split_mixes
from ds4.teacher.indexer import (
    IndexerWeights,
    best_mask,
    candidate_blocks,
    index_query,
    index_scores,
    mask_to_candidates,
    published_after,
    publishers,
    rows_of_mask,
)
from ds4.teacher.moe import MoeWeights, expert, route, router_scores
from ds4.teacher.numerics import Numerics, round_bf16
from tests.teacher.oracles import DATA

NM = Numerics.of("none")
CONFIG = ModelConfig.load(DATA / "oracle-a")  # hc 4
PUBLISHED = ModelConfig.load(DATA / "published")
DIGITS = 5.1e-7  # the vectors have six decimals; float32 adds far less here


def section_14_mixes(s2: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    i = np.arange(24)
    m = (((7 * i) % 11) - 5) / 4
    base = ((i % 5) - 2) / 10
    scale = np.array([0.5, 0.25, s2], np.float32)
    config = replace(CONFIG, hc_mult=4, hc_eps=1e-6, hc_sinkhorn_iters=20)
    pre, post, comb = split_mixes(NM, config, m.astype(np.float32)[None], scale, base.astype(np.float32))
    return pre[0], post[0], comb[0]


def test_mixes_vector() -> None:
    pre, post, comb = section_14_mixes(1.0)
    np.testing.assert_allclose(pre, [0.304704, 0.537431, 0.437824, 0.673708], rtol=0, atol=DIGITS)
    np.testing.assert_allclose(post, [1.130501, 0.808639, 1.074860, 1.000000], rtol=0, atol=DIGITS)
    expected = [
        [0.181581, 0.485882, 0.198642, 0.133894],
        [0.269391, 0.046083, 0.485883, 0.198642],
        [0.149361, 0.399666, 0.269391, 0.181581],
        [0.399666, 0.068368, 0.046083, 0.485882],
    ]
    np.testing.assert_allclose(comb, expected, rtol=0, atol=1e-6)  # six decimals, and 39 float32 steps


def test_mixes_slow_vector_sees_the_iteration_count() -> None:
    _, _, comb = section_14_mixes(20.0)
    expected = [
        [0.041007, 0.500000, 0.000158, 0.452504],
        [0.000326, 0.000000, 0.999684, 0.002880],
        [0.041007, 0.499999, 0.000158, 0.452504],
        [0.917659, 0.000000, 0.000000, 0.092110],
    ]
    np.testing.assert_allclose(comb, expected, rtol=0, atol=5e-6)  # 19 or 21 iterations are off by 1e-3


def test_mixes_norm_is_joint_over_all_streams() -> None:
    rng = np.random.default_rng(0)
    config = replace(CONFIG, hc_mult=4)
    x = rng.standard_normal((3, 4, config.hidden_size)).astype(np.float32) * np.float32(1e-10)
    hyper = HyperWeights(
        rng.standard_normal((24, 4 * config.hidden_size)).astype(np.float32) / 16,
        np.array([0.5, 0.25, 1.0], np.float32), rng.standard_normal(24).astype(np.float32),
    )  # fmt: skip
    v = x.reshape(3, -1).astype(np.float64)
    m = (v @ hyper.fn.T.astype(np.float64)) / np.sqrt((v * v).mean(axis=1, keepdims=True) + config.rms_norm_eps)
    pre, _, _ = mixes(NM, config, hyper, x)
    expected = 1 / (1 + np.exp(-(m[:, :4] * 0.5 + hyper.base[:4]))) + config.hc_eps
    np.testing.assert_allclose(pre, expected, rtol=1e-5)


def test_expand_sums_over_the_first_index() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 4, 8)).astype(np.float32), rng.standard_normal((2, 8)).astype(np.float32)
    post, comb = rng.random((2, 4)).astype(np.float32), rng.random((2, 4, 4)).astype(np.float32)
    expected = post[:, :, None] * y[:, None] + np.einsum("rjk,rjd->rkd", comb.astype(np.float64), x)
    np.testing.assert_allclose(expand(NM, y, x, post, comb), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(collapse(NM, x, post), np.einsum("rs,rsd->rd", post, x), rtol=1e-5, atol=1e-6)


def test_yarn_table() -> None:
    layer = PUBLISHED.kv_source_layer_ids[0]
    f = PUBLISHED.rope_frequencies(layer)
    expected = {
        0: 1, 1: 0.687656022, 15: 0.00363553858, 16: 0.002265625, 20: 2.96977778e-4, 24: 1.953125e-5,
        25: 5.37231267e-6, 31: 5.68052904e-7,
    }  # fmt: skip
    for i, value in expected.items():
        assert f[i] == pytest.approx(value, rel=2e-9), i
    assert PUBLISHED.rope_frequencies(0)[1] == pytest.approx(10000 ** (-2 / 64), rel=1e-15)


def test_rope_turns_the_last_pairs_and_inverts() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 2, 10)).astype(np.float32)
    f = np.array([1.0, 0.25], np.float32)
    p = np.array([0, 3, 900])
    y = NM.rope(x, p, f)
    assert (y[..., :6] == x[..., :6]).all() and (y[0] == x[0]).all()
    z = (x[..., 6::2] + 1j * x[..., 7::2]) * np.exp(1j * p[:, None, None] * f.astype(np.float64))
    np.testing.assert_allclose(y[..., 6::2], z.real, atol=1e-6)
    np.testing.assert_allclose(y[..., 7::2], z.imag, atol=1e-6)
    np.testing.assert_allclose(NM.rope(y, p, f, inverse=True), x, atol=1e-6)


BLOCK = np.array([[0.1, -0.37, 1.25, -2.6, 0.015, 3.3, -0.7, 0] + [0] * 24], np.float32)


def test_rounding_points_of_the_modes() -> None:
    """Section 14's quantiser vectors, through the switches: which mode rounds what."""
    q8 = [0.1015625, -0.375, 1.25, -2.5, 0.0146484375, 3.25, -0.6875, 0]
    q4idx = [0, -0.5, 1, -3, 0, 3, -0.5, 0]
    q4kv = [0, -0.28125, 1.125, -2.25, 0, 3.375, -0.5625, 0]
    kv, vendor = Numerics.of("kv"), Numerics.of("vendor")
    for nm in (kv, vendor):
        assert nm.round_window(BLOCK)[0, :8].tolist() == q8
        assert nm.round_index(BLOCK)[0, :8].tolist() == q4idx
        assert nm.round_compressed(BLOCK)[0, :8].tolist() == q4kv
    eye = np.eye(32, dtype=np.float32)
    assert vendor.quantised_linear(BLOCK, eye)[0, :8].tolist() == q8
    assert (kv.quantised_linear(BLOCK, eye) == BLOCK).all()
    assert (vendor.linear(BLOCK, eye) == round_bf16(np, BLOCK)).all()
    for unchanged in (NM.round_window, NM.round_index, NM.round_compressed, NM.bf16, kv.bf16):
        assert unchanged(BLOCK) is BLOCK
    with pytest.raises(UsageError, match="'half' is unknown"):
        Numerics.of("half")


def test_round_bf16_ties_to_even_and_keeps_nan() -> None:
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1e-40, np.inf, np.nan], np.float32)
    y = round_bf16(np, x)
    assert y[:3].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]
    assert np.isinf(y[4]) and np.isnan(y[5])


def test_rms_norm_eps_decides_at_1e_10() -> None:
    x = np.full((1, 4), 1e-10, np.float32)
    w = np.arange(1, 5, dtype=np.float32)
    expected = 1e-10 / np.sqrt(1e-20 + 1e-20) * w.astype(np.float64)
    np.testing.assert_allclose(NM.rms_norm(x, w, 1e-20)[0], expected, rtol=1e-6)


def test_router_scores() -> None:
    u = np.array([-3, 0, 2, 25, 800, -86], np.float32)
    expected = [0.2204254, 0.8325546, 1.458399, 5, np.sqrt(800), np.sqrt(np.exp(-86.0))]
    np.testing.assert_allclose(router_scores(NM, u), expected, rtol=5e-7)


def test_route_bias_chooses_and_does_not_weigh() -> None:
    config = replace(CONFIG, num_experts_per_tok=2)
    x = np.array([[1.0], [1.0]], np.float32)
    gate = np.array([[3.0], [2.0], [1.0], [2.0]], np.float32)  # experts 1 and 3 tie
    vl = np.array([0, 0, 100, 0], np.float32)
    zero = np.zeros(4, np.float32)
    moe = MoeWeights(gate, zero, vl, (zero, zero, zero))
    picks, weights = route(NM, config, moe, x, np.array([False, True]), 2)
    assert picks.tolist() == [[0, 1], [0, 2]]
    s = np.sqrt(np.log1p(np.exp(np.array([3.0, 2.0, 1.0]))))
    np.testing.assert_allclose(weights[1], s[[0, 2]] / s[[0, 2]].sum() * config.routed_scaling_factor, rtol=1e-6)


def test_expert_clamps() -> None:
    w1 = np.array([[1.0], [1.0]], np.float32)
    w3 = np.array([[1.0], [-1.0]], np.float32)
    w2 = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    x = np.array([[20.0], [-20.0]], np.float32)

    def silu(g: float) -> float:
        return g / (1 + np.exp(-g))

    y = expert(NM, (w1, w3, w2), x, 7.0, np.array([1.0, 2.0], np.float32))
    expected = [[silu(7.0) * 7, silu(7.0) * -7], [2 * silu(-20.0) * -7, 2 * silu(-20.0) * 7]]
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_engram_gate_floor_sign_and_shut() -> None:
    d = 32
    config = replace(CONFIG, hc_mult=2, hidden_size=d)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((3, 2, d)).astype(np.float32)
    w = EngramWeights(
        rng.standard_normal((3 * d, 6)).astype(np.float32),
        np.array([[1] * d, [1e-9] * d], np.float32), np.ones((2, d), np.float32),
    )  # fmt: skip
    e = rng.standard_normal((3, 6)).astype(np.float32)
    y = engram(NM, config, w, x, e, np.array([False, False, True]))
    kv = e.astype(np.float64) @ w.wkv.T
    key, value = kv[:, : 2 * d].reshape(3, 2, d), kv[:, 2 * d :]
    dot = (x * w.q * w.k * key).sum(-1) / np.sqrt((x.astype(np.float64) ** 2).mean(-1) * (key**2).mean(-1)) * d**-0.5
    gate = 1 / (1 + np.exp(-np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot)))
    assert (np.abs(gate[:, 1] - 0.5) > 2e-4).all()  # the floor holds it away from one half
    expected = x + gate[:, :, None] * value[:, None]
    np.testing.assert_allclose(y[:2], expected[:2], rtol=1e-5, atol=1e-6)
    assert (y[2] == x[2]).all()


@pytest.mark.parametrize(
    ("sink", "n_seen", "n_picked"), [(0.0, 3, 2), (60.0, 3, 2), (-3000.0, 1, 0), (0.0, 0, 0), (5.0, 0, 1)]
)
def test_attend_sink_in_the_denominator_only(sink: float, n_seen: int, n_picked: int) -> None:
    rng = np.random.default_rng(4)
    q = rng.standard_normal((1, 2, 8)).astype(np.float32)
    window, rows = rng.standard_normal((5, 8)).astype(np.float32), rng.standard_normal((4, 8)).astype(np.float32)
    seen = np.arange(5)[None] < n_seen
    picks = np.where(np.arange(3) < n_picked, [1, 3, 0], -1)[None]
    o = attend(NM, q, window, seen, rows, picks, np.array([sink, sink], np.float32))
    keys = np.concatenate([window[seen[0]], rows[picks[0][picks[0] >= 0]]]).astype(np.float64)
    if len(keys) == 0:
        assert (o == 0).all()
        return
    e = np.exp(q[0].astype(np.float64) @ keys.T * 8**-0.5)
    np.testing.assert_allclose(o[0], (e @ keys) / (e.sum(1, keepdims=True) + np.exp(sink)), rtol=2e-5, atol=1e-30)


def test_best_mask_ties_lowest_and_never_minus_infinity() -> None:
    inf = -np.inf
    s = np.array([[1, 2, 2, 2, 0], [inf, 3, inf, inf, inf], [inf] * 5, [0, 0, 0, 0, 0]], np.float32)
    mask = best_mask(NM, s, 3)
    assert rows_of_mask(NM, mask, 3).tolist() == [[1, 2, 3], [1, -1, -1], [-1, -1, -1], [0, 1, 2]]
    assert rows_of_mask(NM, best_mask(NM, s, 2), 2).tolist() == [[1, 2], [1, -1], [-1, -1], [0, 1]]
    assert best_mask(NM, s, 9).sum(1).tolist() == [5, 1, 0, 5]
    assert not best_mask(NM, s, 0).any()


def test_index_scores_relu_on_the_dot_and_missing_keys() -> None:
    q = np.array([[[1.0, 0], [0, 1.0]]], np.float32)
    keys = np.array([[1, 1], [-1, 2], [2, -3]], np.float32)
    w = np.array([[2.0, -1.0]], np.float32)
    assert index_scores(NM, q, w, keys, np.array([4]), 5).tolist() == [[1, -2, 4, -np.inf, -np.inf]]
    assert index_scores(NM, q, w, keys, np.array([2]), 3).tolist() == [[1, -2, -np.inf]]
    assert index_scores(NM, q, w, keys[:0], np.array([2]), 2).tolist() == [[-np.inf, -np.inf]]


def test_index_query_scales_its_weights() -> None:
    """A positive common factor on the weights shows in no output, so the oracles cannot see it."""
    rng = np.random.default_rng(5)
    heads, width, d = CONFIG.index_n_heads, CONFIG.index_head_dim, CONFIG.hidden_size
    weights = IndexerWeights(
        rng.standard_normal((heads * width, CONFIG.q_lora_rank)).astype(np.float32),
        rng.standard_normal((heads, d)).astype(np.float32),
    )
    qr, x = rng.standard_normal((2, CONFIG.q_lora_rank)), rng.standard_normal((2, d))
    f = np.ones(2, np.float32)
    q, w = index_query(NM, CONFIG, weights, qr.astype(np.float32), x.astype(np.float32), np.array([0, 0]), f)
    np.testing.assert_allclose(w, (x @ weights.weights_proj.T) * width**-0.5 * heads**-0.5, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(q.reshape(2, -1), qr @ weights.wq_b.T, rtol=1e-4, atol=1e-5)


def test_candidates_force_the_newest_block() -> None:
    config = replace(CONFIG, candidate_block_size=2, candidate_topk_blocks=2)
    inf = -np.inf
    s = np.array([[9, 8, 1, 1, 7, 0, 0.5], [9, 8, inf, inf, inf, inf, inf], [inf] * 7], np.float32)
    blocks = candidate_blocks(NM, config, s, np.array([7, 2, 0]))
    assert blocks.tolist() == [[True, False, False, True], [True, False, False, False], [False] * 4]
    masked = mask_to_candidates(NM, config, s, blocks)
    assert masked[0].tolist() == [9, 8, inf, inf, inf, inf, 0.5]


def test_publishers_come_from_positions() -> None:
    """Released values: at even positions the ratio-2 layers score layer 20's keys (model-text 6)."""
    held = 20
    assert publishers(PUBLISHED, 2, 6, 3, held) == [20, 2, 20]
    assert publishers(PUBLISHED, 8, 7, 2, held) == [8, 20]
    assert publishers(PUBLISHED, 14, 7, 1, held) == [14]
    assert publishers(PUBLISHED, 24, 6, 2, held) == [20, 20]
    assert publishers(PUBLISHED, 2, 0, 2, None) == [None, 2]
    assert published_after(PUBLISHED, 0, 5, None, decode=False) == 20
    assert published_after(PUBLISHED, 6, 1, 20, decode=True) == 20
    halves = SimpleNamespace(
        kv_source_layer_ids=(2, 8, 14), compress_ratios=PUBLISHED.compress_ratios
    )  # no owner that closes at every position
    assert publishers(halves, 2, 6, 2, 14) == [14, 2]
    assert publishers(halves, 2, 6, 3, 8) == [8, 2, 14]
    assert published_after(halves, 6, 1, 8, decode=True) == 8
    assert published_after(halves, 0, 1, None, decode=False) is None
