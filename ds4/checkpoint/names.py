"""The tensor inventory of the release as a table: every name a configuration calls for, its type and shape.

Linear weights are [out, in]. A kind says how a matrix is stored and which companion it has (codecs.py):
    fp8     NAME.weight F8_E4M3 [O, I]    NAME.scale F8_E8M0 [ceil(O/32), ceil(I/32)]
    fp4     NAME.weight I8 [O, I/2]       NAME.scale F8_E8M0 [O, I/32]
    bf16    NAME BF16        f32     NAME F32
Source: model-text 2, dspark 2, vision 2. The released configuration gives exactly the released tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

from ds4.model.config import ModelConfig

ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}


@dataclass(frozen=True)
class Spec:
    """What a tensor must be.

    `part` is one of global, attention, index, hyper, router, experts, shared, engram, table, draft, vision.
    `accept` lists stored dtypes that hold the same values (toy files use them).
    """

    dtype: str
    shape: tuple[int, ...]
    part: str
    accept: tuple[str, ...] = ()
    required: bool = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Row = tuple[str, str, tuple[int, ...], str]  # name, kind, shape of the matrix itself, part


def expected(config: ModelConfig) -> dict[str, Spec]:
    """Name -> Spec, in the order embed, layers, draft stages, vision, head.

    `image_start`, `image_end` and `image_newline` are required only of a checkpoint with a vision tower.
    """
    out: dict[str, Spec] = {}
    for name, kind, shape, part in _rows(config):
        out.update(_specs(name, kind, shape, part))
    if config.vision is None:
        for name in ("image_start", "image_end", "image_newline"):
            out[name] = Spec("BF16", out[name].shape, "global", required=False)
    return out


def bytes_by_part(specs: dict[str, Spec]) -> dict[str, int]:
    """Bytes of each part of the inventory, for a listing."""
    total: Counter[str] = Counter()
    for spec in specs.values():
        total[spec.part] += spec.nbytes
    return dict(total)


def companion(name: str) -> str:
    """The scale's name of a weight: `X.weight` -> `X.scale`."""
    return name.removesuffix(".weight") + ".scale"


def draft_stages(names: Container[str]) -> int:
    """Stages that a checkpoint holds: contiguous `mtp.<i>.attn.wq_a.weight`, for a config that does not say."""
    n = 0
    while f"mtp.{n}.attn.wq_a.weight" in names:
        n += 1
    return n


def _specs(name: str, kind: str, shape: tuple[int, ...], part: str) -> Iterator[tuple[str, Spec]]:
    if kind == "bf16":
        # engram q_weight and k_weight are F32 in one toy writer
        accept = ("F32",) if name.endswith((".q_weight", ".k_weight")) else ()
        yield name, Spec("BF16", shape, part, accept)
    elif kind == "f32":
        yield name, Spec("F32", shape, part)
    else:
        rows, cols = shape
        if kind == "fp8":
            weight, scale = Spec("F8_E4M3", shape, part), (-(-rows // 32), -(-cols // 32))
        elif kind == "fp4":
            weight, scale = Spec("I8", (rows, cols // 2), part), (rows, -(-cols // 32))
        else:  # a table's rows have scales of their own
            weight, scale = Spec("F8_E4M3", shape, part), (rows, -(-cols // 32))
        yield name + ".weight", weight
        yield name + ".scale", Spec("F8_E8M0", scale, part, ("U8",))


def _rows(c: ModelConfig) -> Iterator[Row]:
    D, V = c.hidden_size, c.vocab_size
    yield "embed.weight", "bf16", (V, D), "global"
    for layer in range(c.num_hidden_layers):
        yield from _layer(c, layer)
    for stage in range(c.num_nextn_predict_layers):
        yield from _stage(c, stage)
    yield from _vision(c)
    for name in ("image_start", "image_end", "image_newline", "norm.weight"):
        yield name, "bf16", (D,), "global"
    yield "head.weight", "bf16", (V, D), "global"


def _layer(c: ModelConfig, layer: int) -> Iterator[Row]:
    D, K, p = c.hidden_size, c.head_dim, f"layers.{layer}."
    yield from _block(c, p, c.n_routed_experts, None)
    if layer in c.kv_source_layer_ids:
        yield p + "attn.compressor.wkv.weight", "bf16", (K, D), "attention"
        if c.compress_ratios[layer] > 1:
            yield p + "attn.compressor.wgate.weight", "bf16", (K, D), "attention"
        yield p + "attn.compressor.norm.weight", "bf16", (K,), "attention"
        yield p + "attn.indexer.wk.weight", "bf16", (c.index_head_dim, K), "index"
        yield p + "attn.indexer.k_norm.weight", "bf16", (c.index_head_dim,), "index"
    if layer in c.index_source_layer_ids:
        yield p + "attn.indexer.wq_b", "fp8", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), "index"
        yield p + "attn.indexer.weights_proj.weight", "bf16", (c.index_n_heads, D), "index"
    slot = c.engram_slot(layer)
    if slot is not None:
        yield p + "engram.embed", "table", (c.engram_num_embeddings[slot], c.engram_head_dim), "table"
        yield p + "engram.wkv", "fp8", ((c.hc_mult + 1) * D, c.engram_columns * c.engram_head_dim), "engram"
        yield p + "engram.q_weight", "bf16", (c.hc_mult, D), "engram"
        yield p + "engram.k_weight", "bf16", (c.hc_mult, D), "engram"


def _block(c: ModelConfig, p: str, n_experts: int, part: str | None) -> Iterator[Row]:
    """What a layer and a draft stage share; `part` overrides each row's own (draft)."""
    D, H, K, F, S = c.hidden_size, c.num_attention_heads, c.head_dim, c.moe_intermediate_size, c.hc_mult
    attention: tuple[Row, ...] = (
        ("attn_norm.weight", "bf16", (D,), "attention"),
        ("attn.attn_sink", "f32", (H,), "attention"),
        ("attn.wq_a", "fp8", (c.q_lora_rank, D), "attention"),
        ("attn.q_norm.weight", "bf16", (c.q_lora_rank,), "attention"),
        ("attn.wq_b", "fp8", (H * K, c.q_lora_rank), "attention"),
        ("attn.wkv", "fp8", (K, D), "attention"),
        ("attn.kv_norm.weight", "bf16", (K,), "attention"),
        ("attn.wo_a", "fp8", (c.o_groups * c.o_lora_rank, H * K // c.o_groups), "attention"),
        ("attn.wo_b", "fp8", (D, c.o_groups * c.o_lora_rank), "attention"),
        ("ffn_norm.weight", "bf16", (D,), "router"),
        ("ffn.gate.weight", "bf16", (n_experts, D), "router"),
        ("ffn.gate.bias", "f32", (n_experts,), "router"),
        ("ffn.gate.bias_vl", "f32", (n_experts,), "router"),
    )
    hyper = tuple(
        (f"hc_{half}_{name}", "f32", shape, "hyper")
        for half in ("attn", "ffn")
        for name, shape in (("fn", (c.hc_mixes, S * D)), ("base", (c.hc_mixes,)), ("scale", (3,)))
    )
    experts = tuple(_mlp(f"ffn.experts.{e}.", "fp4", F, D, "experts") for e in range(n_experts))
    shared = _mlp("ffn.shared_experts.", "fp8", F, D, "shared")
    for rows in (attention, hyper, *experts, shared):
        for name, kind, shape, own in rows:
            yield p + name, kind, shape, part or own


def _mlp(p: str, kind: str, F: int, D: int, part: str) -> tuple[Row, ...]:
    return ((p + "w1", kind, (F, D), part), (p + "w2", kind, (D, F), part), (p + "w3", kind, (F, D), part))


def _stage(c: ModelConfig, stage: int) -> Iterator[Row]:
    D, V, rank, p = c.hidden_size, c.vocab_size, c.dspark_markov_rank, f"mtp.{stage}."
    yield from _block(c, p, c.dspark_n_routed_experts, "draft")
    if stage == 0:
        yield p + "main_proj", "fp8", (D, D * len(c.dspark_target_layer_ids)), "draft"
        yield p + "main_norm.weight", "bf16", (D,), "draft"
    if stage == c.num_nextn_predict_layers - 1:
        yield p + "norm.weight", "bf16", (D,), "draft"
        yield p + "markov_head.embed.weight", "bf16", (V, rank), "draft"
        yield p + "markov_head.head.weight", "bf16", (V, rank), "draft"
        yield p + "confidence_head.proj.weight", "bf16", (1, D + rank), "draft"


def _vision(c: ModelConfig) -> Iterator[Row]:
    v = c.vision
    if v is None:
        return
    W, F, D = v.hidden_size, v.intermediate_size, c.hidden_size
    rows: list[tuple[str, tuple[int, ...]]] = [
        ("vision.patch_embed.proj.weight", (W, 3 * v.patch_size**2)),
        ("vision.patch_embed.proj.bias", (W,)),
    ]
    for b in range(v.num_hidden_layers):
        p = f"vision.blocks.{b}."
        rows += [
            (p + "norm1.weight", (W,)),
            (p + "norm2.weight", (W,)),
            (p + "attn.wqkv.weight", (3 * W, W)),
            (p + "attn.wqkv.bias", (3 * W,)),
            (p + "attn.wo.weight", (W, W)),
            (p + "attn.wo.bias", (W,)),
            (p + "mlp.w1.weight", (2 * F, W)),
            (p + "mlp.w2.weight", (W, F)),
        ]
    rows += [
        ("vision.norm.weight", (W,)),
        ("aligner.w1.weight", (D, W * v.downsample_ratio**2)),
        ("aligner.w1.bias", (D,)),
        ("aligner.w2.weight", (D, D)),
        ("aligner.w2.bias", (D,)),
    ]
    for name, shape in rows:
        yield name, "bf16", shape, "vision"
