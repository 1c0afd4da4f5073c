"""A pass of several rows asks for each dense weight once and for each distinct expert's bits once, at released row
lengths; fewer rows of each matrix, because they repeat. The count build is deterministic: these are equalities.

bench/traffic.py holds the same for every matrix of the released model.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.device import Buffer, Device
from ds4.device.kernels import Kernel
from ds4.device.kernels.experts import DOWN, GATE_UP, code_bytes
from ds4.device.kernels.hyper import HYPER_DOTS
from ds4.device.kernels.linear import FORMATS, ROWS, STEP, split_of
from ds4.engine.ops.experts import ExpertWeights, experts, place_experts
from ds4.engine.ops.hyper import HyperParams, mixes
from ds4.engine.ops.linear import Weight, linear
from ds4.engine.ops.placement import BLOCKS, place_weight
from ds4.engine.scratch import Workspace
from ds4.errors import DeviceError
from tests.conftest import opened
from tests.reference_dense import bf16_bits, random_file
from tests.reference_experts import random_blob

PASSES = (1, 2, 3, 4, 5, 6, 8)
K_PICKS = 3


def asked(device: Device, kernel: Kernel, *names: str) -> int:
    """Bytes that the launches of one kernel loaded from the arguments `names`."""
    args = device.counters()["kernels"][kernel.name]["args"]
    found = [a.partition(":")[0] for a in kernel.args]
    return sum(int(tally["load"]["bytes"]) for i, tally in args.items() if found[int(i)] in names)


def product(device: Device, w: Weight, R: int, x_type: str) -> int:
    """Bytes of codes and scales that one product of R rows asks for."""
    N, K = w.rows, w.cols
    ones = np.ones((R, K), np.float32)
    x = device.upload(bf16_bits(ones), "bf16") if x_type == "bf16" else device.upload(ones)
    device.reset_counters()
    linear(device, Workspace(device), "step", w, device.empty((R, N), "f32"), x, R)
    return asked(device, STEP[w.format, x_type, "f32", 1 if R == 1 else ROWS], "codes", "scales")


def placed(device: Device, format: str, N: int, K: int) -> Weight:
    """A matrix of N rows, padded in the file to whole tiles: any number of rows."""
    whole = -(-N // 32) * 32
    raw = random_file(format, whole, K, np.random.default_rng(0))
    w = place_weight(device, format, raw, whole, K)
    return Weight(format, N, K, w.codes, w.scales)


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_dense_weight(count_device: Device, format: str, split: bool) -> None:
    """In both ways of sharing a matrix out, with a tail after the last whole chunk."""
    columns = BLOCKS[format][0]
    N, K = (8, 5120 + columns) if split else (1600, 256 + columns)
    assert split_of(format, N, K) == split
    w = placed(count_device, format, N, K)
    _, code, _, scale = FORMATS[format]
    once = N * (K * code // 8 + K * scale // 256)
    for R in (1, 2, 6, 8) if split else (1, 2, 8):
        for x_type in ("bf16", "f32") if R < 3 else ("bf16",):
            assert product(count_device, w, R, x_type) == once, (R, x_type)


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_an_odd_matrix(count_device: Device, format: str) -> None:
    """One row has two rows of the matrix a warp, and its last warp of an odd matrix asks for the last row twice;
    several rows have one a warp: they never ask for more.
    """
    N, K = 1601, 512
    w = placed(count_device, format, N, K)
    _, code, _, scale = FORMATS[format]
    row = K * code // 8 + K * scale // 256
    assert product(count_device, w, 1, "bf16") == (N + 1) * row
    assert product(count_device, w, 2, "bf16") == product(count_device, w, 8, "bf16") == N * row


def test_more_rows_than_one_tile_are_refused(count_device: Device) -> None:
    """A second tile would read everything again."""
    w = placed(count_device, "bf16", 8, 512)
    with pytest.raises(DeviceError, match="1 to 8 rows"):
        product(count_device, w, ROWS + 1, "bf16")


def overlapping(kind: str, R: int) -> NDArray[np.int32]:
    """Picks i32 [R, 3]: every row the same, no two rows a pick in common, neighbours two of three, or by lot."""
    j, r = np.arange(K_PICKS), np.arange(R)[:, None]
    if kind == "lot":
        rng = np.random.default_rng(R)
        return np.stack([rng.permutation(8)[:K_PICKS] for _ in range(R)]).astype(np.int32)
    step = {"same": 0, "neighbours": 1, "apart": K_PICKS}[kind]
    return (j + step * r).astype(np.int32)


@cache
def layer(F: int, D: int, nc: int) -> ExpertWeights:
    """24 experts, enough for eight rows that share none."""
    E = K_PICKS * ROWS
    return place_experts(opened("fast", "greedy"), random_blob(E, F, D, nc), E, F, D, 10.0)


@pytest.mark.parametrize("kind", ["same", "neighbours", "apart", "lot"])
@pytest.mark.parametrize("nc", [4096, 8192])
@pytest.mark.parametrize("F, D", [(8, 5120), (2304, 8)], ids=["gate and up", "down"])
def test_a_distinct_expert(count_device: Device, F: int, D: int, nc: int, kind: str) -> None:
    ew, streams = layer(F, D, nc), ("codes", "plane", "gains")
    up_bytes, down_bytes = 2 * code_bytes(F, D, nc) + 8 * F, code_bytes(D, F, nc) + 4 * D
    for R in PASSES:
        picks = overlapping(kind, R)
        x = count_device.upload(bf16_bits(np.ones((R, D), np.float32)), "bf16")
        weights = count_device.upload(np.ones((R, K_PICKS), np.float32))
        y = count_device.empty((R, K_PICKS, D), "f32")
        count_device.reset_counters()
        experts(count_device, Workspace(count_device), "step", ew, y, x, count_device.upload(picks), weights, R)
        rows, distinct = 1 if R == 1 else ROWS, len(np.unique(picks))
        assert asked(count_device, GATE_UP["bf16", rows], *streams) == distinct * up_bytes, R
        assert asked(count_device, DOWN["bf16", rows], *streams) == distinct * down_bytes, R


def test_a_hyper_connection_matrix(count_device: Device) -> None:
    S, D = 4, 640
    M = S * (S + 2)
    dev = count_device.with_constants({"HC": S})
    rng = np.random.default_rng(0)

    def f32(*shape: int) -> Buffer:
        return dev.upload(rng.standard_normal(shape).astype(np.float32))

    params = HyperParams(f32(M, S * D), f32(3), f32(M), 20, 1e-6, 1e-6)
    for R in PASSES:
        x, pre, post, comb = f32(R, S, D), f32(R, S), f32(R, S), f32(R, S, S)
        dev.reset_counters()
        mixes(dev, Workspace(dev), params, x, pre, post, comb, R)
        assert asked(dev, HYPER_DOTS, "fn") == 4 * M * S * D, R
