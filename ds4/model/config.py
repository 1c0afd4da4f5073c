"""ModelConfig: every number of the model, read from a file, frozen. Unknown keys are errors.

Axis letters used as name suffixes throughout the project:
T tokens, R rows in flight, D model width, S residual streams (hc_mult), H heads, K head width,
W window, C compressed rows, E experts, F expert width, N codewords, V vocabulary, L layers, G engram
layers, I index-head width.

Two spellings meet here and nowhere else: the released composite `config.json` (`text_config`,
`vision_config`, ...) and the vendor's flat `inference/config.json`; toy files may put flat names inside
`text_config`. Source: model-text.md section 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4.errors import ConfigError

# config.json key <- flat key, where they differ
FLAT_NAMES: dict[str, str] = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_seq_len",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
    "num_nextn_predict_layers": "n_mtp_layers",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}
FLAT_ROPE = {
    "factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_seq_len",
}
# keys that may stand in text_config without changing the model; where a value is given, no other is known
FIXED_TEXT_KEYS: dict[str, tuple[Any, ...] | None] = {
    "model_type": ("deepseek_v41_text", "deepseek_v41"),
    "num_key_value_heads": (1,),
    "hidden_act": ("silu",),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "n_shared_experts": (1,),
    "n_group": (1, 0, None),
    "topk_group": (1, 0, None),
    "initializer_range": None,
    "use_cache": None,
    "dtype": None,
    "torch_dtype": None,
    "architectures": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "image_token_id": None,
    "quantization_config": None,
    "max_batch_size": None,
    "scale_fmt": ("ue8m0",),
    "expert_dtype": ("fp4",),
}
TOP_LEVEL_KEYS = {
    "architectures", "model_type", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id",
    "image_token_id", "quantization_config", "text_config", "vision_config", "transformers_version",
    "tie_word_embeddings",
}  # fmt: skip


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
        if p.is_dir():
            p = p / "config.json"
        try:
            raw = json.loads(p.read_text(encoding="utf-8"))
        except OSError as e:
            raise ConfigError(
                f"{p}: cannot be read ({e.strerror or e}); a checkpoint folder needs config.json"
            ) from e
        except ValueError as e:
            raise ConfigError(f"{p}: not valid JSON ({e})") from e
        return ModelConfig.from_json(raw, str(p))

    @staticmethod
    def from_json(raw: object, where: str = "config.json") -> ModelConfig:
        """Build from parsed JSON, composite or flat."""
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: must be a JSON object, is {type(raw).__name__}")
        composite = "text_config" in raw
        text = raw["text_config"] if composite else raw
        if not isinstance(text, dict):
            raise ConfigError(f"{where}: text_config must be an object, is {type(text).__name__}")
        if composite:
            unknown = sorted(set(raw) - TOP_LEVEL_KEYS)
            if unknown:
                raise ConfigError(
                    f"{where}: unknown key {unknown[0]!r} at the top level; this model has no such setting"
                )
            if raw.get("model_type") != "deepseek_v41":
                raise ConfigError(
                    f"{where}: model_type is {raw.get('model_type')!r}; ds4 runs 'deepseek_v41' and nothing else"
                )
            _check_quantization(raw.get("quantization_config"), where)
        return _Reader(text, raw, where).config()


def _check_quantization(q: object, where: str) -> None:
    if q is None:
        return
    if not isinstance(q, dict):
        raise ConfigError(f"{where}: quantization_config must be an object")
    known = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    }  # fmt: skip
    for key, value in q.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key quantization_config.{key}")
        if value != known[key]:
            raise ConfigError(f"{where}: quantization_config.{key} is {value!r}; only {known[key]!r} is known")


class _Reader:
    """Typed reads of one text config; remembers what was read so that the rest is an error."""

    def __init__(self, text: Mapping[str, Any], top: Mapping[str, Any], where: str) -> None:
        self.text, self.top, self.where = text, top, where
        self.seen: set[str] = set()

    def _get(self, key: str, flat: str | None = None) -> Any:
        flat = flat or FLAT_NAMES.get(key, key)
        names = [n for n in dict.fromkeys((key, flat)) if n in self.text]
        if len(names) == 2 and self.text[names[0]] != self.text[names[1]]:
            raise ConfigError(f"{self.where}: {names[0]} and {names[1]} are the same setting and disagree")
        self.seen.update(names)
        return self.text[names[0]] if names else _ABSENT

    def _bad(self, key: str, value: object, want: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} is {value!r}; expected {want}")

    def int(self, key: str, default: Any = None, least: int = 0) -> Any:
        v = self._get(key)
        if v is _ABSENT:
            if default is not None:
                return default
            raise ConfigError(f"{self.where}: key {key} is missing")
        if isinstance(v, bool) or not isinstance(v, int) or v < least or v >= 2**62:
            raise self._bad(key, v, f"an integer of at least {least}")
        return v

    def float(self, key: str, default: float | None = None) -> float:
        v = self._get(key)
        if v is _ABSENT:
            if default is not None:
                return default
            raise ConfigError(f"{self.where}: key {key} is missing")
        if isinstance(v, bool) or not isinstance(v, (int, float)) or not math.isfinite(v):
            raise self._bad(key, v, "a finite number")
        return float(v)

    def bool(self, key: str, default: bool) -> bool:
        v = self._get(key)
        if v is _ABSENT:
            return default
        if not isinstance(v, bool):
            raise self._bad(key, v, "true or false")
        return v

    def ints(self, key: str) -> tuple[int, ...]:
        v = self._get(key)
        if v is _ABSENT:
            raise ConfigError(f"{self.where}: key {key} is missing")
        ok = isinstance(v, list) and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**62 for i in v)
        if not ok:
            raise self._bad(key, v, "a list of non-negative integers")
        return tuple(v)

    def config(self) -> ModelConfig:
        rope = self._rope()
        n_draft = self.int("num_nextn_predict_layers", default=-1)
        ratios = self.ints("compress_ratios")
        n_layers = self.int("num_hidden_layers", least=1)
        if n_draft < 0:
            n_draft = max(len(ratios) - n_layers, 0)
        has_draft = n_draft > 0
        config = ModelConfig(
            vocab_size=self.int("vocab_size", least=1),
            hidden_size=self.int("hidden_size", least=1),
            num_hidden_layers=n_layers,
            num_attention_heads=self.int("num_attention_heads", least=1),
            head_dim=self.int("head_dim", least=1),
            qk_rope_head_dim=self.int("qk_rope_head_dim", least=2),
            q_lora_rank=self.int("q_lora_rank", least=1),
            o_lora_rank=self.int("o_lora_rank", least=1),
            o_groups=self.int("o_groups", least=1),
            moe_intermediate_size=self.int("moe_intermediate_size", least=1),
            n_routed_experts=self.int("n_routed_experts", least=1),
            num_experts_per_tok=self.int("num_experts_per_tok", least=1),
            norm_topk_prob=self.bool("norm_topk_prob", True),
            routed_scaling_factor=self.float("routed_scaling_factor"),
            gate_temp=self.float("gate_temp", 1.0),
            swiglu_limit=self.float("swiglu_limit"),
            rms_norm_eps=self.float("rms_norm_eps"),
            max_position_embeddings=self.int("max_position_embeddings", least=1),
            sliding_window=self.int("sliding_window", least=1),
            rope_theta=self.float("rope_theta"),
            compress_rope_theta=self.float("compress_rope_theta"),
            rope_factor=rope["factor"],
            rope_beta_fast=rope["beta_fast"],
            rope_beta_slow=rope["beta_slow"],
            rope_original_positions=int(rope["original_max_position_embeddings"]),
            compress_ratios=ratios,
            kv_source_layer_ids=self.ints("kv_source_layer_ids"),
            index_source_layer_ids=self.ints("index_source_layer_ids"),
            index_n_heads=self.int("index_n_heads", least=1),
            index_head_dim=self.int("index_head_dim", least=2),
            index_topk=self.int("index_topk", least=1),
            candidate_source_layer_id=self.int("candidate_source_layer_id", least=-1),
            candidate_topk_blocks=self.int("candidate_topk_blocks", least=1),
            candidate_block_size=self.int("candidate_block_size", least=1),
            hc_mult=self.int("hc_mult", least=1),
            hc_sinkhorn_iters=self.int("hc_sinkhorn_iters", least=1),
            hc_eps=self.float("hc_eps"),
            engram_layer_ids=self.ints("engram_layer_ids"),
            engram_num_embeddings=self.ints("engram_num_embeddings"),
            engram_max_ngram_size=self.int("engram_max_ngram_size", least=2),
            engram_n_heads=self.int("engram_n_heads", least=1),
            engram_head_dim=self.int("engram_head_dim", least=1),
            engram_vocab_size=self.int("engram_vocab_size", least=2),
            engram_pad_token_id=self.int("engram_pad_token_id"),
            engram_compressed_vocab_size=self.int("engram_compressed_vocab_size", least=1),
            num_nextn_predict_layers=n_draft,
            dspark_block_size=self.int("dspark_block_size", default=None if has_draft else 0),
            dspark_noise_token_id=self.int("dspark_noise_token_id", default=None if has_draft else 0),
            dspark_target_layer_ids=self.ints("dspark_target_layer_ids") if has_draft else (),
            dspark_markov_rank=self.int("dspark_markov_rank", default=None if has_draft else 0),
            dspark_n_routed_experts=self.int("dspark_n_routed_experts", default=None if has_draft else 0),
            dspark_num_experts_per_tok=self.int("dspark_num_experts_per_tok", default=None if has_draft else 0),
            bos_token_id=self._token("bos_token_id", 0),
            eos_token_id=self._token("eos_token_id", 1),
            pad_token_id=self._token("pad_token_id", 2),
            image_token_id=self._token("image_token_id", None),
            vision=self._vision(),
        )
        if not has_draft:
            self.seen.update(k for k in self.text if k.startswith("dspark_"))
        self._fixed_keys()
        return config

    def _token(self, key: str, default: Any) -> Any:
        for source in (self.top, self.text):
            if key in source:
                self.seen.add(key)
                v = source[key]
                if isinstance(v, bool) or not isinstance(v, int) or v < 0:
                    raise self._bad(key, v, "a token id")
                return v
        return default

    def _rope(self) -> dict[str, float]:
        nested = self._get("rope_scaling")
        if nested is _ABSENT or nested is None:
            out: dict[str, float] = {}
            for key, flat in FLAT_ROPE.items():
                v = self._get(flat, flat)
                if v is _ABSENT:
                    raise ConfigError(f"{self.where}: key rope_scaling.{key} (or {flat}) is missing")
                out[key] = v
        else:
            if not isinstance(nested, dict):
                raise self._bad("rope_scaling", nested, "an object")
            kind = nested.get("rope_type", nested.get("type"))
            if kind != "yarn":
                raise self._bad("rope_scaling.rope_type", kind, "'yarn'")
            extra = sorted(set(nested) - set(FLAT_ROPE) - {"rope_type", "type"})
            if extra:
                raise ConfigError(f"{self.where}: unknown key rope_scaling.{extra[0]}")
            missing = [k for k in FLAT_ROPE if k not in nested]
            if missing:
                raise ConfigError(f"{self.where}: key rope_scaling.{missing[0]} is missing")
            out = {k: nested[k] for k in FLAT_ROPE}
        for key, v in out.items():
            if isinstance(v, bool) or not isinstance(v, (int, float)) or not math.isfinite(v) or v < 0:
                raise self._bad(f"rope_scaling.{key}", v, "a non-negative number")
        return {k: float(v) for k, v in out.items()}

    def _vision(self) -> VisionConfig | None:
        v = self.top.get("vision_config")
        if v is None:
            return None
        if not isinstance(v, dict):
            raise self._bad("vision_config", v, "an object")
        names = set(VisionConfig.__dataclass_fields__)
        extra = sorted(set(v) - names - {"model_type"})
        if extra:
            raise ConfigError(f"{self.where}: unknown key vision_config.{extra[0]}")
        missing = sorted(names - set(v) - {"max_wh_ratio"})
        if missing:
            raise ConfigError(f"{self.where}: key vision_config.{missing[0]} is missing")
        for key in names & set(v):
            value = v[key]
            if key == "max_wh_ratio" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise self._bad(f"vision_config.{key}", value, "a positive number")
        return VisionConfig(**{k: v.get(k) for k in names})

    def _fixed_keys(self) -> None:
        rest = set(self.text) - self.seen - ({"vision_config"} if self.text is self.top else set())
        for key in sorted(rest):
            name = next((k for k, flat in FLAT_NAMES.items() if flat == key and k in FIXED_TEXT_KEYS), key)
            if name not in FIXED_TEXT_KEYS:
                raise ConfigError(f"{self.where}: unknown key {key!r}; this model has no such setting")
            allowed = FIXED_TEXT_KEYS[name]
            if allowed is not None and self.text[key] not in allowed:
                raise self._bad(key, self.text[key], f"{allowed[0]!r}, the only value this model family has")


_ABSENT: Any = object()


def _check(c: ModelConfig) -> None:
    """Relations between the numbers that the forward pass relies on (model-text.md 5.4, 5.6)."""

    def need(ok: bool, text: str) -> None:
        if not ok:
            raise ConfigError(f"config: {text}")

    L = c.num_hidden_layers
    need(len(c.compress_ratios) >= L, f"compress_ratios has {len(c.compress_ratios)} entries for {L} layers")
    need(
        len(c.compress_ratios) in (L, L + c.num_nextn_predict_layers),
        f"compress_ratios has {len(c.compress_ratios)} entries, not {L} + {c.num_nextn_predict_layers}",
    )
    need(all(r == 0 for r in c.compress_ratios[L:]), "draft stages must have compress ratio 0")
    need(c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim must be even")
    need(c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim), "qk_rope_head_dim exceeds a head width")
    need(c.num_attention_heads % c.o_groups == 0, "o_groups must divide num_attention_heads")
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
    need(c.engram_pad_token_id < c.vocab_size, "engram_pad_token_id is outside the vocabulary")
    if c.num_nextn_predict_layers:
        need(c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts, "dspark_num_experts_per_tok is too large")
        need(c.dspark_noise_token_id < c.vocab_size, "dspark_noise_token_id is outside the vocabulary")
