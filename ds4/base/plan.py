"""Tensor -> type: the whole recipe of a base file in one list, from the config alone.

The order and the names are those of the published file; what it lacks (`exp_probs_b_vl.bias`, the vision
tower as `v.*`) follows at the end when the config has a vision tower. Dims are in GGUF order, fastest first.

| kind  | stored as |
|-------|-----------|
| dense | q4_K; Q8_0 where 256 does not divide the row; BF16 where 32 does not either |
| exact | the release's FP8 tiles (fp8_32x32) where 32 divides both dims; else Q8_0 or BF16 as above |
| bf16, f32, i32, i64 | as named |
| blob  | one layer's routed experts, vector-quantized (blob.py) |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds4.base.blob import MAX_BITS, blob_bytes
from ds4.base.types import BF16, F32, FP8_32X32, I32, I64, Q4_K, Q8_0, VQBLOB, tensor_bytes
from ds4.errors import UsageError
from ds4.model.config import ModelConfig

DEFAULT_FIRST_BITS, DEFAULT_BITS = 13, 12
_EXACT_TYPES = {"bf16": BF16, "f32": F32, "i32": I32, "i64": I64}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the base: what it is called and stored as, and the released tensor it comes from.

    `source` is a released name; for `kind` "blob" the prefix of the layer's experts; "" for engram tables,
    which are derived. `bits`, `n_expert`, `layer` have values for blobs only.
    """

    name: str
    type_id: int
    dims: tuple[int, ...]
    nbytes: int
    source: str
    kind: str
    bits: int = 0
    n_expert: int = 0
    layer: int = 0


def default_bits(config: ModelConfig) -> tuple[int, ...]:
    """13 bits on the first floor(14 L / 40 + 1/2) of L layers, 12 on the rest and in the draft stages."""
    n_layers = config.num_hidden_layers
    first = (28 * n_layers + 40) // 80  # floor(14 L / 40 + 1/2) in integers
    rest = n_layers - first + config.num_nextn_predict_layers
    return (DEFAULT_FIRST_BITS,) * first + (DEFAULT_BITS,) * rest


def expert_bits(config: ModelConfig, bits: int | Sequence[int] | None = None) -> tuple[int, ...]:
    """Index bits of every layer, then of every draft stage.

    Args:
        bits: None for the default recipe; one number for all layers and stages; a list for the layers, or
            for layers and stages.

    Raises:
        UsageError: a wrong count, or a value outside 1..13.
    """
    n_layers, n_draft = config.num_hidden_layers, config.num_nextn_predict_layers
    if bits is None:
        return default_bits(config)
    if isinstance(bits, int):
        chosen = (bits,) * (n_layers + n_draft)
    else:
        chosen = tuple(bits)
        if len(chosen) == n_layers:
            chosen += (DEFAULT_BITS,) * n_draft
    if len(chosen) != n_layers + n_draft:
        raise UsageError(f"--bits lists {len(chosen)} values; expected 1, {n_layers} or {n_layers + n_draft}")
    for b in chosen:
        if isinstance(b, bool) or not isinstance(b, int) or not 1 <= b <= MAX_BITS:
            raise UsageError(f"--bits has the value {b!r}; expected whole numbers from 1 to {MAX_BITS}")
    return chosen


def plan(config: ModelConfig, bits: int | Sequence[int] | None = None) -> list[PlannedTensor]:
    """Every tensor of the base of a model with this config, in file order.

    Raises:
        UsageError: impossible `bits`, or expert widths that the blob cannot hold.
    """
    if config.hidden_size % 8 or config.moe_intermediate_size % 8:
        raise UsageError("expert rows must be a multiple of 8 wide: see hidden_size and moe_intermediate_size")
    chosen = expert_bits(config, bits)
    return [_planned(config, row, chosen) for row in _inventory(config)]


@dataclass(frozen=True)
class _Row:
    name: str
    kind: str
    dims: tuple[int, ...]
    source: str = ""


def _planned(c: ModelConfig, row: _Row, bits: tuple[int, ...]) -> PlannedTensor:
    if row.kind == "blob":
        room, number = row.name.split(".")[:2]
        draft = room == "mtp"
        layer = int(number)
        n_expert = c.dspark_n_routed_experts if draft else c.n_routed_experts
        b = bits[c.num_hidden_layers + layer if draft else layer]
        n = blob_bytes(expert_shapes(c), n_expert, 1 << b)
        return PlannedTensor(row.name, VQBLOB, (n,), n, row.source, row.kind, b, n_expert, layer)
    type_id = _storage(row)
    return PlannedTensor(row.name, type_id, row.dims, tensor_bytes(type_id, row.dims, row.name), row.source, row.kind)


def _storage(row: _Row) -> int:
    if row.kind in _EXACT_TYPES:
        return _EXACT_TYPES[row.kind]
    width, rows = row.dims
    if row.kind == "exact" and width % 32 == 0 and rows % 32 == 0:
        return FP8_32X32
    if row.kind == "dense" and width % 256 == 0:
        return Q4_K
    return Q8_0 if width % 32 == 0 else BF16


def expert_shapes(c: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(rows, cols) of w1, w3, w2."""
    d, f = c.hidden_size, c.moe_intermediate_size
    return (f, d), (f, d), (d, f)


def _inventory(c: ModelConfig) -> Iterator[_Row]:
    d = c.hidden_size
    yield _Row("token_embd.weight", "dense", (d, c.vocab_size), "embed.weight")
    for layer in range(c.num_hidden_layers):
        yield from _trunk_layer(c, layer)
    for stage in range(c.num_nextn_predict_layers):
        yield from _draft_stage(c, stage)
    if c.num_nextn_predict_layers:
        last = f"mtp.{c.num_nextn_predict_layers - 1}."
        rank = c.dspark_markov_rank
        yield _Row("mtp.markov_embd.weight", "bf16", (rank, c.vocab_size), last + "markov_head.embed.weight")
        yield _Row("mtp.markov_head.weight", "bf16", (rank, c.vocab_size), last + "markov_head.head.weight")
        yield _Row("mtp.confidence.weight", "bf16", (d + rank, 1), last + "confidence_head.proj.weight")
        yield _Row("mtp.out_norm.weight", "f32", (d,), last + "norm.weight")
    yield _Row("output_norm.weight", "f32", (d,), "norm.weight")
    yield _Row("output.weight", "dense", (d, c.vocab_size), "head.weight")
    n_engram = len(c.engram_layer_ids)
    if n_engram:
        n, heads = c.engram_max_ngram_size, c.engram_n_heads
        yield _Row("engram.token_map", "i32", (c.vocab_size,))
        yield _Row("engram.multipliers", "i64", (n, n_engram))
        yield _Row("engram.primes", "i64", (heads, n - 1, n_engram))
        yield _Row("engram.offsets", "i64", (c.engram_columns, n_engram))
    if c.vision is not None:
        yield from _vision(c)


def _hyper(c: ModelConfig, p: str, source: str, which: str) -> Iterator[_Row]:
    yield _Row(f"{p}hc_{which}_fn.weight", "f32", (c.hc_mult * c.hidden_size, c.hc_mixes), f"{source}hc_{which}_fn")
    yield _Row(f"{p}hc_{which}_scale.weight", "f32", (3,), f"{source}hc_{which}_scale")
    yield _Row(f"{p}hc_{which}_base.weight", "f32", (c.hc_mixes,), f"{source}hc_{which}_base")


def _attention(c: ModelConfig, p: str, source: str, kind: str) -> Iterator[_Row]:
    d, q, k, h = c.hidden_size, c.q_lora_rank, c.head_dim, c.num_attention_heads
    out = c.o_groups * c.o_lora_rank
    a = source + "attn."
    yield from _hyper(c, p, source, "attn")
    yield _Row(p + "attn_norm.weight", "f32", (d,), source + "attn_norm.weight")
    yield _Row(p + "attn_q_a.weight", kind, (d, q), a + "wq_a.weight")
    yield _Row(p + "attn_q_a_norm.weight", "f32", (q,), a + "q_norm.weight")
    yield _Row(p + "attn_q_b.weight", kind, (q, h * k), a + "wq_b.weight")
    yield _Row(p + "attn_kv.weight", kind, (d, k), a + "wkv.weight")
    yield _Row(p + "attn_kv_a_norm.weight", "f32", (k,), a + "kv_norm.weight")
    yield _Row(p + "attn_sinks.weight", "f32", (h,), a + "attn_sink")
    yield _Row(p + "attn_output_a.weight", kind, (h * k // c.o_groups, out), a + "wo_a.weight")
    yield _Row(p + "attn_output_b.weight", kind, (out, d), a + "wo_b.weight")


def _router(c: ModelConfig, p: str, source: str, n_expert: int) -> Iterator[_Row]:
    d = c.hidden_size
    yield from _hyper(c, p, source, "ffn")
    yield _Row(p + "ffn_norm.weight", "f32", (d,), source + "ffn_norm.weight")
    yield _Row(p + "ffn_gate_inp.weight", "bf16", (d, n_expert), source + "ffn.gate.weight")
    yield _Row(p + "exp_probs_b.bias", "f32", (n_expert,), source + "ffn.gate.bias")


def _shared(c: ModelConfig, p: str, source: str, kind: str) -> Iterator[_Row]:
    d, f = c.hidden_size, c.moe_intermediate_size
    yield _Row(p + "ffn_gate_shexp.weight", kind, (d, f), source + "ffn.shared_experts.w1.weight")
    yield _Row(p + "ffn_up_shexp.weight", kind, (d, f), source + "ffn.shared_experts.w3.weight")
    yield _Row(p + "ffn_down_shexp.weight", kind, (f, d), source + "ffn.shared_experts.w2.weight")


def _trunk_layer(c: ModelConfig, layer: int) -> Iterator[_Row]:
    d, k, i = c.hidden_size, c.head_dim, c.index_head_dim
    p, source = f"blk.{layer}.", f"layers.{layer}."
    yield from _attention(c, p, source, "dense")
    compressor, indexer = source + "attn.compressor.", source + "attn.indexer."
    if layer in c.kv_source_layer_ids:
        yield _Row(p + "attn_compressor_kv.weight", "bf16", (d, k), compressor + "wkv.weight")
        if c.compress_ratios[layer] > 1:
            yield _Row(p + "attn_compressor_gate.weight", "bf16", (d, k), compressor + "wgate.weight")
        yield _Row(p + "attn_compressor_norm.weight", "f32", (k,), compressor + "norm.weight")
        yield _Row(p + "indexer.wk.weight", "bf16", (k, i), indexer + "wk.weight")
        yield _Row(p + "indexer.k_norm.weight", "f32", (i,), indexer + "k_norm.weight")
    if layer in c.index_source_layer_ids:
        n = c.index_n_heads
        yield _Row(p + "indexer.attn_q_b.weight", "dense", (c.q_lora_rank, n * i), indexer + "wq_b.weight")
        yield _Row(p + "indexer.proj.weight", "bf16", (d, n), indexer + "weights_proj.weight")
    yield from _router(c, p, source, c.n_routed_experts)
    yield _Row(p + "ffn_exps_vq.blob", "blob", (), source + "ffn.experts.")
    yield from _shared(c, p, source, "dense")
    if layer in c.engram_layer_ids:
        s, row = c.hc_mult, c.engram_columns * c.engram_head_dim
        yield _Row(p + "engram_wkv.weight", "exact", (row, (s + 1) * d), source + "engram.wkv.weight")
        yield _Row(p + "engram_q.weight", "f32", (d, s), source + "engram.q_weight")
        yield _Row(p + "engram_k.weight", "f32", (d, s), source + "engram.k_weight")


def _draft_stage(c: ModelConfig, stage: int) -> Iterator[_Row]:
    d = c.hidden_size
    p = f"mtp.{stage}."
    yield from _attention(c, p, p, "exact")
    yield from _router(c, p, p, c.dspark_n_routed_experts)
    yield from _shared(c, p, p, "exact")
    yield _Row(p + "ffn_exps_vq.blob", "blob", (), p + "ffn.experts.")
    if stage == 0:
        targets = len(c.dspark_target_layer_ids)
        yield _Row("mtp.main_proj.weight", "exact", (targets * d, d), p + "main_proj.weight")
        yield _Row("mtp.main_norm.weight", "f32", (d,), p + "main_norm.weight")


def _vision(c: ModelConfig) -> Iterator[_Row]:
    """Not in the published file: the router's bias inside image spans, the tower and the aligner, in BF16.

    `vision.X` is stored as `v.X`, `aligner.X` as `v.aligner.X`, `image_X` as `v.image_X`.
    """
    v = c.vision
    assert v is not None
    d, h, f = c.hidden_size, v.hidden_size, v.intermediate_size
    for layer in range(c.num_hidden_layers):
        source = f"layers.{layer}.ffn.gate.bias_vl"
        yield _Row(f"blk.{layer}.exp_probs_b_vl.bias", "f32", (c.n_routed_experts,), source)

    def row(name: str, *dims: int) -> _Row:
        source = name if name.startswith(("aligner.", "image_")) else f"vision.{name}"
        return _Row(f"v.{name}", "bf16", dims, source)

    yield row("patch_embed.proj.weight", 3 * v.patch_size**2, h)
    yield row("patch_embed.proj.bias", h)
    for b in range(v.num_hidden_layers):
        p = f"blocks.{b}."
        yield row(p + "norm1.weight", h)
        yield row(p + "attn.wqkv.weight", h, 3 * h)
        yield row(p + "attn.wqkv.bias", 3 * h)
        yield row(p + "attn.wo.weight", h, h)
        yield row(p + "attn.wo.bias", h)
        yield row(p + "norm2.weight", h)
        yield row(p + "mlp.w1.weight", h, 2 * f)
        yield row(p + "mlp.w2.weight", f, h)
    yield row("norm.weight", h)
    yield row("aligner.w1.weight", v.downsample_ratio**2 * h, d)
    yield row("aligner.w1.bias", d)
    yield row("aligner.w2.weight", d, d)
    yield row("aligner.w2.bias", d)
    for name in ("image_start", "image_end", "image_newline"):
        yield row(name, d)
