"""Sidecar files, byte by byte: per-expert gains and router biases of one layer each.

    gr_Lnn.bin   i32 n_expert · i32 D · i32 type · n_expert x D values, expert-major
                 type 1: f32 s · 2: f16 s · 43: fp4x32 of s - 1 (16 bytes of E2M1, low nibble first, one UE8M0)
    rb_Lnn.bin   i32 n_expert · i32 1 · n_expert f32, added to the selection score

The type numbers are this file's own. Refused: any length that the header does not give exactly, other sizes
than the model's, values that are not finite, layers that the model does not have, `amp_Lnn.bin` (a low-rank
correction that its authors rejected) and every other name that might hold a correction, by name.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint.codecs import dequant_fp4, pack_q4idx
from ds4.errors import FileFormatError

F32 = NDArray[np.float32]

GAIN_F32, GAIN_F16, GAIN_FP4 = 1, 2, 43
BLOCK = 32
_GAIN_HEAD, _BIAS_HEAD = struct.Struct("<iii"), struct.Struct("<ii")
_NAME = re.compile(r"(gr|rb|amp)_L(\d\d+)\.bin")
_LAYER_FILE = re.compile(r"(gr|rb|amp)_", re.IGNORECASE)  # a name that begins so is a layer file or a slip
_FOR_PEOPLE = ("", ".txt", ".md", ".json", ".toml", ".html", ".csv", ".log")  # endings that a load passes over
FINGERPRINT = "base.fnv"  # fingerprint.py reads it


def gain_path(folder: Path, layer: int) -> Path:
    return folder / f"gr_L{layer:02d}.bin"


def bias_path(folder: Path, layer: int) -> Path:
    return folder / f"rb_L{layer:02d}.bin"


@dataclass(frozen=True)
class LayerFiles:
    """The layer files of one folder: layer -> path."""

    gains: dict[int, Path]
    biases: dict[int, Path]


def list_folder(folder: str | Path, n_layers: int | None = None) -> LayerFiles:
    """Find a sidecar folder's layer files; folders, hidden files and text for people are passed over.

    Args:
        n_layers: of the model; None: any layer will do.

    Raises:
        FileFormatError: not a folder, an `amp` file, a layer that the model does not have, or a name that is none of
            these.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileFormatError(f"{folder}: is not a folder; a sidecar is a folder of gr_Lnn.bin and rb_Lnn.bin")
    found = LayerFiles({}, {})
    try:
        paths = sorted(folder.iterdir())
    except OSError as e:
        raise FileFormatError(f"{folder}: cannot be listed ({e.strerror or e})") from e
    for path in paths:
        layer_file = layer_of(path, n_layers)
        if layer_file is not None:
            kind, layer = layer_file
            (found.gains if kind == "gr" else found.biases)[layer] = path
    return found


def layer_of(path: Path, n_layers: int | None) -> tuple[str, int] | None:
    """("gr" or "rb", layer) of a layer file by its name; None for what a load passes over.

    Raises:
        FileFormatError: as `list_folder`.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        _check_other(path)
        return None
    kind, layer = match[1], int(match[2])
    if kind == "amp":
        raise FileFormatError(f"{path}: low-rank corrections (amp) are not supported; remove the file")
    if path.name != f"{kind}_L{layer:02d}.bin":
        raise FileFormatError(f"{path}: layer {layer}'s file is called {kind}_L{layer:02d}.bin")
    if n_layers is not None and layer >= n_layers:
        raise FileFormatError(f"{path}: the model has layers 00 to {n_layers - 1:02d}")
    return kind, layer


def _check_other(path: Path) -> None:
    """A file that is no layer file must be one that nobody could miss when it is not applied."""
    if path.name.startswith(".") or path.name == FINGERPRINT or (path.is_dir() and not _LAYER_FILE.match(path.name)):
        return
    if _LAYER_FILE.match(path.name) or path.suffix.lower() not in _FOR_PEOPLE:
        raise FileFormatError(
            f"{path}: is not known; a sidecar has gr_Lnn.bin and rb_Lnn.bin, {FINGERPRINT}, and text for people "
            f"({' '.join(_FOR_PEOPLE[1:])}); move the file away"
        )


@dataclass(frozen=True)
class Gains:
    """A gain file, checked.

    Attributes:
        kind: 1 (f32), 2 (f16) or 43 (fp4x32).
        s: f32 [n_expert, width], the factor of each output channel of each expert.
        codes, scales: of type 43 as they are in the file, u8 [n_expert, width / 2] and [n_expert, width / 32]; else
            None.
    """

    kind: int
    s: F32
    codes: NDArray[np.uint8] | None = None
    scales: NDArray[np.uint8] | None = None


def read_gains(path: Path, n_expert: int, width: int) -> F32:
    """f32 [n_expert, width]: the factor of each output channel of each expert.

    Raises:
        FileFormatError: the file is not exactly that.
    """
    return load_gains(path, n_expert, width).s


def load_gains(path: Path, n_expert: int, width: int) -> Gains:
    """`read_gains` with what the factors are made of."""
    return unpack_gains(read_bytes(path), n_expert, width, str(path))


def decode_gains(raw: bytes, n_expert: int, width: int, where: str) -> F32:
    """`read_gains` on bytes."""
    return unpack_gains(raw, n_expert, width, where).s


def gain_head(path: Path) -> tuple[int, int, int]:
    """(n_expert, width, type) that a gain file claims, for a reader without a model.

    Raises:
        FileFormatError: it is too short to claim anything, or claims sizes below 1.
    """
    n_expert, width, kind = _head(_GAIN_HEAD, read_bytes(path), str(path))
    if n_expert < 1 or width < 1:
        raise FileFormatError(f"{path}: says {n_expert} experts x {width}; both must be at least 1")
    return n_expert, width, kind


def bias_head(path: Path) -> int:
    """The number of experts that a bias file claims.

    Raises:
        FileFormatError: it is too short to claim anything, or claims fewer than 1.
    """
    n_expert, _ = _head(_BIAS_HEAD, read_bytes(path), str(path))
    if n_expert < 1:
        raise FileFormatError(f"{path}: says {n_expert} experts; there must be at least 1")
    return n_expert


def unpack_gains(raw: bytes, n_expert: int, width: int, where: str) -> Gains:
    """`load_gains` on bytes."""
    found_expert, found_width, kind = _head(_GAIN_HEAD, raw, where)
    if (found_expert, found_width) != (n_expert, width):
        raise FileFormatError(
            f"{where}: gains of {found_expert} experts x {found_width}; the model has {n_expert} x {width}"
        )
    if kind not in (GAIN_F32, GAIN_F16, GAIN_FP4):
        raise FileFormatError(f"{where}: gain type {kind} is not known; 1 (f32), 2 (f16) and 43 (fp4x32) are")
    if kind == GAIN_FP4 and width % BLOCK:
        raise FileFormatError(f"{where}: type 43 needs a width that is a multiple of {BLOCK}, not {width}")
    n_bytes = gain_bytes(n_expert, width, kind)
    if len(raw) != n_bytes:
        raise FileFormatError(f"{where}: has {len(raw)} bytes, its header says {n_bytes}")
    body = np.frombuffer(raw, np.uint8, offset=_GAIN_HEAD.size)
    if kind == GAIN_FP4:
        blocks = body.reshape(-1, 17)
        if np.any(blocks[:, 16] == 255):
            raise FileFormatError(f"{where}: a block scale is NaN")
        codes, scales = np.ascontiguousarray(blocks[:, :16]), np.ascontiguousarray(blocks[:, 16:])
        with np.errstate(over="ignore"):  # an infinity is refused below, by name
            s = _finite((np.float32(1) + dequant_fp4(codes, scales)).reshape(n_expert, width), where)
        return Gains(kind, s, codes.reshape(n_expert, -1), scales.reshape(n_expert, -1))
    s = body.view("<f4" if kind == GAIN_F32 else "<f2").astype(np.float32)
    return Gains(kind, _finite(s.reshape(n_expert, width), where))


def gain_bytes(n_expert: int, width: int, kind: int) -> int:
    """Bytes of a gain file."""
    n = n_expert * width
    return _GAIN_HEAD.size + {GAIN_F32: 4 * n, GAIN_F16: 2 * n, GAIN_FP4: n // BLOCK * 17}[kind]


def encode_gains(s: F32, kind: int = GAIN_FP4) -> bytes:
    """Bytes of f32 [n_expert, D]. fp4x32 holds s - 1, rounded as the index cache is (Q4idx).

    Raises:
        ValueError: a value is not finite, or D does not suit type 43.
    """
    if not np.all(np.isfinite(s)):
        raise ValueError("a gain is not finite")
    n_expert, width = s.shape
    head = _GAIN_HEAD.pack(n_expert, width, kind)
    if kind == GAIN_F32:
        return head + s.astype("<f4").tobytes()
    if kind == GAIN_F16:
        return head + s.astype("<f2").tobytes()
    if kind != GAIN_FP4 or width % BLOCK:
        raise ValueError(f"gain type {kind} with width {width}")
    codes, scales = pack_q4idx((s - np.float32(1)).astype(np.float32).reshape(-1, BLOCK))
    return head + np.concatenate([codes, scales], axis=1).tobytes()


def read_bias(path: Path, n_expert: int) -> F32:
    """f32 [n_expert], added to the router's selection score.

    Raises:
        FileFormatError: the file is not exactly that.
    """
    raw = read_bytes(path)
    found, one = _head(_BIAS_HEAD, raw, str(path))
    if found != n_expert or one != 1:
        raise FileFormatError(f"{path}: header says {found} experts, {one}; expected {n_expert}, 1")
    if len(raw) != _BIAS_HEAD.size + 4 * n_expert:
        raise FileFormatError(f"{path}: has {len(raw)} bytes, its header says {_BIAS_HEAD.size + 4 * n_expert}")
    return _finite(np.frombuffer(raw, "<f4", offset=_BIAS_HEAD.size).astype(np.float32), str(path))


def encode_bias(delta: F32) -> bytes:
    """Bytes of f32 [n_expert]."""
    if not np.all(np.isfinite(delta)):
        raise ValueError("a router bias is not finite")
    return _BIAS_HEAD.pack(len(delta), 1) + delta.astype("<f4").tobytes()


def _head(layout: struct.Struct, raw: bytes, where: str) -> tuple[int, ...]:
    if len(raw) < layout.size:
        raise FileFormatError(f"{where}: has {len(raw)} bytes, its header alone takes {layout.size}")
    return layout.unpack_from(raw)


def _finite(values: F32, where: str) -> F32:
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        place = ", ".join(str(int(i)) for i in bad[0])
        raise FileFormatError(f"{where}: the value at ({place}) is not finite")
    return values


def read_bytes(path: Path) -> bytes:
    """A layer file whole.

    Raises:
        FileFormatError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e})") from e
