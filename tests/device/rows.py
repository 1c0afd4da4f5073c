"""Launch table rows of probe.cu: kernels that exist for the tests of the client."""

from __future__ import annotations

from pathlib import Path

from ds4.device import Kernel

SOURCE = str(Path(__file__).with_name("probe.cu"))

SCALE = Kernel(
    name="scale",
    source=SOURCE,
    grid=lambda n: (-(-n // 128), 1, 1),
    block=128,
    args=("y: f32[n]", "x: f32[n]", "n: i32", "a: f32"),
    constants=("WIDTH",),
)
WIDEN = Kernel(
    name="widen",
    source=SOURCE,
    grid=lambda: (1, 1, 1),
    block=32,
    args=("y: i32[32]", "x: i32[32]"),
    constants=("WIDTH",),
)
BUMP = Kernel(
    name="bump",
    source=SOURCE,
    grid=lambda: (1, 1, 1),
    block=32,
    args=("n: u32[1]", "o: u32[N]", "at: i64"),
    constants=("WIDTH",),
)
REVERSE = Kernel(
    name="reverse",
    source=SOURCE,
    grid=lambda n: (1, 1, 1),
    block=128,
    smem=lambda n: 4 * n,
    args=("y: f32[n]", "x: f32[n]", "n: i32"),
    constants=("WIDTH",),
)
