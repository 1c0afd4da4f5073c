"""Operators of the n-gram memory: sizes to launches (model-text 9.3; kernels in engram.cu)."""

from __future__ import annotations

from ds4.device import Buffer, Device
from ds4.device.kernels.engram import ENGRAM_DECODE, ENGRAM_GATE


def engram_decode(dev: Device, e: Buffer, rows: Buffer, R: int) -> None:
    """e A [R, columns * head_dim] = the values of rows u8 [R, columns, head_dim + head_dim/32], column order."""
    columns, row_bytes = rows.shape[1:]
    head_dim = row_bytes // 33 * 32
    dev.launch(ENGRAM_DECODE[e.kind], e, rows, R * columns, head_dim, R=R, C=columns, HD=head_dim)


def engram_gate(
    dev: Device, x: Buffer, kv: Buffer, qw: Buffer, kw: Buffer, R: int, eps: float, shut: Buffer | None
) -> None:
    """x[r,s] += gate * value, in place.

    Args:
        x: f32 [R, S, D]. kv: f32 [R, (S+1) * D], a key for every stream, then the value. qw, kw: f32 [S, D].
        shut: i32 [R], not 0 where the gate is forced to 0 (image positions); None for text.
    """
    _, S, D = x.shape
    dev.launch(ENGRAM_GATE, x, kv, qw, kw, shut, D, eps, R=R, S=S, D=D)
