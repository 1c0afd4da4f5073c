"""Launch table of rope.cu."""

from __future__ import annotations

from ds4.device.kernels import Kernel

ROPE_HEADS = 4  # heads a block, one a warp
BYTES = {"f32": 4, "bf16": 2}

ROPE_QUERY: dict[str, Kernel] = {
    a: Kernel(
        name=f"rope_query_{a}",
        source="rope.cu",
        grid=lambda R, n_heads: (R, -(-n_heads // ROPE_HEADS), 1),
        block=128,
        args=(f"q: {a}[R,n_heads,HEAD_DIM]", "pos: i32[R]", "freq: f32[ROPE_DIM//2]", "n_heads: i32"),
        constants=("HEAD_DIM", "ROPE_DIM"),
        traffic=lambda R, n_heads, ROPE_DIM, a=a: (
            R * n_heads * ROPE_DIM * BYTES[a] + R * n_heads * (4 + 2 * ROPE_DIM),
            R * n_heads * ROPE_DIM * BYTES[a],
        ),
        released={"R": 1, "n_heads": 64, "HEAD_DIM": 512, "ROPE_DIM": 64},
        in_flight=ROPE_HEADS * 64 * BYTES[a],
        reason="8 KB a row: the launch is the cost, and every head needs its own few pairs only",
    )
    for a in ("f32", "bf16")
}
