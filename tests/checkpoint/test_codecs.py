"""Number formats against ml_dtypes, every code and every rounding edge; quantisers against the written vectors."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.checkpoint import codecs

F32 = NDArray[np.float32]
ALL_U8 = np.arange(256, dtype=np.uint8)
ALL_U16 = np.arange(65536, dtype=np.uint16)


def same(a: NDArray[np.generic], b: NDArray[np.generic]) -> None:
    """Equal bits, except that one NaN is as good as another."""
    a32, b32 = np.asarray(a, np.float32), np.asarray(b, np.float32)
    wrong = (a32.view(np.uint32) != b32.view(np.uint32)) & ~(np.isnan(a32) & np.isnan(b32))
    assert not wrong.any(), f"first at {np.argwhere(wrong)[0]}: {a32[wrong][0]!r} is not {b32[wrong][0]!r}"


def edges(values: F32) -> F32:
    """Every value of a format, every midpoint of neighbours, and the float32 numbers on both sides of each."""
    v = np.unique(values[np.isfinite(values)]).astype(np.float64)
    points = np.concatenate([v, (v[1:] + v[:-1]) / 2, v * 1.5, [-0.0]]).astype(np.float32)
    return np.concatenate(
        [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
    )


def test_bf16_decodes_every_code() -> None:
    same(codecs.bf16_to_f32(ALL_U16), ALL_U16.view(ml_dtypes.bfloat16).astype(np.float32))


def test_bf16_rounds_as_ml_dtypes() -> None:
    grid = (ALL_U16.astype(np.uint32) << 16)[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = grid.reshape(-1).view(np.float32)
    ours, nan = codecs.f32_to_bf16(x), np.isnan(x)
    assert np.array_equal(ours[~nan], x[~nan].astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.isnan(codecs.bf16_to_f32(ours[nan])).all()


def test_e4m3_decodes_every_code() -> None:
    same(codecs.e4m3_to_f32(ALL_U8), ALL_U8.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_e4m3_rounds_as_ml_dtypes_and_saturates() -> None:
    x = np.concatenate([edges(codecs.E4M3_VALUES), codecs.bf16_to_f32(ALL_U16)])
    x = x[~np.isnan(x)]
    theirs = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(codecs.f32_to_e4m3(x), theirs)
    assert codecs.f32_to_e4m3(np.array([np.inf, -np.inf, 1e30], np.float32)).tolist() == [0x7E, 0xFE, 0x7E]
    assert codecs.f32_to_e4m3(np.array([np.nan], np.float32)).tolist() == [0x7F]


def test_ue8m0_decodes_every_code() -> None:
    same(codecs.ue8m0_to_f32(ALL_U8), ALL_U8.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert codecs.ue8m0_to_f32(np.uint8(0)) == 2.0**-127 > 0


def test_e2m1_codes_both_ways() -> None:
    codes = np.arange(16, dtype=np.uint8)
    same(codecs.e2m1_to_f32(codes), codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    x = edges(codecs.E2M1_VALUES)
    theirs = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(codecs.f32_to_e2m1(x), theirs)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 1e9], np.float32)  # the specification's list
    same(codecs.e2m1_to_f32(codecs.f32_to_e2m1(ties)), np.array([0, 1, 1, 2, 2, 4, 4, 6], np.float32))


def test_fp4_nibbles_low_first_and_back() -> None:
    assert codecs.unpack_fp4(np.array([[0x21, 0xF3]], np.uint8)).tolist() == [[1, 2, 3, 15]]
    codes = np.random.default_rng(0).integers(0, 16, (5, 64), dtype=np.uint8)
    assert np.array_equal(codecs.unpack_fp4(codecs.pack_fp4(codes)), codes)


def by_element(value: Callable[[int, int], float], scale: Callable[[int, int], int], rows: int, cols: int) -> F32:
    """The definition, element by element, in float64."""
    out = [[value(o, i) * 2.0 ** (scale(o, i) - 127) for i in range(cols)] for o in range(rows)]
    return np.array(out, np.float64).astype(np.float32)


@pytest.mark.parametrize(("rows", "cols"), [(32, 32), (64, 96), (1, 32), (33, 40), (70, 31)])
def test_dequant_fp8_is_its_definition(rows: int, cols: int) -> None:
    rng = np.random.default_rng(rows * cols)
    w = rng.integers(0, 0x7F, (rows, cols), dtype=np.uint8) | (rng.integers(0, 2, (rows, cols), dtype=np.uint8) << 7)
    s = rng.integers(0, 255, (-(-rows // 32), -(-cols // 32)), dtype=np.uint8)
    s = np.minimum(s, 240)  # 448 * 2^113 is finite in float32
    same(
        codecs.dequant_fp8(w, s),
        by_element(
            lambda o, i: float(codecs.E4M3_VALUES[w[o, i]]), lambda o, i: int(s[o // 32, i // 32]), rows, cols
        ),
    )


@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (7, 64), (5, 96), (3, 48), (2, 2)])
def test_dequant_fp4_is_its_definition(rows: int, cols: int) -> None:
    rng = np.random.default_rng(cols)
    w = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    s = rng.integers(0, 250, (rows, -(-cols // 32)), dtype=np.uint8)

    def value(o: int, i: int) -> float:
        byte = int(w[o, i // 2])
        return float(codecs.E2M1_VALUES[byte & 15 if i % 2 == 0 else byte >> 4])

    same(codecs.dequant_fp4(w, s), by_element(value, lambda o, i: int(s[o, i // 32]), rows, cols))


def test_dequant_engram_scales_by_row() -> None:
    rng = np.random.default_rng(3)
    rows, s = rng.integers(0, 0x7F, (9, 64), dtype=np.uint8), rng.integers(0, 200, (9, 2), dtype=np.uint8)
    want = by_element(lambda o, i: float(codecs.E4M3_VALUES[rows[o, i]]), lambda o, i: int(s[o, i // 32]), 9, 64)
    same(codecs.dequant_engram(rows, s), want)


def test_dequant_works_on_read_only_views_and_leaves_them() -> None:
    w = np.full((32, 16), 0x11, np.uint8)
    w.setflags(write=False)
    s = np.full((32, 1), 128, np.uint8)
    s.setflags(write=False)
    assert (codecs.dequant_fp4(w, s) == 1.0).all() and (w == 0x11).all()


def test_a_foreign_scale_shape_is_refused() -> None:
    w = np.zeros((64, 64), np.uint8)
    with pytest.raises(ValueError, match=r"scale is \[2, 1\]"):
        codecs.dequant_fp8(w, np.zeros((2, 1), np.uint8))
    with pytest.raises(ValueError, match="scale is"):
        codecs.dequant_fp4(w, np.zeros((64, 2), np.uint8))


BLOCK = [0.1, -0.37, 1.25, -2.6, 0.015, 3.3, -0.7, 0.0]


@pytest.mark.parametrize(
    ("quantise", "width", "want"),
    [
        (codecs.q8, 32, [0.1015625, -0.375, 1.25, -2.5, 0.0146484375, 3.25, -0.6875, 0]),
        (codecs.q4idx, 32, [0, -0.5, 1, -3, 0, 3, -0.5, 0]),
        (codecs.q4kv, 16, [0, -0.28125, 1.125, -2.25, 0, 3.375, -0.5625, 0]),
    ],
)
def test_quantisers_on_the_written_block(quantise: Callable[[F32], F32], width: int, want: list[float]) -> None:
    """The specification's block of eight, padded with zeros to a whole block."""
    x = np.zeros((2, width), np.float32)
    x[1, :8] = BLOCK
    got = quantise(x)
    assert (got[0] == 0).all() and got.dtype == np.float32
    assert got[1, :8].tolist() == want


def test_written_scales() -> None:
    x = np.zeros(32, np.float32)
    x[:8] = BLOCK
    assert codecs.pack_q8(x)[1].tolist() == [127 - 7]
    assert codecs.pack_q4idx(x)[1].tolist() == [127]
    assert codecs.e4m3_to_f32(codecs.pack_q4kv(x)[1]).tolist() == [0.5625, 2.0**-9]


def wide(seed: int, shape: tuple[int, ...]) -> F32:
    """Magnitudes from 1e-12 to 1e4, exact zeros, rounding ties and whole zero blocks among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-12, 4, (*shape[:-1], 1))
    x[..., ::7] = 0
    x[0] = np.round(x[0] * 4) / 4
    x[-1] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize(
    ("quantise", "pack", "unpack"),
    [
        (codecs.q8, codecs.pack_q8, codecs.unpack_q8),
        (codecs.q4idx, codecs.pack_q4idx, codecs.unpack_q4idx),
        (codecs.q4kv, codecs.pack_q4kv, codecs.unpack_q4kv),
    ],
)
def test_packed_form_is_the_rounded_value(
    quantise: Callable[[F32], F32],
    pack: Callable[[F32], tuple[NDArray[np.uint8], NDArray[np.uint8]]],
    unpack: Callable[[NDArray[np.uint8], NDArray[np.uint8]], F32],
) -> None:
    x = wide(7, (64, 3, 96))
    got = quantise(x)
    assert got.shape == x.shape and np.isfinite(got).all()
    assert np.array_equal(unpack(*pack(x)), got)  # one arithmetic rounding, one by codes: the same numbers


def by_definition(x: F32, width: int, top: float, floor: float, kind: str) -> F32:
    """Section 10 in float64 with ml_dtypes doing the rounding; scales by their definition."""
    b = x.astype(np.float64).reshape(-1, width)
    amax = np.maximum(np.abs(b).max(axis=1, keepdims=True), floor)
    if kind == "q4kv":
        s = np.clip(amax / top, None, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        s = 2.0 ** np.ceil(np.log2((amax.astype(np.float32) * np.float32(1 / top)).astype(np.float64)))
    target = ml_dtypes.float8_e4m3fn if kind == "q8" else ml_dtypes.float4_e2m1fn
    q = np.clip((b / s).astype(np.float32), -top, top).astype(target).astype(np.float64)
    return (q * s).astype(np.float32).reshape(x.shape)


@pytest.mark.parametrize(
    ("kind", "width", "top", "floor"),
    [("q8", 32, 448.0, 1e-4), ("q4idx", 32, 6.0, 6 * 2.0**-126), ("q4kv", 16, 6.0, 6 * 2.0**-9)],
)
def test_quantisers_are_their_definition(kind: str, width: int, top: float, floor: float) -> None:
    x = np.concatenate(
        [wide(1, (200, 96)), np.full((1, 96), top, np.float32), np.full((1, 96), 2.0**-40, np.float32)]
    )
    got = getattr(codecs, kind)(x)
    assert np.array_equal(got, by_definition(x, width, top, np.float64(np.float32(floor)), kind))


def test_quantisers_refuse_a_ragged_axis_and_another_dtype() -> None:
    with pytest.raises(ValueError, match="divisible by 32"):
        codecs.q8(np.zeros((2, 40), np.float32))
    with pytest.raises(ValueError, match="float32"):
        codecs.q4kv(np.zeros((2, 32), np.float64))
