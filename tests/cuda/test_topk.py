"""topk.cu: exact selection of rows and of candidate blocks, in both block sizes."""

from __future__ import annotations

import numpy as np
import pytest

from ds4.device import Device
from ds4.device.kernels import Kernel
from ds4.device.kernels.topk import TOPK_BLOCKS, TOPK_BLOCKS_SMALL, TOPK_ROWS, TOPK_ROWS_SMALL
from tests.reference_attention import best, candidate_blocks

ORDERS = ["rising", "falling", "greedy"]
INF = np.float32(np.inf)
ROWS = {"1024 threads": TOPK_ROWS, "128 threads": TOPK_ROWS_SMALL}
BLOCKS = {"1024 threads": TOPK_BLOCKS, "128 threads": TOPK_BLOCKS_SMALL}


def rows(device: Device, kernel: Kernel, scores: list[np.ndarray], topk: int, ratio: int = 1) -> np.ndarray:
    """Picks of rows with the given visible scores; what follows them in the buffer is NaN (poison)."""
    capacity = max(8, *(len(s) for s in scores))
    held = np.full((len(scores), capacity), np.nan, np.float32)
    for r, s in enumerate(scores):
        held[r, : len(s)] = s
    pos = device.upload(np.array([len(s) * ratio + ratio - 2 for s in scores], np.int32))  # not closing, if ratio > 1
    picks = device.upload(np.full((len(scores), topk), 7, np.int32))  # poison would be -1, the padding's own value
    device.launch(kernel, picks, device.upload(held), pos, ratio, capacity, topk, R=len(scores))
    return device.download(picks)


def blocks(device: Device, kernel: Kernel, scores: list[np.ndarray], size: int, keep: int) -> list[list[int]]:
    capacity = max(8, *(len(s) for s in scores))
    words = (-(-capacity // size) + 31) // 32 + 1  # one word more than needed: all are written
    held = np.full((len(scores), capacity), np.nan, np.float32)
    for r, s in enumerate(scores):
        held[r, : len(s)] = s
    pos = device.upload(np.array([len(s) - 1 for s in scores], np.int32))
    mask = device.upload(np.full((len(scores), words), 0xA5A5A5A5, np.uint32))
    device.launch(kernel, mask, device.upload(held), pos, 1, capacity, size, keep, words, R=len(scores))
    bits = np.unpackbits(device.download(mask).view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def padded(found: list[int], topk: int) -> list[int]:
    return found + [-1] * (topk - len(found))


def noise(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + n).standard_normal(n).astype(np.float32)


def coarse(n: int) -> np.ndarray:
    """Values on a grid of seven: many ties at any threshold."""
    return np.round(noise(n) * 2).clip(-3, 3).astype(np.float32) + np.float32(0.0)


def without(s: np.ndarray, *dropped: int) -> np.ndarray:
    s = s.copy()
    s[list(dropped)] = -INF
    return s


# name: visible scores, topk
CASES: dict[str, tuple[np.ndarray, int]] = {
    "no visible row": (noise(0), 5),
    "one row": (noise(1), 5),
    "fewer rows than topk": (noise(4), 5),
    "as many rows as topk": (noise(5), 5),
    "one row too many": (noise(6), 5),
    "a ragged warp": (noise(33), 6),
    "over the block": (noise(1300), 64),
    "ties": (coarse(300), 40),
    "all equal": (np.ones(70, np.float32), 33),
    "both zeros tie": (np.array([0.0, -0.0, -1.0, -0.0, 0.0], np.float32), 3),
    "dropped rows": (without(noise(40), 0, 7, 31, 32, 39), 38),
    "all dropped": (np.full(40, -INF, np.float32), 6),
    "exactly topk not dropped": (without(noise(9), 1, 2, 3), 6),
    "plus infinity": (np.array([1, np.inf, 2, np.inf, 0], np.float32), 3),
    "far below zero": (np.array([-3.4e38, -3e38, -1e38, -2e38, -3.3e38], np.float32), 3),
    "last bit decides": (np.float32(1) + np.arange(64, dtype=np.float32)[::-1] * np.float32(2.0**-23), 10),
    "subnormal": (np.arange(40, dtype=np.float32) * np.float32(1e-44), 7),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", ROWS)
def test_rows_are_the_best_rising_and_padded(device: Device, threads: str, name: str) -> None:
    s, topk = CASES[name]
    got = rows(device, ROWS[threads], [s], topk)
    assert got.tolist() == [padded(best(s.astype(np.float64), topk), topk)]


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_rows_of_a_call_do_not_meet(device: Device) -> None:
    """Different lengths beside each other, in every thread order; and each alone."""
    cases = [(coarse(n), 9) for n in (70, 0, 9, 33, 10, 64)]
    got = rows(device, TOPK_ROWS_SMALL, [s for s, _ in cases], 9)
    for r, (s, topk) in enumerate(cases):
        assert got[r].tolist() == padded(best(s.astype(np.float64), topk), topk)
        assert np.array_equal(rows(device, TOPK_ROWS_SMALL, [s], 9)[0], got[r])


def test_visible_rows_follow_the_ratio(device: Device) -> None:
    """A position inside an open group sees whole groups only."""
    s = np.arange(12, dtype=np.float32)
    for ratio in (1, 2, 3):
        assert rows(device, TOPK_ROWS_SMALL, [s], 4, ratio).tolist() == [[8, 9, 10, 11]]


def test_the_released_count(device: Device) -> None:
    s = np.random.default_rng(5).standard_normal(9000).astype(np.float32)
    assert rows(device, TOPK_ROWS, [s], 512)[0].tolist() == best(s.astype(np.float64), 512)


# name: visible scores, block size, blocks kept
BLOCK_CASES: dict[str, tuple[np.ndarray, int, int]] = {
    "no visible row": (noise(0), 4, 3),
    "one row": (noise(1), 4, 3),
    "fewer blocks than kept": (noise(11), 4, 3),
    "a full last block is forced": (np.array([5, 1, 1, 1, 4, 1, 1, 1, 3, 1, 1, 1, -9, -9, -9, -9], np.float32), 4, 2),
    "a ragged last block is forced": (np.array([5, 1, 4, 1, 3, 1, -9], np.float32), 2, 2),
    "only the forced one": (noise(50), 8, 1),
    "ties": (coarse(301), 3, 20),
    "dropped blocks": (without(noise(24), 4, 5, 6, 7, 16, 17, 18, 19), 4, 6),
    "dropped, fewer than kept": (without(noise(24), *range(4, 20)), 4, 4),
    "a maximum at the end of its block": (np.array([0, 0, 0, 9, 8, 0, 0, 0, 0, 0, 0, 0], np.float32), 4, 2),
    "words": (noise(33 * 8 + 1), 8, 30),
}


@pytest.mark.parametrize("name", BLOCK_CASES)
@pytest.mark.parametrize("threads", BLOCKS)
def test_blocks_are_the_best_with_the_last_forced(device: Device, threads: str, name: str) -> None:
    s, size, keep = BLOCK_CASES[name]
    assert blocks(device, BLOCKS[threads], [s], size, keep) == [candidate_blocks(s.astype(np.float64), size, keep)]


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_block_rows_do_not_meet(device: Device) -> None:
    cases = [coarse(n) for n in (70, 0, 9, 257, 128)]
    got = blocks(device, TOPK_BLOCKS_SMALL, cases, 2, 5)
    assert got == [candidate_blocks(s.astype(np.float64), 2, 5) for s in cases]
