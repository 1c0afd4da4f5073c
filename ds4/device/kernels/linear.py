"""Launch table of linear_step.cu, linear_prefill.cu and embed.cu: one row a storage format and activation type."""

from __future__ import annotations

from ds4.device.kernels import Grid, Kernel

# name: (number in weights.cuh, code bytes of eight columns, columns of a chunk, scale bytes of 256 columns)
FORMATS: dict[str, tuple[int, int, int, int]] = {
    "f32": (0, 32, 256, 0),
    "bf16": (1, 16, 256, 0),
    "f16": (2, 16, 256, 0),
    "q8_0": (3, 8, 512, 16),
    "q4_k": (4, 4, 1024, 16),
    "fp4x32": (5, 4, 1024, 8),
    "fp8_32x32": (6, 8, 512, 8),
}
ITEM = {"f32": 4, "bf16": 2}
WARPS = 4
ROWS = 8  # rows of x that one block of a *_rows kernel takes
SHORT = 1536  # fewer rows of w than this, and at least four chunks of columns: a block owns a row
RELEASED = {"R": 1, "N": 32768, "K": 1280, "groups": 1, "split": 0}


def split_of(name: str, N: int, K: int) -> int:
    """Whether linear_step shares one row of w among a block's warps: by shape and format only."""
    return int(N < SHORT and K // FORMATS[name][2] >= WARPS)


def _step(name: str, x: str, y: str, rows: int) -> Kernel:
    number, code, _, scale = FORMATS[name]
    pair = 2 if rows == 1 else 1

    def grid(R: int, N: int, split: int, **_: int) -> Grid:
        return (N if split else -(-N // (WARPS * pair)), -(-R // rows), 1)

    def traffic(R: int, N: int, K: int, split: int, **_: int) -> tuple[int, int]:
        tiles, owners = -(-R // rows), N if split else -(-N // pair)
        read = owners * (1 if split else pair)  # an odd last row is read twice
        weights = read * (K * code // 8 + K * scale // 256)
        return tiles * weights + owners * R * K * ITEM[x], R * N * ITEM[y]

    return Kernel(
        name=f"linear_step_{name}_{x}_{y}_{'one' if rows == 1 else 'rows'}",
        source="linear_step.cu",
        grid=grid,
        block=32 * WARPS,
        args=(
            f"y: {y}[R,N]",
            "codes: u8[*]",
            "scales: u8[*]",
            f"x: {x}[R,groups*K]",
            "R: i32",
            "N: i32",
            "K: i32",
            "groups: i32",
            "split: i32",
        ),
        smem=4 * WARPS * rows,
        weights=("codes", "scales"),
        defines=(f"FORMAT={number}", f"NAME={name}"),
        traffic=traffic,
        released=RELEASED | {"R": rows},
        in_flight=WARPS * pair * 2 * (1024 if code == 32 else 512),
    )


def _prefill(name: str, y: str) -> Kernel:
    number, code, _, scale = FORMATS[name]

    def scale_bytes(N: int, K: int) -> int:
        """Of N rows, as tiles of 64 columns ask for them; a warp has four rows of a tile."""
        columns = FORMATS[name][2]
        whole, rest = K // columns * (columns // 64), K % columns
        if name == "q4_k":  # a head of 16 bytes for each of the four passes that a tile is gathered from
            return N * (whole * 64 + -(-rest // 64) * 16)
        if name == "fp4x32":
            return N * (whole * 4 + rest // 32)
        return N // 4 * (K // 32) if name == "fp8_32x32" else N * (K // 256 * scale + K % 256 * scale // 256)

    def traffic(R: int, N: int, K: int, groups: int, **_: int) -> tuple[int, int]:
        tall, wide = -(-R // 128), groups * -(-(N // groups) // 64)
        return tall * (N * (K * code // 8) + scale_bytes(N, K)) + wide * R * K * 2, R * N * ITEM[y]

    return Kernel(
        name=f"linear_prefill_{name}_bf16_{y}",
        source="linear_prefill.cu",
        grid=lambda R, N, groups: (-(-(N // groups) // 64), -(-R // 128), groups),
        block=256,
        args=(
            f"y: {y}[R,N]",
            "codes: u8[*]",
            "scales: u8[*]",
            "x: bf16[R,groups*K]",
            "R: i32",
            "N: i32",
            "K: i32",
            "groups: i32",
        ),
        smem=2 * (128 + 64) * 72 * 2,
        defines=(f"FORMAT={number}", f"NAME={name}"),
        traffic=traffic,
        released={"R": 2048, "N": 1280, "K": 5120, "groups": 1},
        in_flight=128 * 64 * 2 + 64 * (8 * code + 2 * scale),
    )


STEP: dict[tuple[str, str, str, int], Kernel] = {
    (name, x, y, rows): _step(name, x, y, rows)
    for name in FORMATS
    for x, y in (("bf16", "bf16"), ("bf16", "f32"), ("f32", "f32"))
    for rows in (1, ROWS)
}
PREFILL: dict[tuple[str, str], Kernel] = {(name, y): _prefill(name, y) for name in FORMATS for y in ("bf16", "f32")}


def _embed(name: str) -> Kernel:
    number, code, columns, scale = FORMATS[name]

    def units(D: int) -> int:
        return D // columns + -(-(D % columns) // 256)

    return Kernel(
        name=f"embed_{name}",
        source="embed.cu",
        grid=lambda R, D: (-(-units(D) // WARPS), R, 1),
        block=32 * WARPS,
        args=("x: f32[R,S,D]", "codes: u8[*]", "scales: u8[*]", "ids: i32[R]", "S: i32", "D: i32"),
        defines=(f"FORMAT={number}", f"NAME={name}"),
        traffic=lambda R, S, D: (R * (D * code // 8 + D * scale // 256 + 4 * units(D)), 4 * R * S * D),
        released={"R": 1, "S": 4, "D": 5120},
        in_flight=128 * (32 if code == 32 else 16),
        reason="one row of the table: 3 KB to read, once a token",
    )


EMBED: dict[str, Kernel] = {name: _embed(name) for name in FORMATS}
