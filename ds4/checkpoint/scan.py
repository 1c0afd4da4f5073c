"""One look over a checkpoint folder: configuration, index, every shard's header, the inventory.

Nothing here stops at the first fault: `scan` collects them all, and the reader or `preflight` decides.
Headers are read, data is not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from ds4.checkpoint.names import Spec, draft_stages, expected
from ds4.checkpoint.safetensors import TensorInfo, read_header
from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from ds4.model.config_reader import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass
class Scan:
    """What a folder holds and everything that is wrong with it."""

    path: Path
    config: ModelConfig | None = None
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)  # files that cannot be read or lie
    tensors: list[str] = field(default_factory=list)  # tensors missing, extra or misshapen
    config_error: FileFormatError | None = None

    @property
    def problems(self) -> list[str]:
        return self.broken + self.tensors


def scan(path: Path) -> Scan:
    """Read config.json, the index and all headers of `path`, and hold them against the inventory.

    With an index its shards are read; without one `model.safetensors`, or else every `*.safetensors`.
    Never raises for what it finds.
    """
    out = Scan(path)
    try:
        _scan(out)
    except OSError as e:  # a folder or name that the system will not even look at
        out.broken.append(f"{e.filename or path}: cannot be looked at ({e.strerror or e})")
    return out


def _scan(out: Scan) -> None:
    path = out.path
    if not path.is_dir():
        what = "is not a folder; a checkpoint is one" if path.exists() else "does not exist"
        out.broken.append(f"{path}: {what}")
        return
    placed = _index(out)
    unread = _headers(out, placed)
    _config(out)
    if out.config is not None:
        _inventory(out, expected(out.config), unread)


def plain_file_name(name: object) -> bool:
    """A name that stays inside its folder: no separators, no `..`, nothing hidden in control characters."""
    if not isinstance(name, str) or name in ("", ".", "..") or any(c in "/\\:" or ord(c) < 32 for c in name):
        return False
    try:
        return len(name.encode("utf-8")) <= 255
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _index(out: Scan) -> dict[str, str] | None:
    """Tensor -> shard of the index; None if there is no index to follow."""
    path = out.path / INDEX
    if not path.exists():
        return None
    try:
        raw = read_json(path)
    except FileFormatError as e:
        out.broken.append(str(e))
        return None
    placed = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(placed, dict) or not placed:
        out.broken.append(f"{path}: weight_map must be an object of tensor and shard names")
        return None
    bad = sorted({json.dumps(v)[:80] for v in placed.values() if not plain_file_name(v)})
    out.broken += [f"{path}: shard name {v} is not a plain file name" for v in bad]
    return {k: v for k, v in placed.items() if plain_file_name(v)}


def _shards(out: Scan, placed: dict[str, str] | None) -> list[str]:
    if placed is not None:
        return sorted(set(placed.values()))
    if (out.path / SINGLE).exists():
        return [SINGLE]
    found = sorted(p.name for p in out.path.glob("*.safetensors"))
    if not found and not out.broken:
        out.broken.append(f"{out.path}: holds no *.safetensors file")
    return found


def _headers(out: Scan, placed: dict[str, str] | None) -> set[str] | None:
    """Fill `infos`. Returns the names that unreadable shards should hold, or None if that is not known."""
    unread: set[str] = set()
    n_broken = len(out.broken)
    for shard in _shards(out, placed):
        path = out.path / shard
        homes = {name for name, home in (placed or {}).items() if home == shard}
        if not path.exists():
            some = sorted(homes)
            more = f" and {len(some) - 3} more" if len(some) > 3 else ""
            out.broken.append(f"{path}: is absent; the index places {', '.join(some[:3])}{more} in it")
            unread |= homes
            continue
        try:
            header = read_header(path)
        except FileFormatError as e:
            out.broken.append(str(e))
            unread |= homes
            continue
        for name, info in header.items():
            if name in out.infos:
                out.broken.append(f"{path}: tensor {name} is also in {out.infos[name].file.name}")
            elif placed is not None and name not in homes:
                out.broken.append(f"{path}: holds tensor {name}, which the index does not place there")
            else:
                out.infos[name] = info
        out.broken += [
            f"{path}: lacks tensor {name}, which the index places there" for name in sorted(homes - set(header))
        ]
        unread |= homes - set(header)
    return unread if placed is not None or len(out.broken) == n_broken else None


def _config(out: Scan) -> None:
    path = out.path / "config.json"
    try:
        out.config = ModelConfig.from_json(read_json(path), str(path), draft_stages(out.infos) or None)
    except FileFormatError as e:
        out.config_error = e
        out.broken.append(str(e))


def _inventory(out: Scan, specs: dict[str, Spec], unread: set[str] | None) -> None:
    for name, spec in specs.items():
        info = out.infos.get(name)
        if info is None:
            known_absent = unread is None or name in unread  # its file is reported already
            if spec.required and not known_absent:
                out.tensors.append(f"missing: {name} {spec.dtype} {list(spec.shape)}")
            continue
        if info.dtype not in (spec.dtype, *spec.accept):
            stored = f"is stored as {info.dtype} {list(info.shape)}"
            out.tensors.append(f"misshapen: {name} {stored}, expected {spec.dtype} {list(spec.shape)}")
        elif info.shape != spec.shape:
            out.tensors.append(f"misshapen: {name} is {list(info.shape)}, expected {list(spec.shape)}")
    out.tensors += [f"extra: {name} {i.dtype} {list(i.shape)}" for name, i in out.infos.items() if name not in specs]
    if unread is None and out.infos:
        out.broken.append(
            f"{out.path}: tensors of the files above were not looked for; run again when they are whole"
        )
