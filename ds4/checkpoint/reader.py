"""Checkpoint: the release as a stream, one mapped tensor at a time, never a whole shard in memory.

`open` reads headers only and refuses a folder in which a shard is absent or cut, or a tensor is missing, extra
or misshapen. Packed weights stay mapped: `raw` is a view, `tensor` dequantises exactly one. Engram tables
(98 GB each in the release) are reached by offset alone: `engram_rows` here, or the row store through
`engram_file`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint import codecs
from ds4.checkpoint.names import companion
from ds4.checkpoint.safetensors import TensorInfo
from ds4.checkpoint.scan import scan
from ds4.errors import FileFormatError, MissingTensorError
from ds4.model.config import ModelConfig

# storage types of `raw`: all packed formats are bytes
_RAW: dict[str, type[np.generic]] = {
    "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "U8": np.uint8, "I8": np.uint8, "BF16": np.uint16, "F32": np.float32,
}  # fmt: skip


class Checkpoint:
    """An opened checkpoint. Views that it handed out stay valid after the object is gone."""

    def __init__(self, path: Path, config: ModelConfig, infos: dict[str, TensorInfo]) -> None:
        self.path, self.config, self.infos = path, config, infos
        self._maps: dict[Path, np.memmap[Any, np.dtype[np.uint8]]] = {}

    @staticmethod
    def open(path: str | Path) -> Checkpoint:
        """Check the folder's headers against its configuration and map it lazily.

        Raises:
            ConfigError: config.json alone is at fault.
            FileFormatError: a shard or the index is absent, cut or lies.
            MissingTensorError: tensors are missing, extra or misshapen; `problems` has one line each.
        """
        found = scan(Path(path))
        if found.config_error is not None and len(found.broken) == 1:
            raise found.config_error
        if found.broken:
            raise FileFormatError(_first_of(found.broken, found.path))
        if found.tensors:
            message = f"{found.path}: {_first_of(found.tensors, found.path)}"
            raise MissingTensorError(message, tuple(found.tensors))
        assert found.config is not None
        return Checkpoint(found.path, found.config, found.infos)

    def has(self, name: str) -> bool:
        return name in self.infos

    def raw(self, name: str) -> NDArray[Any]:
        """A read-only view of the mapped bytes in storage type: u8 for FP8, FP4 and scales, u16 for BF16, f32.

        Raises:
            MissingTensorError: there is no such tensor.
            FileFormatError: the file cannot be mapped any more.
        """
        info = self._info(name)
        dtype = _RAW.get(info.dtype)
        if dtype is None:
            raise FileFormatError(f"{info.file}: tensor {name} is {info.dtype}, which no weight of this model is")
        if info.nbytes == 0:
            return np.empty(info.shape, dtype)
        return np.ndarray(info.shape, dtype, buffer=self._map(info.file), offset=info.offset)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32, dequantised with its `.scale` where it has one; F32 is a read-only view.

        Raises:
            MissingTensorError: no such tensor, or packed weights without a scale.
            ValueError: an engram table, which is read by rows.
        """
        info, raw = self._info(name), self.raw(name)
        if name.endswith(".engram.embed.weight"):
            raise ValueError(f"{name} is read by rows (engram_rows), never whole")
        if info.dtype == "BF16":
            return codecs.bf16_to_f32(raw)
        if info.dtype == "F32":
            view: NDArray[np.float32] = raw if raw.flags.aligned else raw.copy()
            return view
        if info.dtype in ("F8_E8M0", "U8"):
            return codecs.ue8m0_to_f32(raw)
        scale = companion(name)
        if scale == name or scale not in self.infos:
            raise MissingTensorError(f"{info.file}: {name} is packed {info.dtype} and has no {scale} beside it")
        return (codecs.dequant_fp4 if info.dtype == "I8" else codecs.dequant_fp8)(raw, self.raw(scale))

    def engram_file(self, layer: int) -> tuple[Path, int, int]:
        """(shard, byte offset of the table's rows, byte offset of their scales) of an engram layer.

        Raises:
            FileFormatError: rows and scales lie in different shards, which a base cannot point at.
        """
        weight, scale = self._engram(layer)
        if weight.file != scale.file:
            raise FileFormatError(
                f"{self.path}: {weight.name} is in {weight.file.name} and its scale in {scale.file.name}; "
                "a table and its scales must share a shard"
            )
        return weight.file, weight.offset, scale.offset

    def engram_rows(self, layer: int, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows i64 [...] of a layer's table -> f32 [..., head_dim], by one read of each part a distinct row.

        Raises:
            IndexError: a row number outside the table.
        """
        weight, scale = self._engram(layer)
        n_rows, width = weight.shape
        distinct, inverse = np.unique(np.asarray(rows, np.int64), return_inverse=True)
        if distinct.size and not 0 <= distinct[0] <= distinct[-1] < n_rows:
            raise IndexError(f"engram rows {distinct[0]}..{distinct[-1]} of a table of {n_rows}")
        codes = _read_rows(weight, distinct, width)
        scales = _read_rows(scale, distinct, scale.shape[1])
        return codecs.dequant_engram(codes, scales)[inverse.reshape(np.shape(rows))]

    def _engram(self, layer: int) -> tuple[TensorInfo, TensorInfo]:
        if layer not in self.config.engram_layer_ids:
            raise ValueError(f"layer {layer} has no engram table; layers {self.config.engram_layer_ids} have")
        name = f"layers.{layer}.engram.embed.weight"
        return self._info(name), self._info(companion(name))

    def _info(self, name: str) -> TensorInfo:
        if name not in self.infos:
            raise MissingTensorError(f"{self.path}: has no tensor {name}")
        return self.infos[name]

    def _map(self, file: Path) -> np.memmap[Any, np.dtype[np.uint8]]:
        if file not in self._maps:
            try:
                self._maps[file] = np.memmap(file, np.uint8, "r")
            except (OSError, ValueError) as e:
                raise FileFormatError(f"{file}: cannot be mapped ({e})") from e
        return self._maps[file]


def _read_rows(info: TensorInfo, rows: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    out = np.empty((len(rows), width), np.uint8)
    try:
        fd = os.open(info.file, os.O_RDONLY)
    except OSError as e:
        raise FileFormatError(f"{info.file}: cannot be read ({e.strerror or e})") from e
    try:
        os.posix_fadvise(fd, info.offset, info.nbytes, os.POSIX_FADV_RANDOM)  # no read-ahead of 98 GB
        for i, row in enumerate(rows.tolist()):
            if os.preadv(fd, [out[i]], info.offset + row * width) != width:
                raise FileFormatError(f"{info.file}: is cut off inside row {row} of {info.name}")
    finally:
        os.close(fd)
    return out


def _first_of(lines: list[str], path: Path) -> str:
    if len(lines) == 1:
        return lines[0]
    return f"{lines[0]} (and {len(lines) - 1} more problems; `ds4 preflight {path}` lists all)"
