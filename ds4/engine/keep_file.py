"""A kept text as a file that is not believed before it was checked.

    8 bytes    magic              4 bytes  version            4 bytes  length of the header
    32 bytes   SHA-256 of the header
    header     JSON: identity, chain (what it can be found by), numbers, points; each array's name, bytes, CRC-32
    arrays     in the order of the header, each from a multiple of 64 bytes after the one before

Everything little-endian. The header says how long the file is to the byte. Arrays go from the file into the memory
that they stay in, and from there into the file: a text of a gigabyte takes no second one. Checksums are for disks
that lie and writers that died: who may write into the folder is the folder's business.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from ds4.engine.draft_state import DraftSnapshot
from ds4.engine.keep import MOST_POINTS, Mark, Point, Saved
from ds4.engine.state import Snapshot
from ds4.errors import FileFormatError

MAGIC, VERSION = b"DS4KEEP\n", 1
_FIXED = struct.Struct("<8sII32s")
MOST_HEADER = 16 << 20
_ALIGN = 64
_PIECE = 16 << 20  # bytes a read or a write
_DRAFT = ("position", "written", "first", "start", "pending")


class KeepError(FileFormatError):
    """A file that is not used. `reason` is a word for counters: "unreadable", "version", "truncated" or "broken"; the
    last two are of files that nobody will ever use.
    """

    def __init__(self, path: Path, reason: str, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.reason = reason

    @property
    def useless(self) -> bool:
        return self.reason in ("truncated", "broken")


@dataclass(frozen=True)
class Header:
    """What a file says of itself. `chain`: see ds4/server/prefix_index.py; `n_tokens`: of its text."""

    identity: str
    chain: bytes
    n_tokens: int
    marks: tuple[Mark, ...]
    points: tuple[dict[str, Any], ...]
    arrays: tuple[tuple[str, int, int], ...]  # name, bytes, CRC-32
    data: int  # where the first array begins
    file_bytes: int


def write(path: Path, saved: Saved, identity: str, chain: bytes) -> int:
    """Make `path`, which appears whole or not at all.

    Returns:
        Bytes of the file.

    Raises:
        OSError: the disk is full, or does not work; nothing is left behind.
    """
    arrays = dict(_arrays(saved))
    header = {
        "identity": identity,
        "chain": chain.hex(),
        "tokens": len(saved.tokens),
        "points": [_described(p) for p in saved.points],
        "arrays": [[name, len(view), zlib.crc32(view)] for name, view in arrays.items()],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    beside = path.with_name(path.name + ".part")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as f:
            f.write(_FIXED.pack(MAGIC, VERSION, len(text), hashlib.sha256(text).digest()) + text)
            for view in arrays.values():
                f.write(b"\0" * (-f.tell() % _ALIGN))
                for i in range(0, len(view), _PIECE):
                    f.write(view[i : i + _PIECE])
            size = f.tell()
            f.flush()
            os.fsync(f.fileno())
        os.rename(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return size


def _arrays(saved: Saved) -> Iterator[tuple[str, memoryview]]:
    yield "tokens", _bytes(saved.tokens)
    for name, array in saved.rows.items():
        yield f"rows.{name}", _bytes(array)
    for i, p in enumerate(saved.points):
        for name, array in p.state.arrays.items():
            yield f"{i}.state.{name}", _bytes(array)
        if p.logits is not None:
            yield f"{i}.logits", _bytes(p.logits)
        if p.draft is not None:
            yield f"{i}.main", _bytes(p.draft.main)
            for j, ring in enumerate(p.draft.rings):
                yield f"{i}.ring.{j}", _bytes(ring)


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _described(p: Point) -> dict[str, Any]:
    s = p.state
    return {
        **asdict(p.mark), "lower": s.first[0], "published": s.published, "capacity": s.capacity, "prompt": p.prompt,
        "lengths": p.lengths, "draft": None if p.draft is None else {n: getattr(p.draft, n) for n in _DRAFT},
    }  # fmt: skip


def read_header(path: Path) -> Header:
    """The header of a file whose size is what it says; no array is read.

    Raises:
        KeepError: it cannot be used, and why.
    """
    with _opened(path) as f:
        return _header(path, f)


def read(path: Path) -> tuple[Header, Saved]:
    """The whole of it, every checksum compared.

    Raises:
        KeepError: it cannot be used, and why.
        MemoryError: no memory for it.
    """
    with _opened(path) as f:
        header = _header(path, f)
        found: dict[str, NDArray[np.uint8]] = {}
        at = header.data
        try:
            for name, size, crc in header.arrays:
                at += -at % _ALIGN
                found[name] = _array(path, f, at, name, size, crc)
                at += size
        except OSError as e:
            raise KeepError(path, "unreadable", f"cannot be read ({e.strerror or e})") from e
    try:
        return header, _saved(header, found)
    except (KeyError, ValueError, TypeError) as e:
        raise KeepError(path, "broken", f"its arrays and its points do not belong together ({e!r})") from e


def _opened(path: Path) -> BinaryIO:
    """No link is followed and no pipe waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        what = "is a link" if e.errno == errno.ELOOP else f"cannot be read ({e.strerror})"
        raise KeepError(path, "unreadable", what) from e
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise KeepError(path, "unreadable", "is not a regular file")
    return open(fd, "rb", buffering=0)


def _array(path: Path, f: BinaryIO, at: int, name: str, size: int, crc: int) -> NDArray[np.uint8]:
    out = np.empty(size, np.uint8)
    view, done, found = out.data, 0, 0
    f.seek(at)
    while done < size:
        n = f.readinto(view[done : done + _PIECE])  # type: ignore[attr-defined]
        if not n:
            raise KeepError(path, "truncated", f"ends inside {name}")
        found = zlib.crc32(view[done : done + n], found)
        done += n
    if found != crc:
        raise KeepError(path, "broken", f"{name} has CRC-32 {found:08x}, its header says {crc:08x}")
    return out


def _header(path: Path, f: BinaryIO) -> Header:
    try:
        size = os.fstat(f.fileno()).st_size
        fixed = f.read(_FIXED.size)
        if len(fixed) < _FIXED.size:
            raise KeepError(path, "truncated", f"has {size} bytes, less than its first lines")
        magic, version, length, digest = _FIXED.unpack(fixed)
        if magic != MAGIC:
            raise KeepError(path, "broken", f"begins with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise KeepError(path, "version", f"is of version {version}; this ds4 keeps texts in version {VERSION}")
        if length > MOST_HEADER:
            raise KeepError(path, "broken", f"says that its header has {length} bytes; at most {MOST_HEADER}")
        if _FIXED.size + length > size:
            raise KeepError(path, "truncated", f"has {size} bytes, its header alone {length}")
        text = f.read(length)
    except OSError as e:
        raise KeepError(path, "unreadable", f"cannot be read ({e.strerror or e})") from e
    if len(text) < length or hashlib.sha256(text).digest() != digest:
        raise KeepError(path, "broken", "its header has another SHA-256 than it says")
    try:
        header = _parsed(cast("dict[str, Any]", json.loads(text)), _FIXED.size + length)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as e:
        raise KeepError(path, "broken", f"its header makes no sense ({e!r})") from e
    if header.file_bytes != size:
        raise KeepError(path, "truncated", f"has {size} bytes, its header says {header.file_bytes}")
    return header


def _parsed(h: dict[str, Any], data: int) -> Header:
    """Every number checked before anything is made from it."""
    arrays = tuple((str(name), _count(size), _count(crc)) for name, size, crc in h["arrays"])
    points, n = tuple(h["points"]), _count(h["tokens"])
    if len({name for name, _, _ in arrays}) != len(arrays) or not 1 <= len(points) <= MOST_POINTS:
        raise ValueError("names that come twice, or points")
    marks = tuple(
        Mark(_count(p["position"]), _count(p["written"]), _count(p["first"]), _count(p["exact"]), p["whole"] is True)
        for p in points
    )
    positions = [m.position for m in marks]
    if positions != sorted(set(positions)) or positions[-1] != n or positions[0] < 1:
        raise ValueError(f"points at {positions} of {n} tokens")
    if any(m.written < m.position or m.first > m.position or m.exact > m.position for m in marks):
        raise ValueError("points that hold more than was written")
    at = data
    for _, size, _ in arrays:
        at += -at % _ALIGN + size
    identity, chain = h["identity"], bytes.fromhex(h["chain"])
    if not isinstance(identity, str):
        raise ValueError("an identity that is no text")
    return Header(identity, chain, n, marks, points, arrays, data, at)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 48:
        raise ValueError(f"{value!r} is no count")
    return value


def _saved(header: Header, found: dict[str, NDArray[np.uint8]]) -> Saved:
    tokens = found.pop("tokens").view("<i4").astype(np.int32, copy=False)
    if len(tokens) != header.n_tokens:
        raise ValueError(f"{len(tokens)} tokens")
    rows = {name.removeprefix("rows."): a for name, a in found.items() if name.startswith("rows.")}
    points = tuple(
        _point(p, mark, _of(found, f"{i}."), rows) for i, (p, mark) in enumerate(zip(header.points, header.marks))
    )
    if sum(len(_of(found, f"{i}.")) for i in range(len(points))) + len(rows) != len(found):
        raise ValueError("an array of no point")
    return Saved(tokens, rows, points)


def _of(found: dict[str, NDArray[np.uint8]], prefix: str) -> dict[str, NDArray[np.uint8]]:
    return {name.removeprefix(prefix): a for name, a in found.items() if name.startswith(prefix)}


def _point(
    p: dict[str, Any], mark: Mark, arrays: dict[str, NDArray[np.uint8]], rows: dict[str, NDArray[np.uint8]]
) -> Point:
    lengths = {str(name): _count(n) for name, n in p["lengths"].items()}
    if lengths.keys() != rows.keys() or any(n > rows[name].nbytes for name, n in lengths.items()):
        raise ValueError("rows that are not there")
    own = _of(arrays, "state.")
    published = None if p["published"] is None else _count(p["published"])
    state = Snapshot(
        mark.position, mark.written, (_count(p["lower"]), mark.first), published, _count(p["capacity"]), own
    )  # fmt: skip
    draft, rings = None, _of(arrays, "ring.")
    if p["draft"] is not None:
        numbers = {name: _count(p["draft"][name]) for name in _DRAFT}
        ordered = tuple(rings[str(j)] for j in range(len(rings)))
        draft = DraftSnapshot(**numbers, rings=ordered, main=arrays["main"])
    logits = arrays["logits"].view("<f4").astype(np.float32, copy=False) if "logits" in arrays else None
    if mark.whole and logits is None:
        raise ValueError("logits that are not there")
    if len(own) + len(rings) + ("main" in arrays) + ("logits" in arrays) != len(arrays):
        raise ValueError("an array of nothing")
    return Point(mark, state, lengths, _count(p["prompt"]), logits, draft)
