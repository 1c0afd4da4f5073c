"""Quantizing in tasks: a layer's codebook, and a range of a layer's experts against it. They return bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.base.blob import MATRICES, Shapes, encode_payload
from ds4.base.codebook import Assigner, BlasAssigner, Workers, codewords, train
from ds4.base.experts import Gain, layer_pool, quantize_matrix
from ds4.base.source import digest, matrix_rows
from ds4.checkpoint.reader import Checkpoint

EXPERTS = 4  # of a task: seconds of work at released size, and 100 MB to keep until they are written
Record = dict[str, Any]
U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class CodebookTask:
    """One layer's: the source's prefix up to the expert's number, matrices' shapes, codewords."""

    checkpoint: str
    prefix: str
    n_expert: int
    shapes: Shapes
    nc: int

    def __str__(self) -> str:
        return f"codebook of {self.prefix}"


@dataclass(frozen=True)
class ExpertsTask:
    """Experts of one layer, and the codebook u8 [nc, 8] that their vectors are looked up in."""

    checkpoint: str
    prefix: str
    experts: tuple[int, ...]
    n_expert: int
    gain: Gain
    codebook: U8

    def __str__(self) -> str:
        return f"{self.prefix}{self.experts[0]}..{self.experts[-1]}"


def run_codebook(task: CodebookTask) -> tuple[U8, float]:
    """The codebook u8 [nc, 8], and the pool's vectors a codeword."""
    checkpoint = Checkpoint.open(task.checkpoint)
    pool = layer_pool(checkpoint, task.prefix, task.n_expert, task.shapes, task.nc)
    return train(pool, task.nc, BlasAssigner(Workers(1))), len(pool) / task.nc


def run_experts(task: ExpertsTask) -> list[tuple[list[bytes], Record]]:
    """For every expert, `encode_expert`."""
    checkpoint, assigner = Checkpoint.open(task.checkpoint), BlasAssigner(Workers(1))
    assigner.load(codewords(task.codebook))
    return [
        encode_expert(checkpoint, task.prefix, e, task.n_expert, task.codebook, assigner, task.gain)
        for e in task.experts
    ]


def encode_expert(
    checkpoint: Checkpoint, prefix: str, e: int, n_expert: int, codebook: U8, assigner: Assigner, gain: Gain
) -> tuple[list[bytes], Record]:
    """One expert's three payloads as the blob holds them, and its record for the report.

    Args:
        assigner: has loaded `codebook`.

    Raises:
        FileFormatError: a weight is NaN or infinite.
    """
    names = [f"{prefix}{e}.{m}.weight" for m in MATRICES]
    error = energy = 0.0
    saturated, payloads = 0, []
    for name in names:
        q = quantize_matrix(matrix_rows(checkpoint, name, slice(None)), codebook, assigner, gain)
        payloads.append(bytes(encode_payload(q.gains, q.indices, len(codebook), n_expert)))
        error, energy, saturated = error + q.error, energy + q.energy, saturated + q.saturated
    record = {"source": digest(checkpoint, names), "error": error, "energy": energy, "lost_rows": saturated}
    return payloads, record
