"""sample_logprobs.cu: the likeliest tokens in order, and their log-probabilities against float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.device import Device
from ds4.device.kernels.sample import TOP_LOGPROBS, TOP_LOGPROBS_SMALL
from ds4.engine.ops.sample import pack_params, sample, top_logprobs


def top(device: Device, logits: NDArray[np.float32], n: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    R = len(logits)
    ids, values = device.empty((R, n), "i32"), device.empty((R, n), "f32")
    top_logprobs(device, ids, values, device.upload(logits), R)
    return device.download(ids), device.download(values)


def check(logits: NDArray[np.float32], n: int, ids: NDArray[np.int32], values: NDArray[np.float32]) -> None:
    for row, got, logprobs in zip(logits, ids, values):
        want = sorted(range(len(row)), key=lambda v: (-row[v], v))[:n]
        assert got.tolist() == want
        exact = row.astype(float) - np.log(np.exp(row.astype(float) - row.max()).sum()) - row.max()
        assert logprobs == pytest.approx(exact[want], abs=4e-6)


@pytest.mark.parametrize("device", ["rising", "falling", "greedy"], indirect=True)
@pytest.mark.parametrize("n", [1, 5, 20])
def test_likeliest_first_lowest_id_of_equals(device: Device, n: int) -> None:
    logits = (np.random.default_rng(n).standard_normal((4, 137)) * 3).astype(np.float32)
    logits[1] = np.round(logits[1])
    logits[2] = 0.5
    logits[3, ::2] = -np.inf
    check(logits, n, *top(device, logits, n))


def test_the_whole_vocabulary_and_rows_without_a_distribution(device: Device) -> None:
    logits = np.array([[1, 3, 2, 3, -np.inf], [0, np.nan, 0, 0, 0], [-np.inf] * 5], np.float32)
    ids, values = top(device, logits, 5)
    assert ids.tolist() == [[1, 3, 2, 0, 4], [-1] * 5, [-1] * 5]
    assert values[0, 4] == -np.inf and not values[1:].any()
    with pytest.raises(ValueError, match="1 to 5"):
        top(device, logits, 6)


def test_the_chosen_token_has_the_same_bits_in_both_places(device: Device) -> None:
    logits = (np.random.default_rng(3).standard_normal((6, 20)) * 2).astype(np.float32)
    ids, values = top(device, logits, 20)
    out = device.empty((6, 4), "i32")
    params, pos = device.upload(pack_params(6, 0.8, 0, 0.95, 0.0, 1)), device.upload(np.arange(6, dtype=np.int32))
    sample(device, out, device.upload(logits), params, pos, 6)
    for row, chosen in enumerate(device.download(out)):
        place = ids[row].tolist().index(chosen[0])
        assert values[row, place].view(np.int32) == chosen[1]


def test_the_number_of_threads_changes_nothing(device: Device) -> None:
    logits = (np.random.default_rng(5).standard_normal((2, 300)) * 3).astype(np.float32)
    got = []
    for kernel in (TOP_LOGPROBS, TOP_LOGPROBS_SMALL):
        ids, values = device.empty((2, 9), "i32"), device.empty((2, 9), "f32")
        device.launch(kernel, ids, values, device.upload(logits), 9, 300, R=2, V=300)
        got.append((device.download(ids), device.download(values)))
    assert np.array_equal(got[0][0], got[1][0]) and np.array_equal(got[0][1], got[1][1])


@pytest.mark.parametrize("device", ["fast"], indirect=True)
def test_released_vocabulary(device: Device) -> None:
    wide = (np.random.default_rng(6).standard_normal((1, 129_280)) * 3).astype(np.float32)
    check(wide, 20, *top(device, wide, 20))
