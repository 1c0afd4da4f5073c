"""Which model a checkpoint or a base is: a base is made from a checkpoint, and only those two may be compared."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from ds4.base.mark import file_mark as file_mark
from ds4.errors import FileFormatError
from ds4.teacher.source import Source

_SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "n_routed_experts",
    "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip


def model_fingerprint(source: Source) -> str:
    """Sixteen hex digits of the dimensions and of the vectors that every base carries unchanged.

    Norms and router biases are stored as float32 in a base, whatever becomes of the matrices, so a checkpoint and
    each base made from it agree, and two trainings of one shape do not. Reads a few hundred kilobytes.
    """
    h = hashlib.sha256(json.dumps({name: getattr(source.config, name) for name in _SHAPE}).encode())
    names = ["norm.weight"]
    for layer in range(source.config.num_hidden_layers):
        names += [f"layers.{layer}.{name}" for name in ("attn_norm.weight", "ffn_norm.weight", "ffn.gate.bias")]
    for name in names:
        h.update(np.ascontiguousarray(source.dense(name), "<f4").tobytes())
    return h.hexdigest()[:16]


def folder_mark(path: str | Path) -> str:
    """Eight hex digits of the names and marks of a folder's files, as of a sidecar's.

    Raises:
        FileFormatError: no such folder, or a file cannot be read.
    """
    if not Path(path).is_dir():
        raise FileFormatError(f"{path}: no such folder")
    h = hashlib.sha256()
    for file in sorted(p for p in Path(path).iterdir() if p.is_file()):
        h.update(f"{file.name} {file_mark(file)}\n".encode())
    return h.hexdigest()[:8]
