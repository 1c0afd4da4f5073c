"""Attention over window and chosen compressed rows (model-text 5.4)."""

from __future__ import annotations

from ds4.device import Buffer, Device
from ds4.device.kernels.attention import ATTENTION_COMBINE, ATTENTION_MMA, ATTENTION_ROWS, STEP_SLOTS
from ds4.engine.ops.kv import mode_of
from ds4.engine.scratch import Workspace
from ds4.errors import DeviceError

STEP_ROWS = 8


def attention(
    dev: Device, ws: Workspace, family: str, out: Buffer, q: Buffer, ring: Buffer, chunk: Buffer,
    comp: Buffer | None, picks: Buffer | None, sinks: Buffer, pos: Buffer, freq: Buffer, first: Buffer, R: int,
    *, window: int,
) -> None:  # fmt: skip
    """out A [R, H, K] = attention of q A [R, H, K] over each row's window and picked rows, rotated back.

    Key order is by position, then by pick, whatever the chunking: positions max(first, p - window + 1) .. p, from
    chunk where they are pos[0] or later, older ones from ring (slot p % ring rows); then
    comp[picks[r, i]] up to the first -1.

    Args:
        family: "step" (1..8 rows, keys split over blocks) or "prefill" (any rows; on tensor cores where queries are
            bf16 and rows packed).
        comp, picks: compressed rows and i32 [R, topk]; both None in a window-only layer.
        sinks: f32 [H].   first: i32 [1], the lowest position whose window row exists.

    Raises:
        DeviceError: more than eight rows in a step, or a ring shorter than the window.
    """
    _, H, K = q.shape
    if family == "step" and not 1 <= R <= STEP_ROWS:
        raise DeviceError(f"attention: a step has 1 to {STEP_ROWS} rows, not {R}")
    ring_rows = ring.shape[0]
    if ring_rows < window:
        raise DeviceError(f"attention: a ring of {ring_rows} rows does not hold a window of {window}")
    topk = picks.shape[1] if picks is not None else 0
    if family == "prefill" and q.dtype == "bf16" and mode_of(ring) == "fp4":
        kernel = ATTENTION_MMA[16 if H <= 16 else 32]
        dev.launch(
            kernel,
            out,
            q,
            ring,
            chunk,
            comp,
            picks,
            sinks,
            pos,
            freq,
            first,
            H,
            window,
            ring_rows,
            topk,
            K**-0.5,
            R=R,
        )
        return
    slots = window + topk
    split = STEP_SLOTS if family == "step" else slots
    n_splits = -(-slots // split)
    part = part_ml = None
    if n_splits > 1:
        part = ws.get("attention_part", (R, H, n_splits, K), "f32")
        part_ml = ws.get("attention_part_ml", (R, H, n_splits, 2), "f32")
    dev.launch(
        ATTENTION_ROWS[q.dtype, mode_of(ring)], out, part, part_ml, q, ring, chunk, comp, picks, sinks, pos, freq,
        first, H, window, ring_rows, topk, split, K**-0.5, R=R, n_splits=n_splits,
    )  # fmt: skip
    if n_splits > 1:
        dev.launch(ATTENTION_COMBINE[q.dtype], out, part, part_ml, sinks, pos, freq, H, n_splits, R=R)
