"""lloyd.cu against numpy: nearest codewords, ties, and sums that are exact integers."""

from __future__ import annotations

import numpy as np
import pytest

from ds4.base.lloyd_gpu import GpuAssigner
from ds4.device import Device
from ds4.device.kernels.lloyd import LLOYD_ASSIGN
from ds4.errors import DeviceError
from tests.reference_dense import F32, F64, UNIT

ORDERS = ["rising", "falling", "greedy"]


def case(n: int, nc: int, seed: int = 0) -> tuple[F32, F32]:
    rng = np.random.default_rng(seed + n + nc)
    return rng.standard_normal((n, 8), np.float32), rng.standard_normal((nc, 8), np.float32)


def scores(x: F32, book: F32) -> F64:
    x64, b64 = x.astype(np.float64), book.astype(np.float64)
    return x64 @ b64.T - (b64 * b64).sum(1) / 2


@pytest.mark.parametrize("n, nc", [(1, 3), (300, 7), (70, 1030), (257, 2049)])  # ragged blocks, one and more tiles
def test_assignment_is_nearest_within_rounding(device: Device, n: int, nc: int) -> None:
    x, book = case(n, nc)
    gpu = GpuAssigner(device)
    gpu.load(book)
    index = gpu.assign(x)
    s = scores(x, book)
    size = np.abs(x).astype(np.float64) @ np.abs(book).T.astype(np.float64) + (book.astype(np.float64) ** 2).sum(1)
    # eight products and sums, half rounded once, its subtraction: ten roundings on each of the two compared
    slack = 20 * UNIT * size.max(axis=1)
    assert np.all(s[np.arange(n), index] >= s.max(axis=1) - slack)
    clear = s.max(axis=1) - np.partition(s, -2, axis=1)[:, -2] > slack
    assert clear.mean() > 0.9 and np.array_equal(index[clear], s.argmax(axis=1)[clear])


def test_ties_go_to_the_lowest_code(device: Device) -> None:
    """Every codeword twice, the copies in another tile."""
    x, book = case(40, 700)
    gpu = GpuAssigner(device)
    gpu.load(np.concatenate([book, book]))
    assert gpu.assign(x).max() < 700
    gpu.load(np.zeros((5, 8), np.float32))
    assert gpu.assign(x).tolist() == [0] * 40


def test_codewords_beyond_the_last_are_never_taken(device: Device) -> None:
    """All scores negative: a start value of zero, or a codeword past the end, would win."""
    x = np.full((3, 8), -1.0, np.float32)
    book = np.arange(1, 5, dtype=np.float32)[:, None] * np.ones(8, np.float32)
    gpu = GpuAssigner(device)
    gpu.load(book)
    assert gpu.assign(x).tolist() == [0, 0, 0]


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_sums_are_exact_integers(device: Device) -> None:
    x, book = case(1000, 6)
    x[::3] *= np.float32(1e-8)  # below the step: truncated to nothing or little
    x[5], x[6] = 63.5, -63.5
    index = np.random.default_rng(1).integers(0, 6, 1000).astype(np.uint16)
    index[index == 4] = 3  # an empty cell
    gpu = GpuAssigner(device)
    gpu.load(book)
    sums, counts = gpu.update(x, index)
    fixed = np.trunc(x.astype(np.float64) * 2.0**30).astype(np.int64)
    want = np.zeros((6, 8), np.int64)
    np.add.at(want, index, fixed)
    assert np.array_equal(counts, np.bincount(index, minlength=6))
    assert np.array_equal(sums, want * 2.0**-30)


def test_the_carry_goes_up(device: Device) -> None:
    """Low words that overflow again and again, negative ones too."""
    x = np.repeat(np.array([[3.9, -3.9, 1.0, -1.0, 2.0**-30, -(2.0**-30), 0.0, 4.0]], np.float32), 513, axis=0)
    gpu = GpuAssigner(device)
    gpu.load(np.zeros((1, 8), np.float32))
    sums, counts = gpu.update(x, np.zeros(513, np.uint16))
    assert np.array_equal(sums[0], 513 * np.trunc(x[0].astype(np.float64) * 2.0**30) * 2.0**-30)
    assert counts.tolist() == [513]


def test_refusals(device: Device) -> None:
    gpu = GpuAssigner(device)
    with pytest.raises(DeviceError, match="no codebook"):
        gpu.assign(np.zeros((1, 8), np.float32))
    gpu.load(np.zeros((1, 8), np.float32))
    with pytest.raises(DeviceError, match="below 64"):
        gpu.update(np.full((1, 8), 64.0, np.float32), np.zeros(1, np.uint16))


def test_traffic_is_the_header_s_formula(count_device: Device) -> None:
    x, book = case(512, 1100)
    gpu = GpuAssigner(count_device)
    gpu.load(book)
    gpu.assign(x)
    args = count_device.counters()["kernels"]["lloyd_assign"]["args"].values()
    counted = sum(a["load"]["bytes"] for a in args), sum(a["store"]["bytes"] for a in args)
    assert LLOYD_ASSIGN.traffic is not None and counted == LLOYD_ASSIGN.traffic(n=512, N=1100)
