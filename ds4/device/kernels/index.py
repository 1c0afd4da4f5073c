"""Launch table of index.cu."""

from __future__ import annotations

from ds4.device.kernels import Kernel
from ds4.device.kernels.kv import KV_ROWS, ROW, index_row_bytes, stage_bytes

SCORE_KEYS = 128  # keys a block, one a thread
QUERY_CHANNELS = 128 * 16  # channels a block of index_query
CONSTANTS = ("INDEX_DIM", "ROPE_DIM")
RELEASED = {"INDEX_DIM": 128, "ROPE_DIM": 64}
TINY = "a few KB a row: the launch is the cost"


def _tile_bytes(n: int, kv: str) -> int:
    """Shared memory of a tile of keys; f32 rows are one word longer, against bank conflicts."""
    return SCORE_KEYS * (4 * n + 4 if kv == "f32" else index_row_bytes(n, kv))


INDEX_KEYS: dict[str, Kernel] = {
    kv: Kernel(
        name=f"index_keys_{kv}",
        source="index.cu",
        grid=lambda n_rows: (-(-n_rows // KV_ROWS), 1, 1),
        block=128,
        args=(
            f"keys: {ROW[kv]}[C,B]", "k: f32[n_rows,INDEX_DIM]", "w: f32[INDEX_DIM]", "pos: i32[n_rows]",
            "freq: f32[ROPE_DIM//2]", "n_rows: i32", "ratio: i32", "eps: f32",
        ),
        smem=lambda INDEX_DIM: stage_bytes(INDEX_DIM),
        constants=CONSTANTS,
        traffic=lambda n_rows, ratio, INDEX_DIM, ROPE_DIM, kv=kv: (
            n_rows * 4 + n_rows // ratio * (8 * INDEX_DIM + 2 * ROPE_DIM),
            n_rows // ratio * index_row_bytes(INDEX_DIM, kv),
        ),
        released={**RELEASED, "n_rows": 2, "ratio": 2, "C": 512, "B": 68},
        in_flight=KV_ROWS * 1024,
        reason=TINY,
    )
    for kv in ("f32", "fp4")
}  # fmt: skip

INDEX_QUERY: dict[str, Kernel] = {
    kv: Kernel(
        name=f"index_query_{kv}",
        source="index.cu",
        grid=lambda n_rows, n_heads, INDEX_DIM: (-(-n_rows * n_heads * INDEX_DIM // QUERY_CHANNELS), 1, 1),
        block=128,
        args=(
            "q: f32[n_rows,n_heads,INDEX_DIM]", "pos: i32[n_rows]", "freq: f32[ROPE_DIM//2]", "n_rows: i32",
            "n_heads: i32",
        ),
        constants=CONSTANTS,
        traffic=lambda n_rows, n_heads, INDEX_DIM, ROPE_DIM: (
            n_rows * n_heads * 4 * INDEX_DIM + -(-n_rows * n_heads * INDEX_DIM // 512) * (4 + 2 * ROPE_DIM),
            n_rows * n_heads * 4 * INDEX_DIM,
        ),
        released={**RELEASED, "n_rows": 1, "n_heads": 32},
        in_flight=4 * QUERY_CHANNELS,
        reason=TINY,
    )
    for kv in ("f32", "fp4")
}  # fmt: skip

INDEX_SCORES: dict[str, Kernel] = {
    kv: Kernel(
        name=f"index_scores_{kv}",
        source="index.cu",
        grid=lambda n_rows, capacity, rows_per_block: (-(-capacity // SCORE_KEYS), -(-n_rows // rows_per_block), 1),
        block=128,
        args=(
            "scores: f32[n_rows,capacity]", "q: f32[n_rows,n_heads,INDEX_DIM]", "w: f32[n_rows,n_heads]",
            f"keys: {ROW[kv]}[C,B]", "pos: i32[n_rows]", "mask: u32[n_rows,mask_words]?", "n_rows: i32",
            "n_heads: i32", "ratio: i32", "capacity: i32", "rows_per_block: i32", "block_size: i32",
            "mask_words: i32", "factor: f32",
        ),
        smem=lambda n_heads, INDEX_DIM, kv=kv: _tile_bytes(INDEX_DIM, kv) + 4 * n_heads * (INDEX_DIM + 1),
        constants=CONSTANTS,
        traffic=lambda n_rows, n_heads, capacity, rows_per_block, INDEX_DIM, kv=kv: (
            -(-n_rows // rows_per_block) * capacity * index_row_bytes(INDEX_DIM, kv)
            + -(-capacity // SCORE_KEYS)
            * (n_rows * (4 * n_heads * (INDEX_DIM + 1) + 16) + -(-n_rows // rows_per_block) * 16),
            4 * n_rows * capacity,
        ),
        released={
            **RELEASED, "n_rows": 1, "n_heads": 32, "ratio": 2, "capacity": 25600, "rows_per_block": 1, "C": 25600,
            "B": 68, "block_size": 8, "mask_words": 100,
        },
        in_flight=SCORE_KEYS * 68,
    )
    for kv in ("f32", "fp4")
}  # fmt: skip
