"""Launch table of router.cu."""

from __future__ import annotations

from ds4.device.kernels import Kernel

ROUTE = Kernel(
    name="route",
    source="router.cu",
    grid=lambda R: (R, 1, 1),
    block=32,
    args=(
        "picks: i32[R,k]",
        "weights: f32[R,k]",
        "u: f32[R,E]",
        "bias: f32[E]",
        "delta: f32[E]?",
        "E: i32",
        "k: i32",
        "gate_temp: f32",
        "scale: f32",
        "norm: i32",
    ),
    smem=lambda E: 12 * E,
    weights=("bias", "delta"),
    traffic=lambda R, E, k, mounted=0: ((8 + 4 * mounted) * R * E, 8 * R * k),
    released={"R": 1, "E": 384, "k": 6},
    in_flight=32 * 8,
    reason="one row of 384 scores, 1.5 KB: a warp reads it in twelve requests",
)
