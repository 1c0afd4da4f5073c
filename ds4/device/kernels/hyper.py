"""Launch table of hyper.cu: mixes, Sinkhorn, collapse, expand."""

from ds4.device.kernels import Kernel

SLICE = 256
ROWS = 8
RELEASED = {"R": 1, "S": 4, "D": 5120, "M": 24, "P": 80, "HC": 4}
ONE_ROW = "one block owns a row because its norm needs the whole row: 80 KB of streams, read once from L2"

HYPER_DOTS = Kernel(
    name="hyper_dots",
    source="hyper.cu",
    grid=lambda R, P: (P, -(-R // ROWS), 1),
    block=256,
    args=("part: f32[R,P,M+1]", "x: f32[R,S,D]", "fn: f32[M,S*D]", "rows: i32", "width: i32"),
    smem=4 * ROWS * SLICE,
    weights=("fn",),
    constants=("HC",),
    traffic=lambda R, S, D, M, P: (4 * M * S * D * -(-R // ROWS) + 4 * R * S * D, 4 * R * P * (M + 1)),
    released=RELEASED,
    in_flight=24 * SLICE * 4,
)
HYPER_MIX = Kernel(
    name="hyper_mix",
    source="hyper.cu",
    grid=lambda R: (R, 1, 1),
    block=32,
    args=(
        "pre: f32[R,S]", "post: f32[R,S]", "comb: f32[R,S,S]", "part: f32[R,P,M+1]", "scale: f32[3]", "base: f32[M]",
        "n_slices: i32", "width: i32", "iters: i32", "eps: f32", "heps: f32",
    ),
    weights=("scale", "base"),
    constants=("HC",),
    traffic=lambda R, S, M, P: (R * (4 * P * (M + 1) + 12 + 4 * M), R * 4 * (2 * S + S * S)),
    released=RELEASED,
    in_flight=32 * 8,
    reason="24 numbers a row: the chain of 39 dependent Sinkhorn steps is the cost, not bytes or blocks",
)  # fmt: skip


def _collapse(dtype: str, n_bytes: int) -> Kernel:
    return Kernel(
        name=f"hyper_collapse_{dtype}",
        source="hyper.cu",
        grid=lambda R: (R, 1, 1),
        block=256,
        args=(f"y: {dtype}[R,D]", "x: f32[R,S,D]", "pre: f32[R,S]", "w: f32[D]", "width: i32", "eps: f32"),
        smem=lambda D: 4 * D,
        weights=("w",),
        constants=("HC",),
        traffic=lambda R, S, D: (R * (4 * S * D + 8 * 4 * S + 4 * D), R * n_bytes * D),  # pre: each of 8 warps
        released=RELEASED,
        in_flight=256 * 4 * 4,
        reason=ONE_ROW,
    )


def _expand(dtype: str, n_bytes: int) -> Kernel:
    return Kernel(
        name=f"hyper_expand_{dtype}",
        source="hyper.cu",
        grid=lambda R, D: (-(-D // 256), R, 1),
        block=256,
        args=("x: f32[R,S,D]", f"y: {dtype}[R,D]", "post: f32[R,S]", "comb: f32[R,S,S]", "width: i32"),
        constants=("HC",),
        traffic=lambda R, S, D: (
            R * (4 * S * D + n_bytes * D + -(-D // 32) * 4 * (S + S * S)),  # post and comb: once a warp
            R * 4 * S * D,
        ),
        released=RELEASED,
        in_flight=256 * (4 * 4 + n_bytes),
        reason="a row has 5,120 columns: 20 blocks of one column a thread; it reads 90 KB, which L2 holds",
    )


HYPER_COLLAPSE = {"f32": _collapse("f32", 4), "bf16": _collapse("bf16", 2)}
HYPER_EXPAND = {"f32": _expand("f32", 4), "bf16": _expand("bf16", 2)}
KERNELS = (HYPER_DOTS, HYPER_MIX, *HYPER_COLLAPSE.values(), *HYPER_EXPAND.values())
