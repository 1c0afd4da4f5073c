"""Launch table of kv.cu, and the bytes of the rows that the caches hold (kvrows.cuh says the same)."""

from __future__ import annotations

from ds4.device.kernels import Kernel

BYTES = {"f32": 4, "bf16": 2}
ROW = {"f32": "f32", "fp4": "u8"}  # element type of a cache's rows
KV_ROWS = 4  # rows a block, one a warp
CONSTANTS = ("HEAD_DIM", "ROPE_DIM")
RELEASED = {"R": 1, "HEAD_DIM": 512, "ROPE_DIM": 64}


def window_row_bytes(n: int, kv: str) -> int:
    """A window row of n channels: n E4M3 codes, n/32 UE8M0 scales, zeros to a multiple of 16; or n floats."""
    return 4 * n if kv == "f32" else (n + n // 32 + 15) // 16 * 16


def comp_row_bytes(n: int, kv: str) -> int:
    """A compressed row: n/2 bytes of E2M1 pairs, n/16 E4M3 scales, zeros to a multiple of 16; or n floats."""
    return 4 * n if kv == "f32" else (n // 2 + n // 16 + 15) // 16 * 16


def index_row_bytes(n: int, kv: str) -> int:
    """An index key: n/2 bytes of E2M1 pairs, n/32 UE8M0 scales, zeros to a multiple of 4; or n floats."""
    return 4 * n if kv == "f32" else (n // 2 + n // 32 + 3) // 4 * 4


def stage_bytes(n: int) -> int:
    """Shared memory of a block's norm weights: n floats a warp, four spare ones after sixteen."""
    return KV_ROWS * 4 * (n // 16 * 20)


WINDOW_KV: dict[tuple[str, str], Kernel] = {
    (a, kv): Kernel(
        name=f"window_kv_{a}_{kv}",
        source="kv.cu",
        grid=lambda n_rows: (-(-n_rows // KV_ROWS), 1, 1),
        block=128,
        args=(
            f"chunk: {ROW[kv]}[n_rows,B]", f"x: {a}[n_rows,HEAD_DIM]", "w: f32[HEAD_DIM]", "pos: i32[n_rows]",
            "freq: f32[ROPE_DIM//2]", "n_rows: i32", "eps: f32",
        ),
        smem=lambda HEAD_DIM: stage_bytes(HEAD_DIM),
        weights=("w",),
        constants=CONSTANTS,
        traffic=lambda n_rows, HEAD_DIM, ROPE_DIM, a=a, kv=kv: (
            n_rows * (HEAD_DIM * (BYTES[a] + 4) + 4 + 2 * ROPE_DIM),
            n_rows * window_row_bytes(HEAD_DIM, kv),
        ),
        released={**RELEASED, "n_rows": 1, "B": 528},
        in_flight=KV_ROWS * 512 * (BYTES[a] + 4),
        reason="a row is 1 KB and its norm needs all of it: one warp, and the launch is the cost",
    )
    for a in ("f32", "bf16")
    for kv in ("f32", "fp4")
}  # fmt: skip

WINDOW_COMMIT = Kernel(
    name="window_commit",
    source="kv.cu",
    grid=lambda n_rows, ring_rows: (min(n_rows, ring_rows), 1, 1),
    block=64,
    args=(
        "ring: u8[ring_rows,row_bytes]", "chunk: u8[n_rows,row_bytes]", "pos: i32[n_rows]", "n_rows: i32",
        "ring_rows: i32", "row_bytes: i32",
    ),
    constants=CONSTANTS,
    traffic=lambda n_rows, ring_rows, row_bytes: (
        min(n_rows, ring_rows) * (row_bytes + 8),
        min(n_rows, ring_rows) * row_bytes,
    ),
    released={**RELEASED, "n_rows": 1, "ring_rows": 192, "row_bytes": 528},
    in_flight=64 * 16,
    reason="one row of 528 bytes: the launch is the cost",
)  # fmt: skip
