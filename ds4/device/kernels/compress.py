"""Launch table of compress.cu."""

from __future__ import annotations

from ds4.device.kernels import Kernel
from ds4.device.kernels.kv import BYTES, CONSTANTS, KV_ROWS, RELEASED, ROW, comp_row_bytes, stage_bytes

ONE_ROW = "a group is a few KB and closes once in `ratio` tokens: one warp a row, and the launch is the cost"

COMPRESS_POOL: dict[str, Kernel] = {
    a: Kernel(
        name=f"compress_pool_{a}",
        source="compress.cu",
        grid=lambda n_rows: (-(-n_rows // KV_ROWS), 1, 1),
        block=128,
        args=(
            f"lat: {a}[n_rows,HEAD_DIM]", "a: f32[n_rows,HEAD_DIM]", "g: f32[n_rows,HEAD_DIM]?",
            "partial: f32[2,slots,HEAD_DIM]?", "norm_w: f32[HEAD_DIM]", "pos: i32[n_rows]", "n_rows: i32",
            "ratio: i32", "slots: i32", "eps: f32",
        ),
        smem=lambda HEAD_DIM: stage_bytes(HEAD_DIM),
        weights=("norm_w",),
        constants=CONSTANTS,
        traffic=lambda n_rows, ratio, HEAD_DIM, a=a: (
            n_rows * 4 + n_rows // ratio * HEAD_DIM * ((12 * ratio if ratio > 1 else 4) + 4),
            n_rows * HEAD_DIM * BYTES[a],
        ),
        released={**RELEASED, "n_rows": 2, "ratio": 2, "slots": 66},
        in_flight=KV_ROWS * 512 * 4,
        reason=ONE_ROW,
    )
    for a in ("f32", "bf16")
}  # fmt: skip

COMPRESS_COMMIT = Kernel(
    name="compress_commit",
    source="compress.cu",
    grid=lambda n_rows, slots: (min(n_rows, slots), 1, 1),
    block=128,
    args=(
        "partial: f32[2,slots,HEAD_DIM]", "a: f32[n_rows,HEAD_DIM]", "g: f32[n_rows,HEAD_DIM]", "pos: i32[n_rows]",
        "n_rows: i32", "slots: i32",
    ),
    constants=CONSTANTS,
    traffic=lambda n_rows, slots, HEAD_DIM: (
        min(n_rows, slots) * (8 * HEAD_DIM + 16),
        min(n_rows, slots) * 8 * HEAD_DIM,
    ),
    released={**RELEASED, "n_rows": 1, "slots": 66},
    in_flight=128 * 32,
    reason=ONE_ROW,
)  # fmt: skip

COMPRESS_STORE: dict[tuple[str, str], Kernel] = {
    (a, kv): Kernel(
        name=f"compress_store_{a}_{kv}",
        source="compress.cu",
        grid=lambda n_rows: (-(-n_rows // KV_ROWS), 1, 1),
        block=128,
        args=(
            f"comp: {ROW[kv]}[C,B]", f"lat: {a}[n_rows,HEAD_DIM]", "pos: i32[n_rows]", "freq: f32[ROPE_DIM//2]",
            "n_rows: i32", "ratio: i32",
        ),
        constants=CONSTANTS,
        traffic=lambda n_rows, ratio, HEAD_DIM, ROPE_DIM, a=a, kv=kv: (
            n_rows * 4 + n_rows // ratio * (HEAD_DIM * BYTES[a] + 2 * ROPE_DIM),
            n_rows // ratio * comp_row_bytes(HEAD_DIM, kv),
        ),
        released={**RELEASED, "n_rows": 2, "ratio": 2, "C": 512, "B": 288},
        in_flight=KV_ROWS * 512 * BYTES[a],
        reason=ONE_ROW,
    )
    for a in ("f32", "bf16")
    for kv in ("f32", "fp4")
}  # fmt: skip
