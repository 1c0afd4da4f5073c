"""Launch table of lloyd.cu."""

from __future__ import annotations

from ds4.device.kernels import Grid, Kernel

_TILE = 1024
_RELEASED = {"n": 8 << 20, "N": 8192}


def _grid(n: int) -> Grid:
    return (-(-n // 256), 1, 1)


LLOYD_ASSIGN = Kernel(
    name="lloyd_assign",
    source="lloyd.cu",
    grid=_grid,
    block=256,
    args=("index: u16[n]", "x: f32[n,8]", "book: f32[N,8]", "half: f32[N]", "n: i32", "N: i32"),
    smem=_TILE * 9 * 4,
    traffic=lambda n, N: (32 * n + -(-n // 256) * 36 * N, 2 * n),
    released=_RELEASED,
    in_flight=256 * 32,
)
LLOYD_SUMS = Kernel(
    name="lloyd_sums",
    source="lloyd.cu",
    grid=_grid,
    block=256,
    args=("low: u32[N,8]", "high: u32[N,8]", "count: u32[N]", "x: f32[n,8]", "index: u16[n]", "n: i32"),
    traffic=lambda n: (34 * n, 17 * 4 * n),  # at most: a high word that does not change is left alone
    released=_RELEASED,
    in_flight=256 * 34,
)
