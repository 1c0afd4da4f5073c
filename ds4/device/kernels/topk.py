"""Launch table of topk.cu."""

from __future__ import annotations

from ds4.device.kernels import Kernel

SMALL_CAPACITY = 4096  # up to here a block of 128 threads selects; the result is the same
HELD = 16384  # values that shared memory holds
ONE_ROW = "a row is selected by one block, and a step has few rows"


def _smem(threads: int) -> int:
    """SelectSmem: four histograms, two counts a warp, the search's state."""
    return 4 * (4 * 256 + 2 * (threads // 32) + 4)


def _passes(n: int) -> int:
    """Reads of every value: once into shared memory, or (at most) once a pass."""
    return 1 if n <= HELD else 6


def _rows(suffix: str, threads: int) -> Kernel:
    return Kernel(
        name=f"topk_rows{suffix}",
        source="topk.cu",
        grid=lambda R: (R, 1, 1),
        block=threads,
        args=(
            "picks: i32[R,topk]", "scores: f32[R,capacity]", "pos: i32[R]", "ratio: i32", "capacity: i32",
            "topk: i32",
        ),
        smem=lambda capacity: _smem(threads) + 4 * min(capacity, HELD),
        traffic=lambda R, capacity, topk: (R * (threads // 8 + _passes(capacity) * 4 * capacity), 4 * R * topk),
        released={"R": 1, "ratio": 2, "capacity": 25600, "topk": 512},
        in_flight=threads * 4 * 4,
        reason=ONE_ROW,
    )  # fmt: skip


def _blocks(suffix: str, threads: int) -> Kernel:
    return Kernel(
        name=f"topk_blocks{suffix}",
        source="topk.cu",
        grid=lambda R: (R, 1, 1),
        block=threads,
        args=(
            "mask: u32[R,words]", "scores: f32[R,capacity]", "pos: i32[R]", "ratio: i32", "capacity: i32",
            "block_size: i32", "n_keep: i32", "words: i32",
        ),
        smem=lambda capacity, block_size: _smem(threads) + 4 * min(-(-capacity // block_size), HELD),
        traffic=lambda R, capacity, block_size, words: (
            R * (threads // 8 + _passes(capacity // block_size) * 4 * ((capacity - 1) // block_size) * block_size),
            4 * R * words,
        ),
        released={"R": 1, "ratio": 1, "capacity": 51200, "block_size": 8, "n_keep": 2048, "words": 200},
        in_flight=threads * 4 * 8,
        reason=ONE_ROW,
    )  # fmt: skip


TOPK_ROWS, TOPK_ROWS_SMALL = _rows("", 1024), _rows("_small", 128)
TOPK_BLOCKS, TOPK_BLOCKS_SMALL = _blocks("", 1024), _blocks("_small", 128)
