"""Rows of a checkpoint's matrices as float32, a few at a time: no large tensor is ever whole in memory."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint import codecs
from ds4.checkpoint.names import companion
from ds4.checkpoint.reader import Checkpoint
from ds4.errors import FileFormatError

TILE = 32  # rows under one FP8 scale
F32 = NDArray[np.float32]


def matrix_rows(checkpoint: Checkpoint, name: str, rows: slice) -> F32:
    """f32 [n, cols] of the rows of a slice; a vector counts as one row. FP8 slices begin at a multiple of 32.

    Raises:
        FileFormatError: a value is NaN or infinite.
    """
    raw = as_rows(checkpoint.raw(name))
    dtype = checkpoint.infos[name].dtype
    if dtype == "F32":
        out = np.array(raw[rows], np.float32)
    elif dtype == "BF16":
        out = codecs.bf16_to_f32(raw[rows])
    else:
        scale = as_rows(checkpoint.raw(companion(name)))
        if dtype == "I8":
            out = codecs.dequant_fp4(raw[rows].view(np.uint8), scale[rows])
        else:
            start, stop, _ = rows.indices(len(raw))
            assert start % TILE == 0
            out = codecs.dequant_fp8(raw[rows], scale[start // TILE : -(-stop // TILE)])
    if not np.isfinite(out).all():
        bad = int(np.flatnonzero(~np.isfinite(out).all(axis=1))[0])
        file = checkpoint.infos[name].file
        raise FileFormatError(f"{file}: {name} has a NaN or infinity (row {bad} of those at {rows.start})")
    return out


def as_rows(raw: NDArray[Any]) -> NDArray[Any]:
    return raw if raw.ndim == 2 else raw.reshape(1, -1)


def digest(checkpoint: Checkpoint, names: list[str]) -> str:
    """SHA-256 (hex) of tensors as stored, with their scales."""
    h = hashlib.sha256()
    for name in names:
        for part in dict.fromkeys((name, companion(name))):
            if checkpoint.has(part):
                h.update(part.encode())
                h.update(np.ascontiguousarray(checkpoint.raw(part)).data)
    return h.hexdigest()
