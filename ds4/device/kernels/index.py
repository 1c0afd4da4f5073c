"""Launch table of index.cu and index_mma.cu."""

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
        weights=("w",),
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

_SCORES_TAIL = (
    "pos: i32[n_rows]", "mask: u32[n_rows,mask_words]?", "n_rows: i32", "n_heads: i32", "ratio: i32", "capacity: i32",
    "rows_per_block: i32", "block_size: i32", "mask_words: i32", "factor: f32",
)  # fmt: skip


def _scores_args(kv: str) -> tuple[str, ...]:
    return (
        "scores: f32[n_rows,capacity]", "q: f32[n_rows,n_heads,INDEX_DIM]", "w: f32[n_rows,n_heads]",
        f"keys: {ROW[kv]}[C,B]", *_SCORES_TAIL,
    )  # fmt: skip


def _scores_grid(n_rows: int, capacity: int, rows_per_block: int) -> tuple[int, int, int]:
    return (-(-capacity // SCORE_KEYS), -(-n_rows // rows_per_block), 1)


def _scores_traffic(
    n_rows: int, n_heads: int, capacity: int, rows_per_block: int, n: int, kv: str, warps: int
) -> tuple[int, int]:
    """Keys once a row group; queries and weights once a row and block; positions by every warp. All keys visible."""
    groups, blocks = -(-n_rows // rows_per_block), -(-capacity // SCORE_KEYS)
    positions = blocks * (n_rows + groups) * 4 * warps
    queries = blocks * n_rows * 4 * n_heads * (n + 1)
    return groups * capacity * index_row_bytes(n, kv) + queries + positions, 4 * n_rows * capacity


_SCORES_RELEASED = {
    **RELEASED, "n_rows": 1, "n_heads": 32, "ratio": 2, "capacity": 25600, "rows_per_block": 1, "C": 25600, "B": 68,
    "block_size": 8, "mask_words": 100,
}  # fmt: skip

INDEX_SCORES: dict[str, Kernel] = {
    kv: Kernel(
        name=f"index_scores_{kv}",
        source="index.cu",
        grid=_scores_grid,
        block=128,
        args=_scores_args(kv),
        smem=lambda n_heads, INDEX_DIM, kv=kv: _tile_bytes(INDEX_DIM, kv) + 4 * n_heads * (INDEX_DIM + 1),
        constants=CONSTANTS,
        traffic=lambda n_rows, n_heads, capacity, rows_per_block, INDEX_DIM, kv=kv: _scores_traffic(
            n_rows, n_heads, capacity, rows_per_block, INDEX_DIM, kv, 4
        ),
        released=_SCORES_RELEASED,
        in_flight=SCORE_KEYS * 68,
    )
    for kv in ("f32", "fp4")
}

INDEX_SCORES_MMA = Kernel(
    name="index_scores_mma",
    source="index_mma.cu",
    grid=_scores_grid,
    block=256,
    args=_scores_args("fp4"),
    smem=lambda n_heads, INDEX_DIM: (
        _tile_bytes(INDEX_DIM, "fp4") + 2 * (-(-n_heads // 8) * 8) * (INDEX_DIM + 8) + 4 * n_heads
    ),
    constants=CONSTANTS,
    traffic=lambda n_rows, n_heads, capacity, rows_per_block, INDEX_DIM: _scores_traffic(
        n_rows, n_heads, capacity, rows_per_block, INDEX_DIM, "fp4", 8
    ),
    released={**_SCORES_RELEASED, "n_rows": 512, "rows_per_block": 8},
    in_flight=SCORE_KEYS * 68,
)
