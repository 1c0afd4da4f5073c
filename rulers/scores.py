"""Logits of a text in full precision: a scores file, `.npz`.

ids, documents, windows   i32 [n], the text (text.py)
logits                    f32 [n, V]; row t follows ids[:t + 1] of its window, and predicts the token after it
meta                      u8, JSON: `Meta`

Rows are large (517 KB a position at the released vocabulary), so they are mapped, not loaded, and a file is written
window by window beside its name; a run that was killed goes on with the windows that are missing.
"""

from __future__ import annotations

import json
import struct
import zipfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.base.output import Output
from ds4.errors import CapacityError, FileFormatError, UsageError
from ds4.teacher.files import save_results
from rulers.text import Text

F32 = NDArray[np.float32]
ARRAYS = ("ids", "documents", "windows", "logits", "meta")
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a zip member: signature ... length of name, length of extra


@dataclass(frozen=True)
class Meta:
    """Whose logits they are.

    Attributes:
        model: fingerprint of the model (identity.py); the same for a checkpoint and every base made from it.
        domain: name of the domain, `split`: its slice, "judge" or "fit".
        length: most tokens of a window.
        arithmetic: what rounds, for instance "f32 none" (a teacher), "bf16 fp4" (an engine).
        path: "prefill" or "decode".
        weights: which weights computed, for people: a folder's or file's name, and what tells it from others.
    """

    model: str
    domain: str
    split: str
    length: int
    arithmetic: str
    path: str
    weights: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @staticmethod
    def from_json(text: str, where: str) -> Meta:
        """Raises FileFormatError, which starts with `where`."""
        try:
            raw = json.loads(text)
        except ValueError as e:
            raise FileFormatError(f"{where}: meta is no JSON ({e})") from e
        types = {f.name: int if f.name == "length" else str for f in fields(Meta)}
        if not isinstance(raw, dict) or set(raw) != set(types):
            raise FileFormatError(f"{where}: meta must have exactly {', '.join(types)}")
        for name, kind in types.items():
            if type(raw[name]) is not kind:
                raise FileFormatError(f"{where}: meta.{name} is {raw[name]!r}; expected {kind.__name__}")
        return Meta(**raw)


@dataclass(frozen=True)
class Scores:
    """A text, its logits f32 [n, V] (mapped where they come from a file), and whose they are."""

    text: Text
    logits: F32
    meta: Meta

    @property
    def vocab_size(self) -> int:
        return int(self.logits.shape[1])

    def rows(self, where: slice | NDArray[np.int64]) -> F32:
        """Rows copied into memory, f32 [m, V], aligned."""
        return np.array(self.logits[where], np.float32)

    def save(self, path: str | Path) -> None:
        """Write a scores file, whole or not at all.

        Raises:
            CapacityError: the disk is full. Ds4Error: it cannot be written.
        """
        save_results(path, {**_text_arrays(self.text), "logits": self.logits, "meta": meta_array(self.meta)})

    @staticmethod
    def load(path: str | Path) -> Scores:
        """A scores file, its logits mapped.

        Raises:
            FileFormatError: unreadable, cut short, or not such a file; names file and array.
        """
        arrays = load_arrays(path, ARRAYS, mapped="logits")
        text, meta = text_of(arrays, path), Meta.from_json(meta_text(arrays, path), str(path))
        logits = arrays["logits"]
        if logits.dtype != np.float32 or logits.ndim != 2 or len(logits) != len(text):
            got = f"{logits.dtype} {list(logits.shape)}"
            raise FileFormatError(f"{path}: logits are {got}; expected float32 [{len(text)}, vocabulary]")
        if not 0 <= int(text.ids.min()) <= int(text.ids.max()) < logits.shape[1]:
            raise FileFormatError(f"{path}: ids outside the vocabulary of {logits.shape[1]}")
        return Scores(text, logits, meta)


class ScoresWriter:
    """A scores file that grows window by window.

    with ScoresWriter(path, text, meta, vocab_size) as writer:
        for w in writer.missing():
            writer.put(w, logits)        # f32 [tokens of window w, V]
        scores = writer.publish()

    Leaving without `publish` keeps `PATH.rows.part` and its journal; the same job goes on there.

    Raises:
        CapacityError: the disk cannot hold the file (twice its bytes, while it is packed).
        UsageError: no such folder, or another process is writing the same file.
    """

    def __init__(self, path: str | Path, text: Text, meta: Meta, vocab_size: int) -> None:
        self.path, self.text, self.meta, self.vocab_size = Path(path), text, meta, vocab_size
        self.nbytes = 4 * len(text) * vocab_size
        rows = self.path.with_name(self.path.name + ".rows")
        self._output = Output(rows, self.nbytes, f"{meta.to_json()} {text.digest} {vocab_size}")

    def __enter__(self) -> ScoresWriter:
        self._output.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._output.__exit__(kind, e, tb)

    @property
    def resumed(self) -> int:
        """Windows that an earlier run left."""
        return self._output.resumed

    def missing(self) -> list[int]:
        """Windows that are not there yet, in order."""
        return [w for w in range(len(self.text.slices)) if str(w) not in self._output.done]

    def put(self, window: int, logits: F32) -> None:
        """All rows of a window; on disk when this returns.

        Raises:
            FileFormatError: a shape that is not the window's, or a value that is not finite.
        """
        where = self.text.slices[window]
        expected = (where.stop - where.start, self.vocab_size)
        if logits.dtype != np.float32 or logits.shape != expected:
            got = f"{logits.dtype} {list(logits.shape)}"
            raise FileFormatError(f"window {window}: logits are {got}; expected float32 {list(expected)}")
        finite = np.isfinite(logits).all(axis=1)
        if not finite.all():
            at = int(finite.argmin())
            raise FileFormatError(f"window {window}: logits of position {at} are not finite")
        self._output.write(4 * where.start * self.vocab_size, np.ascontiguousarray(logits, "<f4").data)
        self._output.finish(str(window), {})
        self._output.commit()

    def publish(self) -> Scores:
        """Give the whole file its name, and open it.

        Raises:
            UsageError: windows are missing.
        """
        if self.missing():
            raise UsageError(f"{self.path}: {len(self.missing())} windows are missing")
        rows = np.memmap(self._output.part, "<f4", "r", shape=(len(self.text), self.vocab_size))
        Scores(self.text, rows, self.meta).save(self.path)
        del rows
        self._output.discard()
        return Scores.load(self.path)


def meta_array(meta: Meta) -> NDArray[np.uint8]:
    """As it stands in a file: u8, UTF-8 JSON."""
    return np.frombuffer(meta.to_json().encode(), np.uint8)


def _text_arrays(text: Text) -> dict[str, NDArray[Any]]:
    return {"ids": text.ids, "documents": text.documents, "windows": text.windows}


def text_of(arrays: dict[str, NDArray[Any]], path: str | Path) -> Text:
    """The text in a file's arrays; FileFormatError starts with the path."""
    try:
        return Text(arrays["ids"], arrays["documents"], arrays["windows"])
    except FileFormatError as e:
        raise FileFormatError(f"{path}: {e}") from e


def meta_text(arrays: dict[str, NDArray[Any]], path: str | Path) -> str:
    """The JSON in a file's `meta`; FileFormatError starts with the path."""
    try:
        return arrays["meta"].tobytes().decode()
    except UnicodeDecodeError as e:
        raise FileFormatError(f"{path}: meta is no text ({e})") from e


def load_arrays(path: str | Path, names: tuple[str, ...], mapped: str | None = None) -> dict[str, NDArray[Any]]:
    """Exactly these arrays of an .npz file; one of them is mapped and not read.

    Raises:
        FileFormatError: unreadable, not an .npz file, or with other arrays.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            there = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if set(there) != set(names):
                raise FileFormatError(f"{path}: holds {', '.join(sorted(there))}; expected {', '.join(names)}")
            out: dict[str, NDArray[Any]] = {}
            for name in names:
                if name == mapped:
                    out[name] = _map(Path(path), there[name])
                else:
                    with archive.open(there[name]) as f:
                        out[name] = np.lib.format.read_array(f, allow_pickle=False)
            return out
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e})") from e
    except (ValueError, EOFError, KeyError, struct.error, zipfile.BadZipFile) as e:
        raise FileFormatError(f"{path}: not a readable .npz file (cut short, or of another format)") from e
    except MemoryError as e:
        raise CapacityError(f"{path}: no memory for its arrays") from e


def _map(path: Path, info: zipfile.ZipInfo) -> NDArray[Any]:
    """A member that is stored as it is (numpy's `savez` does that) as a map of the file."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise FileFormatError(f"{path}: {info.filename} is compressed; it must be stored as it is")
    with open(path, "rb") as f:
        f.seek(info.header_offset)
        header = _LOCAL_HEADER.unpack(f.read(_LOCAL_HEADER.size))
        f.seek(info.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1])
        start = f.tell()
        version = np.lib.format.read_magic(f)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(f)
        at = f.tell()
    if fortran or dtype.hasobject or at - start + dtype.itemsize * int(np.prod(shape)) != info.file_size:
        raise FileFormatError(f"{path}: {info.filename} is not laid out as expected")
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", at, shape)
