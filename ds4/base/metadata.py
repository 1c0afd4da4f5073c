"""Config <-> GGUF metadata (prefix `deepseek4.`): the one place where the two spellings meet.

The published keys carry the text model. What they lack goes under `ds4.` and is optional: `ds4.vision.*`,
`ds4.gate_temp`, `ds4.image_token_id`, `ds4.engram_pad_token_id`. float32 values are read back through their
shortest decimal spelling, so that 1e-20 in a config is 1e-20 again. The five runtime keys of `mtp.` count
only together: without all of them the model has no draft stages.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.base.gguf import Metadata, Value
from ds4.errors import ConfigError, FileFormatError
from ds4.model.config import ModelConfig, VisionConfig

ARCHITECTURE, NAME = "deepseek4", "DeepSeek V4.1 Flash"
P = ARCHITECTURE + "."
MAX_VISION_LAYERS = 4096  # a tensor inventory is made from this number before anything can contradict it
MTP_RUNTIME = ("block_size", "expert_used_count", "noise_token_id", "markov_rank", "target_layers")

# field of ModelConfig <-> (key, kind)
FIELDS: dict[str, tuple[str, str]] = {
    "num_hidden_layers": ("block_count", "u32"),
    "max_position_embeddings": ("context_length", "u32"),
    "hidden_size": ("embedding_length", "u32"),
    "vocab_size": ("vocab_size", "u32"),
    "num_attention_heads": ("attention.head_count", "u32"),
    "head_dim": ("attention.key_length", "u32"),
    "q_lora_rank": ("attention.q_lora_rank", "u32"),
    "o_lora_rank": ("attention.output_lora_rank", "u32"),
    "o_groups": ("attention.output_group_count", "u32"),
    "sliding_window": ("attention.sliding_window", "u32"),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", "f32"),
    "compress_rope_theta": ("attention.compress_rope_freq_base", "f32"),
    "kv_source_layer_ids": ("attention.kv_source_layers", "[i32]"),
    "index_source_layer_ids": ("attention.index_source_layers", "[i32]"),
    "candidate_source_layer_id": ("attention.candidate.source_layer", "i32"),
    "candidate_topk_blocks": ("attention.candidate.topk_blocks", "u32"),
    "candidate_block_size": ("attention.candidate.block_size", "u32"),
    "index_n_heads": ("attention.indexer.head_count", "u32"),
    "index_head_dim": ("attention.indexer.key_length", "u32"),
    "index_topk": ("attention.indexer.top_k", "u32"),
    "qk_rope_head_dim": ("rope.dimension_count", "u32"),
    "rope_theta": ("rope.freq_base", "f32"),
    "rope_factor": ("rope.scaling.factor", "f32"),
    "rope_original_positions": ("rope.scaling.original_context_length", "u64"),
    "rope_beta_fast": ("rope.scaling.yarn_beta_fast", "f32"),
    "rope_beta_slow": ("rope.scaling.yarn_beta_slow", "f32"),
    "hc_mult": ("hyper_connection.count", "u32"),
    "hc_sinkhorn_iters": ("hyper_connection.sinkhorn_iterations", "u32"),
    "hc_eps": ("hyper_connection.epsilon", "f32"),
    "n_routed_experts": ("expert_count", "u32"),
    "num_experts_per_tok": ("expert_used_count", "u32"),
    "moe_intermediate_size": ("expert_feed_forward_length", "u32"),
    "routed_scaling_factor": ("expert_weights_scale", "f32"),
    "norm_topk_prob": ("expert_weights_norm", "bool"),
    "engram_layer_ids": ("engram.layer_ids", "[i32]"),
    "engram_num_embeddings": ("engram.num_embeddings", "[u64]"),
    "engram_max_ngram_size": ("engram.max_ngram_size", "u32"),
    "engram_n_heads": ("engram.head_count", "u32"),
    "engram_head_dim": ("engram.head_dim", "u32"),
    "engram_vocab_size": ("engram.vocab_size", "u32"),
    "engram_compressed_vocab_size": ("engram.compressed_vocab_size", "u32"),
}
MTP_FIELDS: dict[str, tuple[str, str]] = {
    "num_nextn_predict_layers": ("mtp.tower_count", "u32"),
    "dspark_n_routed_experts": ("mtp.expert_count", "u32"),
    "dspark_block_size": ("mtp.block_size", "u32"),
    "dspark_num_experts_per_tok": ("mtp.expert_used_count", "u32"),
    "dspark_noise_token_id": ("mtp.noise_token_id", "u32"),
    "dspark_markov_rank": ("mtp.markov_rank", "u32"),
    "dspark_target_layer_ids": ("mtp.target_layers", "[i32]"),
}
# keys with the one value that this model family has
FIXED: dict[str, tuple[str, Any]] = {
    "attention.head_count_kv": ("u32", 1),
    "hash_layer_count": ("u32", 0),
    "expert_shared_count": ("u32", 1),
}
TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def from_config(c: ModelConfig, pad_compressed: int) -> Metadata:
    """Metadata of the model, without tokenizer lists and engram files.

    Args:
        pad_compressed: the pad token's id after the engram token map.
    """
    out: Metadata = {
        "general.architecture": Value("str", ARCHITECTURE),
        "general.name": Value("str", NAME),
    }
    out.update({P + key: _value(kind, getattr(c, field)) for field, (key, kind) in FIELDS.items()})
    out.update({P + key: Value(kind, v) for key, (kind, v) in FIXED.items()})
    out[P + "attention.value_length"] = Value("u32", c.head_dim)
    out[P + "attention.compress_ratios"] = Value("[i32]", list(c.compress_ratios))
    out[P + "expert_group_count"] = Value("u32", 1)
    out[P + "expert_group_used_count"] = Value("u32", 1)
    out[P + "swiglu_clamp_exp"] = Value("[f32]", [c.swiglu_limit] * c.num_hidden_layers)
    out[P + "engram.pad_id_compressed"] = Value("u32", pad_compressed)
    if c.num_nextn_predict_layers:
        out.update({P + key: _value(kind, getattr(c, field)) for field, (key, kind) in MTP_FIELDS.items()})
    out.update({key: Value("u32", getattr(c, field)) for field, key in TOKENS.items()})
    out["ds4.engram_pad_token_id"] = Value("u32", c.engram_pad_token_id)
    out["ds4.gate_temp"] = Value("f32", c.gate_temp)
    if c.image_token_id is not None:
        out["ds4.image_token_id"] = Value("u32", c.image_token_id)
    if c.vision is not None:
        for f in dataclasses.fields(VisionConfig):
            v = getattr(c.vision, f.name)
            if v is not None:
                out[f"ds4.vision.{f.name}"] = Value("u32" if isinstance(v, int) else "f32", v)
    return out


def _value(kind: str, v: Any) -> Value:
    if kind.startswith("["):
        return Value(kind, list(v))
    if kind == "u32" and v >= 1 << 32:
        kind = "u64"
    return Value(kind, int(v) if kind[0] in "ui" else v)


def to_config(meta: dict[str, Any], token_map: NDArray[np.int32] | None, where: str) -> ModelConfig:
    """The model that a base's metadata describe.

    Args:
        token_map: `engram.token_map`, to find the pad token where `ds4.engram_pad_token_id` is absent.

    Raises:
        FileFormatError, ConfigError: a key is missing, of a wrong type, or has an impossible value.
    """
    r = _Reader(meta, where)
    if r.get("general.architecture", "str") != ARCHITECTURE:
        got = meta["general.architecture"]
        raise FileFormatError(f"{where}: architecture {got!r} is not known; ds4 runs {ARCHITECTURE!r} only")
    values: dict[str, Any] = {field: r.get(P + key, kind) for field, (key, kind) in FIELDS.items()}
    for key, (kind, want) in FIXED.items():
        got = r.get(P + key, kind)
        if got != want:
            raise ConfigError(f"{where}: {P}{key} is {got}; this model family has {want}")
    if r.get(P + "attention.value_length", "u32") != values["head_dim"]:
        raise ConfigError(f"{where}: {P}attention.value_length differs from key_length")
    values["swiglu_limit"] = r.same(P + "swiglu_clamp_exp")
    values.update(_draft(r, values["num_hidden_layers"]))
    for field, key in TOKENS.items():
        values[field] = r.get(key, "u32", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}[field])
    pad = r.get(P + "engram.pad_id_compressed", "u32")
    values["engram_pad_token_id"] = _pad_token(r, pad, token_map)
    values["gate_temp"] = r.get("ds4.gate_temp", "f32", 1.0)
    values["image_token_id"] = r.get("ds4.image_token_id", "u32", None)
    values["vision"] = _vision(r)
    values["rope_original_positions"] = float(values["rope_original_positions"])
    names = {f.name for f in dataclasses.fields(ModelConfig)}
    assert set(values) == names, set(values) ^ names
    try:
        return ModelConfig(**{k: _typed(k, v) for k, v in values.items()})
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from e


def has_draft(meta: dict[str, Any]) -> bool:
    """Whether the draft stages of the file are to be used."""
    return all(f"{P}mtp.{key}" in meta for key in (*MTP_RUNTIME, "tower_count", "expert_count"))


def _draft(r: _Reader, n_layers: int) -> dict[str, Any]:
    ratios = r.get(P + "attention.compress_ratios", "[i32]")
    if has_draft(r.meta):
        out = {field: r.get(P + key, kind) for field, (key, kind) in MTP_FIELDS.items()}
        out["compress_ratios"] = ratios
        return out
    out = {field: (() if kind.startswith("[") else 0) for field, (_, kind) in MTP_FIELDS.items()}
    out["compress_ratios"] = ratios[:n_layers]
    return out


def _pad_token(r: _Reader, pad_compressed: int, token_map: NDArray[np.int32] | None) -> int:
    key = "ds4.engram_pad_token_id"
    if token_map is None or key in r.meta:
        pad = int(r.get(key, "u32", 2))
        if token_map is not None and (pad >= len(token_map) or int(token_map[pad]) != pad_compressed):
            raise ConfigError(f"{r.where}: {key} {pad} does not map to {P}engram.pad_id_compressed {pad_compressed}")
        return pad
    plain_pad = r.get(TOKENS["pad_token_id"], "u32", 2)
    if plain_pad < len(token_map) and int(token_map[plain_pad]) == pad_compressed:
        return int(plain_pad)
    found = np.flatnonzero(token_map == pad_compressed)  # any of them hashes alike
    if not len(found):
        raise ConfigError(f"{r.where}: {P}engram.pad_id_compressed {pad_compressed} is in no token's place")
    return int(found[0])


def _vision(r: _Reader) -> VisionConfig | None:
    if not any(key.startswith("ds4.vision.") for key in r.meta):
        return None
    floats = {"rope_theta", "max_wh_ratio"}
    values: dict[str, Any] = {}
    for f in dataclasses.fields(VisionConfig):
        default = (None,) if f.name == "max_wh_ratio" else ()
        v = r.get(f"ds4.vision.{f.name}", "f32" if f.name in floats else "u32", *default)
        if v is not None and v <= 0:
            raise ConfigError(f"{r.where}: ds4.vision.{f.name} is {v}; expected a positive number")
        values[f.name] = v
    if values["num_hidden_layers"] > MAX_VISION_LAYERS:
        raise ConfigError(f"{r.where}: ds4.vision.num_hidden_layers is {values['num_hidden_layers']}")
    return VisionConfig(**values)


def _typed(field: str, v: Any) -> Any:
    if field == "vision" or v is None or isinstance(v, bool):
        return v
    if isinstance(v, int) and v < (-1 if field == "candidate_source_layer_id" else 0):
        raise ConfigError(f"{field} is {v}")
    return v


_ABSENT: Any = object()


class _Reader:
    """Typed reads of parsed metadata: any integer kind serves for an integer, either float kind for a float."""

    def __init__(self, meta: dict[str, Any], where: str) -> None:
        self.meta, self.where = meta, where

    def get(self, key: str, kind: str, default: Any = _ABSENT) -> Any:
        if key not in self.meta:
            if default is _ABSENT:
                raise FileFormatError(f"{self.where}: metadata key {key} is missing")
            return default
        v = self.meta[key]
        if kind.startswith("["):
            return self._list(key, kind[1:-1], v)
        if kind == "str":
            ok = isinstance(v, str)
        elif kind == "bool":
            ok = isinstance(v, bool)
        elif kind[0] == "f":
            ok = isinstance(v, (int, float)) and not isinstance(v, bool) and bool(np.isfinite(v))
            v = shortest(v) if ok else v
        else:
            ok = isinstance(v, int) and not isinstance(v, bool)
        if not ok:
            raise FileFormatError(f"{self.where}: metadata key {key} is {v!r}; expected a value of kind {kind}")
        return v

    def _list(self, key: str, kind: str, v: Any) -> tuple[Any, ...]:
        want = "f" if kind[0] == "f" else "iu"
        if not isinstance(v, np.ndarray) or v.dtype.kind not in want or not np.all(np.isfinite(v)):
            raise FileFormatError(f"{self.where}: metadata key {key} must be a list of {kind}")
        if kind[0] == "f":
            return tuple(shortest(x) for x in v)
        if np.any(v < 0):
            raise FileFormatError(f"{self.where}: metadata key {key} has the value {int(v.min())}")
        return tuple(int(x) for x in v)

    def same(self, key: str) -> float:
        values = set(self.get(key, "[f32]"))
        if len(values) != 1:
            raise ConfigError(f"{self.where}: {key} must be one value for all layers; found {sorted(values)}")
        return float(values.pop())


def shortest(v: float) -> float:
    """The float64 whose decimal spelling is the shortest that names this float32: 1e-20, not 9.99999968e-21."""
    return float(str(np.float32(v)))
