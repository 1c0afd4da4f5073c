"""What a base or a checkpoint holds, as data for a listing; reads headers only."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from ds4.base.gguf import align
from ds4.base.plan import PlannedTensor
from ds4.base.reader import Base
from ds4.base.types import TYPES
from ds4.checkpoint.names import expected
from ds4.checkpoint.reader import Checkpoint
from ds4.model.config import ModelConfig

# the first prefix or piece of a base tensor's name that fits says which part it belongs to
_PARTS: tuple[tuple[str, str], ...] = (
    ("v.", "vision"),
    ("mtp.", "draft"),
    ("engram.", "engram"),
    ("token_embd.", "embedding"),
    ("output", "head"),
)
_LAYER_PARTS: tuple[tuple[str, str], ...] = (
    ("ffn_exps_vq.", "experts"),
    ("engram_", "engram"),
    ("indexer.", "index"),
    ("hc_", "hyper"),
    ("attn", "attention"),
    ("ffn_gate_inp.", "router"),
    ("exp_probs_b", "router"),
    ("ffn_", "shared"),
)


def inspect_path(path: str | Path) -> dict[str, Any]:
    """A base file or a checkpoint folder -> {"kind", "config", "tensors", "parts", "bytes", ...}, JSON-ready.

    Raises:
        FileFormatError, MissingTensorError: what opening it raises.
    """
    p = Path(path)
    return inspect_checkpoint(Checkpoint.open(p)) if p.is_dir() else inspect_base(Base.open(p, with_shards=False))


def inspect_base(base: Base) -> dict[str, Any]:
    """Config, metadata (long lists shortened), tensors in file order, bytes by part, expert bits a layer."""
    tensors = sorted(base.tensors.values(), key=lambda t: t.offset)
    rows = [
        {
            "name": t.name,
            "type": TYPES[t.type_id].name,
            "type_id": t.type_id,
            "dims": list(t.dims),
            "bytes": t.nbytes,
            "offset": t.offset,
        }
        for t in tensors
    ]
    blobs = [t.name.removesuffix(".ffn_exps_vq.blob") for t in tensors if t.name.endswith(".ffn_exps_vq.blob")]
    used = [name for name in blobs if not name.startswith("mtp.") or base.config.num_nextn_predict_layers]
    return {
        "kind": "base",
        "path": str(base.path),
        "config": config_values(base.config),
        "metadata": {key: _short(v) for key, v in base.metadata.items()},
        "experts": [
            {"name": name, "version": blob.version, "codewords": blob.nc, "n_expert": blob.n_expert}
            for name in used
            for blob in (base.experts(name),)
        ],
        "parts": _sums((part_of(t.name), t.nbytes) for t in tensors),
        "types": _sums((TYPES[t.type_id].name, t.nbytes) for t in tensors),
        "bytes": base.file_bytes,
        "tensors": rows,
    }


def inspect_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Config, tensors, bytes by part and by dtype."""
    specs = expected(checkpoint.config)
    infos = checkpoint.infos
    return {
        "kind": "checkpoint",
        "path": str(checkpoint.path),
        "config": config_values(checkpoint.config),
        "parts": _sums((specs[name].part if name in specs else "other", t.nbytes) for name, t in infos.items()),
        "types": _sums((t.dtype, t.nbytes) for t in infos.values()),
        "bytes": sum(t.nbytes for t in infos.values()),
        "tensors": [
            {"name": name, "type": t.dtype, "shape": list(t.shape), "bytes": t.nbytes, "file": t.file.name}
            for name, t in infos.items()
        ],
    }


def plan_rows(planned: list[PlannedTensor]) -> list[dict[str, Any]]:
    """A plan as `ds4 quantize --plan --json` prints it; offsets count from the start of the tensor data."""
    rows, at = [], 0
    for t in planned:
        row = {"name": t.name, "type": TYPES[t.type_id].name, "type_id": t.type_id, "dims": list(t.dims)}
        rows.append({**row, "bytes": t.nbytes, "offset": at})
        at += align(t.nbytes)
    return rows


def packed_bytes(planned: list[PlannedTensor]) -> int:
    """Bytes of the tensor data with their padding: 113,551,851,680 for the published model."""
    return sum(align(t.nbytes) for t in planned)


def config_values(config: ModelConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)


def part_of(name: str) -> str:
    """embedding, attention, index, hyper, router, experts, shared, engram, draft, vision, head or other."""
    for prefix, part in _PARTS:
        if name.startswith(prefix):
            return part
    inner = name.split(".", 2)[-1]
    return next((part for prefix, part in _LAYER_PARTS if inner.startswith(prefix)), "other")


def _sums(pairs: Any) -> dict[str, int]:
    out: dict[str, int] = {}
    for key, n in pairs:
        out[key] = out.get(key, 0) + n
    return out


def _short(v: Any) -> Any:
    if isinstance(v, np.ndarray):
        v = v.tolist()
    if isinstance(v, list) and len(v) > 64:
        return {"length": len(v), "first": v[:3]}
    if isinstance(v, str) and len(v) > 200:
        return {"length": len(v), "first": v[:60]}
    return v
