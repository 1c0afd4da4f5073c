"""Ids in, results out: IDS.npy and OUT.npz, as `ds4 teacher`, `ds4 score` and `ds4 diff` exchange them.

logits_TV      f32 [T, V], row t predicts token t + 1
streams_LTSD   f32 [L + 1, T, S, D], entering each layer before its engram, then after the last
hash_rows_TGN  i64 [T, engram layer, column]
"""

from __future__ import annotations

import os
import secrets
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError


def load_ids(path: str | Path) -> NDArray[Any]:
    """The array in an .npy file, mapped and not judged: `check_ids` knows what ids are.

    Raises:
        FileFormatError: unreadable, not an .npy file, cut short, or pickled objects.
    """
    try:
        loaded = np.load(path, allow_pickle=False, mmap_mode="r")
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
        raise FileFormatError(f"{path}: {_reason(e, '.npy file of ids')}") from e
    if not isinstance(loaded, np.ndarray):
        raise FileFormatError(f"{path}: an .npz archive; ids are one array in an .npy file")
    return loaded


def load_results(path: str | Path) -> dict[str, NDArray[Any]]:
    """Every array of an OUT.npz.

    Raises:
        FileFormatError: unreadable, or not such an archive.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise FileFormatError(f"{path}: a single array; an .npz archive of results is expected")
        with archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as e:
        raise FileFormatError(f"{path}: {_reason(e, '.npz file of results')}") from e


def _reason(e: Exception, expected: str) -> str:
    if isinstance(e, OSError) and e.strerror:
        return f"cannot be read ({e.strerror})"
    # numpy takes anything that it does not know for a pickle, and advises to trust it
    return f"not a readable {expected} (cut short, of another format, or holding Python objects)"


def check_output(path: str | Path, suffix: str = ".npz") -> Path:
    """Refuse an output that could not be written, or would replace what is no file, before the hours of work.

    Raises:
        UsageError: a folder, a device, a pipe, a socket, a link to one or to nothing; or no folder to write in.
    """
    p = Path(path)
    if p.is_dir():
        raise UsageError(f"{p}: is a folder; name the {suffix} file to write")
    if os.path.lexists(p) and not p.is_file():  # a rename would put the result in a device's place
        raise UsageError(f"{p}: is there and is no regular file; name another {suffix} file to write")
    if not p.parent.is_dir():
        raise UsageError(f"{p.parent}: no such folder to write {p.name} in")
    return p


def save_results(path: str | Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write OUT.npz beside itself and rename: a reader sees the old file or the whole new one.

    Raises:
        CapacityError: the disk is full. Ds4Error: it cannot be written. Nothing is left behind.
    """
    p = Path(path)
    beside = p.with_name(f".{p.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(beside, "xb") as f:
                np.savez(f, allow_pickle=False, **dict(arrays))
                f.flush()
                os.fsync(f.fileno())
            os.replace(beside, p)
        except OSError as e:
            kind = CapacityError if e.errno == 28 else Ds4Error
            raise kind(f"{p}: cannot be written ({e.strerror or e})") from e
    finally:
        beside.unlink(missing_ok=True)
