"""linear_step.cu and linear_prefill.cu against float64: every format, ragged rows, groups, rows that stay alone."""

from __future__ import annotations

import numpy as np
import pytest

from ds4.device import Buffer, Device
from ds4.device.kernels.linear import FORMATS, split_of
from ds4.engine.ops import placement
from ds4.engine.ops.linear import linear
from ds4.engine.ops.placement import Weight, place_weight
from ds4.engine.scratch import Workspace
from ds4.errors import DeviceError
from tests.reference_dense import (
    BF16,
    F32,
    F64,
    UNIT,
    assert_within,
    bf16_bits,
    bf16_values,
    decode,
    grouped,
    random_file,
    round_bf16,
)

ORDERS = ["rising", "falling", "greedy"]
# (format, N, K): one partial pass; a chunk and a ragged tail; four chunks and a tail (a block owns a row)
CASES = [
    ("f32", 10, 8), ("f32", 7, 296), ("f32", 5, 1064),
    ("bf16", 11, 40), ("bf16", 6, 520), ("bf16", 3, 1288),
    ("f16", 9, 24), ("f16", 5, 264),
    ("q8_0", 10, 96), ("q8_0", 7, 544), ("q8_0", 5, 2080),
    ("q4_k", 10, 256), ("q4_k", 7, 1280), ("q4_k", 3, 4352),
    ("fp4x32", 10, 96), ("fp4x32", 7, 1056), ("fp4x32", 3, 4128),
    ("fp8_32x32", 32, 96), ("fp8_32x32", 64, 544), ("fp8_32x32", 32, 2080),
]  # fmt: skip

ONE_A_FORMAT = [
    ("f32", 7, 296), ("bf16", 6, 520), ("f16", 5, 264), ("q8_0", 7, 544), ("q4_k", 7, 1280), ("fp4x32", 7, 1056),
    ("fp8_32x32", 64, 544),
]  # fmt: skip


def placed(device: Device, format: str, N: int, K: int) -> tuple[Weight, F64]:
    raw = random_file(format, N, K, np.random.default_rng(N * 1000 + K))
    return place_weight(device, format, raw, N, K), decode(format, raw, N, K)


def activations(device: Device, R: int, width: int, kind: str) -> tuple[Buffer, F64]:
    x = np.random.default_rng(R * 7919 + width).standard_normal((R, width), np.float32)
    if kind == "f32":
        return device.upload(x), x.astype(np.float64)
    return device.upload(bf16_bits(x), "bf16"), bf16_values(bf16_bits(x))


def run(device: Device, family: str, w: Weight, x: Buffer, R: int, kind: str, groups: int = 1) -> np.ndarray:
    """The kernel as the engine calls it; a bf16 result as its bits."""
    y = device.empty((R, w.rows), kind)
    linear(device, Workspace(device), family, w, y, x, R, groups)
    return device.download(y)


def step_bound(x: F64, w: F64, groups: int = 1) -> F64:
    """Decoding rounds a weight once. A lane adds ceil(K / 256) products, then eight sums, 32 lanes and four warps
    meet: each addition is one rounding of a partial sum that is at most sum |x| |w|."""
    depth = -(-w.shape[1] // 256) + 3 + 5 + 4
    return (depth + 1) * UNIT * 1.001 * grouped(np.abs(x), np.abs(w), groups)


def prefill_bound(x: F64, w: F64, groups: int = 1) -> F64:
    """A product of two bf16 is exact in f32; 16 are added (the hardware may truncate, two units each), and each slice
    then takes one rounding more."""
    depth = -(-w.shape[1] // 16) + 4 + 2 * 16
    return depth * UNIT * 1.001 * grouped(np.abs(x), np.abs(w), groups)


@pytest.mark.parametrize("format, N, K", CASES)
@pytest.mark.parametrize("R", [1, 3])
def test_a_step_is_within_its_rounding_bound(device: Device, format: str, N: int, K: int, R: int) -> None:
    w, w64 = placed(device, format, N, K)
    x, x64 = activations(device, R, K, "f32")
    got = run(device, "step", w, x, R, "f32")
    assert_within(got, x64 @ w64.T, step_bound(x64, w64))


@pytest.mark.parametrize("format, N, K", CASES)
def test_prefill_is_within_its_rounding_bound(device: Device, format: str, N: int, K: int) -> None:
    w, w64 = placed(device, format, N, K)
    R = 5
    x, x64 = activations(device, R, K, "bf16")
    got = run(device, "prefill", w, x, R, "f32")
    rounded = round_bf16(w64)  # the kernel's weights
    assert_within(got, x64 @ rounded.T, prefill_bound(x64, rounded))


@pytest.mark.parametrize("format, N, K", ONE_A_FORMAT)
@pytest.mark.parametrize("R", [1, 3])
def test_a_step_of_bf16_rows_is_within_its_bound(device: Device, format: str, N: int, K: int, R: int) -> None:
    w, w64 = placed(device, format, N, K)
    x, x64 = activations(device, R, K, "bf16")
    assert_within(run(device, "step", w, x, R, "f32"), x64 @ w64.T, step_bound(x64, w64))


@pytest.mark.parametrize("family", ["step", "prefill"])
@pytest.mark.parametrize("R", [1, 3])
@pytest.mark.parametrize("format, N, K", [("q8_0", 70, 544), *ONE_A_FORMAT])
def test_bf16_results_are_the_rounded_f32_results(
    device: Device, family: str, format: str, N: int, K: int, R: int
) -> None:
    w, _ = placed(device, format, N, K)
    x, _ = activations(device, R, K, "bf16")
    exact = run(device, family, w, x, R, "f32")
    assert np.array_equal(run(device, family, w, x, R, "bf16"), bf16_bits(exact))


@pytest.mark.parametrize("family", ["step", "prefill"])
@pytest.mark.parametrize("format, N, K, groups", [("q8_0", 18, 64, 3), ("bf16", 132, 40, 2), ("f32", 12, 1064, 6)])
def test_groups_read_their_own_columns(device: Device, family: str, format: str, N: int, K: int, groups: int) -> None:
    w, w64 = placed(device, format, N, K)
    x, x64 = activations(device, 2, groups * K, "bf16")
    got = run(device, family, w, x, 2, "f32", groups)
    if family == "prefill":
        w64 = round_bf16(w64)
    bound = (step_bound if family == "step" else prefill_bound)(x64, w64, groups)
    assert_within(got, grouped(x64, w64, groups), bound)


@pytest.mark.parametrize("device", ORDERS, indirect=True)
@pytest.mark.parametrize("format, N, K", [("q4_k", 6, 4352), ("fp8_32x32", 32, 544), ("f32", 5, 296)])
def test_a_row_alone_is_the_same_row_among_eight(device: Device, format: str, N: int, K: int) -> None:
    """Bit for bit, in both activation types and all thread orders."""
    w, _ = placed(device, format, N, K)
    for kind in ("bf16", "f32"):
        x, _ = activations(device, 8, K, kind)
        together = run(device, "step", w, x, 8, "f32")
        for r in (0, 5, 7):
            one = x.view(r * K * x.numpy.itemsize, (1, K))
            assert np.array_equal(run(device, "step", w, one, 1, "f32")[0], together[r]), (kind, r)


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_a_prefill_row_does_not_depend_on_its_tile(device: Device) -> None:
    """Rows 0, 1, 129 of 131 alone, as a pair, and in a second tile: the same bits."""
    w, _ = placed(device, "q8_0", 68, 544)
    x, _ = activations(device, 131, 544, "bf16")
    whole = run(device, "prefill", w, x, 131, "f32")
    for r, n in ((0, 1), (129, 1), (127, 2), (17, 20)):
        part = run(device, "prefill", w, x.view(r * 544 * 2, (n, 544)), n, "f32")
        assert np.array_equal(part, whole[r : r + n])


def test_f32_prefill_is_the_step_kernel(device: Device) -> None:
    w, _ = placed(device, "q8_0", 6, 96)
    x, _ = activations(device, 19, 96, "f32")
    whole = run(device, "prefill", w, x, 19, "f32")
    for r in (0, 8, 18):
        one = x.view(r * 96 * 4, (1, 96))
        assert np.array_equal(run(device, "step", w, one, 1, "f32")[0], whole[r])


@pytest.mark.parametrize("format, N, K", [("q4_k", 4, 5120), ("q8_0", 3, 8192), ("bf16", 2, 5120)])
def test_released_row_lengths(device: Device, format: str, N: int, K: int) -> None:
    w, w64 = placed(device, format, N, K)
    x, x64 = activations(device, 1, K, "bf16")
    assert_within(run(device, "step", w, x, 1, "f32"), x64 @ w64.T, step_bound(x64, w64))
    rounded = round_bf16(w64)
    assert_within(run(device, "prefill", w, x, 1, "f32"), x64 @ rounded.T, prefill_bound(x64, rounded))


def test_split_depends_on_the_matrix_only() -> None:
    assert split_of("bf16", 384, 5120) == 1  # the router: 384 blocks instead of 48
    assert split_of("q4_k", 32768, 1280) == 0
    assert all(split_of(f, 64, 96) == 0 for f in FORMATS)


def test_q4_k_decodes_as_gguf_does(device: Device) -> None:
    """The package's decoder is the oracle: one-hot activations read single weights."""
    import gguf.quants

    raw = random_file("q4_k", 3, 512, np.random.default_rng(5))
    want = gguf.quants.dequantize(raw.reshape(3, -1), gguf.GGMLQuantizationType.Q4_K).astype(np.float64)
    w = place_weight(device, "q4_k", raw, 3, 512)
    columns = 256 + 32 * np.arange(8) + np.arange(8)  # one of each sub-block
    got: F32 = run(device, "step", w, device.upload(np.eye(512, dtype=np.float32)[columns]), 8, "f32")
    assert_within(got, want[:, columns].T, 4 * UNIT * np.abs(want).max())
    assert np.allclose(decode("q4_k", raw, 3, 512), want, atol=4 * UNIT * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_placement_by_slabs_is_placement_at_once(
    device: Device, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    N, K = 32, 1280
    raw = random_file(format, N, K, np.random.default_rng(9))
    whole = place_weight(device, format, raw, N, K)
    monkeypatch.setattr(placement, "SLAB", 5 * K)
    parts = place_weight(device, format, raw, N, K)
    for plane in ("codes", "scales"):
        assert np.array_equal(*(device.download(getattr(w, plane)) for w in (whole, parts)))


@pytest.mark.parametrize("format, N, K", [("q4_k", 2, 96), ("q8_0", 2, 40), ("bf16", 2, 12), ("q5_0", 2, 32)])
def test_a_matrix_the_format_cannot_hold_is_refused(device: Device, format: str, N: int, K: int) -> None:
    with pytest.raises(DeviceError, match=format):
        place_weight(device, format, np.zeros(4 * N * K, np.uint8), N, K)


def test_refusals(device: Device) -> None:
    w, _ = placed(device, "f32", 6, 16)
    x, _ = activations(device, 9, 16, "f32")
    with pytest.raises(DeviceError, match="1 to 8 rows, not 9"):
        run(device, "step", w, x, 9, "f32")
    with pytest.raises(DeviceError, match="groups"):
        run(device, "step", w, x, 1, "f32", groups=2)
    with pytest.raises(DeviceError, match="from f32 to bf16"):
        run(device, "step", w, x, 1, "bf16")
    with pytest.raises(DeviceError, match="bytes"):
        place_weight(device, "f32", np.zeros(3, np.uint8), 6, 16)


def test_the_bound_would_see_a_bf16_weight() -> None:
    """The step bound is far below one bf16 rounding of the weights, which is what the prefill kernel has."""
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((1, 256)), rng.standard_normal((1, 256))
    assert step_bound(x, w).max() < BF16 * 2.0**-4 * np.linalg.norm(x) * np.linalg.norm(w)
