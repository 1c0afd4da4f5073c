"""A checkpoint of random weights: the embedded model's dimensions and layout, in a second.

FP8, FP4, engram tables in the last two shards, three draft stages, and a byte-level BPE tokenizer learned from
Python's own sources. The weights are well scaled: every activation stays near 1. For what must not depend on a
trained model.
The same seed and the same Python give the same bytes; config.json is written last.
"""

from __future__ import annotations

import importlib.util
import json
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint.names import Spec, expected
from ds4.checkpoint.writer import encode, replace_file, write_checkpoint
from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from train import vocabulary

N_SHARDS = 4
# Text to learn merges from: English prose and code that every Python carries, in this order.
CORPUS = (
    "argparse", "ast", "bdb", "calendar", "collections", "configparser", "difflib", "doctest", "enum", "functools",
    "inspect", "ipaddress", "logging", "mailbox", "optparse", "pickle", "pydoc", "random", "shutil", "smtplib",
    "socket", "statistics", "subprocess", "tarfile", "textwrap", "threading", "traceback", "turtle", "typing",
    "unittest.case", "unittest.mock", "urllib.parse",
)  # fmt: skip


def make_tokenizer() -> str:
    """tokenizer.json of 4,096 ids, its merges learned from the standard library."""
    return vocabulary.train_tokenizer((corpus_text(module) for module in CORPUS), "the standard library's text")


def corpus_text(module: str) -> str:
    """The source of a module of the standard library."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise FileFormatError(f"the source of Python's module {module} is needed for the tokenizer and is not here")
    try:
        return Path(spec.origin).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise FileFormatError(f"{spec.origin}: the source of Python's module {module} cannot be read ({e})") from e


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
    raw = vocabulary.make_config(tokenizer_json)
    config = ModelConfig.from_json(raw)
    stored = encode(config, make_weights(config, seed))
    replace_file(folder / "tokenizer.json", tokenizer_json.encode())
    write_checkpoint(folder, stored, config.engram_layer_ids, N_SHARDS)
    replace_file(folder / "config.json", json.dumps(raw, indent=2).encode() + b"\n")
