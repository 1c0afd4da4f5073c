"""Launch table of engram.cu."""

from __future__ import annotations

from ds4.device.kernels import Kernel

DECODE_BLOCK = 128
ITEM = {"f32": 4, "bf16": 2}
RELEASED = {"R": 1, "S": 4, "D": 5120, "C": 24, "HD": 256, "n_rows": 24, "head_dim": 256}


def _decode(dtype: str) -> Kernel:
    return Kernel(
        name=f"engram_decode_{dtype}",
        source="engram.cu",
        grid=lambda n_rows, head_dim: (-(-n_rows * head_dim // (8 * DECODE_BLOCK)), 1, 1),
        block=DECODE_BLOCK,
        args=(f"e: {dtype}[R,C*HD]", "rows: u8[R,C,HD+HD//32]", "n_rows: i32", "head_dim: i32"),
        traffic=lambda R, C, HD: (R * C * (HD + HD // 32), R * C * HD * ITEM[dtype]),
        released=RELEASED,
        in_flight=DECODE_BLOCK * 9,
        reason="a token has 24 rows of 264 bytes, one load a thread: 6 blocks, and the launch is the cost",
    )


ENGRAM_DECODE = {dtype: _decode(dtype) for dtype in ITEM}

ENGRAM_GATE = Kernel(
    name="engram_gate",
    source="engram.cu",
    grid=lambda R, S: (S, R, 1),
    block=256,
    args=(
        "x: f32[R,S,D]", "kv: f32[R,(S+1)*D]", "qw: f32[S,D]", "kw: f32[S,D]", "shut: i32[R]?", "width: i32",
        "eps: f32",
    ),
    smem=lambda D: 4 * D,
    weights=("qw", "kw"),
    traffic=lambda R, S, D: (20 * R * S * D, 4 * R * S * D),
    released=RELEASED,
    in_flight=256 * 4 * 16,
    reason="a stream's gate needs the whole stream, 4 streams a row; 340 KB, twice a token",
)  # fmt: skip
