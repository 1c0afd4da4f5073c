"""The lattice of gain files: the writer's rule, the cheapest scale, and what survives the file."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.checkpoint.codecs import E2M1_VALUES, q4idx
from ds4.sidecar.files import decode_gains, encode_gains
from solvers.lattice import BLOCK, FINER, LEAST_EXPONENT, cheapest, nearest

F32 = np.float32


def deltas(n: int, seed: int) -> np.ndarray:
    """Rows of 64 of very unequal size, some zeros, one row of ties."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((n, 64)) * np.exp(3 * rng.standard_normal((n, 1)))).astype(F32)
    x[0] = 0
    x[1, ::3] = 0
    x[2] = np.resize([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5], 64)
    return x


def test_nearest_is_the_writers_rounding() -> None:
    x = deltas(400, 0)
    assert np.array_equal(nearest(x), q4idx(x))


def test_nearest_in_float64_agrees() -> None:
    """A float64 value that is a float32 goes to the same point, but where amax / 6 rounds across a power of two."""
    x = deltas(400, 1)
    apart = (nearest(x.astype(np.float64)) != nearest(x)).mean()
    assert apart < 0.01


def test_tiny_deltas_stay_exact_beside_one() -> None:
    """Q4idx would go on below 2^-22; 1 + delta would not."""
    x = np.full((1, 32), F32(2.0**-30))
    assert np.array_equal(q4idx(x), x) and not nearest(x).any()
    x[0, 1] = 2.0**-23
    assert nearest(x)[0, 1] == 2.0**-23
    q = nearest(deltas(1000, 2) * F32(2.0**-18))
    assert np.array_equal((F32(1) + q) - F32(1), q)


@given(st.lists(st.integers(0, 15), min_size=32, max_size=32), st.integers(LEAST_EXPONENT, 3))
@settings(max_examples=300, deadline=None)
def test_every_lattice_point_survives_the_file(codes: list[int], p: int) -> None:
    """Whatever scale the writer takes, the values are the same: c is also a lattice value at 2c or 4c."""
    s = (F32(1) + E2M1_VALUES[codes] * F32(2.0**p))[None]
    assert np.array_equal(decode_gains(encode_gains(s), 1, 32, "x"), s)


def brute(delta: np.ndarray, weight: np.ndarray) -> float:
    """Least cost of a block over every power of two that could matter."""
    values = np.unique(E2M1_VALUES).astype(np.float64)
    costs = []
    for p in range(LEAST_EXPONENT, 12):
        apart = np.abs(delta[:, None].astype(np.float64) - values * 2.0**p).min(axis=1)
        costs.append(float((weight * apart**2).sum()))
    return min(costs)


@pytest.mark.parametrize("loud", [0.0, 1.0, 2.0])
def test_cheapest_is_the_least_of_all_scales(loud: float) -> None:
    """Where weights are within a few orders of magnitude, three finer scales hold the least of all."""
    rng = np.random.default_rng(3)
    x = (0.1 * rng.standard_normal((60, 64))).astype(F32)
    w = np.exp(loud * rng.standard_normal((60, 64))).astype(F32)
    q = cheapest(x, w)
    for d, v, got in zip(x.reshape(-1, BLOCK), w.reshape(-1, BLOCK), q.reshape(-1, BLOCK), strict=True):
        cost = float((v * (got.astype(np.float64) - d) ** 2).sum())
        assert cost <= brute(d, v) * (1 + 1e-5) + 1e-12


def test_cheapest_saturates_a_channel_that_does_not_matter() -> None:
    x, w = np.full((1, 32), F32(0.05)), np.ones((1, 32), F32)
    x[0, 0], w[0, 0] = 1.0, 1e-6
    assert nearest(x)[0, 1] == 0.125 or nearest(x)[0, 1] == 0  # Q4idx: steps of 1/8 for the sake of the loud one
    q = cheapest(x, w)
    assert abs(q[0, 1] - 0.05) < 0.02 and q[0, 0] < 0.5
    assert q[0, 0] >= 2.0 ** -(FINER + 3) * 6  # and no further than three scales


def test_zero_stays_zero() -> None:
    x = np.zeros((2, 32), F32)
    assert not nearest(x).any() and not cheapest(x, np.zeros_like(x)).any()


def test_whole_blocks_only() -> None:
    with pytest.raises(ValueError, match="divisible by 32"):
        nearest(np.zeros((1, 40), F32))
