"""The compressor: groups of positions become latents, compressed rows and index keys (model-text 5.5, 5.6)."""

from __future__ import annotations

from ds4.device import Buffer, Device
from ds4.device.kernels.compress import COMPRESS_COMMIT, COMPRESS_POOL, COMPRESS_STORE
from ds4.device.kernels.index import INDEX_KEYS
from ds4.engine.ops.kv import mode_of
from ds4.errors import DeviceError


def compress_pool(
    dev: Device, lat: Buffer, a: Buffer, g: Buffer | None, partial: Buffer | None, norm_w: Buffer, pos: Buffer,
    R: int, ratio: int, eps: float,
) -> None:  # fmt: skip
    """lat[r] = the normed latent of the group that row r closes, 0 for every other row.

    Args:
        lat: A [R, K]; bf16 rounds the pooled vector before its norm too.   a, g: f32 [R, K], g None with ratio 1.
        partial: f32 [2, slots, K], slots a multiple of ratio: what came before this call. None with ratio 1.

    Raises:
        DeviceError: a ratio above 1 without g or partial, or slots that groups do not divide.
    """
    slots = ratio if partial is None else partial.shape[1]
    if ratio > 1 and (g is None or partial is None or slots % ratio):
        raise DeviceError(f"compress_pool: ratio {ratio} needs gates and partial slots of a multiple of {ratio}")
    dev.launch(COMPRESS_POOL[lat.dtype], lat, a, g, partial, norm_w, pos, R, ratio, slots, eps)


def compress_commit(dev: Device, partial: Buffer, a: Buffer, g: Buffer, pos: Buffer, R: int) -> None:
    """Keep a and g of the last min(R, slots) rows in partial f32 [2, slots, K], slot pos % slots."""
    dev.launch(COMPRESS_COMMIT, partial, a, g, pos, R, partial.shape[1])


def compress_store(dev: Device, comp: Buffer, lat: Buffer, pos: Buffer, freq: Buffer, R: int, ratio: int) -> None:
    """comp[pos // ratio] = lat of closing rows, roped at the group's first position, Q4kv unless comp is f32."""
    dev.launch(COMPRESS_STORE[lat.dtype, mode_of(comp)], comp, lat, pos, freq, R, ratio)


def index_keys(
    dev: Device, keys: Buffer, k: Buffer, norm_w: Buffer, pos: Buffer, freq: Buffer, R: int, ratio: int, eps: float
) -> None:
    """keys[pos // ratio] = k f32 [R, I] of closing rows: normed, roped at the group's start, Q4idx or f32."""
    dev.launch(INDEX_KEYS[mode_of(keys)], keys, k, norm_w, pos, freq, R, ratio, eps)
