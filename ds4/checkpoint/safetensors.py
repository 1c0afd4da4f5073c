"""The safetensors container, read strictly: a header that lies about anything is refused, by name.

Layout: u64 little-endian header length n, n bytes of JSON, then the data. The JSON maps a tensor's name to
{"dtype", "shape", "data_offsets": [begin, end)} with offsets from the start of the data; the data has no
holes, no overlaps and nothing after the last tensor. Only the header is read here, never the data, except by
`load_arrays`, which is for small files. We do not use the safetensors package: it does not know our scale
dtype in every version, and its messages name neither the file nor the place.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint.files import require_regular
from ds4.errors import FileFormatError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 8

# dtype -> numpy type of the stored bytes; formats that numpy lacks are kept as unsigned integers of their size
STORAGE: dict[str, type[np.generic]] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
    "I16": np.int16, "U16": np.uint16, "F16": np.float16, "BF16": np.uint16, "I32": np.int32, "U32": np.uint32,
    "F32": np.float32, "I64": np.int64, "U64": np.uint64, "F64": np.float64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Names and places of all tensors of one file, in the order of their data.

    Raises:
        FileFormatError: unreadable, not a regular file, cut off, or a header that does not describe the file exactly.
    """
    require_regular(path)
    try:
        with path.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            if size < 8:
                raise FileFormatError(f"{path}: is cut off: {size} bytes, a safetensors file begins with 8 of length")
            n = int.from_bytes(f.read(8), "little")
            if n > MAX_HEADER_BYTES:
                raise FileFormatError(f"{path}: bytes 0..8 give a header of {n} bytes; at most {MAX_HEADER_BYTES}")
            if 8 + n > size:
                raise FileFormatError(f"{path}: is cut off: the header ends at byte {8 + n}, the file at {size}")
            text = f.read(n)
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e})") from e
    return parse_header(text, size, path)


def parse_header(text: bytes, file_size: int, path: Path) -> dict[str, TensorInfo]:
    """The JSON header `text` of a file of `file_size` bytes; see `read_header`."""
    header = _json(text, path)
    start = 8 + len(text)
    _metadata(header.pop("__metadata__", {}), path)
    infos = [_entry(name, value, start, path) for name, value in header.items()]
    infos.sort(key=lambda i: (i.offset, i.offset + i.nbytes))
    at, before = start, ""
    for info in infos:
        if info.offset != at:
            fault = "overlaps" if info.offset < at else f"leaves a hole of {info.offset - at} bytes after"
            _refuse(
                path, f"tensor {info.name} at byte {info.offset} {fault} {before or 'the header'}, which ends at {at}"
            )
        at, before = info.offset + info.nbytes, info.name
    if at > file_size:
        cut = next(i for i in infos if i.offset + i.nbytes > file_size)
        end = cut.offset + cut.nbytes
        _refuse(path, f"is cut off: tensor {cut.name} needs bytes {cut.offset}..{end}, the file has {file_size}")
    if at < file_size:
        _refuse(path, f"has {file_size - at} bytes after the last tensor, which ends at byte {at}")
    return {info.name: info for info in infos}


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Every tensor of a small file as an array in its storage type (BF16 as uint16, FP8 as uint8); copies."""
    infos = read_header(path)
    data = np.fromfile(path, np.uint8)
    out: dict[str, NDArray[Any]] = {}
    for name, i in infos.items():
        out[name] = data[i.offset : i.offset + i.nbytes].copy().view(STORAGE[i.dtype]).reshape(i.shape)
    return out


def _refuse(path: Path, what: str) -> NoReturn:
    raise FileFormatError(f"{path}: {what}")


def _json(text: bytes, path: Path) -> dict[str, Any]:
    if not text.startswith(b"{"):
        _refuse(path, f"byte 8 must open the header with '{{', is {text[:1]!r}")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except UnicodeDecodeError as e:
        _refuse(path, f"the header is not UTF-8 at byte {8 + e.start}")
    except json.JSONDecodeError as e:
        _refuse(path, f"the header is not JSON: {e.msg} near byte {8 + e.pos}")
    except (ValueError, RecursionError) as e:
        _refuse(path, f"the header is not usable: {str(e)[:200]}")
    if not isinstance(header, dict):
        _refuse(path, "the header is not a JSON object")
    return header


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"name {name!r} stands twice")
            seen.add(name)
    return out


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _metadata(value: object, path: Path) -> None:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        _refuse(path, "__metadata__ must be an object of strings")


def _entry(name: str, value: object, start: int, path: Path) -> TensorInfo:
    if not name.isprintable() or len(name) > 512:  # also keeps lone surrogates out of messages
        _refuse(path, f"tensor name {ascii(name)[:80]} is not printable text of at most 512 characters")
    if not isinstance(value, Mapping) or set(value) != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"tensor {name} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORAGE:
        _refuse(path, f"tensor {name} has unknown dtype {_short(dtype)}; known are {', '.join(STORAGE)}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        _refuse(path, f"tensor {name} has shape {_short(shape)}; expected up to {MAX_DIMS} non-negative integers")
    if not _naturals(offsets) or len(offsets) != 2:
        _refuse(path, f"tensor {name} has data_offsets {_short(offsets)}; expected two non-negative integers")
    begin, end = offsets
    nbytes = math.prod(shape) * np.dtype(STORAGE[dtype]).itemsize
    if end - begin != nbytes:
        _refuse(
            path, f"tensor {name}: {dtype} {_short(shape)} is {nbytes} bytes, data_offsets {begin}..{end} are not"
        )
    return TensorInfo(name, dtype, tuple(shape), path, start + begin, nbytes)


def _naturals(v: object) -> bool:
    return isinstance(v, list) and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**63 for i in v)


def _short(v: object) -> str:
    text = repr(v)
    return text if len(text) <= 80 else text[:77] + "..."
