"""Engram shards: from `table_path` in a base to a file that is there, of the right size, and nowhere else.

A base may carry the absolute path of the machine that built it; only its last part counts. The file is looked
for in the engram folder if one is given, else beside the base, and nowhere else. Refused: relative paths, names
that are no plain file name, links that lead out of the folder, extents that do not fit the file, and a file
whose size is not what its table says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4.checkpoint.files import link_that_leads_out
from ds4.checkpoint.safetensors import read_header
from ds4.checkpoint.scan import plain_file_name
from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig

PREFIX = "deepseek4.engram."


@dataclass(frozen=True)
class EngramTableRef:
    """Rows of one engram layer: E4M3 [rows, head_dim] at `weight_offset`, UE8M0 [rows, head_dim/32] at
    `scale_offset`, both from the start of the file."""

    path: Path
    weight_offset: int
    scale_offset: int
    rows: int
    head_dim: int


def resolve(
    meta: dict[str, Any], config: ModelConfig, base: Path, engram_dir: str | Path | None
) -> list[EngramTableRef]:
    """One reference an engram layer.

    Raises:
        FileFormatError: a key is missing or lies, a shard is absent or of the wrong size, or no `engram_dir`.
    """
    folder = base.parent if engram_dir is None else Path(engram_dir)
    try:
        return _resolve(meta, config, base, folder)
    except OSError as e:
        raise FileFormatError(f"{e.filename or folder}: cannot be looked at ({e.strerror or e})") from e


def _resolve(meta: dict[str, Any], config: ModelConfig, base: Path, folder: Path) -> list[EngramTableRef]:
    if not folder.is_dir():
        raise FileFormatError(f"{base}: --engram-dir {folder}: no such folder")
    refs = []
    for g, rows in enumerate(config.engram_num_embeddings):
        where = f"{base}: engram table {g}"
        name = plain_name(meta.get(f"{PREFIX}{g}.table_path"), where)
        offsets = [_offset(meta, f"{PREFIX}{g}.{key}", where) for key in ("weight_offset", "scale_offset")]
        path = _find(name, folder, where)
        ref = EngramTableRef(path, offsets[0], offsets[1], rows, config.engram_head_dim)
        _check_size(ref, where)
        refs.append(ref)
    return refs


def plain_name(table_path: object, where: str) -> str:
    """The file name that a `table_path` stands for: itself, or the last part of an absolute path (POSIX, or
    Windows with a drive), which says where the shard was on another machine.

    Raises:
        FileFormatError: not a string, a relative path, or nothing that names a file.
    """
    if not isinstance(table_path, str):
        raise FileFormatError(f"{where}: table_path is missing")
    if table_path.startswith("/"):
        name = table_path.rsplit("/", 1)[-1]
    elif re.match(r"[A-Za-z]:[\\/]", table_path):
        name = re.split(r"[\\/]", table_path)[-1]
    else:
        name = table_path
    if not plain_file_name(name):
        raise FileFormatError(
            f"{where}: table_path {table_path!a} is neither a file name nor an absolute path to a file"
        )
    return name


def _offset(meta: dict[str, Any], key: str, where: str) -> int:
    v = meta.get(key)
    if not isinstance(v, int) or isinstance(v, bool) or not 0 <= v < 1 << 62:
        raise FileFormatError(f"{where}: {key} is {v!r}; expected a byte offset")
    return v


def _find(name: str, folder: Path, where: str) -> Path:
    path = folder / name
    if not path.exists():
        raise FileFormatError(f"{where}: shard {name} is not in {folder}; use --engram-dir to say where it is")
    if fault := link_that_leads_out(path, folder):
        raise FileFormatError(f"{where}: {path} {fault}")
    if not path.is_file():
        raise FileFormatError(f"{where}: {path} is not a file")
    return path


def _check_size(ref: EngramTableRef, where: str) -> None:
    """The file ends where the table does, or is a safetensors shard that has the table where the base says."""
    weights, scales = ref.rows * ref.head_dim, ref.rows * (ref.head_dim // 32)
    extents = sorted([(ref.weight_offset, weights), (ref.scale_offset, scales)])
    if extents[0][0] + extents[0][1] > extents[1][0]:
        raise FileFormatError(f"{where}: rows and scales overlap at {extents[1][0]}")
    end, size = extents[1][0] + extents[1][1], ref.path.stat().st_size
    if size < end:
        raise FileFormatError(f"{where}: {ref.path} has {size} bytes, the table needs {end}; is the file cut short?")
    if size == end:
        return
    found = {(t.offset, t.nbytes) for t in read_header(ref.path).values()}
    if not found.issuperset(extents):
        raise FileFormatError(
            f"{where}: {ref.path} has {size} bytes and no tensors where the table should be; is it another file?"
        )
