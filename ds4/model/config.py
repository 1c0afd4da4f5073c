"""ModelConfig: every number of the model, read from a file, frozen. Unknown keys are errors.

Axis letters used as name suffixes throughout the project:
T tokens, R rows in flight, D model width, S residual streams (hc_mult), H heads, K head width,
W window, C compressed rows, E experts, F expert width, N codewords, V vocabulary, L layers, G engram
layers, I index-head width.

This file holds the numbers, what is derived from them and the relations they must obey; the reading of
files, their two spellings and their types, is config_reader.py's. Source: model-text 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4.errors import ConfigError
from ds4.model.config_reader import Reader, check_quantization, check_top_level, read_json


@dataclass(frozen=True)
class VisionConfig:
    """Numbers of the vision tower (vision.md section 1); kept so that tensors can be inventoried."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True)
class ModelConfig:
    """The text model's numbers, in config.json's spelling. Derived values are properties."""

    vocab_size: int
    hidden_size: int  # D
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    head_dim: int  # K
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_intermediate_size: int  # F
    n_routed_experts: int  # E
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    gate_temp: float
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    sliding_window: int  # W
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_original_positions: int  # 0: no YaRN
    compress_ratios: tuple[int, ...]  # L + draft stages
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int  # I
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int  # S
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def hc_mixes(self) -> int:
        """Rows of hc_fn: pre, post and comb, S * (S + 2)."""
        return self.hc_mult * (self.hc_mult + 2)

    @property
    def nope_head_dim(self) -> int:
        return self.head_dim - self.qk_rope_head_dim

    @property
    def engram_columns(self) -> int:
        """Table rows read a token and engram layer: (max_ngram - 1) * heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def last_kv_source(self) -> int:
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else -1

    def kv_owner(self, layer: int) -> int | None:
        """The layer whose compressed cache `layer` reads; None for a window-only layer."""
        if self.compress_ratios[layer] == 0:
            return None
        return max(s for s in self.kv_source_layer_ids if s <= layer)

    def index_owner(self, layer: int) -> int | None:
        """The layer whose pick list `layer` uses; None for a window-only layer."""
        if self.compress_ratios[layer] == 0:
            return None
        return max(s for s in self.index_source_layer_ids if s <= layer)

    def uses_candidates(self, layer: int) -> bool:
        """Index sources after the candidate source score only inside its blocks (model-text.md 5.6)."""
        return layer in self.index_source_layer_ids and 0 <= self.candidate_source_layer_id < layer

    def engram_slot(self, layer: int) -> int | None:
        """Index g of `layer` among the engram layers, or None."""
        return self.engram_layer_ids.index(layer) if layer in self.engram_layer_ids else None

    def rope_frequencies(self, layer: int) -> tuple[float, ...]:
        """f_i, i < r/2, in float64; window-only layers without YaRN (model-text.md 5.3)."""
        r = self.qk_rope_head_dim
        if layer >= self.num_hidden_layers or self.compress_ratios[layer] == 0:
            return tuple(self.rope_theta ** (-2.0 * i / r) for i in range(r // 2))
        base = self.compress_rope_theta
        plain = [base ** (-2.0 * i / r) for i in range(r // 2)]
        orig = self.rope_original_positions
        if orig <= 0:
            return tuple(plain)

        def g(n: float) -> float:
            return r * math.log(orig / (2 * math.pi * n)) / (2 * math.log(base))

        low = max(math.floor(g(self.rope_beta_fast)), 0)
        high = min(math.ceil(g(self.rope_beta_slow)), r - 1)
        out = []
        for i, f in enumerate(plain):
            ramp = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
            out.append(f / self.rope_factor * ramp + f * (1 - ramp))
        return tuple(out)

    @staticmethod
    def load(path: str | Path) -> ModelConfig:
        """Read a checkpoint folder's or a plain `config.json`.

        Raises:
            ConfigError: unreadable, not JSON, a key missing, unknown, or of a wrong type or value.
        """
        p = Path(path)
        p = p / "config.json" if p.is_dir() else p
        return ModelConfig.from_json(read_json(p), str(p))

    @staticmethod
    def from_json(raw: object, where: str = "config.json", draft_stages: int | None = None) -> ModelConfig:
        """Build from parsed JSON, composite or flat.

        Args:
            draft_stages: their number as the checkpoint's tensor names tell it, for a file that does not
                (one source's copy lacked the key); else the length of compress_ratios tells.
        """
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: must be a JSON object, is {type(raw).__name__}")
        text = raw.get("text_config", raw)
        if not isinstance(text, dict):
            raise ConfigError(f"{where}: text_config must be an object, is {type(text).__name__}")
        if text is not raw:
            check_top_level(raw, where)
        check_quantization(raw.get("quantization_config"), where)
        numbers = _numbers(Reader(text, raw, where), draft_stages)
        try:
            return ModelConfig(**numbers)
        except ConfigError as e:
            raise ConfigError(f"{where}: {e}") from e


def _numbers(r: Reader, draft_stages: int | None) -> dict[str, Any]:
    """Every field of ModelConfig, typed; relations between them are `_check`'s."""
    rope = r.rope()
    vision = r.vision()
    ratios = r.integers("compress_ratios")
    n_layers = r.integer("num_hidden_layers", least=1)
    told = draft_stages if draft_stages is not None else max(len(ratios) - n_layers, 0)
    n_draft = r.integer("num_nextn_predict_layers", default=told)
    # the vendor's flat file leaves the context to the caller; YaRN stretches to exactly this
    stretched = int(rope["factor"] * rope["original_max_position_embeddings"]) if r.flat else None
    released_ids = {"bos": 0, "eos": 1, "pad": 2}
    found = {name: r.token(f"{name}_token_id") for name in released_ids}
    tokens = {name: released_ids[name] if i is None else i for name, i in found.items()}

    def draft(key: str, least: int = 1) -> int:
        """Draft settings are needed only with draft stages; without, they may stand there unread."""
        return r.integer(key, least=least) if n_draft else 0

    numbers = {
        "vocab_size": r.integer("vocab_size", least=1),
        "hidden_size": r.integer("hidden_size", least=1),
        "num_hidden_layers": n_layers,
        "num_attention_heads": r.integer("num_attention_heads", least=1),
        "head_dim": r.integer("head_dim", least=1),
        "qk_rope_head_dim": r.integer("qk_rope_head_dim", least=2),
        "q_lora_rank": r.integer("q_lora_rank", least=1),
        "o_lora_rank": r.integer("o_lora_rank", least=1),
        "o_groups": r.integer("o_groups", least=1),
        "moe_intermediate_size": r.integer("moe_intermediate_size", least=1),
        "n_routed_experts": r.integer("n_routed_experts", least=1),
        "num_experts_per_tok": r.integer("num_experts_per_tok", least=1),
        "norm_topk_prob": r.boolean("norm_topk_prob", True),
        "routed_scaling_factor": r.number("routed_scaling_factor", above=0),
        "gate_temp": r.number("gate_temp", above=0, default=1.0),
        "swiglu_limit": r.number("swiglu_limit", above=0),
        "rms_norm_eps": r.number("rms_norm_eps", above=0),
        "max_position_embeddings": r.integer("max_position_embeddings", least=1, default=stretched),
        "sliding_window": r.integer("sliding_window", least=1),
        "rope_theta": r.number("rope_theta", above=1),
        "compress_rope_theta": r.number("compress_rope_theta", above=1),
        "rope_factor": rope["factor"],
        "rope_beta_fast": rope["beta_fast"],
        "rope_beta_slow": rope["beta_slow"],
        "rope_original_positions": int(rope["original_max_position_embeddings"]),
        "compress_ratios": ratios,
        "kv_source_layer_ids": r.integers("kv_source_layer_ids"),
        "index_source_layer_ids": r.integers("index_source_layer_ids"),
        "index_n_heads": r.integer("index_n_heads", least=1),
        "index_head_dim": r.integer("index_head_dim", least=2),
        "index_topk": r.integer("index_topk", least=1),
        "candidate_source_layer_id": r.integer("candidate_source_layer_id", least=-1),
        "candidate_topk_blocks": r.integer("candidate_topk_blocks", least=1),
        "candidate_block_size": r.integer("candidate_block_size", least=1),
        "hc_mult": r.integer("hc_mult", least=1),
        "hc_sinkhorn_iters": r.integer("hc_sinkhorn_iters", least=1),
        "hc_eps": r.number("hc_eps", above=0),
        "engram_layer_ids": r.integers("engram_layer_ids"),
        "engram_num_embeddings": r.integers("engram_num_embeddings"),
        "engram_max_ngram_size": r.integer("engram_max_ngram_size", least=2),
        "engram_n_heads": r.integer("engram_n_heads", least=1),
        "engram_head_dim": r.integer("engram_head_dim", least=1),
        "engram_vocab_size": r.integer("engram_vocab_size", least=2),
        "engram_pad_token_id": r.integer("engram_pad_token_id"),
        "engram_compressed_vocab_size": r.integer("engram_compressed_vocab_size", least=1),
        "num_nextn_predict_layers": n_draft,
        "dspark_block_size": draft("dspark_block_size"),
        "dspark_noise_token_id": draft("dspark_noise_token_id", least=0),
        "dspark_target_layer_ids": r.integers("dspark_target_layer_ids") if n_draft else (),
        "dspark_markov_rank": draft("dspark_markov_rank"),
        "dspark_n_routed_experts": draft("dspark_n_routed_experts"),
        "dspark_num_experts_per_tok": draft("dspark_num_experts_per_tok"),
        "bos_token_id": tokens["bos"],
        "eos_token_id": tokens["eos"],
        "pad_token_id": tokens["pad"],
        "image_token_id": r.token("image_token_id"),
        "vision": VisionConfig(**vision) if vision else None,
    }
    if not n_draft:
        r.seen.update(key for key in r.text if key.startswith("dspark_"))
    r.finish()
    return numbers


def _check(c: ModelConfig) -> None:
    """Relations between the numbers that the forward pass relies on (model-text.md 5.4, 5.6)."""

    def need(ok: bool, text: str) -> None:
        if not ok:
            raise ConfigError(f"model configuration: {text}")

    L = c.num_hidden_layers
    need(len(c.compress_ratios) >= L, f"compress_ratios has {len(c.compress_ratios)} entries for {L} layers")
    need(
        len(c.compress_ratios) in (L, L + c.num_nextn_predict_layers),
        f"compress_ratios has {len(c.compress_ratios)} entries, not {L} + {c.num_nextn_predict_layers}",
    )
    need(all(r == 0 for r in c.compress_ratios[L:]), "draft stages must have compress ratio 0")
    for key in ("hidden_size", "head_dim", "moe_intermediate_size", "index_head_dim", "engram_head_dim"):
        need(
            getattr(c, key) % 32 == 0, f"{key} is {getattr(c, key)}, not a multiple of 32, the width of a scale block"
        )
    need(c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim must be even")
    need(c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim), "qk_rope_head_dim exceeds a head width")
    need(c.num_attention_heads % c.o_groups == 0, "o_groups must divide num_attention_heads")
    for key, most in (
        ("n_routed_experts", 2**16),
        ("dspark_n_routed_experts", 2**16),
        ("num_nextn_predict_layers", 64),
    ):
        need(getattr(c, key) <= most, f"{key} is {getattr(c, key)}; at most {most} can be addressed")
    need(c.vision is None or c.vision.num_hidden_layers <= 4096, "vision_config.num_hidden_layers exceeds 4096")
    need(c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok exceeds n_routed_experts")
    need(len(c.engram_layer_ids) == len(c.engram_num_embeddings), "engram_num_embeddings: one entry an engram layer")
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        ids = getattr(c, key)
        need(list(ids) == sorted(set(ids)) and all(i < L for i in ids), f"{key} must rise and stay below {L}")
    need(set(c.kv_source_layer_ids) <= set(c.index_source_layer_ids), "every kv source must be an index source")
    for layer in range(L):
        ratio = c.compress_ratios[layer]
        if ratio == 0:
            need(layer not in c.index_source_layer_ids, f"layer {layer} has ratio 0 and cannot be an index source")
            continue
        below = [s for s in c.kv_source_layer_ids if s <= layer]
        need(bool(below), f"layer {layer} has ratio {ratio} and no kv source at or below it")
        need(c.compress_ratios[below[-1]] == ratio, f"layer {layer} and its kv source {below[-1]} differ in ratio")
        index_owner = max(s for s in c.index_source_layer_ids if s <= layer)
        need(
            max(s for s in c.kv_source_layer_ids if s <= index_owner) == below[-1],
            f"layer {layer}: its index source {index_owner} has another kv source",
        )
    cand = c.candidate_source_layer_id
    need(cand < 0 or cand in c.index_source_layer_ids, "candidate_source_layer_id must be an index source or -1")
    if cand >= 0:
        later = [s for s in c.index_source_layer_ids if s > cand]
        need(
            all(c.kv_owner(s) == c.kv_owner(cand) for s in later),
            "index sources after the candidate source must share its kv source",
        )
    need(c.engram_compressed_vocab_size <= c.vocab_size, "engram_compressed_vocab_size exceeds vocab_size")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        need((getattr(c, key) or 0) < c.vocab_size, f"{key} is outside the vocabulary")
    need(c.engram_pad_token_id < c.vocab_size, "engram_pad_token_id is outside the vocabulary")
    if c.num_nextn_predict_layers:
        need(len(c.dspark_target_layer_ids) > 0, "dspark_target_layer_ids is empty")
        need(c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts, "dspark_num_experts_per_tok is too large")
        need(c.dspark_noise_token_id < c.vocab_size, "dspark_noise_token_id is outside the vocabulary")
