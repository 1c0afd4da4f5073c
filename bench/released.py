"""Launches at the released model's shapes, with made-up data: what bench/traffic.py counts.

Matrices are cut to a slice of their rows (a row's requests repeat), columns never; `linear_step`'s choice by shape is
made from the whole matrix. Experts are whole, six of them, each picked once: what one token reads of one layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from watched import Seen, Watched

from ds4.base.plan import PlannedTensor, plan
from ds4.device import Buffer, Device
from ds4.device.kernels.linear import PREFILL, STEP, split_of
from ds4.engine.ops.attention import attention
from ds4.engine.ops.compress import compress_commit, compress_pool, compress_store, index_keys
from ds4.engine.ops.embed import embed
from ds4.engine.ops.engram import engram_decode, engram_gate
from ds4.engine.ops.experts import ExpertWeights, experts, moe_sum, place_experts, swiglu
from ds4.engine.ops.hyper import HyperParams, collapse_norm, expand, mixes
from ds4.engine.ops.index import index_query, index_select, mask_words
from ds4.engine.ops.kv import kv_layout, window_commit, window_kv
from ds4.engine.ops.norm import rms_norm
from ds4.engine.ops.placement import file_bytes, place_weight
from ds4.engine.ops.rope import rope_query
from ds4.engine.ops.router import route
from ds4.engine.ops.sample import pack_params, sample
from ds4.engine.scratch import Workspace
from ds4.engine.weights import FORMATS, kernel_constants
from ds4.model.config import ModelConfig

CONFIG = Path(__file__).resolve().parent.parent / "tests" / "data" / "published" / "config.json"
SLICE = 512  # rows of a matrix that are launched
F32_OUT = (
    "ffn_gate_inp",
    "indexer.",
    "attn_compressor_kv",
    "attn_compressor_gate",
    "engram_wkv",
    "output.weight",
    "markov_head",
)


@dataclass(frozen=True)
class Matrix:
    """A stored matrix [N, K]; `names` are those of this shape and format, `count` how often a pass reads one."""

    names: str
    format: str
    N: int
    K: int
    groups: int
    out: str  # element type of the product
    x: str  # of what it is multiplied with
    count: int


def released_config() -> ModelConfig:
    """The released model's numbers."""
    return ModelConfig.load(CONFIG)


def matrices(config: ModelConfig) -> list[Matrix]:
    """The distinct matrices that a decoded token multiplies with, from the quantizer's own plan."""
    others = ("mtp.", "v.", "engram.", "token_embd")
    return _distinct(config, [t for t in plan(config) if not t.name.startswith(others)])


def draft_matrices(config: ModelConfig) -> list[Matrix]:
    """Those that a round of drafts multiplies with, the backbone's output head too. A stage's `attn_kv` is read for
    committed rows and for the block's, the Markov head once a draft.
    """
    ours = [t for t in plan(config) if t.name.startswith("mtp.") or t.name == "output.weight"]
    others = ("mtp.markov_embd", "mtp.confidence")
    return _distinct(config, [t for t in ours if not t.name.startswith(others)])


def _distinct(config: ModelConfig, tensors: list[PlannedTensor]) -> list[Matrix]:
    found: dict[tuple[str, int, int, int, str, str], list[str]] = {}
    for t in tensors:
        if "hc_" in t.name or "engram_q" in t.name or "engram_k.weight" in t.name:
            continue  # read by kernels of their own
        if len(t.dims) != 2 or t.type_id not in FORMATS:
            continue
        K, N = t.dims
        short = re.sub(r"^(blk\.\d+|mtp\.\d+|mtp)\.", "", t.name).removesuffix(".weight")
        groups = config.o_groups if short == "attn_output_a" else 1
        out = "f32" if f"{short}.weight".startswith(F32_OUT) else "bf16"
        x = "f32" if short == "markov_head" else "bf16"
        times = config.dspark_block_size if short == "markov_head" else 1
        times += t.name.startswith("mtp.") and short == "attn_kv"
        found.setdefault((FORMATS[t.type_id], N, K, groups, out, x), []).extend([short] * times)
    return [Matrix(" ".join(dict.fromkeys(names)), *key, len(names)) for key, names in found.items()]


def stored(rng: np.random.Generator, format: str, N: int, K: int) -> NDArray[np.uint8]:
    """Bytes of a matrix in the file; any bytes will do, nobody looks at the products."""
    return rng.integers(0, 120, file_bytes(format, N, K), dtype=np.uint8)


def linear_steps(dev: Watched, m: Matrix, R: int, n_rows: int) -> Seen:
    """One launch of the step kernel on a slice of `m`."""
    rng = np.random.default_rng(1)
    N = min(m.N, n_rows)
    w = place_weight(dev, m.format, stored(rng, m.format, N, m.K), N, m.K)
    y, x = dev.empty((R, N), m.out), dev.zeros((R, m.groups * m.K), m.x)
    kernel = STEP[m.format, m.x, m.out, 1 if R == 1 else 8]
    dev.launch(kernel, y, w.codes, w.scales, x, R, N, m.K, m.groups, split_of(m.format, m.N, m.K))
    return dev.log.seen[-1]


def linear_prefills(dev: Watched, m: Matrix, R: int, n_rows: int) -> Seen:
    """One launch of the prefill kernel on a slice of `m`."""
    rng = np.random.default_rng(1)
    N = min(m.N, max(n_rows, 64 * m.groups))
    w = place_weight(dev, m.format, stored(rng, m.format, N, m.K), N, m.K)
    y, x = dev.empty((R, N), m.out), dev.zeros((R, m.groups * m.K), "bf16")
    dev.launch(PREFILL[m.format, m.out], y, w.codes, w.scales, x, R, N, m.K, m.groups)
    return dev.log.seen[-1]


@dataclass(frozen=True)
class _Payload:
    main: NDArray[np.uint8]
    plane: NDArray[np.uint8] | None
    gains: NDArray[np.float16]


class _Blob:
    """Random experts of one layer in `bits` bits."""

    def __init__(self, bits: int, F: int, D: int) -> None:
        self.bits, self.F, self.D = bits, F, D
        self.rng = np.random.default_rng(bits)
        self.codebook = self.rng.integers(0, 120, (1 << bits, 8), dtype=np.uint8)

    def payload(self, expert: int, matrix: int) -> _Payload:
        rows, cols = (self.D, self.F) if matrix == 2 else (self.F, self.D)
        n = cols // 8
        main = self.rng.integers(0, 256, (rows, -(-n * 12 // 8)), dtype=np.uint8)
        plane = self.rng.integers(0, 256, (rows, -(-n // 8)), dtype=np.uint8) if self.bits > 12 else None
        return _Payload(main, plane, np.ones(rows, np.float16))


def some_experts(
    fast: Device, config: ModelConfig, bits: int, F: int | None = None, n: int | None = None
) -> ExpertWeights:
    """`n` experts of one layer, as many as a token picks unless said otherwise, placed by the fast build."""
    F, D = F or config.moe_intermediate_size, config.hidden_size
    return place_experts(fast, _Blob(bits, F, D), n or config.num_experts_per_tok, F, D, config.swiglu_limit)


def expert_launches(
    dev: Watched, config: ModelConfig, weights: ExpertWeights, family: str, R: int,
    chosen: NDArray[np.int32] | None = None,
) -> list[Seen]:  # fmt: skip
    """The routed experts of one layer for R rows with the picks `chosen` [R, k]; if not given, all rows with the same
    ones: as many items as picks for up to eight rows in a step, 64 in a prefill.
    """
    k, D = config.num_experts_per_tok, config.hidden_size
    if chosen is None:
        chosen = np.tile(np.arange(k, dtype=np.int32), (R, 1))
    picks = dev.upload(chosen)
    factors = dev.upload(np.ones((R, k), np.float32))
    x, y = dev.zeros((R, D), "bf16"), dev.empty((R, k, D), "f32")
    start = len(dev.log.seen)
    experts(dev, Workspace(dev), family, weights, y, x, picks, factors, R)
    n_items = len(np.unique(chosen))
    return [replace(seen, axes=seen.axes | {"n_items": n_items}) for seen in dev.log.seen[start:]]


class Rest:
    """Everything else that a decoded token launches, at R rows from position `at` on."""

    def __init__(self, dev: Watched, config: ModelConfig, R: int, at: int, vocabulary: int) -> None:
        self.dev, self.c, self.R, self.at, self.V = dev, config, R, at, vocabulary
        self.ws = Workspace(dev)
        self.pos = dev.upload(np.arange(at, at + R, dtype=np.int32))
        self.freq = dev.upload(np.asarray(config.rope_frequencies(config.kv_source_layer_ids[0]), np.float32))
        self.layout = kv_layout(config, "fp4")
        self.rng = np.random.default_rng(3)

    def f32(self, *shape: int) -> Buffer:
        return self.dev.upload(self.rng.standard_normal(shape).astype(np.float32))

    def act(self, *shape: int) -> Buffer:
        return self.dev.zeros(shape, "bf16")

    def run(self) -> Iterator[Seen]:
        """The launches of every part, in the order of a layer."""
        parts: tuple[Callable[[], None], ...] = (
            self.embedding, self.hyper, self.engram, self.attention_input, self.publish, self.select, self.attend,
            self.router, self.sums, self.sampling,
        )  # fmt: skip
        for part in parts:
            start = len(self.dev.log.seen)
            part()
            yield from self.dev.log.seen[start:]

    def embedding(self) -> None:
        c = self.c
        w = place_weight(self.dev, "q4_k", stored(self.rng, "q4_k", 64, c.hidden_size), 64, c.hidden_size)
        ids = self.dev.upload((7 * np.arange(self.R, dtype=np.int32) + 3) % 64)
        embed(self.dev, w, self.dev.empty((self.R, c.hc_mult, c.hidden_size), "f32"), ids, self.R, c.hc_mult)

    def hyper(self) -> None:
        c, R, S, D = self.c, self.R, self.c.hc_mult, self.c.hidden_size
        M = S * (S + 2)
        params = HyperParams(
            self.f32(M, S * D), self.f32(3), self.f32(M), c.hc_sinkhorn_iters, c.rms_norm_eps, c.hc_eps
        )
        x, pre, post, comb = self.f32(R, S, D), self.f32(R, S), self.f32(R, S), self.f32(R, S, S)
        mixes(self.dev, self.ws, params, x, pre, post, comb, R)
        y = self.act(R, D)
        collapse_norm(self.dev, y, x, pre, self.f32(D), R, c.rms_norm_eps)
        expand(self.dev, x, y, post, comb, R)

    def engram(self) -> None:
        c, R, S, D = self.c, self.R, self.c.hc_mult, self.c.hidden_size
        width = c.engram_head_dim + c.engram_head_dim // 32
        rows = self.dev.zeros((R, c.engram_columns, width), "u8")
        engram_decode(self.dev, self.act(R, c.engram_columns * c.engram_head_dim), rows, R)
        x, kv = self.f32(R, S, D), self.f32(R, (S + 1) * D)
        engram_gate(self.dev, x, kv, self.f32(S, D), self.f32(S, D), R, c.rms_norm_eps, None)

    def attention_input(self) -> None:
        c, R = self.c, self.R
        qa = self.act(R, c.q_lora_rank)
        rms_norm(self.dev, self.act(R, c.q_lora_rank), qa, self.f32(c.q_lora_rank), R, c.q_lora_rank, c.rms_norm_eps)
        rope_query(self.dev, self.act(R, c.num_attention_heads, c.head_dim), self.pos, self.freq, R)

    def publish(self) -> None:
        c, dev = self.c, self.dev
        source = c.kv_source_layer_ids[0]
        ratio, K = c.compress_ratios[source], c.head_dim
        R = -(-self.R // ratio) * ratio  # whole groups: the formulas count a group in `ratio` rows
        pos = dev.upload(np.arange(self.at, self.at + R, dtype=np.int32))
        a, g, lat = self.f32(R, K), self.f32(R, K), self.act(R, K)
        partial = dev.zeros((2, 33 * ratio, K), "f32")
        compress_pool(dev, lat, a, g, partial, self.f32(K), pos, R, ratio, c.rms_norm_eps)
        compress_commit(dev, partial, a, g, pos, R)
        n = (self.at + R) // ratio + 1
        compress_store(dev, self.layout.empty_compressed(dev, n), lat, pos, self.freq, R, ratio)
        keys, I = self.layout.empty_keys(dev, n), c.index_head_dim  # noqa: E741 - the axis' letter
        index_keys(dev, keys, self.f32(R, I), self.f32(I), pos, self.freq, R, ratio, c.rms_norm_eps)

    def select(self) -> None:
        c, R, dev = self.c, self.R, self.dev
        H, I = c.index_n_heads, c.index_head_dim  # noqa: E741
        capacity = self.at + R
        q = self.f32(R, H, I)
        index_query(dev, q, self.pos, self.freq, R, "fp4")
        keys = self.layout.empty_keys(dev, capacity)
        keys.write(self.rng.integers(0, 120, keys.nbytes, dtype=np.uint8))
        mask = dev.zeros((R, mask_words(capacity, c.candidate_block_size)), "u32")
        picks = dev.empty((R, c.index_topk), "i32")
        index_select(
            dev, self.ws, "step", picks, q, self.f32(R, H), keys, self.pos, R, ratio=1, capacity=capacity,
            factor=0.1, candidates=("make", mask), block_size=c.candidate_block_size,
            topk_blocks=min(c.candidate_topk_blocks, capacity // c.candidate_block_size // 2),
        )  # fmt: skip

    def attend(self) -> None:
        c, R, dev = self.c, self.R, self.dev
        H, K = c.num_attention_heads, c.head_dim
        ring = self.layout.empty_window(dev, c.sliding_window + 64)
        chunk = dev.zeros(self.layout.window_shape(R), self.layout.dtype)
        window_kv(dev, chunk, self.act(R, K), self.f32(K), self.pos, self.freq, R, c.rms_norm_eps)
        comp = self.layout.empty_compressed(dev, c.index_topk)
        picks = dev.upload(np.tile(np.arange(c.index_topk, dtype=np.int32), (R, 1)))
        first = dev.zeros((1,), "i32")
        attention(
            dev, self.ws, "step", self.act(R, H, K), self.act(R, H, K), ring, chunk, comp, picks, self.f32(H),
            self.pos, self.freq, first, R, window=c.sliding_window,
        )  # fmt: skip
        window_commit(dev, ring, chunk, self.pos, R)

    def router(self) -> None:
        c, R = self.c, self.R
        E, k = c.n_routed_experts, c.num_experts_per_tok
        picks, weights = self.dev.empty((R, k), "i32"), self.dev.empty((R, k), "f32")
        route(self.dev, self.ws, self.f32(R, E), self.f32(E), picks, weights, R, c)

    def sums(self) -> None:
        c, R, F, D = self.c, self.R, self.c.moe_intermediate_size, self.c.hidden_size
        swiglu(self.dev, self.act(R, F), self.act(R, F), self.act(R, F), R, F, c.swiglu_limit)
        moe_sum(self.dev, self.act(R, D), self.f32(R, c.num_experts_per_tok, D), self.act(R, D), R)

    def sampling(self) -> None:
        params = self.dev.upload(pack_params(self.R, 0.0, 0, 1.0, 0.0, 1))
        sample(self.dev, self.dev.empty((self.R, 4), "i32"), self.f32(self.R, self.V), params, self.pos, self.R)


def constants(device: Device) -> Watched:
    """The device with the released model's compile-time sizes, and a log."""
    return Watched(device.with_constants(kernel_constants(released_config())))
