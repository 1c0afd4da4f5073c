"""Write a checkpoint in the released layout from float arrays: the encoders and the container.

For the embedded model, toy checkpoints and tests; the release itself is never written. Encoders are the plain
ones: a power-of-two scale large enough that nothing saturates, then round to nearest even. FP4 may instead
choose each scale by the error it leaves (`fit_scales`). Same input, same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint import codecs
from ds4.checkpoint.names import Spec, companion, expected
from ds4.checkpoint.safetensors import STORAGE
from ds4.checkpoint.scan import INDEX, SINGLE
from ds4.errors import FileFormatError, MissingTensorError
from ds4.model.config import ModelConfig

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Stored = dict[str, tuple[str, NDArray[Any]]]  # name -> (dtype, array in storage type)


def encode_fp8(w: F32) -> tuple[U8, U8]:
    """f32 [O, I] -> (E4M3 codes [O, I], UE8M0 scales [ceil(O/32), ceil(I/32)]), one scale a 32x32 tile."""
    rows, cols = w.shape
    tiles = (-(-rows // 32), -(-cols // 32))
    padded = np.zeros((tiles[0] * 32, tiles[1] * 32), np.float32)
    padded[:rows, :cols] = np.abs(w)
    scale = _scale_bytes(padded.reshape(tiles[0], 32, tiles[1], 32).max(axis=(1, 3)), codecs.E4M3_MAX)
    wide = np.repeat(np.repeat(codecs.ue8m0_to_f32(scale), 32, axis=0), 32, axis=1)[:rows, :cols]
    return codecs.f32_to_e4m3(w / wide), scale


def encode_fp4(w: F32, fit_scales: bool = False) -> tuple[U8, U8]:
    """f32 [O, I], 32 | I -> (packed E2M1 [O, I/2], UE8M0 scales [O, I/32]), one scale a row and 32 columns.

    With `fit_scales` a block takes half the plain scale where that leaves the smaller squared error: its few
    largest values saturate, all others have steps half as wide. Other scales never win: a quarter cuts more
    off the largest value than 31 finer steps can gain, and the double's grid lies within the plain one.
    """
    blocks = w.reshape(w.shape[0], -1, 32)
    scale = _scale_bytes(np.abs(blocks).max(axis=2), codecs.E2M1_MAX)
    codes, error = _fp4_codes(blocks, scale)
    if fit_scales:
        half = np.maximum(scale, 2) - np.uint8(1)  # 2^-126 is the least: below it a division would overflow
        half_codes, half_error = _fp4_codes(blocks, half)
        better = half_error < error
        scale, codes = np.where(better, half, scale), np.where(better[:, :, None], half_codes, codes)
    return codecs.pack_fp4(codes.reshape(w.shape)), scale


def _fp4_codes(blocks: F32, scale: U8) -> tuple[U8, NDArray[np.float64]]:
    """f32 [O, n, 32] under scales [O, n] -> (codes [O, n, 32], squared error [O, n])."""
    wide = codecs.ue8m0_to_f32(scale)[:, :, None]
    codes = codecs.f32_to_e2m1(blocks / wide)
    return codes, np.square((codecs.e2m1_to_f32(codes) * wide).astype(np.float64) - blocks).sum(axis=2)


def encode_engram(rows: F32) -> tuple[U8, U8]:
    """f32 [n, hd], 32 | hd -> (E4M3 codes [n, hd], UE8M0 scales [n, hd/32])."""
    blocks = rows.reshape(rows.shape[0], -1, 32)
    scale = _scale_bytes(np.abs(blocks).max(axis=2), codecs.E4M3_MAX)
    return codecs.f32_to_e4m3(blocks / codecs.ue8m0_to_f32(scale)[:, :, None]).reshape(rows.shape), scale


def _scale_bytes(amax: F32, top: float) -> U8:
    """The least power of two that brings amax under `top`; 2^-126 for zeros, so that a division stays finite."""
    mantissa, exponent = np.frexp(np.maximum(amax.astype(np.float64) / top, 2.0**-126))
    out: U8 = (exponent - (mantissa == 0.5) + 127).astype(np.uint8)
    return out


def encode(config: ModelConfig, weights: Mapping[str, F32], fit_scales: bool = False) -> Stored:
    """Float weights by name (`X.weight` for packed ones, no scales) -> every tensor as it is stored.

    Args:
        fit_scales: FP4 scales by least error (`encode_fp4`).

    Raises:
        MissingTensorError: a weight is missing, extra or misshapen; `problems` has one line each.
    """
    specs = {n: s for n, s in expected(config).items() if s.required or n in weights}
    problems = [f"extra: {n}" for n in weights if n not in specs or specs[n].dtype == "F8_E8M0"]
    out: Stored = {}
    for name, spec in specs.items():
        if spec.dtype == "F8_E8M0":
            continue  # written with its weight
        shape = spec.shape if spec.dtype != "I8" else (spec.shape[0], spec.shape[1] * 2)
        w = weights.get(name)
        if w is None or w.shape != shape:
            problems.append(
                f"missing: {name}" if w is None else f"misshapen: {name} {list(w.shape)}, not {list(shape)}"
            )
        elif not np.isfinite(w).all():
            problems.append(f"not finite: {name}")
        else:
            _encode_one(out, name, spec, np.asarray(w, np.float32), fit_scales)
    if problems:
        raise MissingTensorError(f"weights do not fill the configuration: {problems[0]}", tuple(problems))
    return out


def _encode_one(out: Stored, name: str, spec: Spec, w: F32, fit_scales: bool) -> None:
    if spec.dtype == "F32":
        out[name] = ("F32", w)
    elif spec.dtype == "BF16":
        out[name] = ("BF16", codecs.f32_to_bf16(w))
    else:
        if spec.dtype == "I8":
            codes, scale = encode_fp4(w, fit_scales)
        else:
            codes, scale = encode_engram(w) if spec.part == "table" else encode_fp8(w)
        out[name] = (spec.dtype, codes)
        out[companion(name)] = ("F8_E8M0", scale)


def write_checkpoint(
    folder: Path, tensors: Stored, engram_layers: tuple[int, ...], n_shards: int | None = None
) -> None:
    """Write stored tensors as one `model.safetensors`, or as `n_shards` files and an index.

    With shards, each engram table and its scales fill one of the last files, as in the release; the others
    share the rest by size, in order. Existing files are replaced one by one, each by a rename.
    """
    if n_shards is None:
        write_safetensors(folder / SINGLE, tensors)
        return
    tables = [
        {n: t for n, t in tensors.items() if n.startswith(f"layers.{layer}.engram.embed.")} for layer in engram_layers
    ]
    rest = {n: t for n, t in tensors.items() if ".engram.embed." not in n}
    n_rest = n_shards - len(tables)
    if n_rest < 1:
        raise ValueError(f"{n_shards} shards cannot hold {len(tables)} engram tables and the rest")
    shards: list[Stored] = [{} for _ in range(n_rest)]
    total, at = sum(t[1].nbytes for t in rest.values()), 0
    for name, tensor in rest.items():
        shards[min(at * n_rest // max(total, 1), n_rest - 1)][name] = tensor
        at += tensor[1].nbytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate([*shards, *tables], 1):
        file = f"model-{i:05}-of-{n_shards:05}.safetensors"
        write_safetensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    size = sum(t[1].nbytes for t in tensors.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}, indent=1)
    replace_file(folder / INDEX, text.encode() + b"\n")


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> None:
    """Write a container whose data begins at a multiple of 8; larger items first, so that all stay aligned."""
    order = sorted(tensors, key=lambda n: (-np.dtype(STORAGE[tensors[n][0]]).itemsize, _name_key(n)))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        dtype, value = tensors[name]
        if value.dtype.itemsize != np.dtype(STORAGE[dtype]).itemsize:
            raise ValueError(f"{name}: {value.dtype} is not how {dtype} is stored")
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts = [np.ascontiguousarray(tensors[name][1]).tobytes() for name in order]
    replace_file(path, b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def _name_key(name: str) -> str:
    """An engram table stands before its scales, as in the release."""
    return name.replace(".engram.embed.weight", ".engram.embed.rows")


def replace_file(path: Path, data: bytes) -> None:
    """Write beside, flush to disk, rename: a reader sees the old file or the new one.

    Raises:
        FileFormatError: the file cannot be written; nothing is left behind.
    """
    beside = path.with_name(path.name + ".part")
    try:
        with beside.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        beside.replace(path)
    except OSError as e:
        beside.unlink(missing_ok=True)
        raise FileFormatError(f"{path}: cannot be written ({e.strerror or e})") from e
