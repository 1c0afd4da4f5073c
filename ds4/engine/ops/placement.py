"""Dense weights from the file's bytes to the device's layout (cuda/weights.cuh), slab by slab of rows.

The device layout holds the same codes and scales in another order, so that a warp reads whole 128-byte lines and
each lane decodes eight consecutive columns a pass. Refuses shapes a format cannot hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer, Device
from ds4.device.kernels.linear import FORMATS
from ds4.errors import DeviceError

U8 = NDArray[np.uint8]
SLAB = 1 << 22  # elements re-laid at a time
# columns a row must be a multiple of, bytes of that many in the file
BLOCKS = {"f32": (8, 32), "bf16": (8, 16), "f16": (8, 16), "q8_0": (32, 34), "q4_k": (256, 144), "fp4x32": (32, 17),
          "fp8_32x32": (32, 32)}  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """A matrix [rows N, cols K] on the device: `codes` and `scales` planes (the same buffer when it has none)."""

    format: str
    rows: int
    cols: int
    codes: Buffer
    scales: Buffer

    @property
    def nbytes(self) -> int:
        """Device bytes of codes and scales."""
        return self.codes.nbytes + (0 if self.scales is self.codes else self.scales.nbytes)


def file_bytes(format: str, N: int, K: int) -> int:
    """Bytes of a [N, K] matrix in the file.

    Raises:
        DeviceError: unknown format, or K (for FP8 also N) is not what the format needs.
    """
    if format not in BLOCKS:
        raise DeviceError(f"weight format {format!r} is not one of {', '.join(BLOCKS)}")
    columns, nbytes = BLOCKS[format]
    if K % columns:
        raise DeviceError(f"a {format} matrix of {N} x {K}: its rows must be a multiple of {columns} long")
    tiles = -(-N // 32) * (K // 32) if format == "fp8_32x32" else 0
    return N * (K // columns) * nbytes + tiles


def place_weight(dev: Device, format: str, raw: U8, N: int, K: int) -> Weight:
    """Re-lay the file's bytes `raw` of a [N, K] matrix and put them on the device.

    Raises:
        DeviceError: see `file_bytes`; or `raw` has another length.
    """
    want = file_bytes(format, N, K)
    if raw.dtype != np.uint8 or raw.size != want:
        raise DeviceError(f"a {format} matrix of {N} x {K} has {want} bytes, got {raw.size} of {raw.dtype}")
    raw = raw.reshape(-1)
    row_bytes = K * FORMATS[format][1] // 8
    codes_bytes, scales_bytes = plane_bytes(format, N, K)
    codes = dev.empty((codes_bytes,), "u8")
    if format == "fp8_32x32":
        plane, tiles = raw[: N * K].reshape(N, K), raw[N * K :].reshape(-1, K // 32)
        scales = _scales(tiles, 2, 2)
    step = max(SLAB // K // 4 * 4, 4)  # q4_k heads go by four rows
    stride = scale_stride(format, K)
    if format == "fp8_32x32":
        plane_scales = dev.upload(scales.reshape(-1))
    else:
        plane_scales = dev.empty((scales_bytes,), "u8") if scales_bytes else codes
    for n in range(0, N, step):
        m = min(n + step, N)
        if format == "fp8_32x32":
            codes.write(_codes(np.ascontiguousarray(plane[n:m]).view(np.uint64), 2), n * row_bytes)
            continue
        slab = raw[n * (want // N) : m * (want // N)].reshape(m - n, want // N)
        laid, scale = _RELAY[format](slab)
        codes.write(laid, n * row_bytes)
        if scale is not None:
            plane_scales.write(scale, n * stride)
    return Weight(format, N, K, codes, plane_scales)


def plane_bytes(format: str, N: int, K: int) -> tuple[int, int]:
    """Device bytes of the two planes of a [N, K] matrix: codes, and scales (0: it has none).

    Raises:
        DeviceError: see `file_bytes`.
    """
    file_bytes(format, N, K)
    rows = {"q4_k": -(-N // 4) * 4, "fp8_32x32": -(-N // 32)}.get(format, N)  # q4_k heads go by four rows
    return N * (K * FORMATS[format][1] // 8), rows * scale_stride(format, K)


def scale_stride(format: str, K: int) -> int:
    """Bytes of one row (FP8: row of tiles) of the scale plane; as scale_stride in weights.cuh."""
    if format == "q8_0":
        return -(-(K // 32 * 2) // 4) * 4
    if format == "q4_k":
        return K // 256 * 16
    if format == "fp4x32":
        return -(-(K // 32) // 4) * 4
    return -(-(K // 32) // 2) * 2 if format == "fp8_32x32" else 0


def _codes(units: NDArray[Any], passes: int) -> U8:
    """[rows, K/8] units of eight columns: within each whole chunk from [pass, lane] to [lane, pass]."""
    rows, n = units.shape
    whole = n // (32 * passes)
    head = units[:, : whole * 32 * passes].reshape(rows, whole, passes, 32).swapaxes(2, 3).reshape(rows, -1)
    return np.ascontiguousarray(np.concatenate([head, units[:, whole * 32 * passes :]], axis=1)).view(np.uint8)


def _scales(of_32: NDArray[Any], passes: int, align: int) -> U8:
    """[rows, K/32] scales: within each whole chunk from [pass, group] to [group, pass]; rows padded to `align`."""
    rows, n = of_32.shape
    whole = n // (8 * passes)
    head = of_32[:, : whole * 8 * passes].reshape(rows, whole, passes, 8).swapaxes(2, 3).reshape(rows, -1)
    laid = np.ascontiguousarray(np.concatenate([head, of_32[:, whole * 8 * passes :]], axis=1)).view(np.uint8)
    pad = -laid.shape[1] % align
    return np.ascontiguousarray(np.pad(laid, ((0, 0), (0, pad))))


def _f32(slab: U8) -> tuple[U8, U8 | None]:
    rows, nbytes = slab.shape
    whole = nbytes // 1024
    head = slab[:, : whole * 1024].reshape(rows, whole, 32, 2, 16).swapaxes(2, 3).reshape(rows, -1)
    tail = slab[:, whole * 1024 :].reshape(rows, -1, 2, 16).swapaxes(1, 2).reshape(rows, -1)
    return np.ascontiguousarray(np.concatenate([head, tail], axis=1)), None


def _plain(slab: U8) -> tuple[U8, U8 | None]:
    return slab, None


def _q8_0(slab: U8) -> tuple[U8, U8 | None]:
    blocks = slab.reshape(slab.shape[0], -1, 34)
    codes = np.ascontiguousarray(blocks[:, :, 2:]).reshape(slab.shape[0], -1).view(np.uint64)
    scales = np.ascontiguousarray(blocks[:, :, :2]).reshape(slab.shape[0], -1).view(np.uint16)
    return _codes(codes, 2), _scales(scales, 2, 4)


def _q4_k(slab: U8) -> tuple[U8, U8 | None]:
    rows = slab.shape[0]
    blocks = slab.reshape(rows, -1, 144)
    pairs = np.ascontiguousarray(blocks[:, :, 16:]).view(np.uint16).reshape(rows, -1, 4, 16)  # bytes 2i, 2i + 1
    packed = np.empty((rows, pairs.shape[1], 4, 2, 16), np.uint8)  # low nibbles are 32 columns, high ones the next 32
    packed[..., 0, :] = (pairs & 0xF) | (pairs >> 4 & 0xF0)
    packed[..., 1, :] = (pairs >> 4 & 0xF) | (pairs >> 8 & 0xF0)
    return _codes(packed.reshape(rows, -1).view(np.uint32), 4), _heads(blocks[:, :, :16])


def _heads(of_256: U8) -> U8:
    """[rows, K/256, 16] heads, by fours of rows: those of whole chunks row by row, then each tail pass's four."""
    rows, n, _ = of_256.shape
    whole = n // 4 * 4
    fours = np.pad(of_256, ((0, -rows % 4), (0, 0), (0, 0))).reshape(-1, 4, n, 16)
    chunks = fours[:, :, :whole].reshape(len(fours), -1)
    tail = fours[:, :, whole:].swapaxes(1, 2).reshape(len(fours), -1)
    return np.ascontiguousarray(np.concatenate([chunks, tail], axis=1))


def _fp4x32(slab: U8) -> tuple[U8, U8 | None]:
    rows = slab.shape[0]
    blocks = slab.reshape(rows, -1, 17)
    codes = np.ascontiguousarray(blocks[:, :, :16]).reshape(rows, -1).view(np.uint32)
    return _codes(codes, 4), _scales(np.ascontiguousarray(blocks[:, :, 16]), 4, 4)


_RELAY = {"f32": _f32, "bf16": _plain, "f16": _plain, "q8_0": _q8_0, "q4_k": _q4_k, "fp4x32": _fp4x32}
