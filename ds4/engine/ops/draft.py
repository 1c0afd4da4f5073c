"""Operators of the draft head (dspark.md): the backbone's tap, stage attention, and the pass from draft to draft."""

from __future__ import annotations

from ds4.device import Buffer, Device
from ds4.device.kernels.attention import ATTENTION_COMBINE, ATTENTION_ROWS, STEP_SLOTS
from ds4.device.kernels.draft import DRAFT_ARGMAX, DRAFT_BIAS, DRAFT_CONFIDENCE, DRAFT_TAP
from ds4.engine.ops.kv import mode_of
from ds4.engine.scratch import Workspace
from ds4.errors import DeviceError


def draft_tap(dev: Device, y: Buffer, x: Buffer, slot: int, R: int) -> None:
    """y[r, slot * D + d] = mean_c x[r,c,d].   y: A [R, targets * D]; x: f32 [R, S, D]; slot counts target layers."""
    D, W = x.shape[2], y.shape[1]
    if (slot + 1) * D > W:
        raise DeviceError(f"draft_tap: slot {slot} of {D} columns is outside rows of {W}")
    dev.launch(DRAFT_TAP[y.dtype], y, x, D, W, slot * D, R=R, S=x.shape[1])


def draft_attention(
    dev: Device, ws: Workspace, out: Buffer, q: Buffer, ring: Buffer, chunk: Buffer, sinks: Buffer, pos: Buffer,
    ends: Buffer, freq: Buffer, first: Buffer, B: int, *, window: int,
) -> None:  # fmt: skip
    """out A [B, H, K] = attention of the block's B rows: each sees the anchor's window and all B rows, later ones
    too.

    Keys in order: positions max(first, b - window + 1) .. b from `ring`, then the rows of `chunk` at b+1 .. b+B. This
    is the backbone's kernel: a row that ends at b + B with a window of `window` + B sees just these. Which keys lie
    in `chunk` is told by the position of row 0, hence one row before the block's, at b + 1, whose result nobody
    reads. Keys are always split, so that nothing but partial sums is written, and the rotation back, at each row's
    own position, is left to the combining launch.

    Args:
        q: A [B + 1, H, K], rotated; row 0 any values.   chunk: window rows [B + 1, ..], the last one not read.
        pos: i32 [B], b + 1 .. b + B.   ends: i32 [B + 1] = b + 1, then b + B in every row.
        first: i32 [1], the lowest position whose ring row exists.   sinks: f32 [H].

    Raises:
        DeviceError: the ring is shorter than the window.
    """
    _, H, K = q.shape
    ring_rows, slots = ring.shape[0], window + B
    if ring_rows < window:
        raise DeviceError(f"draft_attention: a ring of {ring_rows} rows does not hold a window of {window}")
    split = STEP_SLOTS if slots > STEP_SLOTS else -(-slots // 2)
    n_splits = -(-slots // split)
    part = ws.get("attention_part", (B + 1, H, n_splits, K), "f32")
    part_ml = ws.get("attention_part_ml", (B + 1, H, n_splits, 2), "f32")
    dev.launch(
        ATTENTION_ROWS[q.dtype, mode_of(ring)], q, part, part_ml, q, ring, chunk, None, None, sinks, ends, freq,
        first, H, slots, ring_rows, 0, split, K**-0.5, R=B + 1, n_splits=n_splits,
    )  # fmt: skip
    row = 4 * H * n_splits
    dev.launch(
        ATTENTION_COMBINE[q.dtype], out, part.view(row * K, (B, H, n_splits, K)),
        part_ml.view(row * 2, (B, H, n_splits, 2)), sinks, pos, freq, H, n_splits, R=B,
    )  # fmt: skip


def draft_bias(dev: Device, logits: Buffer, bias: Buffer) -> None:
    """logits[v] += bias[v]; both f32 [1, V]."""
    V = logits.size
    dev.launch(DRAFT_BIAS, logits, bias, V, V=V)


def draft_argmax(dev: Device, token: Buffer, logits: Buffer) -> None:
    """token i32 [1] = the lowest id with the largest of logits f32 [1, V]; NaN ranks last, so it is always an id."""
    V = logits.size
    dev.launch(DRAFT_ARGMAX, token, logits, V, V=V)


def draft_confidence(dev: Device, conf: Buffer, w: Buffer, x: Buffer, pre: Buffer, e: Buffer, B: int) -> None:
    """conf f32 [B] = w . concat(sum_c pre[i,c] x[i,c], e[i]).

    w: f32 [D + K]; x: f32 [B, S, D]; pre: f32 [B, S]; e: f32 [B, K].
    """
    _, S, D = x.shape
    K = e.shape[-1]
    dev.launch(DRAFT_CONFIDENCE, conf, w, x, pre, e, D, K, B=B, S=S, D=D, K=K)
