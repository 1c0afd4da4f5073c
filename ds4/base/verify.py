"""Read all of a base and say everything that is wrong with it: NaN, infinities, indices, padding, tables.

A load trusts what costs too much to read (base/reader.py); this does not. Engram shards are not read here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.base import codecs
from ds4.base.blob import DIM, MATRICES, ExpertBlob, payload_bytes
from ds4.base.reader import Base, BaseTensor
from ds4.base.types import FP8_32X32, I32, I64, VQBLOB, tensor_bytes

CHUNK = 1 << 22  # weights decoded at a time
Progress = Callable[[str, int, int], None]


def verify(path: str | Path, engram_dir: str | Path | None = None, progress: Progress | None = None) -> list[str]:
    """Problems of a base, one line each; an empty list for a sound file.

    Raises:
        FileFormatError, MissingTensorError: what a load refuses already.
    """
    base = Base.open(path, engram_dir)
    problems: list[str] = []
    done = 0
    for t in sorted(base.tensors.values(), key=lambda t: t.offset):
        if t.type_id == VQBLOB:
            problems += _blob_problems(base, t)
        elif t.type_id not in (I32, I64):
            problems += _dense_problems(base, t)
        done += t.nbytes
        if progress is not None:
            progress(t.name, done, base.file_bytes)
    problems += _gap_problems(base)
    problems += _table_problems(base)
    return problems


def fingerprint(path: str | Path) -> str:
    """SHA-256 (hex) of a whole file."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _dense_problems(base: Base, t: BaseTensor) -> Iterator[str]:
    for start, x in _decoded(base, t):
        bad = np.flatnonzero(~np.isfinite(x.reshape(-1)))
        if len(bad):
            value = x.reshape(-1)[bad[0]]
            yield f"{t.name}: {len(bad)} values are not finite, the first is {value} at element {start + int(bad[0])}"


def _decoded(base: Base, t: BaseTensor) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(first element, values) of row slices; fp8_32x32 has its scales at the end and is decoded whole."""
    raw, cols = base.raw(t.name), t.dims[0]
    rows = int(np.prod(t.dims[1:], dtype=np.int64))
    step = rows if t.type_id == FP8_32X32 else max(CHUNK // cols, 1)
    for i in range(0, rows, step):
        n = min(step, rows - i)
        if n == rows:
            part = raw
        else:
            row = tensor_bytes(t.type_id, (cols,), t.name)
            part = raw[i * row : (i + n) * row]
        yield i * cols, codecs.decode(part, t.type_id, (cols, n))


def _blob_problems(base: Base, t: BaseTensor) -> Iterator[str]:
    prefix = t.name.removesuffix(".ffn_exps_vq.blob")
    if prefix.startswith("mtp.") and not base.config.num_nextn_predict_layers:
        return
    blob = base.experts(prefix)
    for e in range(blob.n_expert):
        for m, name in enumerate(MATRICES):
            where = f"{t.name}: expert {e} {name}"
            p = blob.payload(e, m)
            indices = p.indices()
            worst = int(indices.max(initial=0))
            if worst >= p.nc:
                row = int(np.flatnonzero((indices >= p.nc).any(axis=1))[0])
                yield f"{where}: index {worst} in row {row}, there are {p.nc} codewords"
            if blob.version == 3:
                yield from _padding_problems(blob, base.raw(t.name), e, m, where)


def _padding_problems(blob: ExpertBlob, raw: NDArray[np.uint8], e: int, m: int, where: str) -> Iterator[str]:
    """Bits after a row's last index, and bytes after the payload's streams, are zero."""
    p = blob.payload(e, m)
    n = p.cols // DIM
    spare = p.main.shape[1] * 8 - 12 * n
    if spare and np.any(p.main[:, -1] >> np.uint8(8 - spare)):
        yield f"{where}: bits after the last index of a row are not zero"
    if p.plane is not None and n % 8 and np.any(p.plane[:, -1] >> np.uint8(n % 8)):
        yield f"{where}: bits after the last plane bit of a row are not zero"
    plane_bytes = 0 if p.plane is None else p.plane.size
    at = int(blob.slots[e, m])
    used = 32 + 2 * p.rows + p.main.size + plane_bytes
    if np.any(raw[at + used : at + payload_bytes(p.rows, p.cols, p.nc)]):
        yield f"{where}: padding after the streams is not zero"


def _gap_problems(base: Base) -> Iterator[str]:
    """Bytes between tensors are zero."""
    tensors = sorted(base.tensors.values(), key=lambda t: t.offset)
    ends = [t.offset for t in tensors[1:]] + [base.file_bytes]
    with open(base.path, "rb") as f:
        for t, end in zip(tensors, ends, strict=True):
            f.seek(t.offset + t.nbytes)
            if any(f.read(end - t.offset - t.nbytes)):
                yield f"{t.name}: the padding after it is not zero"


def _table_problems(base: Base) -> Iterator[str]:
    """The engram tables among themselves: what a load's range checks cannot see."""
    c = base.config
    if not c.engram_layer_ids:
        return
    t = base.engram_tensors()
    distinct = len(np.unique(t.token_map))
    if distinct != c.engram_compressed_vocab_size:
        yield f"engram.token_map: {distinct} distinct ids, the config says {c.engram_compressed_vocab_size}"
    for g, rows in enumerate(c.engram_num_embeddings):
        primes = t.primes[g].reshape(-1)
        if not np.array_equal(t.offsets[g], np.cumsum(primes) - primes):
            yield f"engram.offsets: table {g} is not the running sum of its primes"
        if int(primes.sum()) != rows:
            yield f"engram.primes: table {g} sums to {int(primes.sum())}, it has {rows} rows"
        if np.any(t.multipliers[g] % 2 == 0):
            yield f"engram.multipliers: table {g} has an even multiplier"
