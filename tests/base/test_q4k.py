"""q4k.py: decoded identically by the `gguf` package, and within 3 % of an exhaustive search."""

import gguf
import numpy as np
import pytest

from ds4.base import q4k

KINDS = ("gaussian", "laplace", "groups of different sizes", "offset", "heavy tails", "all negative", "fp8")


def rows(kind: str, n: int) -> np.ndarray:
    rng = np.random.default_rng([KINDS.index(kind), n])
    x = rng.standard_normal((n, 256))
    if kind == "laplace":
        x = rng.laplace(size=(n, 256))
    elif kind == "groups of different sizes":
        x = (x.reshape(n, 8, 32) * np.exp(rng.standard_normal((n, 8, 1)))).reshape(n, 256)
    elif kind == "offset":
        x += 2
    elif kind == "heavy tails":
        x = rng.standard_t(3, (n, 256))
    elif kind == "all negative":
        x = -np.abs(x) - 1
    elif kind == "fp8":
        x = np.round(x * 8) / 8  # few distinct values, as dequantised FP8 has
    return (x * 0.02).astype(np.float32)


def exhaustive(x: np.ndarray) -> float:
    """Least squared error of one block over a grid of (d, dmin), with all 64 x 64 scales of each group.

    The grid covers the values that make the largest fitted step or offset one of 40..66 units. For given
    d, dmin, sc, m the codes are optimal by rounding, and groups do not interact: the search is exact on the grid.
    """
    groups = x.reshape(8, 32).astype(np.float32)
    low, high = np.minimum(groups.min(axis=1), 0), groups.max(axis=1)
    top_d = np.float32(((high - low) / 15).max())
    top_m = np.float32(max(-low.min(), 1e-9))
    best = np.inf
    levels = np.arange(64, dtype=np.float32)
    for d in (top_d / np.linspace(46, 72, 14)).astype(np.float16).astype(np.float32):
        step = (d * levels)[:, None, None]
        inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
        for dmin in (top_m / np.linspace(46, 72, 10)).astype(np.float16).astype(np.float32):
            offset = (dmin * levels)[None, :, None]
            total = 0.0
            for g in groups:
                shifted = g + offset
                q = np.clip(np.rint(shifted * inverse), 0, 15)
                r = q * step - shifted
                total += float(np.einsum("smi,smi->sm", r, r).min())
                if total >= best:
                    break
            best = min(best, total)
    return best


@pytest.mark.parametrize("kind", KINDS)
def test_within_three_percent_of_an_exhaustive_search(kind: str) -> None:
    x = rows(kind, 2)
    error = ((q4k.decode(q4k.encode(x)) - x) ** 2).sum()
    assert error <= 1.03 * sum(exhaustive(block) for block in x)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gguf_package_decodes_the_same(kind: str) -> None:
    blocks = q4k.encode(rows(kind, 300))
    want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_K)
    assert np.array_equal(q4k.decode(blocks), want.reshape(-1, 256))


def test_every_scale_and_code_is_where_the_package_looks_for_it() -> None:
    raw = np.random.default_rng(3).integers(0, 256, (50, 144), dtype=np.uint8)
    raw[:, 1], raw[:, 3] = 0x3C, 0x34  # f16 near 1 and 1/4: no NaN
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_K)
    assert np.array_equal(q4k.decode(raw), want.reshape(-1, 256))


SPECIAL = {
    "zeros": np.zeros(256),
    "one value": np.full(256, 0.3),
    "one negative value": np.full(256, -0.3),
    "one outlier": np.eye(1, 256, 17)[0] * 5,
    "tiny": np.linspace(-1e-30, 1e-30, 256),
    "subnormal": np.full(256, 1e-44),
    "largest": np.linspace(-3e38, 3e38, 256),
    "zeros but one group": np.repeat(np.eye(1, 8, 3)[0], 32) * np.linspace(-1, 1, 256),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_blocks_stay_finite(name: str) -> None:
    x = SPECIAL[name].astype(np.float32)[None]
    with np.errstate(over="ignore", invalid="ignore"):
        y = q4k.decode(q4k.encode(x))
    assert np.all(np.isfinite(y))
    if name in ("zeros", "tiny", "subnormal"):
        assert np.array_equal(y, np.zeros_like(y))
    elif name != "largest":  # beyond 65504 * 63 * 15 the format ends
        span = x.max() - min(x.min(), 0)
        # half a step, half as much again for scales of 6 bits; and f16 for d and dmin
        assert np.abs(y - x).max() <= span / 15 * 0.75 + np.abs(x).max() * 2.0**-11


def test_chunks_do_not_matter() -> None:
    """A block's bytes depend on nothing but the block."""
    x = rows("gaussian", 600)
    whole = q4k.encode(x)
    assert np.array_equal(whole[250:270], q4k.encode(x[250:270]))
    assert np.array_equal(whole[599:], q4k.encode(x[599:]))
