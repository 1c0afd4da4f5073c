"""router.cu against float64: scores, selection, ties, weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds4.device import Device
from ds4.engine.ops.router import route
from ds4.engine.scratch import Workspace
from tests.reference_dense import F32, UNIT, assert_within
from tests.reference_dense import route as reference

ORDERS = ["rising", "falling", "greedy"]


def run(
    device: Device, u: F32, bias: F32, k: int, gate_temp: float = 1.0, scale: float = 1.5, norm: bool = True,
    delta: F32 | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    R = len(u)
    config: Any = SimpleNamespace(gate_temp=gate_temp, routed_scaling_factor=scale, norm_topk_prob=norm)
    picks, weights = device.empty((R, k), "i32"), device.empty((R, k), "f32")
    moved = None if delta is None else device.upload(delta)
    route(device, Workspace(device), device.upload(u), device.upload(bias), picks, weights, R, config, moved)
    return device.download(picks), device.download(weights)


def case(R: int, E: int, spread: float) -> tuple[F32, F32]:
    rng = np.random.default_rng(R * 1000 + E)
    return (rng.standard_normal((R, E)) * spread).astype(np.float32), rng.uniform(-0.3, 0.3, E).astype(np.float32)


@pytest.mark.parametrize(
    "R, E, k, spread, temp, norm",
    [
        (3, 7, 2, 1.0, 1.0, True),
        (2, 24, 3, 12.0, 1.0, True),  # beyond softplus' linear branch at 20
        (5, 33, 8, 2.0, 0.7, True),  # a ragged second round of the warp
        (2, 384, 6, 2.0, 1.0, True),  # the released one
        (2, 9, 9, 1.0, 1.0, False),  # all of them
    ],
)
def test_picks_and_weights(device: Device, R: int, E: int, k: int, spread: float, temp: float, norm: bool) -> None:
    u, bias = case(R, E, spread)
    picks, weights = run(device, u, bias, k, temp, norm=norm)
    want, want_weights, scores = reference(u.astype(np.float64), bias.astype(np.float64), k, temp, 1.5, norm)
    # softplus: exp and log of 4 ulp (8 units) each, the quotient before them moves u by a unit; the root halves; one
    # more for it. The weight adds k roundings of the sum, a quotient and a product.
    score_bound = (2 * 8 + 2 + np.abs(u).max() / temp + 2) * UNIT
    gap = 2 * score_bound * (np.abs(scores).max() + 1)
    for r in range(R):
        near = np.sort(scores[r])[::-1]
        assert len(near) == k or near[k - 1] - near[k] > gap, "a case must not sit on a tie"
    assert np.array_equal(np.sort(picks, axis=1), np.sort(want, axis=1))
    assert np.array_equal(picks, want)
    assert_within(weights, want_weights, (2 * score_bound + (k + 3) * UNIT) * want_weights)


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_ties_go_to_the_lowest_expert(device: Device) -> None:
    u = np.zeros((2, 70), np.float32)
    u[1, [66, 3, 40, 35]] = 2.0
    picks, weights = run(device, u, np.zeros(70, np.float32), 3)
    assert picks.tolist() == [[0, 1, 2], [3, 35, 40]]
    assert np.allclose(weights, 0.5, rtol=4 * UNIT)


def test_the_bias_selects_and_does_not_weigh(device: Device) -> None:
    u = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    bias = np.array([-9.0, 0.0, 0.0, 9.0], np.float32)
    picks, weights = run(device, u, bias, 2, scale=1.0)
    s = np.sqrt(np.log1p(np.exp([-1.0, 1.0])))
    assert picks.tolist() == [[3, 1]]
    assert_within(weights, np.array([s / s.sum()]), 40 * UNIT)


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_a_mounted_bias_selects_and_does_not_weigh(device: Device) -> None:
    """Its picks are those of the sum of both biases, the weights those of the unbiased scores of these picks."""
    u, bias = case(4, 40, 1.0)
    delta = np.random.default_rng(1).uniform(-0.5, 0.5, 40).astype(np.float32)
    picks, weights = run(device, u, bias, 5, delta=delta)
    total = bias.astype(np.float64) + delta
    want, want_weights, scores = reference(u.astype(np.float64), total, 5, 1.0, 1.5, True)
    near = np.sort(scores, axis=1)[:, ::-1]
    assert (near[:, :5] - near[:, 1:6]).min() > 1e-5, "a case must not sit on a tie"
    assert np.array_equal(picks, want)
    assert_within(weights, want_weights, 60 * UNIT * want_weights)
    assert not np.array_equal(picks, run(device, u, bias, 5)[0])


def test_a_mounted_bias_of_zeros_leaves_every_bit(device: Device) -> None:
    u, bias = case(6, 384, 2.0)
    for got, want in zip(run(device, u, bias, 6, delta=np.zeros(384, np.float32)), run(device, u, bias, 6)):
        assert np.array_equal(got, want)


def test_a_mounted_bias_is_added_after_the_models_own(device: Device) -> None:
    """(s + bias) + delta in float32: where the bias swallows the scores they tie, although the sum of both is 0."""
    u = np.array([[0.0, 1.0, 2.0]], np.float32)
    big = np.full(3, 2.0**30, np.float32)
    assert run(device, u, big, 2, delta=-big)[0].tolist() == [[0, 1]]
    assert run(device, u, np.zeros(3, np.float32), 2)[0].tolist() == [[2, 1]]


def test_spec_scores(device: Device) -> None:
    """model-text 14: sqrt(softplus(u)) at -3, 0, 2, 25."""
    u = np.array([[-3.0, 0.0, 2.0, 25.0]], np.float32)
    picks, weights = run(device, u, np.zeros(4, np.float32), 4, scale=1.0, norm=False)
    assert picks.tolist() == [[3, 2, 1, 0]]
    assert np.allclose(weights, [[5, 1.458399, 0.8325546, 0.2204254]], rtol=5e-7)


def test_tiny_scores_are_still_normalised(device: Device) -> None:
    """Scores of 4e-9 (u = -38.7): the sum's 1e-20 must not show, and the small ones must not vanish."""
    u = np.array([[-38.7, -38.7, -60.0]], np.float32)
    picks, weights = run(device, u, np.zeros(3, np.float32), 2, scale=1.0)
    assert picks.tolist() == [[0, 1]] and np.allclose(weights, 0.5, rtol=1e-6)
    far = run(device, np.full((1, 3), -95.0, np.float32), np.zeros(3, np.float32), 2, scale=1.0)[1]
    want = np.sqrt(np.exp(-95.0))  # 2.4e-21: here the 1e-20 is most of the denominator
    assert np.allclose(far, want / (2 * want + 1e-20), rtol=1e-3)


def test_nan_never_repeats_a_pick(device: Device) -> None:
    u = np.full((1, 5), np.nan, np.float32)
    u[0, 2] = 1.0
    assert run(device, u, np.zeros(5, np.float32), 3)[0].tolist() == [[2, 0, 1]]


def test_a_row_alone_is_the_same_row(device: Device) -> None:
    u, bias = case(6, 40, 3.0)
    picks, weights = run(device, u, bias, 5)
    one_picks, one_weights = run(device, u[4:5], bias, 5)
    assert np.array_equal(one_picks[0], picks[4]) and np.array_equal(one_weights[0], weights[4])
