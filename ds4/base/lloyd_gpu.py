"""Lloyd's arithmetic on a device: the same protocol as the CPU's assigner, other bits.

Distances are float32 in column order, so an assignment can differ from BLAS' where two codewords are equally near to
within rounding; sums are integers of 2^-30, independent of the order of addition. One device, one set of bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer, Device
from ds4.device.kernels.lloyd import LLOYD_ASSIGN, LLOYD_SUMS
from ds4.errors import DeviceError

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U16 = NDArray[np.uint16]

DIM = 8
CHUNK = 1 << 20  # vectors a launch
STEP = 2.0**-30  # of the sums
MOST = 1 << 24  # vectors of one update: 64 * 2^30 * 2^24 still fits the integer


class GpuAssigner:
    """Assignment and update on `device` (NVIDIA's driver or the CPU driver); see ds4.base.codebook.Assigner."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.name = f"{device.info.driver} {device.info.name}"
        self._book: Buffer | None = None
        self._half: Buffer | None = None

    def load(self, codebook: F32) -> None:
        """Use this codebook, f32 [nc, 8]."""
        half = 0.5 * np.einsum("nd,nd->n", codebook, codebook, dtype=np.float64)
        self._book = self.device.upload(np.ascontiguousarray(codebook, np.float32))
        self._half = self.device.upload(half.astype(np.float32))

    def assign(self, x: F32) -> U16:
        """f32 [n, 8] -> u16 [n], the nearest codeword, lowest index on a tie.

        Raises:
            DeviceError: no codebook was loaded.
        """
        book, half = self._loaded()
        out = np.empty(len(x), np.uint16)
        for i in range(0, len(x), CHUNK):
            part = self.device.upload(np.ascontiguousarray(x[i : i + CHUNK], np.float32))
            n = part.shape[0]
            index = self.device.empty((n,), "u16")
            self.device.launch(LLOYD_ASSIGN, index, part, book, half, n, book.shape[0])
            out[i : i + n] = self.device.download(index)
        return out

    def update(self, x: F32, indices: U16) -> tuple[F64, NDArray[np.int64]]:
        """Sums f64 [nc, 8] and counts i64 [nc] of the vectors of each cell.

        Raises:
            DeviceError: no codebook was loaded; more than 2^24 vectors, or one of 64 or more.
        """
        nc = self._loaded()[0].shape[0]
        if len(x) > MOST or (len(x) and not float(np.abs(x).max()) < 64):
            raise DeviceError(f"update of {len(x)} vectors: at most {MOST}, each below 64 in size")
        low, high = self.device.zeros((nc, DIM), "u32"), self.device.zeros((nc, DIM), "u32")
        count = self.device.zeros((nc,), "u32")
        for i in range(0, len(x), CHUNK):
            part = self.device.upload(np.ascontiguousarray(x[i : i + CHUNK], np.float32))
            index = self.device.upload(np.ascontiguousarray(indices[i : i + CHUNK], np.uint16))
            self.device.launch(LLOYD_SUMS, low, high, count, part, index, part.shape[0])
        words = self.device.download(high).astype(np.uint64) << np.uint64(32) | self.device.download(low)
        sums: F64 = words.view(np.int64).astype(np.float64) * STEP
        return sums, self.device.download(count).astype(np.int64)

    def _loaded(self) -> tuple[Buffer, Buffer]:
        if self._book is None or self._half is None:
            raise DeviceError("no codebook is loaded")
        return self._book, self._half
