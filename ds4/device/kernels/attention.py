"""Launch table of attention.cu and attention_mma.cu."""

from __future__ import annotations

from ds4.device.kernels import Kernel
from ds4.device.kernels.kv import BYTES, CONSTANTS, ROW

STEP_SLOTS = 64  # key slots a block of the step family takes
BLOCK_HEADS = 8  # heads a block
WARP_HEADS = 4  # of them a warp: each reads the keys anew
RELEASED = {
    "R": 1, "n_heads": 64, "window": 128, "ring_rows": 192, "topk": 512, "n_splits": 10, "split_slots": STEP_SLOTS,
    "HEAD_DIM": 512, "ROPE_DIM": 64, "B": 528,
}  # fmt: skip


def _key_bytes(window: int, topk: int, n: int, kv: str) -> int:
    """Bytes of a row's keys without padding."""
    return (window + topk) * 4 * n if kv == "f32" else window * (n + n // 32) + topk * (n // 2 + n // 16)


ATTENTION_ROWS: dict[tuple[str, str], Kernel] = {
    (a, kv): Kernel(
        name=f"attention_rows_{a}_{kv}",
        source="attention.cu",
        grid=lambda R, n_heads, n_splits: (-(-n_heads // BLOCK_HEADS), n_splits, R),
        block=64,
        args=(
            f"out: {a}[R,n_heads,HEAD_DIM]", "part: f32[R,n_heads,n_splits,HEAD_DIM]?",
            "part_ml: f32[R,n_heads,n_splits,2]?", f"q: {a}[R,n_heads,HEAD_DIM]", f"ring: {ROW[kv]}[ring_rows,B]",
            f"chunk: {ROW[kv]}[R,B]", f"comp: {ROW[kv]}[*]?", "picks: i32[R,topk]?", "sinks: f32[n_heads]",
            "pos: i32[R]", "freq: f32[ROPE_DIM//2]", "first: i32[1]", "n_heads: i32", "window: i32",
            "ring_rows: i32", "topk: i32", "split_slots: i32", "scale: f32",
        ),
        smem=4 * 2 * 2 * 20,
        constants=CONSTANTS,
        traffic=lambda R, n_heads, n_splits, window, topk, HEAD_DIM, ROPE_DIM, a=a, kv=kv: (
            R * (n_splits * n_heads * HEAD_DIM * BYTES[a]
                 + -(-n_heads // WARP_HEADS) * (_key_bytes(window, topk, HEAD_DIM, kv) + 4 * topk + 12 * n_splits)
                 + (n_heads * (4 + 2 * ROPE_DIM) if n_splits == 1 else 0)),
            R * n_heads * (n_splits * (4 * HEAD_DIM + 8) if n_splits > 1 else HEAD_DIM * BYTES[a]),
        ),
        released=RELEASED,
        in_flight=2 * 4 * 288,
    )
    for a in ("f32", "bf16")
    for kv in ("f32", "fp4")
}  # fmt: skip

ATTENTION_COMBINE: dict[str, Kernel] = {
    a: Kernel(
        name=f"attention_combine_{a}",
        source="attention.cu",
        grid=lambda R, n_heads: (n_heads, R, 1),
        block=32,
        args=(
            f"out: {a}[R,n_heads,HEAD_DIM]", "part: f32[R,n_heads,n_splits,HEAD_DIM]",
            "part_ml: f32[R,n_heads,n_splits,2]", "sinks: f32[n_heads]", "pos: i32[R]", "freq: f32[ROPE_DIM//2]",
            "n_heads: i32", "n_splits: i32",
        ),
        constants=CONSTANTS,
        traffic=lambda R, n_heads, n_splits, HEAD_DIM, ROPE_DIM, a=a: (
            R * n_heads * (n_splits * (4 * HEAD_DIM + 12) + 2 * ROPE_DIM + 8),
            R * n_heads * HEAD_DIM * BYTES[a],
        ),
        released=RELEASED,
        in_flight=32 * 64,
        reason="partial sums come from the cache, 2 KB a split and head, straight into registers",
    )
    for a in ("f32", "bf16")
}  # fmt: skip


def mma_smem(heads: int, HEAD_DIM: int) -> int:
    """MmaSmem: 32 keys in bf16, four partial score tiles, bf16 weights, a factor a head."""
    return 2 * 32 * (HEAD_DIM + 8) + 4 * 4 * heads * 40 + 2 * heads * 40 + 4 * heads


ATTENTION_MMA: dict[int, Kernel] = {
    heads: Kernel(
        name=f"attention_mma_h{heads}",
        source="attention_mma.cu",
        grid=lambda R, n_heads, heads=heads: (-(-n_heads // heads), R, 1),
        block=8 * heads,
        args=(
            "out: bf16[R,n_heads,HEAD_DIM]", "q: bf16[R,n_heads,HEAD_DIM]", "ring: u8[ring_rows,B]", "chunk: u8[R,B]",
            "comp: u8[*]?", "picks: i32[R,topk]?", "sinks: f32[n_heads]", "pos: i32[R]", "freq: f32[ROPE_DIM//2]",
            "first: i32[1]", "n_heads: i32", "window: i32", "ring_rows: i32", "topk: i32", "scale: f32",
        ),
        smem=lambda HEAD_DIM, heads=heads: mma_smem(heads, HEAD_DIM),
        constants=CONSTANTS,
        traffic=lambda R, n_heads, window, topk, HEAD_DIM, ROPE_DIM, heads=heads: (
            R * n_heads * (2 * HEAD_DIM + 4) + R * -(-n_heads // 16) * 4 * ROPE_DIM
            + R * -(-n_heads // heads) * (
                _key_bytes(window, topk, HEAD_DIM, "fp4") + topk * 4 * max(1, HEAD_DIM // 256)
                + heads // 4 * (12 + 4 * topk + 4 * -(-topk // 32))
            ),
            R * 2 * n_heads * HEAD_DIM,
        ),
        released={**RELEASED, "R": 512},
        in_flight=32 * 288,
    )
    for heads in (16, 32)
}  # fmt: skip
