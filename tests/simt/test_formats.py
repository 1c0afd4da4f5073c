"""Conversions against ml_dtypes over every code, functions against float64 in ulp, tiles against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.simt.rig import Pointer, rig

F32 = NDArray[np.float32]


def run(kernel: str, values: NDArray[Any], to: Any, variant: str = "fast") -> NDArray[Any]:
    r = rig(variant)
    n = values.size
    source, out = r.upload(values), r.alloc(n * np.dtype(to).itemsize)
    function = r.function(kernel, "formats.cu")
    r.launch(function, Pointer(out), Pointer(source), n, grid=(-(-n // 256), 1, 1))
    found = r.download(out, n, to)
    r.free(source)
    r.free(out)
    return found


def same(found: NDArray[Any], want: NDArray[Any]) -> None:
    """Bit for bit, except that any NaN matches any NaN."""
    with np.errstate(invalid="ignore"):  # the casts of NaN
        nan, found_nan = np.isnan(want.astype(np.float64)), np.isnan(found.astype(np.float64))
    assert np.array_equal(found_nan, nan)
    unsigned = {4: np.uint32, 2: np.uint16, 1: np.uint8}[found.dtype.itemsize]
    a, b = found.view(unsigned)[~nan], want.view(unsigned)[~nan]
    wrong = np.flatnonzero(a != b)
    assert wrong.size == 0, f"first at {wrong[0]}: {a[wrong[0]]:#x}, expected {b[wrong[0]]:#x}"


DECODERS: dict[str, tuple[Any, Any, int]] = {
    "bf16_decode": (np.uint16, ml_dtypes.bfloat16, 65536),
    "f16_decode": (np.uint16, np.float16, 65536),
    "e4m3_decode": (np.uint8, ml_dtypes.float8_e4m3fn, 256),
    "ue8m0_decode": (np.uint8, ml_dtypes.float8_e8m0fnu, 256),
}


@pytest.mark.parametrize("kernel", DECODERS)
def test_every_code_decodes(kernel: str) -> None:
    storage, kind, n = DECODERS[kernel]
    codes = np.arange(n).astype(storage)
    same(run(kernel, codes, np.float32), codes.view(kind).astype(np.float32))


def test_every_e2m1_code_decodes() -> None:
    codes = np.arange(16, dtype=np.uint8)
    want = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    same(run("e2m1_decode", codes, np.float32), np.concatenate([want, -want]))


def hard_floats() -> F32:
    """Every float whose low 15 bits are one of a few patterns: all rounding cases of a 16-bit mantissa cut, every
    exponent, subnormals, infinities, NaN; and every tie and its neighbours of the eight-bit formats."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (high[:, None] | low).reshape(-1).view(np.float32)


def test_bf16_rounds_to_even() -> None:
    x = hard_floats()
    with np.errstate(invalid="ignore"):
        want = x.astype(ml_dtypes.bfloat16)
    same(run("bf16_encode", x, np.uint16).view(ml_dtypes.bfloat16), want)


def test_e4m3_rounds_to_even_and_clamps() -> None:
    x = hard_floats()
    with np.errstate(invalid="ignore"):
        want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    same(run("e4m3_encode", x, np.uint8).view(ml_dtypes.float8_e4m3fn), want)


def test_e2m1_rounds_to_even_and_clamps() -> None:
    x = hard_floats()
    x = x[~np.isnan(x)]
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = np.abs(np.abs(np.clip(x, -6, 6)).astype(np.float64)[:, None] - levels)
    nearest = distance.min(axis=1, keepdims=True)
    # two at the same distance: the even code
    want = np.where(distance == nearest, np.arange(8) + 100.0 * (np.arange(8) % 2), 1e9).argmin(axis=1)
    found = run("e2m1_encode", x, np.uint8)
    assert np.array_equal(found & 7, want)
    assert np.array_equal(found >> 3, np.signbit(x))


def test_pow2_ceil() -> None:
    x = hard_floats()
    x = x[np.isfinite(x) & (x >= 2.0**-126)]
    want = 127 + np.ceil(np.log2(x.astype(np.float64)))
    assert np.array_equal(run("pow2_ceil", x, np.uint32), want)


@pytest.mark.parametrize("variant", ["fast", "check", "count"])
def test_eight_e4m3_are_eight_times_one(variant: str) -> None:
    codes = np.concatenate([np.roll(np.arange(256, dtype=np.uint8), s) for s in range(8)])
    r = rig(variant)
    source, out = r.upload(codes), r.alloc(4 * codes.size)
    n = codes.size // 8
    r.launch(r.function("e4m3_eight", "formats.cu"), Pointer(out), Pointer(source), n, grid=(1, 1, 1))
    same(r.download(out, codes.size, np.float32), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_eight_bf16_are_in_order() -> None:
    r = rig("check")
    codes = np.random.default_rng(1).integers(0, 0x7F80, 8 * 32).astype(np.uint16)
    source, out = r.upload(codes), r.alloc(4 * codes.size)
    r.launch(r.function("bf16_eight", "formats.cu"), Pointer(out), Pointer(source), block=(32, 1, 1))
    same(r.download(out, codes.size, np.float32), codes.view(ml_dtypes.bfloat16).astype(np.float32))


# -- functions


def ulps(found: F32, want: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance in units of the last place of the float32 nearest to `want`; subnormals have the smallest unit."""
    near = want.astype(np.float32)
    unit = np.spacing(np.maximum(np.abs(near), np.float32(2.0**-126))).astype(np.float64)
    return np.abs(found.astype(np.float64) - want) / unit


def spread(lo: float, hi: float, n: int = 200_000) -> F32:
    rng = np.random.default_rng(7)
    return np.concatenate([rng.uniform(lo, hi, n), np.linspace(lo, hi, 2001)]).astype(np.float32)


def logs(lo: float, hi: float, n: int = 200_000) -> F32:
    rng = np.random.default_rng(8)
    return np.exp2(rng.uniform(lo, hi, n)).astype(np.float32)


def softplus(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(x > 20, x, np.log1p(np.exp(x)))


FUNCTIONS: dict[str, tuple[str, F32, Callable[[Any], Any], float]] = {
    # name: (kernel, inputs, float64 truth, bound in ulp)
    "exp": ("exponential", spread(-103, 88.7), np.exp, 2),
    "exp near 0": ("exponential", spread(-1, 1), np.exp, 2),
    "log": ("logarithm", logs(-126, 127.9), np.log, 2),
    "log near 1": ("logarithm", spread(0.7, 1.4), np.log, 2),
    "log of subnormals": ("logarithm", logs(-148, -126, 5000), np.log, 2),
    "log1p small": ("logarithm1p", logs(-60, 0), np.log1p, 4),
    "log1p large": ("logarithm1p", logs(0, 60), np.log1p, 4),
    "log1p negative": ("logarithm1p", -logs(-40, -0.01), np.log1p, 4),
    "sigmoid": ("sigmoid", spread(-30, 30), lambda x: 1 / (1 + np.exp(-x)), 4),
    "silu": ("silu", spread(-30, 30), lambda x: x / (1 + np.exp(-x)), 4),
    "softplus": ("softplus", spread(-30, 30), softplus, 4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_within_its_ulps(name: str) -> None:
    kernel, x, truth, bound = FUNCTIONS[name]
    worst = ulps(run(kernel, x, np.float32), truth(x.astype(np.float64))).max()
    assert worst <= bound, f"{worst:.2f} ulp"


def test_function_edges() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 0, -0.0, 1000, -1000, 88.8, -104], np.float32)
    with np.errstate(all="ignore"):
        same(run("exponential", x, np.float32), np.array([np.inf, 0, np.nan, 1, 1, np.inf, 0, np.inf, 0], np.float32))
        same(run("logarithm", x[:5], np.float32), np.array([np.inf, np.nan, np.nan, -np.inf, -np.inf], np.float32))
        want = np.array([np.inf, np.nan, np.nan, 0, -0.0], np.float32)
        same(run("logarithm1p", x[:5], np.float32), want)
        same(run("logarithm1p", np.array([-1, -2], np.float32), np.float32), np.array([-np.inf, np.nan], np.float32))
        same(run("sigmoid", x[:5], np.float32), np.array([1, 0, np.nan, 0.5, 0.5], np.float32))
        same(run("softplus", x[5:7], np.float32), np.array([1000, 0], np.float32))


@pytest.mark.parametrize("top", [3.2, 1000.0, 2.0**21])
def test_sine_and_cosine(top: float) -> None:
    x = spread(-top, top)
    # the worst for a reduction: floats next to multiples of pi/2
    near = (np.arange(1, int(top / 1.6), max(1, int(top / 1.6) // 50_000)) * (np.pi / 2)).astype(np.float32)
    x = np.concatenate([x, near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(1e9))])
    r = rig("fast")
    source, s, c = r.upload(x), r.alloc(x.nbytes), r.alloc(x.nbytes)
    function = r.function("sine_cosine", "formats.cu")
    r.launch(function, Pointer(s), Pointer(c), Pointer(source), x.size, grid=(-(-x.size // 256), 1, 1))
    exact = x.astype(np.float64)
    assert ulps(r.download(s, x.size, np.float32), np.sin(exact)).max() <= 2
    assert ulps(r.download(c, x.size, np.float32), np.cos(exact)).max() <= 2
    for p in (source, s, c):
        r.free(p)


def test_builds_agree_bit_for_bit() -> None:
    """Optimised and checked code compute the same: nothing is contracted or reordered."""
    x = spread(-20, 20, 3000)
    for kernel in ("exponential", "sigmoid", "silu", "softplus", "logarithm1p"):
        fast = run(kernel, x, np.float32)
        for variant in ("check", "count"):
            same(run(kernel, x, np.float32, variant), fast)


def test_fma8_and_sum8_keep_their_order() -> None:
    rng = np.random.default_rng(2)
    w, x = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    acc = np.zeros(8, np.float32)
    for i in range(0, 64, 8):  # float64 holds a product of two float32 exactly; one rounding is left
        acc = (acc.astype(np.float64) + w[i : i + 8].astype(np.float64) * x[i : i + 8]).astype(np.float32)
    want = ((acc[0] + acc[4]) + (acc[2] + acc[6])) + ((acc[1] + acc[5]) + (acc[3] + acc[7]))
    for variant in ("fast", "check"):
        r = rig(variant)
        out, a, b = r.alloc(4), r.upload(w), r.upload(x)
        r.launch(r.function("dot_eights", "formats.cu"), Pointer(out), Pointer(a), Pointer(b), 64, block=(32, 1, 1))
        assert r.download(out, 1, np.float32)[0] == want


@pytest.mark.parametrize("variant", ["fast", "check", "count"])
@pytest.mark.parametrize("trans", [0, 1])
def test_a_tile_product(variant: str, trans: int) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((16, 16), (8, 16)))
    given = np.ascontiguousarray(b.T if trans else b)
    r = rig(variant)
    out, pa, pb = r.alloc(512), r.upload(a.view(np.uint16)), r.upload(given.view(np.uint16))
    function = r.function("tile_product", "formats.cu")
    r.launch(function, Pointer(out), Pointer(pa), Pointer(pb), trans, block=(32, 1, 1), smem=(16 + 8) * 24 * 2)
    start = np.empty((16, 8))
    start[:8, 0::2], start[:8, 1::2], start[8:, 0::2], start[8:, 1::2] = 1, 2, 3, 4
    want = start + a.astype(np.float64) @ b.astype(np.float64).T
    # sixteen fused adds, each off by half an ulp of a partial sum
    bound = 16 * 2.0**-24 * (start + np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T)
    assert np.all(np.abs(r.download(out, (16, 8), np.float32) - want) <= bound)
