"""Bytes that the weight-streaming kernels ask for, counted per warp request, against the formulas in their headers.

Rows have the released lengths; there are fewer of them. The count build is deterministic: these are equalities.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds4.device import Device
from ds4.device.kernels import Kernel
from ds4.device.kernels.experts import (
    DOWN,
    DOWN_MMA,
    EXPERTS_PLAN,
    GATE_UP,
    GATE_UP_MMA,
    STEP_THREADS,
    VQ_PLACE,
    code_bytes,
)
from ds4.device.kernels.linear import EMBED, FORMATS, PREFILL, ROWS, STEP, split_of
from ds4.engine.ops.embed import embed
from ds4.engine.ops.experts import experts, place_experts, step_blocks
from ds4.engine.ops.linear import linear
from ds4.engine.ops.placement import place_weight
from ds4.engine.scratch import Workspace
from tests.reference_dense import bf16_bits, random_file
from tests.reference_experts import random_blob

EFFICIENT = 0.95  # useful over sector bytes of a warp's requests


def counted(device: Device, row: Kernel) -> dict[str, dict[str, int]]:
    """Counters of one kernel by argument name: bytes and sector_bytes of loads, bytes of stores."""
    args = device.counters()["kernels"][row.name]["args"]
    names = [a.partition(":")[0] for a in row.args]
    return {
        names[int(i)]: {
            "bytes": a["load"]["bytes"], "sectors": a["load"]["sector_bytes"], "stored": a["store"]["bytes"],
        }
        for i, a in args.items()
    }  # fmt: skip


def check_formula(found: dict[str, dict[str, int]], row: Kernel, **axes: int) -> None:
    assert row.traffic is not None
    total = sum(a["bytes"] for a in found.values()), sum(a["stored"] for a in found.values())
    assert total == row.traffic(**axes), {name: a["bytes"] for name, a in found.items()}


def check_efficient(found: dict[str, dict[str, int]], *names: str) -> None:
    """Each stream by itself, and the streams together."""
    for name in names:
        assert found[name]["bytes"] >= EFFICIENT * found[name]["sectors"], (name, found[name])


@pytest.mark.parametrize(
    "format, N, K",
    [("q4_k", 6, 5120), ("q4_k", 1600, 1280), ("q4_k", 6, 8192), ("q4_k", 6, 4096), ("q4_k", 6, 2304),
     ("q8_0", 6, 5120), ("bf16", 6, 5120), ("f32", 6, 20480), ("fp8_32x32", 32, 6144)],
)  # fmt: skip
@pytest.mark.parametrize("R", [1, 3])
def test_linear_step(count_device: Device, format: str, N: int, K: int, R: int) -> None:
    """(1600 rows of 1280: the plain shape, a warp owns a row or a pair; the others are split among a block.)"""
    if N == 1600 and R == 3:
        N = 64
    w = place_weight(count_device, format, random_file(format, N, K, np.random.default_rng(0)), N, K)
    x = count_device.upload(bf16_bits(np.ones((R, K), np.float32)), "bf16")
    y = count_device.empty((R, N), "f32")
    linear(count_device, Workspace(count_device), "step", w, y, x, R)
    row = STEP[format, "bf16", "f32", 1 if R == 1 else ROWS]
    found = counted(count_device, row)
    check_formula(found, row, R=R, N=N, K=K, groups=1, split=split_of(format, N, K))
    check_efficient(found, "codes")
    streams = [found[name] for name in ("codes", "scales") if name in found]
    assert sum(s["bytes"] for s in streams) >= EFFICIENT * sum(s["sectors"] for s in streams)


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_embed(count_device: Device, format: str) -> None:
    V, D, S = 32, 1280 if format == "q4_k" else 1088, 3
    w = place_weight(count_device, format, random_file(format, V, D, np.random.default_rng(0)), V, D)
    x = count_device.empty((2, S, D), "f32")
    embed(count_device, w, x, count_device.upload(np.array([31, 4], np.int32)), 2, S)
    found = counted(count_device, EMBED[format])
    check_formula(found, EMBED[format], R=2, S=S, D=D)
    check_efficient(found, "codes")


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_linear_prefill(count_device: Device, format: str) -> None:
    """Codes are asked for by the sector although a tile of 64 columns is gathered from a chunk's passes."""
    N, K, R = 128, 1280 if format == "q4_k" else 1088, 130
    w = place_weight(count_device, format, random_file(format, N, K, np.random.default_rng(0)), N, K)
    x = count_device.upload(bf16_bits(np.ones((R, K), np.float32)), "bf16")
    y = count_device.empty((R, N), "bf16")
    linear(count_device, Workspace(count_device), "prefill", w, y, x, R)
    row = PREFILL[format, "bf16"]
    found = counted(count_device, row)
    check_formula(found, row, R=R, N=N, K=K, groups=1)
    check_efficient(found, "codes", "x", *(["scales"] if format == "q4_k" else []))


@pytest.mark.parametrize("nc", [4096, 8192])
@pytest.mark.parametrize("k, E, F, D", [(2, 3, 16, 5120), (2, 3, 2304, 16)])
def test_experts_step(count_device: Device, nc: int, k: int, E: int, F: int, D: int) -> None:
    ew = place_experts(count_device, random_blob(E, F, D, nc), E, F, D, 10.0)
    x = count_device.upload(bf16_bits(np.ones((1, D), np.float32)), "bf16")
    picks = count_device.upload(np.array([[2, 0]], np.int32))
    weights = count_device.upload(np.ones((1, k), np.float32))
    y = count_device.empty((1, k, D), "f32")
    experts(count_device, Workspace(count_device), "step", ew, y, x, picks, weights, 1)
    for row, octets in ((GATE_UP["bf16", 1], F // 8), (DOWN["bf16", 1], D // 8)):
        blocks = step_blocks(count_device, ew, k, k * octets, STEP_THREADS[1])
        found = counted(count_device, row)
        check_formula(found, row, k=k, F=F, D=D, n_codes=nc, blocks=blocks)
        check_efficient(found, "codes", "gains", "codebook", *(["plane"] if nc == 8192 else []))


@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_experts_for_several_rows(count_device: Device, kind: str) -> None:
    """Four rows, five experts, one of them picked by all: its bits are read once."""
    E, F, D, nc, R, k = 5, 16, 512, 8192, 4, 2
    ew = place_experts(count_device, random_blob(E, F, D, nc), E, F, D, 10.0)
    x = np.ones((R, D), np.float32)
    data = count_device.upload(bf16_bits(x), "bf16") if kind == "bf16" else count_device.upload(x)
    picks = count_device.upload(np.array([[3, 0], [1, 3], [3, 1], [4, 3]], np.int32))
    weights = count_device.upload(np.ones((R, k), np.float32))
    y = count_device.empty((R, k, D), "f32")
    experts(count_device, Workspace(count_device), "step", ew, y, data, picks, weights, R)
    for row, octets in ((GATE_UP[kind, 8], F // 8), (DOWN[kind, 8], D // 8)):
        blocks = step_blocks(count_device, ew, k, min(R * k, E + 1) * octets, STEP_THREADS[8])
        found = counted(count_device, row)
        check_formula(found, row, R=R, k=k, F=F, D=D, n_codes=nc, blocks=blocks, n_items=4)
        check_efficient(found, "codes", "gains", "plane")


@pytest.mark.parametrize("nc", [4096, 8192])
def test_experts_prefill(count_device: Device, nc: int) -> None:
    """Two full items; each code's words are asked for twice, by the sector."""
    E, F, D, R, k = 3, 64, 320, 64, 2
    ew = place_experts(count_device, random_blob(E, F, D, nc), E, F, D, 10.0)
    x = count_device.upload(bf16_bits(np.ones((R, D), np.float32)), "bf16")
    picks = count_device.upload(np.array([[2, 0]] * R, np.int32))
    weights = count_device.upload(np.ones((R, k), np.float32))
    y = count_device.empty((R, k, D), "f32")
    experts(count_device, Workspace(count_device), "prefill", ew, y, x, picks, weights, R)
    most = min(R * k, E + R * k // 64)
    for row, tiles in ((GATE_UP_MMA, F // 32), (DOWN_MMA, D // 64)):
        found = counted(count_device, row)
        blocks = min(most * tiles, count_device.info.n_sm)
        check_formula(found, row, R=R, k=k, F=F, D=D, n_codes=nc, blocks=blocks, n_items=2)
        check_efficient(
            found, "codes", "codebook", "x" if row is GATE_UP_MMA else "h", *(["plane"] if nc > 4096 else [])
        )
    found = counted(count_device, EXPERTS_PLAN)
    check_formula(found, EXPERTS_PLAN, P=R * k, E=E, n_items=2)


@pytest.mark.parametrize("n, plane", [(24, 0), (64, 8), (37, 5)])
def test_placement(count_device: Device, n: int, plane: int) -> None:
    main = count_device.zeros((16, -(-n * 12 // 8)), "u8")
    high = count_device.zeros((16, plane), "u8") if plane else None
    blocks = 2 * -(-n // 32)
    out, out_plane = count_device.empty((blocks * 96,), "u32"), count_device.empty((blocks * 32,), "u8")
    bits = out_plane if plane else None
    count_device.launch(VQ_PLACE, out, bits, main, high, 16, n, main.shape[1], plane, -(-n // 32))
    check_formula(counted(count_device, VQ_PLACE), VQ_PLACE, rows=16, n_codes=n, plane_bytes=plane)


@pytest.mark.parametrize("nc, blocks", [(4096, 48), (8192, 32)])
def test_codebook_copies_stay_under_a_tenth_at_the_released_shape(nc: int, blocks: int) -> None:
    k, F, D = 6, 2304, 5120
    device: Any = SimpleNamespace(info=SimpleNamespace(n_sm=48))
    ew: Any = SimpleNamespace(F=F, D=D, n_codes=nc)
    made = [step_blocks(device, ew, k, k * rows // 8, STEP_THREADS[1]) for rows in (F, D)]
    assert made == [blocks, blocks]
    codes = k * (2 * code_bytes(F, D, nc) + code_bytes(D, F, nc))
    assert codes == k * 3 * F * D // 8 * (13 if nc == 8192 else 12) // 8  # nothing but codes
    assert sum(made) * 8 * nc <= codes // 10
