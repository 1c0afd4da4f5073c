"""Window rows: what the caches hold, how rows are made, and how they reach the ring."""

from __future__ import annotations

from dataclasses import dataclass

from ds4.device import Buffer, Device
from ds4.device.kernels.kv import WINDOW_COMMIT, WINDOW_KV, comp_row_bytes, index_row_bytes, window_row_bytes
from ds4.errors import UsageError
from ds4.model.config import ModelConfig

__all__ = ["KvLayout", "kv_layout", "mode_of", "window_commit", "window_kv"]


@dataclass(frozen=True)
class KvLayout:
    """Rows of the three caches.

    Mode "fp4" packs them (u8): window rows Q8, compressed rows Q4kv, index keys Q4idx (model-text 10), padded with
    zeros to a multiple of 16, 16 and 4 bytes. Mode "f32" keeps the channels as floats.
    """

    mode: str
    head_dim: int
    index_dim: int

    @property
    def dtype(self) -> str:
        """Element type of every cache buffer."""
        return "u8" if self.mode == "fp4" else "f32"

    @property
    def window_bytes(self) -> int:
        """Bytes of a window row."""
        return window_row_bytes(self.head_dim, self.mode)

    @property
    def compressed_bytes(self) -> int:
        """Bytes of a compressed row."""
        return comp_row_bytes(self.head_dim, self.mode)

    @property
    def key_bytes(self) -> int:
        """Bytes of an index key."""
        return index_row_bytes(self.index_dim, self.mode)

    def _shape(self, n_rows: int, row_bytes: int) -> tuple[int, int]:
        return (n_rows, row_bytes if self.mode == "fp4" else row_bytes // 4)

    def window_shape(self, n_rows: int) -> tuple[int, int]:
        """Shape of a buffer of `n_rows` window rows."""
        return self._shape(n_rows, self.window_bytes)

    def empty_window(self, dev: Device, n_rows: int) -> Buffer:
        """A buffer of window rows; shape[0] is their number."""
        return dev.empty(self.window_shape(n_rows), self.dtype)

    def empty_compressed(self, dev: Device, n_rows: int) -> Buffer:
        """A buffer of compressed rows."""
        return dev.empty(self._shape(n_rows, self.compressed_bytes), self.dtype)

    def empty_keys(self, dev: Device, n_rows: int) -> Buffer:
        """A buffer of index keys."""
        return dev.empty(self._shape(n_rows, self.key_bytes), self.dtype)


def kv_layout(config: ModelConfig, kv: str) -> KvLayout:
    """The layout of `config`'s caches, packed ("fp4") or not ("f32").

    Raises:
        UsageError: another mode, or head widths that blocks of 32 channels do not divide.
    """
    if kv not in ("fp4", "f32"):
        raise UsageError(f"kv is {kv!r}; it can be 'fp4' (packed, as stored) or 'f32'")
    for name, n, most in (("head_dim", config.head_dim, 512), ("index_head_dim", config.index_head_dim, 128)):
        if n % 32 or not 32 <= n <= most:
            raise UsageError(f"{name} is {n}; the kernels take 32 to {most} channels, a multiple of 32")
    return KvLayout(kv, config.head_dim, config.index_head_dim)


def mode_of(rows: Buffer) -> str:
    """Whether a cache buffer is packed."""
    return "fp4" if rows.dtype == "u8" else "f32"


def window_kv(
    dev: Device, chunk: Buffer, x: Buffer, norm_w: Buffer, pos: Buffer, freq: Buffer, R: int, eps: float
) -> None:
    """chunk[r] = the window row of x[r] A [R, K]: normed with norm_w f32 [K], roped, Q8 unless f32."""
    dev.launch(WINDOW_KV[x.dtype, mode_of(chunk)], chunk, x, norm_w, pos, freq, R, eps)


def window_commit(dev: Device, ring: Buffer, chunk: Buffer, pos: Buffer, R: int) -> None:
    """ring[pos[r] % ring_rows] = chunk[r] for the last min(R, ring_rows) rows; ring_rows is the ring's shape[0]."""
    ring_rows, width = ring.shape
    row_bytes = width if ring.dtype == "u8" else 4 * width
    dev.launch(
        WINDOW_COMMIT, ring.view(0, (ring_rows, row_bytes), "u8"), chunk.view(0, (R, row_bytes), "u8"), pos, R,
        ring_rows, row_bytes,
    )  # fmt: skip
