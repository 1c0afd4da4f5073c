"""norm.cu against float64."""

from __future__ import annotations

import numpy as np
import pytest

from ds4.device import Device
from ds4.engine.ops.norm import rms_norm
from tests.reference_dense import BF16, F32, UNIT, assert_within, bf16_bits, bf16_values
from tests.reference_dense import rms_norm as reference

EPS = 1e-20  # the model's
ORDERS = ["rising", "falling", "greedy"]


def run(device: Device, x: np.ndarray, w: F32, kind: str = "f32") -> np.ndarray:
    """x f32, or bf16 bits; the result as stored."""
    R, width = x.shape
    y = device.empty((R, width), kind)
    data = device.upload(x, "bf16" if x.dtype == np.uint16 else "f32")
    rms_norm(device, y, data, device.upload(w), R, width, EPS)
    return device.download(y)


def case(R: int, width: int) -> tuple[F32, F32]:
    rng = np.random.default_rng(10_000 * R + width)
    return rng.standard_normal((R, width), np.float32), rng.standard_normal(width, np.float32)


def bound(width: int) -> float:
    """Sum of squares: ceil(width / 256) fused steps, 5 shuffles, 8 warps. One rounding for the mean, two for eps; the
    root halves the lot. Root and quotient one each, then two products."""
    return ((-(-width // 256) + 5 + 8 + 4) / 2 + 2 + 2) * UNIT


@pytest.mark.parametrize("scale", [1.0, 1e-10])  # 1e-10: mean square and eps are of one size
@pytest.mark.parametrize("R, width", [(1, 1), (3, 31), (2, 257), (1, 5120)])
def test_error_is_within_the_rounding_bound(device: Device, R: int, width: int, scale: float) -> None:
    x, w = case(R, width)
    x *= np.float32(scale)
    want = reference(x.astype(np.float64), w.astype(np.float64), EPS)
    assert_within(run(device, x, w), want, bound(width) * np.abs(want))


@pytest.mark.parametrize("source", ["f32", "bf16"])
def test_other_types_round_once(device: Device, source: str) -> None:
    x, w = case(3, 257)
    data = bf16_bits(x) if source == "bf16" else x
    values = bf16_values(data) if source == "bf16" else x.astype(np.float64)
    want = reference(values, w.astype(np.float64), EPS)
    exact = run(device, data, w)
    assert_within(exact, want, bound(257) * np.abs(want))
    assert np.array_equal(run(device, data, w, "bf16"), bf16_bits(exact))
    assert_within(bf16_values(run(device, data, w, "bf16")), want, (BF16 + 2 * bound(257)) * np.abs(want))


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_a_row_does_not_depend_on_its_neighbours(device: Device) -> None:
    x, w = case(5, 515)
    whole = run(device, x, w)
    for r in range(5):
        assert np.array_equal(run(device, x[r : r + 1], w)[0], whole[r])


def test_in_place(device: Device) -> None:
    x, w = case(2, 515)
    data = device.upload(x)
    rms_norm(device, data, data, device.upload(w), 2, 515, EPS)
    assert np.array_equal(device.download(data), run(device, x, w))


def test_a_zero_row_stays_zero(device: Device) -> None:
    assert np.array_equal(run(device, np.zeros((1, 257), np.float32), np.ones(257, np.float32)), np.zeros((1, 257)))


def test_traffic_is_the_header_s_formula(count_device: Device) -> None:
    from ds4.device.kernels.norm import RMS_NORM

    x, w = case(3, 512)
    run(count_device, x, w)
    row = RMS_NORM["f32", "f32"]
    assert row.traffic is not None
    args = count_device.counters()["kernels"][row.name]["args"].values()
    counted = sum(a["load"]["bytes"] for a in args), sum(a["store"]["bytes"] for a in args)
    assert counted == row.traffic(R=3, width=512)
