"""The dimensions of the embedded model, and the working folder's files that every command of `train` reads.

One place says them; the tests' toy of random weights has the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer

WORK = Path("var/train")
DOMAINS = ("code", "law", "medicine", "science", "finance", "general", "chinese")  # trained on
DIALOGUES = "dialogues"
UNSEEN = "unseen"  # judged, never trained on
SPLITS = ("train", "fit", "judge")

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 4096,
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 96,
    "o_lora_rank": 64,
    "o_groups": 2,
    "moe_intermediate_size": 96,
    "n_routed_experts": 24,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "sliding_window": 64,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 512,
    },
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [1, 2, 3],
    "index_source_layer_ids": [1, 2, 3, 5],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 32,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "engram_vocab_size": 2669,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [3, 4, 5],
    "dspark_markov_rank": 64,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}


def read_config(work: Path) -> tuple[dict[str, Any], ModelConfig]:
    """The working folder's config.json, raw and checked; its dimensions must be those of this checkout.

    Raises:
        FileFormatError: missing, not JSON, or made for other dimensions.
        ConfigError: a key is missing, unknown or impossible.
    """
    path = work / "config.json"
    raw = _json(path, "run `python -m train.tokenizer` first")
    config = ModelConfig.from_json(raw)
    for key, value in TEXT_CONFIG.items():
        found = raw["text_config"].get(key)
        if found != value:
            raise FileFormatError(
                f"{path}: {key} is {found!r}, this checkout trains {value!r}; "
                "use another --work folder, or the checkout that made this one"
            )
    return raw, config


def read_tokenizer(work: Path) -> Tokenizer:
    """The working folder's tokenizer.json.

    Raises:
        FileFormatError: missing or not this model's.
    """
    path = work / "tokenizer.json"
    if not path.is_file():
        raise FileFormatError(f"{path}: is not there; run `python -m train.tokenizer` first")
    return Tokenizer.from_file(path, read_config(work)[1])


def corpus_path(work: Path, domain: str, split: str) -> Path:
    return work / "corpora" / f"{domain}.{split}.jsonl"


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file, one after the other.

    Raises:
        FileFormatError: missing, or a line that is not an object; names the line.
    """
    n = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for n, line in enumerate(lines, 1):
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise FileFormatError(f"{path}: line {n} is not an object")
                yield row
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e}); run `python -m train.corpora`") from e
    except ValueError as e:
        raise FileFormatError(f"{path}: line {n} is not JSON ({e})") from e


def _json(path: Path, hint: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e}); {hint}") from e
    except ValueError as e:
        raise FileFormatError(f"{path}: is not JSON ({e}); {hint}") from e
