"""engram.cu: rows exactly, the gate against float64 where each of its constants matters."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.device import Device
from ds4.device.kernels.engram import ENGRAM_DECODE, ENGRAM_GATE
from ds4.engine.ops.engram import engram_decode, engram_gate

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

EPS = 1e-20  # the model's
UNIT = 2.0**-24  # unit roundoff of float32
ORDERS = ["rising", "falling", "greedy"]


# Rows ------------------------------------------------------------------------------------------------------


def row_values(rows: U8, head_dim: int) -> F64:
    codes = rows[..., :head_dim].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales = rows[..., head_dim:].astype(np.int64)
    return codes * np.repeat(np.where(scales == 255, np.nan, np.ldexp(1.0, scales - 127)), 32, axis=-1)


def decoded(device: Device, rows: U8, kind: str) -> NDArray[np.generic]:
    R, columns, row_bytes = rows.shape
    e = device.empty((R, columns * (row_bytes // 33) * 32), kind)
    engram_decode(device, e, device.upload(rows), R)
    return device.download(e)


@pytest.mark.parametrize("head_dim", [32, 64, 256])  # rows of 33, 66 and 264 bytes: the last alone is aligned
@pytest.mark.parametrize("R", [1, 3])
def test_rows_decode_exactly(device: Device, R: int, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim + R)
    rows = rng.integers(0, 256, (R, 5, head_dim + head_dim // 32), np.uint8)
    rows[..., head_dim:] = rng.integers(100, 140, rows[..., head_dim:].shape)
    want = row_values(rows, head_dim).reshape(R, -1)
    assert np.array_equal(decoded(device, rows, "f32"), want.astype(np.float32), equal_nan=True)
    got = decoded(device, rows, "bf16").view(np.uint16).astype(np.uint32) << 16  # e4m3 has three bits: no rounding
    assert np.array_equal(got.view(np.float32), want.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("head_dim", [32, 256])
def test_every_code_and_extreme_scales(device: Device, head_dim: int) -> None:
    """All 256 codes under the smallest, the largest and the not-a-number scale; subnormal results included."""
    scales = [0, 1, 7, 119, 127, 246, 254, 255]
    codes = np.arange(256, dtype=np.uint8).reshape(-1, head_dim)
    rows = np.zeros((len(scales), len(codes), head_dim + head_dim // 32), np.uint8)
    rows[..., :head_dim] = codes
    rows[..., head_dim:] = np.array(scales, np.uint8)[:, None, None]
    want = row_values(rows, head_dim).reshape(len(scales), -1)
    with np.errstate(over="ignore"):
        assert np.array_equal(decoded(device, rows, "f32"), want.astype(np.float32), equal_nan=True)


# Gate ------------------------------------------------------------------------------------------------------


def inverse_rms(v: F64) -> F64:
    return 1.0 / np.sqrt((v * v).mean(-1) + EPS)


def gate_reference(x: F32, kv: F32, qw: F32, kw: F32) -> tuple[F64, F64]:
    """The new streams, and how far float32 may be from them."""
    R, S, D = x.shape
    a, both = x.astype(np.float64), kv.astype(np.float64).reshape(R, S + 1, D)
    key, value = both[:, :S], both[:, S:]
    terms = a * qw * kw * key
    factor = inverse_rms(a) * inverse_rms(key) * D**-0.5
    dot, mass = terms.sum(-1) * factor, np.abs(terms).sum(-1) * factor
    # A sum: ceil(D/1024) float4 a thread, 5 shuffles, 8 warps, and 3 roundings a term. Of the factors, two roots of
    # such sums (half their error), eight more roundings.
    adds = 4 * -(-D // 1024) + 5 + 8
    d_dot = ((adds + 3) * mass + (adds + 8) * np.abs(dot)) * UNIT
    assert np.all((np.abs(dot) > 2 * d_dot) | (mass == 0)), "an input whose sign float32 cannot know proves nothing"
    size = np.maximum(np.abs(dot), 1e-6)
    gate = 1.0 / (1.0 + np.exp(-np.copysign(np.sqrt(size), dot)))
    d_gate = 0.25 * (d_dot / np.sqrt(size) + np.sqrt(size) * UNIT) + 6 * UNIT * gate  # slope <= 1/4; exp 4 ulp
    want = a + gate[..., None] * value
    return want, d_gate[..., None] * np.abs(value) + UNIT * np.abs(want)


def gated(device: Device, x: F32, kv: F32, qw: F32, kw: F32, shut: NDArray[np.int32] | None = None) -> F32:
    held = device.upload(x)
    shut_buffer = None if shut is None else device.upload(shut)
    engram_gate(device, held, device.upload(kv), device.upload(qw), device.upload(kw), len(x), EPS, shut_buffer)
    return np.asarray(device.download(held), np.float32)


def gate_case(R: int, S: int, D: int, scale: float = 1.0) -> tuple[F32, F32, F32, F32]:
    rng = np.random.default_rng(1000 * R + 100 * S + D)
    x = (rng.standard_normal((R, S, D)) * scale).astype(np.float32)
    kv = (rng.standard_normal((R, (S + 1) * D)) * scale).astype(np.float32)
    qw, kw = (1.0 + 0.3 * rng.standard_normal((2, S, D))).astype(np.float32)
    return x, kv, qw, kw


@pytest.mark.parametrize("device", ORDERS, indirect=True)
@pytest.mark.parametrize("scale", [1.0, 1e-10])  # 1e-10: mean square and eps are of one size
@pytest.mark.parametrize(("R", "S", "D"), [(1, 4, 4), (3, 3, 64), (2, 4, 1028)])
def test_gate_is_within_the_rounding_bound(device: Device, R: int, S: int, D: int, scale: float) -> None:
    x, kv, qw, kw = gate_case(R, S, D, scale)
    want, bound = gate_reference(x, kv, qw, kw)
    assert np.all(np.abs(gated(device, x, kv, qw, kw) - want) <= bound)


def test_gate_at_the_released_width(device: Device) -> None:
    x, kv, qw, kw = gate_case(1, 4, 5120)
    want, bound = gate_reference(x, kv, qw, kw)
    assert np.all(np.abs(gated(device, x, kv, qw, kw) - want) <= bound)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("size", [1e-9, 1e-5])  # below the floor of 1e-6, and above it
def test_a_small_dot_keeps_its_sign_and_meets_the_floor(device: Device, size: float, sign: float) -> None:
    """One column decides: dot = +-size, so the gate is sigmoid(+-1e-3) or sigmoid(+-sqrt(size))."""
    D = 64
    x, kv = np.zeros((1, 1, D), np.float32), np.zeros((1, 2 * D), np.float32)
    x[0, 0, :2] = 1.0, size
    kv[0, :2] = 0.0, sign
    kv[0, D:] = 1.0
    ones = np.ones((1, D), np.float32)
    dot = sign * size / np.sqrt((1 + size**2) / D) / np.sqrt(1 / D) / np.sqrt(D)
    want = 1 / (1 + np.exp(-np.copysign(np.sqrt(max(abs(dot), 1e-6)), dot)))
    got = gated(device, x, kv, ones, ones)[0, 0]
    assert np.all(np.abs(got[2:] - want) <= 8 * UNIT)
    other = 1 / (1 + np.exp(np.copysign(np.sqrt(max(abs(dot), 1e-6)), dot)))
    assert abs(want - other) > 1e3 * UNIT  # the wrong sign would show


def test_shut_rows_stay_as_they_are(device: Device) -> None:
    x, kv, qw, kw = gate_case(3, 4, 64)
    kv[1] = np.nan  # whatever the lookup gave there
    got = gated(device, x, kv, qw, kw, np.array([0, 1, 0], np.int32))
    open_rows = [0, 2]
    assert np.array_equal(got[1], x[1])
    assert np.array_equal(got[open_rows], gated(device, x[open_rows], kv[open_rows], qw, kw))


def test_a_nan_shows(device: Device) -> None:
    x, kv, qw, kw = gate_case(2, 3, 64)
    kv[0, 64 + 5] = np.nan  # in the key of stream 1
    got = gated(device, x, kv, qw, kw)
    assert np.isnan(got[0, 1]).all() and not np.isnan(got[0, [0, 2]]).any() and not np.isnan(got[1]).any()


def test_a_row_does_not_depend_on_its_neighbours(device: Device) -> None:
    x, kv, qw, kw = gate_case(5, 4, 260)
    whole = gated(device, x, kv, qw, kw)
    for r in (0, 4):
        assert np.array_equal(gated(device, x[[r]], kv[[r]], qw, kw)[0], whole[r])


def test_streams_are_independent(device: Device) -> None:
    """A permuted input gives a permuted output."""
    x, kv, qw, kw = gate_case(2, 4, 64)
    turn = [2, 0, 3, 1]
    keys, value = kv[:, :256].reshape(2, 4, 64), kv[:, 256:]
    turned = np.concatenate([keys[:, turn].reshape(2, -1), value], axis=1)
    assert np.array_equal(
        gated(device, x[:, turn], turned, qw[turn], kw[turn]), gated(device, x, kv, qw, kw)[:, turn]
    )


# Traffic ---------------------------------------------------------------------------------------------------


def counted(device: Device, name: str) -> tuple[int, int]:
    """Bytes read and written over all arguments; what several lanes of a warp ask for together counts once."""
    arguments = device.counters()["kernels"][name]["args"].values()
    return sum(a["load"]["bytes"] for a in arguments), sum(a["store"]["bytes"] for a in arguments)


@pytest.mark.parametrize(("R", "columns", "head_dim"), [(1, 24, 256), (3, 5, 32)])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_decode_traffic(count_device: Device, kind: str, R: int, columns: int, head_dim: int) -> None:
    row = ENGRAM_DECODE[kind]
    decoded(count_device, np.zeros((R, columns, head_dim + head_dim // 32), np.uint8), kind)
    assert row.traffic is not None
    assert counted(count_device, row.name) == row.traffic(R=R, C=columns, HD=head_dim)


@pytest.mark.parametrize(("R", "S", "D"), [(1, 4, 5120), (3, 3, 64)])
def test_gate_traffic(count_device: Device, R: int, S: int, D: int) -> None:
    gated(count_device, *gate_case(R, S, D))
    assert ENGRAM_GATE.traffic is not None
    assert counted(count_device, "engram_gate") == ENGRAM_GATE.traffic(R=R, S=S, D=D)
