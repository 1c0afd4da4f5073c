"""Typed reads of a configuration: the two spellings of a key, its type, and what is left over.

Two spellings meet here and nowhere else: the released composite `config.json` and the vendor's flat
`inference/config.json`; toy files may put flat names inside `text_config`. Source: model-text 1, vision 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds4.errors import ConfigError

LIMIT = 2**53  # beyond it nothing here is a size, and JSON writers begin to round

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
FLAT_VISION = {
    "num_hidden_layers": "vision_n_layers",
    "hidden_size": "vision_dim",
    "num_attention_heads": "vision_n_heads",
    "intermediate_size": "vision_inter_dim",
    "patch_size": "vision_patch_size",
    "rope_theta": "vision_rope_theta",
    "downsample_ratio": "vision_downsample_ratio",
    "max_image_tokens": "vision_max_n_token",
    "min_pixels": "vision_min_pixels",
    "max_wh_ratio": "vision_max_wh_ratio",
}
# keys that may stand in text_config without changing the model; where values are given, no other is known
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
    "transformers_version": None,
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
QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

ABSENT: Any = object()


def read_json(path: Path) -> object:
    """Parse a JSON file; a key that stands twice is an error.

    Raises:
        ConfigError: unreadable, not UTF-8, not JSON, nested too deep, or a duplicate key.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as e:
        hint = "; a checkpoint folder needs config.json" if path.name == "config.json" else ""
        raise ConfigError(f"{path}: cannot be read ({e.strerror or e}){hint}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: not valid JSON ({e})") from e


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"key {next(k for k in names if names.count(k) > 1)!r} stands twice")
    return out


def check_top_level(raw: Mapping[str, Any], where: str) -> None:
    """The composite form: known keys, this model type, the one known quantization."""
    unknown = sorted(set(raw) - TOP_LEVEL_KEYS)
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r} at the top level; this model has no such setting")
    if raw.get("model_type") != "deepseek_v41":
        kind = raw.get("model_type")
        raise ConfigError(f"{where}: model_type is {kind!r}; ds4 runs 'deepseek_v41' and nothing else")
    if raw.get("tie_word_embeddings", False) is not False:
        raise ConfigError(f"{where}: tie_word_embeddings is true; this model has an output head of its own")


def check_quantization(q: object, where: str) -> None:
    if q is None:
        return
    if not isinstance(q, dict):
        raise ConfigError(f"{where}: quantization_config must be an object, is {type(q).__name__}")
    for key, value in q.items():
        if key not in QUANTIZATION:
            raise ConfigError(f"{where}: unknown key quantization_config.{key}")
        if value != QUANTIZATION[key]:
            want = QUANTIZATION[key]
            raise ConfigError(f"{where}: quantization_config.{key} is {value!r}; only {want!r} is known")


def is_int(v: object) -> bool:
    return isinstance(v, int) and not isinstance(v, bool)


def is_number(v: object) -> bool:
    """A finite JSON number of a size that float holds (a long integer would overflow)."""
    if isinstance(v, float):
        return math.isfinite(v)
    return isinstance(v, int) and not isinstance(v, bool) and abs(v) < LIMIT


class Reader:
    """Typed reads of one text config; remembers what was read so that the rest is an error."""

    def __init__(self, text: Mapping[str, Any], top: Mapping[str, Any], where: str) -> None:
        self.text, self.top, self.where = text, top, where
        self.flat = text is top
        self.seen: set[str] = set()

    def get(self, key: str, flat: str | None = None) -> Any:
        """The value under either spelling, or ABSENT."""
        flat = flat or FLAT_NAMES.get(key, key)
        names = [n for n in dict.fromkeys((key, flat)) if n in self.text]
        if len(names) == 2 and self.text[names[0]] != self.text[names[1]]:
            raise ConfigError(f"{self.where}: {names[0]} and {names[1]} are the same setting and disagree")
        self.seen.update(names)
        return self.text[names[0]] if names else ABSENT

    def bad(self, key: str, value: object, want: str) -> ConfigError:
        shown = repr(value)
        return ConfigError(
            f"{self.where}: {key} is {shown if len(shown) < 80 else shown[:77] + '...'}; expected {want}"
        )

    def missing(self, key: str) -> ConfigError:
        flat = FLAT_NAMES.get(key)
        return ConfigError(f"{self.where}: key {key}{f' (or {flat})' if flat else ''} is missing")

    def integer(self, key: str, least: int = 0, default: int | None = None) -> int:
        v = self.get(key)
        if v is ABSENT and default is not None:
            return default
        if v is ABSENT:
            raise self.missing(key)
        if not is_int(v) or not least <= v < LIMIT:
            raise self.bad(key, v, f"an integer of at least {least}")
        return int(v)

    def number(self, key: str, above: float, default: float | None = None) -> float:
        v = self.get(key)
        if v is ABSENT and default is not None:
            return default
        if v is ABSENT:
            raise self.missing(key)
        if not is_number(v) or v <= above:
            raise self.bad(key, v, f"a finite number above {above:g}")
        return float(v)

    def boolean(self, key: str, default: bool) -> bool:
        v = self.get(key)
        if v is ABSENT:
            return default
        if not isinstance(v, bool):
            raise self.bad(key, v, "true or false")
        return v

    def integers(self, key: str) -> tuple[int, ...]:
        v = self.get(key)
        if v is ABSENT:
            raise self.missing(key)
        if not isinstance(v, list) or not all(is_int(i) and 0 <= i < LIMIT for i in v):
            raise self.bad(key, v, "a list of non-negative integers")
        return tuple(v)

    def token(self, key: str) -> int | None:
        """A token id, which stands at the top level or in the text config."""
        for source in (self.top, self.text):
            if key in source:
                self.seen.add(key)
                v = source[key]
                if not is_int(v) or not 0 <= v < LIMIT:
                    raise self.bad(key, v, "a token id")
                return int(v)
        return None

    def rope(self) -> dict[str, float]:
        """factor, beta_fast, beta_slow, original_max_position_embeddings, nested or flat."""
        nested = self.get("rope_scaling")
        if nested is ABSENT or nested is None:
            out = {key: self.get(flat, flat) for key, flat in FLAT_ROPE.items()}
        elif isinstance(nested, dict):
            kind = nested.get("rope_type", nested.get("type"))
            if kind != "yarn":
                raise self.bad("rope_scaling.rope_type", kind, "'yarn'")
            extra = sorted(set(nested) - set(FLAT_ROPE) - {"rope_type", "type"})
            if extra:
                raise ConfigError(f"{self.where}: unknown key rope_scaling.{extra[0]}")
            out = {key: nested.get(key, ABSENT) for key in FLAT_ROPE}
        else:
            raise self.bad("rope_scaling", nested, "an object")
        for key, v in out.items():
            if v is ABSENT:
                raise ConfigError(f"{self.where}: key rope_scaling.{key} (or {FLAT_ROPE[key]}) is missing")
            if not is_number(v) or v < 0:
                raise self.bad(f"rope_scaling.{key}", v, "a non-negative number")
        orig = out["original_max_position_embeddings"]
        if not is_int(orig):
            raise self.bad("rope_scaling.original_max_position_embeddings", orig, "an integer")
        if orig > 0 and min(out["factor"], out["beta_fast"], out["beta_slow"]) <= 0:
            raise self.bad("rope_scaling", out, "positive numbers")
        return {k: float(v) for k, v in out.items()}

    def vision(self) -> dict[str, Any] | None:
        """The vision tower's numbers by their composite names, or None without one."""
        if self.flat:
            found = {key: self.get(flat, flat) for key, flat in FLAT_VISION.items()}
            v: Any = {key: value for key, value in found.items() if value is not ABSENT} or None
        else:
            v = self.top.get("vision_config")
        if v is None:
            return None
        if not isinstance(v, dict):
            raise self.bad("vision_config", v, "an object")
        extra = sorted(set(v) - set(FLAT_VISION) - {"model_type"})
        if extra:
            raise ConfigError(f"{self.where}: unknown key vision_config.{extra[0]}")
        if v.get("model_type", "deepseek_v41_vision") != "deepseek_v41_vision":
            raise self.bad("vision_config.model_type", v["model_type"], "'deepseek_v41_vision'")
        out: dict[str, Any] = {"max_wh_ratio": None}
        for key in FLAT_VISION:
            if key not in v and key != "max_wh_ratio":
                raise ConfigError(f"{self.where}: key vision_config.{key} is missing")
            value: Any = v.get(key)
            if key in ("max_wh_ratio", "rope_theta"):
                if not (is_number(value) and value > 0) and not (value is None and key == "max_wh_ratio"):
                    raise self.bad(f"vision_config.{key}", value, "a positive number")
            elif not is_int(value) or not 0 < value < LIMIT:
                raise self.bad(f"vision_config.{key}", value, "a positive integer")
            out[key] = value
        return out

    def finish(self) -> None:
        """Everything that nobody read must be a key that is known to change nothing."""
        for key in sorted(set(self.text) - self.seen):
            name = next((k for k, flat in FLAT_NAMES.items() if flat == key and k in FIXED_TEXT_KEYS), key)
            if name not in FIXED_TEXT_KEYS:
                raise ConfigError(f"{self.where}: unknown key {key!r}; this model has no such setting")
            allowed = FIXED_TEXT_KEYS[name]
            value = self.text[key]
            if allowed is not None and not any(
                value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed
            ):
                raise self.bad(key, value, f"{allowed[0]!r}, the only value this model family has")
