"""Launch table of experts_plan.cu, experts_step.cu and experts_prefill.cu."""

from __future__ import annotations

import functools

from ds4.device.kernels import Kernel
from ds4.device.kernels.linear import ITEM

STEP_THREADS = {1: 576, 8: 256}  # by slots an item: 576 threads share 6 x 288 octets of 48 blocks without remainder
STEP_CAP, PREFILL_CAP = 8, 64  # slots an item
PREFILL_SMEM = 3 * 64 * 72 * 2
RELEASED = {"R": 1, "k": 6, "F": 2304, "D": 5120, "n_codes": 4096, "blocks": 48}


def code_bytes(rows: int, cols: int, n_codes: int) -> int:
    """Device bytes of one matrix's codes: whole blocks of 256 columns, with the plane above 4,096 codewords."""
    return rows // 8 * -(-cols // 256) * (384 + (32 if n_codes > 4096 else 0))


EXPERTS_PLAN = Kernel(
    name="experts_plan",
    source="experts_plan.cu",
    grid=lambda: (1, 1, 1),
    block=256,
    args=(
        "order: i32[P]",
        "items: i32[*]",
        "n_items: i32[1]",
        "total: u32[1]?",
        "picks: i32[P]",
        "P: i32",
        "E: i32",
        "cap: i32",
    ),
    smem=lambda E: 12 * E,
    traffic=lambda P, E, n_items: (2 * -(-E // 32) * 4 * P, 4 * P + 16 * n_items + 4),
    released={"P": 48, "E": 384, "cap": 8, "n_items": 40},
    in_flight=256 * 4,
    reason="a counting sort of at most a few thousand numbers",
)
VQ_PLACE = Kernel(
    name="vq_place",
    source="experts_plan.cu",
    grid=lambda rows, n_codes: (-(-(rows // 8 * -(-n_codes // 32)) // 8), 1, 1),
    block=256,
    args=(
        "out: u32[*]",
        "out_plane: u8[*]?",
        "main: u8[rows,row_bytes]",
        "plane: u8[rows,plane_bytes]?",
        "rows: i32",
        "n_codes: i32",
        "row_bytes: i32",
        "plane_bytes: i32",
        "octet_blocks: i32",
    ),
    traffic=lambda rows, n_codes, plane_bytes: (
        rows * (2 * n_codes + plane_bytes),
        rows // 8 * -(-n_codes // 32) * (384 + (32 if plane_bytes else 0)),
    ),
    released={"rows": 2304, "n_codes": 640, "row_bytes": 960, "plane_bytes": 0, "octet_blocks": 40},
    in_flight=256 * 16,
)
SWIGLU: dict[str, Kernel] = {
    a: Kernel(
        name=f"swiglu_{a}",
        source="experts_plan.cu",
        grid=lambda R, F: (-(-F // 128), R, 1),
        block=128,
        args=(f"h: {a}[R,F]", f"g: {a}[R,F]", f"u: {a}[R,F]", "F: i32", "limit: f32"),
        traffic=lambda R, F, a=a: (2 * R * F * ITEM[a], R * F * ITEM[a]),
        released={"R": 1, "F": 2304},
        in_flight=128 * 2 * ITEM[a],
        reason="4,608 numbers in all",
    )
    for a in ITEM
}
MOE_SUM: dict[str, Kernel] = {
    a: Kernel(
        name=f"moe_sum_{a}",
        source="experts_plan.cu",
        grid=lambda R, D: (-(-D // 128), R, 1),
        block=128,
        args=(f"y: {a}[R,D]", "y_slots: f32[R,k,D]", f"shared: {a}[R,D]", "k: i32", "D: i32"),
        traffic=lambda R, k, D, a=a: (R * D * (4 * k + ITEM[a]), R * D * ITEM[a]),
        released={"R": 1, "k": 6, "D": 5120},
        in_flight=128 * 28,
        reason="one row: 140 KB to read",
    )
    for a in ITEM
}
_PLANNED = ("order: i32[*]?", "items: i32[*]?", "n_items: i32[1]?")
_SIZES = ("k: i32", "F: i32", "D: i32", "n_codes: i32")


_FACTORS = ("domain: u32[*]?", "domain_scale: u8[*]?", "post: u32[*]?", "post_scale: u8[*]?")
_FACTOR_NAMES = ("domain", "domain_scale", "post", "post_scale")


def _one_traffic(
    a: str, up: bool, k: int, F: int, D: int, n_codes: int, blocks: int, mounted: int = 0
) -> tuple[int, int]:
    """Header's formula for one row: codes, gains, codebook and activations once an octet and slot. mounted: sidecars
    whose factors down reads, a word of codes and a scale an octet."""
    book = blocks * 8 * n_codes
    if up:
        octets = k * F // 8
        per_octet = 2 * code_bytes(8, D, n_codes) + 64 + D * ITEM[a] + 4 + 4  # pick and routing weight
        return book + octets * per_octet, k * F * ITEM[a]
    octets = k * D // 8
    return book + octets * (code_bytes(8, F, n_codes) + 32 + 5 * mounted + F * ITEM[a] + 4), k * D * 4


def _rows_traffic(
    a: str, up: bool, R: int, k: int, F: int, D: int, n_codes: int, blocks: int, n_items: int, mounted: int = 0
) -> tuple[int, int]:
    """The same for several rows. n_items: of the plan, which only the picks tell; each is 12 bytes of item and 32 of
    order a warp, a slot 8 bytes more in gate-up, whose activations come once for each of its matrices."""
    fixed = blocks * (8 * n_codes + STEP_THREADS[8] // 32 * 4)
    slots, rows, cols = R * k, (F if up else D) // 8, D if up else F
    per_item = 44 + (2 if up else 1) * (code_bytes(8, cols, n_codes) + 32) + (0 if up else 5 * mounted)
    per_slot = 2 * cols * ITEM[a] + 8 if up else cols * ITEM[a]
    return fixed + rows * (n_items * per_item + slots * per_slot), slots * rows * 8 * (ITEM[a] if up else 4)


def _step(a: str, rows: int) -> tuple[Kernel, Kernel]:
    suffix = f"{a}_{'one' if rows == 1 else 'rows'}"
    streams = ("codebook: u64[n_codes]", "codes: u32[*]", "plane: u8[*]?", "gains: f32[*]")
    released = RELEASED | {"R": rows} | ({"n_items": 26} if rows > 1 else {})
    traffic = _one_traffic if rows == 1 else _rows_traffic
    up = Kernel(
        name=f"experts_gate_up_{suffix}",
        source="experts_step.cu",
        grid=lambda blocks: (blocks, 1, 1),
        block=STEP_THREADS[rows],
        args=(f"h: {a}[R*k,F]", *streams, f"x: {a}[R,D]", "picks: i32[R,k]", "weights: f32[R,k]", *_PLANNED, *_SIZES,
              "limit: f32"),
        smem=lambda n_codes: 8 * n_codes,
        weights=("codebook", "codes", "plane", "gains"),
        traffic=functools.partial(traffic, a, True),
        released=released,
        in_flight=STEP_THREADS[rows] // 32 * (4 if rows == 1 else 2) * 384,
        reason="as many blocks as keep the copies of the codebook under a tenth of the codes",
    )  # fmt: skip
    down = Kernel(
        name=f"experts_down_{suffix}",
        source="experts_step.cu",
        grid=lambda blocks: (blocks, 1, 1),
        block=STEP_THREADS[rows],
        args=("y: f32[R*k,D]", *streams, *_FACTORS, f"h: {a}[R*k,F]", "picks: i32[R,k]", *_PLANNED, *_SIZES),
        smem=lambda n_codes: 8 * n_codes,
        weights=("codebook", "codes", "plane", "gains", *_FACTOR_NAMES),
        traffic=functools.partial(traffic, a, False),
        released=released,
        in_flight=STEP_THREADS[rows] // 32 * 2 * 384,
        reason="as many blocks as keep the copies of the codebook under a tenth of the codes",
    )  # fmt: skip
    return up, down


GATE_UP: dict[tuple[str, int], Kernel] = {}
DOWN: dict[tuple[str, int], Kernel] = {}
for _a in ITEM:
    for _rows in STEP_THREADS:
        GATE_UP[_a, _rows], DOWN[_a, _rows] = _step(_a, _rows)


def _mma_traffic(
    up: bool, R: int, k: int, F: int, D: int, n_codes: int, blocks: int, n_items: int, mounted: int = 0
) -> tuple[int, int]:
    """Of full items (64 slots each) and whole tiles (F a multiple of 32, D of 64). A code costs its words twice.
    mounted: sidecars whose factors down reads."""
    fixed = blocks * (8 * n_codes + 8 * 4)
    cols, tiles = (D, F // 32) if up else (F, D // 64)
    codes = 8 * (cols // 8 * 24 + (-(-cols // 256) * 128 if n_codes > 4096 else 0))
    per_tile = codes + 8 * (12 + 32 + 512) + (0 if up else 8 * 40 * mounted)
    return fixed + tiles * (n_items * per_tile + R * k * cols * 2), R * k * (2 * F if up else 4 * D)


_PREFILL = {"R": 2048, "k": 6, "F": 2304, "D": 5120, "n_codes": 4096, "blocks": 48, "n_items": 192}
GATE_UP_MMA = Kernel(
    name="experts_gate_up_mma",
    source="experts_prefill.cu",
    grid=lambda blocks: (blocks, 1, 1),
    block=256,
    args=(
        "h: bf16[R*k,F]",
        "codebook: u64[n_codes]",
        "codes: u32[*]",
        "plane: u8[*]?",
        "gains: f32[*]",
        "x: bf16[R,D]",
        "weights: f32[R,k]",
        "order: i32[R*k]",
        "items: i32[*]",
        "n_items: i32[1]",
        *_SIZES,
        "limit: f32",
    ),
    smem=lambda n_codes: PREFILL_SMEM + 8 * n_codes,
    traffic=functools.partial(_mma_traffic, True),
    released=_PREFILL,
    in_flight=64 * 64 * 2 + 64 * 12,
)
DOWN_MMA = Kernel(
    name="experts_down_mma",
    source="experts_prefill.cu",
    grid=lambda blocks: (blocks, 1, 1),
    block=256,
    args=(
        "y: f32[R*k,D]",
        "codebook: u64[n_codes]",
        "codes: u32[*]",
        "plane: u8[*]?",
        "gains: f32[*]",
        *_FACTORS,
        "h: bf16[R*k,F]",
        "order: i32[R*k]",
        "items: i32[*]",
        "n_items: i32[1]",
        "F: i32",
        "D: i32",
        "n_codes: i32",
    ),
    smem=lambda n_codes: PREFILL_SMEM + 8 * n_codes,
    traffic=functools.partial(_mma_traffic, False),
    released=_PREFILL,
    in_flight=64 * 64 * 2 + 64 * 12,
)
