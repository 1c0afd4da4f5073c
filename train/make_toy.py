"""Make the small checkpoint that the installer quantizes when it is given no model.

    python train/make_toy.py -o DIR [--seed N]

A model of the released structure with random, well-scaled weights, in the released layout: shards with an
index, FP8, FP4, engram tables in the last two shards, three draft stages, and a byte-level BPE tokenizer with
the released pre-tokenizer and the released names of the special tokens. It says nothing sensible; it exercises
every mechanism. About 15 MB in a few seconds, no network, no GPU. The same seed and the same Python give the
same bytes, so an interrupted run is simply run again; config.json is written last.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # before the import: one thread, one order of counting

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ds4.checkpoint.names import Spec, expected
from ds4.checkpoint.writer import encode, replace_file, write_checkpoint
from ds4.engram.tables import derive_primes, derive_tables, derive_token_map
from ds4.errors import Ds4Error, FileFormatError
from ds4.model import tokenizer as released
from ds4.model.config import ModelConfig

N_SHARDS = 4
VOCABULARY = 4096
FIRST = (released.BOS, released.EOS, released.PAD)
# (name, special, normalized): flags as in the public tokenizer file of this series
ADDED = (
    (released.SYSTEM, True),
    (released.USER, False),
    (released.ASSISTANT, False),
    (released.THINK, False),
    (released.END_THINK, False),
    (released.DSML, False),
    (released.REMINDER, False),
    *((f"<｜{task}｜>", False) for task in released.TASKS),
    (released.IMAGE, False),
)
# Text to learn merges from: English prose and code that every Python carries, in this order.
CORPUS = (
    "argparse", "ast", "bdb", "calendar", "collections", "configparser", "difflib", "doctest", "enum", "functools",
    "inspect", "ipaddress", "logging", "mailbox", "optparse", "pickle", "pydoc", "random", "shutil", "smtplib",
    "socket", "statistics", "subprocess", "tarfile", "textwrap", "threading", "traceback", "turtle", "typing",
    "unittest.case", "unittest.mock", "urllib.parse",
)  # fmt: skip

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": VOCABULARY,
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
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}


def make_tokenizer() -> str:
    """tokenizer.json of 4,096 ids, its merges learned from the standard library."""
    return train_tokenizer((corpus_text(module) for module in CORPUS), "the standard library's text")


def train_tokenizer(texts: Iterable[str], what: str) -> str:
    """tokenizer.json of 4,096 ids: three specials, 256 bytes, merges learned from `texts`, the other added tokens.

    Args:
        what: names the texts in the message if they are too few.

    Raises:
        FileFormatError: too little text for so many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r), "isolated") for r in (released.DIGITS, released.CJK, released.WORDS)]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(ADDED),
        special_tokens=[AddedToken(name, normalized=False, special=True) for name in FIRST],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(name, normalized=not special, special=special) for name, special in ADDED])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise FileFormatError(
            f"{what} gave {tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}; is some of it missing?"
        )
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))


def corpus_text(module: str) -> str:
    """The source of a module of the standard library."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise FileFormatError(f"the source of Python's module {module} is needed for the tokenizer and is not here")
    try:
        return Path(spec.origin).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise FileFormatError(f"{spec.origin}: the source of Python's module {module} cannot be read ({e})") from e


def make_config(tokenizer_json: str, dimensions: Mapping[str, Any] = TEXT_CONFIG) -> dict[str, Any]:
    """config.json, with the numbers that follow from the tokenizer and the prime search filled in."""
    tokenizer = released.Tokenizer.from_json(tokenizer_json)
    text = dict(dimensions)
    text["dspark_noise_token_id"] = tokenizer.special_id(released.SYSTEM)  # as released
    text["engram_compressed_vocab_size"] = derive_token_map(tokenizer)[1]
    text["engram_num_embeddings"] = [0] * len(text["engram_layer_ids"])
    raw: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": tokenizer.special_id(released.BOS),
        "eos_token_id": tokenizer.special_id(released.EOS),
        "pad_token_id": tokenizer.special_id(released.PAD),
        "image_token_id": tokenizer.special_id(released.IMAGE),
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }
    text["engram_num_embeddings"] = derive_primes(ModelConfig.from_json(raw)).sum(axis=(1, 2)).tolist()
    derive_tables(ModelConfig.from_json(raw), tokenizer)  # the check that a load makes
    return raw


def make_weights(config: ModelConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """Every weight in float32. Each name has a generator of its own, so no weight depends on another's shape."""
    out = {}
    for name, spec in expected(config).items():
        if spec.required and spec.dtype != "F8_E8M0":
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            out[name] = _weight(config, name, spec, rng)
    return out


def _weight(c: ModelConfig, name: str, spec: Spec, rng: np.random.Generator) -> NDArray[np.float32]:
    """Scales that keep every activation near 1: a matrix is N(0, 1/inputs), a norm about 1.

    The hyper-connections start near the identity: pre sums to about 1 (sigmoid(-1.1) = 1/4 a stream), post is
    about 1, comb favours a stream's own copy.
    """
    shape = (spec.shape[0], spec.shape[1] * 2) if spec.dtype == "I8" else spec.shape
    noise = rng.standard_normal(shape).astype(np.float32)
    leaf = name.split(".")[-1]
    if leaf.startswith("hc_"):
        if leaf.endswith("_fn"):
            return noise / np.float32(np.sqrt(shape[1]))
        if leaf.endswith("_scale"):
            return np.float32(0.5) + np.float32(0.05) * noise
        comb = 3 * np.eye(c.hc_mult).ravel()
        base = np.concatenate([np.full(c.hc_mult, -1.1), np.zeros(c.hc_mult), comb])
        return np.asarray(base + 0.2 * noise, np.float32)
    if len(shape) == 1 and ("norm" in name):
        return 1 + np.float32(0.1) * noise
    if leaf in ("q_weight", "k_weight"):
        return 1 + np.float32(0.1) * noise
    if name == "embed.weight" or spec.part == "table" or name.endswith("markov_head.embed.weight"):
        return noise
    if leaf in ("bias", "bias_vl"):
        return np.float32(0.05) * noise
    if leaf == "attn_sink":
        return noise
    gain = 3.0 if name == "head.weight" else 1.0  # logits of deviation 3: a clear first choice
    return noise * np.float32(gain / np.sqrt(shape[-1]))


def make(folder: Path, seed: int) -> None:
    """Write the whole checkpoint into `folder`, config.json last."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise FileFormatError(f"{folder}: cannot be made ({e.strerror or e})") from e
    tokenizer_json = make_tokenizer()
    raw = make_config(tokenizer_json)
    config = ModelConfig.from_json(raw)
    stored = encode(config, make_weights(config, seed))
    replace_file(folder / "tokenizer.json", tokenizer_json.encode())
    write_checkpoint(folder, stored, config.engram_layer_ids, N_SHARDS)
    replace_file(folder / "config.json", json.dumps(raw, indent=2).encode() + b"\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a small checkpoint in the released layout.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights (default 1)")
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed is {args.seed}; it must not be negative")
    try:
        make(args.output, args.seed)
    except Ds4Error as e:
        print(f"make_toy: {e}", file=sys.stderr)
        return 1
    size = sum(p.stat().st_size for p in args.output.iterdir())
    print(f"{args.output}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
