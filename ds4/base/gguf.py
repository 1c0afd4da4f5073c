"""The GGUF v3 container: a strict parser and a writer of headers. Knows nothing of models.

layout (little-endian)
    0   "GGUF" · u32 version 3 · u64 tensor count · u64 key count
    24  keys: string name · u32 value type · value; an array is u32 element type · u64 count · elements
    ..  tensors: string name · u32 n_dims (1..4) · u64 dims[n_dims], fastest first · u32 type id · u64 offset
    ..  zero padding to the alignment; tensor data, each at an aligned offset from here

A string is u64 length and UTF-8 bytes. Refused: every length, count or offset that does not fit the file,
nested arrays, duplicate names, unknown value or tensor types, overlapping tensors, bytes after the last one.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.base.types import tensor_bytes
from ds4.checkpoint.files import require_regular
from ds4.errors import FileFormatError

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_HEADER_BYTES = 1 << 30  # the published header has 4.8 MB; a larger one than this is a lie
MAX_NAME_BYTES = 1024

# value type: id, struct code, numpy dtype
SCALARS: dict[str, tuple[int, str]] = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "bool": (7, "B"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip
STRING_ID, ARRAY_ID = 8, 9
_BY_ID = {number: (kind, code) for kind, (number, code) in SCALARS.items()}


@dataclass(frozen=True)
class Value:
    """A metadata value with its GGUF type: a scalar kind of `SCALARS`, "str", or "[kind]" for an array."""

    kind: str
    value: Any


Metadata = dict[str, Value]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file; `offset` counts from the start of the file."""

    name: str
    type_id: int
    dims: tuple[int, ...]  # fastest first
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Container:
    """A parsed header. `metadata` has plain Python values (arrays of numbers as numpy arrays)."""

    path: Path
    metadata: dict[str, Any]
    kinds: dict[str, str]
    tensors: dict[str, TensorInfo]
    alignment: int
    data_start: int
    file_bytes: int


def read_container(path: str | Path) -> Container:
    """Parse a file's header; touches nothing behind it.

    Raises:
        FileFormatError: the file cannot be read or is not a whole, consistent GGUF v3 file.
    """
    p = Path(path)
    require_regular(p)
    try:
        with open(p, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            if size < 24:
                raise FileFormatError(f"{p}: {size} bytes are too few for a GGUF header")
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _parse(p, view, size)
    except OSError as e:
        raise FileFormatError(f"{p}: cannot be read ({e.strerror or e})") from e


class _Cursor:
    """Bounded reads; every error names the file and the byte."""

    def __init__(self, path: Path, view: mmap.mmap, size: int) -> None:
        self.path, self.view, self.pos = path, view, 0
        self.end = min(size, MAX_HEADER_BYTES)
        self.capped = size > MAX_HEADER_BYTES

    def fail(self, text: str, at: int | None = None) -> FileFormatError:
        return FileFormatError(f"{self.path}: {text} (at byte {self.pos if at is None else at})")

    def take(self, n: int, what: str) -> int:
        """Advance by n bytes and return where they start."""
        if n > self.end - self.pos:
            limit = f"the header limit of {MAX_HEADER_BYTES} bytes" if self.capped else "the end of the file"
            raise self.fail(f"{what} of {n} bytes runs past {limit}")
        start = self.pos
        self.pos += n
        return start

    def number(self, code: str, what: str) -> Any:
        start = self.take(struct.calcsize(code), what)
        return struct.unpack_from("<" + code, self.view, start)[0]

    def string(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        at = self.pos
        n = self.number("Q", f"length of {what}")
        if n > most:
            raise self.fail(f"{what} claims {n} bytes", at)
        start = self.take(n, what)
        try:
            return self.view[start : start + n].decode("utf-8")
        except UnicodeDecodeError as e:
            raise self.fail(f"{what} is not UTF-8", start + e.start) from e

    def value(self, key: str) -> tuple[str, Any]:
        at = self.pos
        number = self.number("I", f"type of {key}")
        if number == ARRAY_ID:
            return self.array(key)
        if number == STRING_ID:
            return "str", self.string(f"value of {key}")
        kind, code = self.scalar_type(number, key, at)
        return kind, self.scalar(kind, code, key)

    def scalar(self, kind: str, code: str, key: str) -> Any:
        v = self.number(code, f"value of {key}")
        if kind == "bool":
            if v > 1:
                raise self.fail(f"{key}: a bool is stored as {v}", self.pos - 1)
            return bool(v)
        return v

    def scalar_type(self, number: int, key: str, at: int) -> tuple[str, str]:
        if number not in _BY_ID:
            raise self.fail(f"{key}: unknown value type {number}", at)
        return _BY_ID[number]

    def array(self, key: str) -> tuple[str, Any]:
        at = self.pos
        number = self.number("I", f"element type of {key}")
        count = self.number("Q", f"length of {key}")
        if number == ARRAY_ID:
            raise self.fail(f"{key}: nested arrays are not allowed", at)
        if number == STRING_ID:
            if count > (self.end - self.pos) // 8:
                raise self.fail(f"{key}: {count} strings do not fit the file", at)
            return "[str]", [self.string(f"{key}[{i}]") for i in range(count)]
        kind, code = self.scalar_type(number, key, at)
        size = struct.calcsize(code)
        start = self.take(count * size, f"array {key} of {count} x {kind}")
        values: NDArray[Any] = np.frombuffer(self.view[start : self.pos], np.dtype("<" + code))
        if kind == "bool":
            if np.any(values > 1):
                raise self.fail(f"{key}: a bool is neither 0 nor 1", start)
            values = values.astype(bool)
        return f"[{kind}]", values


def _parse(path: Path, view: mmap.mmap, size: int) -> Container:
    c = _Cursor(path, view, size)
    start = c.take(4, "magic")
    if view[start : start + 4] != MAGIC:
        raise c.fail(f"not a GGUF file: it begins with {view[start : start + 4]!r}", 0)
    version = c.number("I", "version")
    if version != VERSION:
        hint = " (big-endian)" if version == VERSION << 24 else ""
        raise c.fail(f"GGUF version {version}{hint} is not supported; version {VERSION} is", 4)
    n_tensors, n_keys = c.number("Q", "tensor count"), c.number("Q", "key count")
    if n_keys > (c.end - c.pos) // 13 or n_tensors > (c.end - c.pos) // 33:
        raise c.fail(f"{n_tensors} tensors and {n_keys} keys do not fit {size} bytes", 8)
    metadata: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for i in range(n_keys):
        key = c.string(f"name of key {i}", MAX_NAME_BYTES)
        if key in metadata:
            raise c.fail(f"key {key!r} appears twice")
        kinds[key], metadata[key] = c.value(key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or not _is_alignment(alignment):
        raise c.fail(f"general.alignment is {alignment!r}; expected a power of two from 8 to 65536")
    raw = [_tensor(c, i) for i in range(n_tensors)]
    data_start = -(-c.pos // alignment) * alignment
    if data_start > size:
        raise c.fail(f"the file ends in its header, {data_start - size} bytes before the tensor data")
    if any(view[c.pos : data_start]):
        raise c.fail("padding before the tensor data is not zero")
    tensors = _place(c, raw, alignment, data_start, size)
    return Container(path, metadata, kinds, tensors, alignment, data_start, size)


def _is_alignment(n: int) -> bool:
    return 8 <= n <= 65536 and n & (n - 1) == 0


def _tensor(c: _Cursor, i: int) -> tuple[str, tuple[int, ...], int, int]:
    name = c.string(f"name of tensor {i}", MAX_NAME_BYTES)
    if not name:
        raise c.fail(f"tensor {i} has an empty name")
    n_dims = c.number("I", f"dimension count of {name}")
    if not 1 <= n_dims <= 4:
        raise c.fail(f"tensor {name} has {n_dims} dimensions; 1 to 4 are allowed", c.pos - 4)
    dims = tuple(c.number("Q", f"dims of {name}") for _ in range(n_dims))
    if min(dims) < 1 or math.prod(dims) >= 1 << 62:
        raise c.fail(f"tensor {name} has impossible dims {list(dims)}")
    return name, dims, c.number("I", f"type of {name}"), c.number("Q", f"offset of {name}")


def _place(
    c: _Cursor, raw: list[tuple[str, tuple[int, ...], int, int]], alignment: int, data_start: int, size: int
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name, dims, type_id, offset in raw:
        where = f"{c.path}: tensor {name}"
        if name in tensors:
            raise FileFormatError(f"{where} appears twice")
        nbytes = tensor_bytes(type_id, dims, where)
        if offset % alignment:
            raise FileFormatError(f"{where}: offset {offset} is not a multiple of {alignment}")
        if offset > size - data_start or nbytes > size - data_start - offset:
            raise FileFormatError(
                f"{where}: {nbytes} bytes at offset {offset} run past the end of the file ({size} bytes); "
                "is the file cut short?"
            )
        tensors[name] = TensorInfo(name, type_id, dims, data_start + offset, nbytes)
    end, last = data_start, "the header"
    for t in sorted(tensors.values(), key=lambda t: t.offset):
        if t.offset < end:
            raise FileFormatError(f"{c.path}: tensor {t.name} overlaps {last}")
        end, last = t.offset + t.nbytes, t.name
    if size > -(-end // alignment) * alignment:
        raise FileFormatError(f"{c.path}: {size - end} bytes follow the last tensor; expected none")
    return tensors


# ---- writing ----


def align(n: int, alignment: int = DEFAULT_ALIGNMENT) -> int:
    """The least multiple of `alignment` that is at least n."""
    return -(-n // alignment) * alignment


def header_bytes(metadata: Metadata, tensors: list[tuple[str, int, tuple[int, ...]]]) -> tuple[bytes, list[int], int]:
    """A header for tensors (name, type id, dims) packed in that order at the default alignment.

    Returns:
        The header, padded to where the data start; each tensor's offset in the file; the file's size.
    """
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, v in metadata.items():
        parts += [_string(key), _value(v)]
    offset, offsets = 0, []
    for name, type_id, dims in tensors:
        parts += [_string(name), struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)]
        offsets.append(offset)
        offset = align(offset + tensor_bytes(type_id, dims, name))
    head = b"".join(parts)
    start = align(len(head))
    return head.ljust(start, b"\0"), [start + o for o in offsets], start + offset


def _string(s: str) -> bytes:
    raw = s.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(v: Value) -> bytes:
    if v.kind == "str":
        return struct.pack("<I", STRING_ID) + _string(v.value)
    if v.kind == "[str]":
        return struct.pack("<IIQ", ARRAY_ID, STRING_ID, len(v.value)) + b"".join(map(_string, v.value))
    if v.kind.startswith("["):
        number, code = SCALARS[v.kind[1:-1]]
        body = np.asarray(v.value, np.dtype("<" + code)).tobytes()
        return struct.pack("<IIQ", ARRAY_ID, number, len(v.value)) + body
    number, code = SCALARS[v.kind]
    return struct.pack("<I" + code, number, v.value)
