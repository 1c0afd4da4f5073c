"""The tokenizer inside a base: `tokenizer.ggml.*` lists and, in ours, the whole `tokenizer.json`.

The published file has no `token_type`: its added tokens are ids 0-2 and everything from 128,000 on. Ours
always writes it. Types: 1 ordinary, 3 added and special, 4 added, 5 a hole in the vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds4.base.gguf import Metadata, Value
from ds4.errors import FileFormatError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
JSON_KEY = "ds4.tokenizer_json"


@dataclass(frozen=True)
class TokenizerData:
    """What a tokenizer is built from. `tokenizer_json` is the file's text where the base has it."""

    tokenizer_json: str | None
    tokens: list[str]
    merges: list[str]  # "left right"
    token_types: list[int] | None
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int


def metadata_from_json(text: str, vocab_size: int, where: str) -> Metadata:
    """`tokenizer.ggml.*` and the file itself, from the text of a tokenizer.json.

    Raises:
        FileFormatError: not a byte-level BPE tokenizer.json, or an id outside the model's vocabulary.
    """
    try:
        raw = json.loads(text)
        model = raw["model"]
        vocab: dict[str, int] = dict(model["vocab"])
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        added = [(int(t["id"]), str(t["content"]), bool(t["special"])) for t in raw.get("added_tokens", [])]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise FileFormatError(f"{where}: not a BPE tokenizer.json ({type(e).__name__}: {e})") from e
    tokens: list[str | None] = [None] * vocab_size
    types = np.full(vocab_size, UNUSED, np.int32)
    for content, i in vocab.items():
        _put(tokens, types, i, content, NORMAL, where)
    for i, content, special in added:
        _put(tokens, types, i, content, CONTROL if special else USER_DEFINED, where)
    filled = [t if t is not None else f"[PAD{i}]" for i, t in enumerate(tokens)]
    for piece in (*filled, *merges):
        if not _encodable(piece):
            raise FileFormatError(f"{where}: {piece!r} has half of a surrogate pair and is no text")
    return {
        "tokenizer.ggml.model": Value("str", "gpt2"),
        "tokenizer.ggml.tokens": Value("[str]", filled),
        "tokenizer.ggml.merges": Value("[str]", merges),
        "tokenizer.ggml.token_type": Value("[i32]", types),
        JSON_KEY: Value("str", text),
    }


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _put(tokens: list[str | None], types: Any, i: int, content: str, kind: int, where: str) -> None:
    if not isinstance(i, int) or not 0 <= i < len(tokens):
        raise FileFormatError(f"{where}: token {content!r} has id {i!r}; the model has {len(tokens)} ids")
    tokens[i], types[i] = content, kind


def from_metadata(meta: dict[str, Any], vocab_size: int, where: str) -> TokenizerData:
    """Read back; checks kinds and lengths.

    Raises:
        FileFormatError: a list is missing, of a wrong kind, or not of the vocabulary's length.
    """
    model = meta.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise FileFormatError(f"{where}: tokenizer.ggml.model is {model!r}; expected 'gpt2'")
    tokens, merges = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or len(tokens) != vocab_size:
        n = len(tokens) if isinstance(tokens, list) else "no"
        raise FileFormatError(f"{where}: tokenizer.ggml.tokens has {n} strings for {vocab_size} ids")
    if not isinstance(merges, list):
        raise FileFormatError(f"{where}: tokenizer.ggml.merges is missing or not a list of strings")
    types = meta.get("tokenizer.ggml.token_type")
    if types is not None:
        if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu" or len(types) != vocab_size:
            raise FileFormatError(f"{where}: tokenizer.ggml.token_type must be {vocab_size} integers")
        types = [int(t) for t in types]
    text = meta.get(JSON_KEY)
    if text is not None and not isinstance(text, str):
        raise FileFormatError(f"{where}: {JSON_KEY} is not a string")
    special = []
    for name, default in (("bos", 0), ("eos", 1), ("padding", 2)):
        i = meta.get(f"tokenizer.ggml.{name}_token_id", default)
        if not isinstance(i, int) or not 0 <= i < vocab_size:
            raise FileFormatError(f"{where}: tokenizer.ggml.{name}_token_id is {i!r}")
        special.append(i)
    return TokenizerData(text, tokens, merges, types, *special)
