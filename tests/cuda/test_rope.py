"""rope.cu against float64."""

from __future__ import annotations

import numpy as np
import pytest

from ds4.checkpoint.codecs import bf16_to_f32, f32_to_bf16
from ds4.device import Device
from ds4.engine.ops.rope import rope_query
from tests.reference_attention import UNIT, frequencies, rope, same_bits, within

ORDERS = ["rising", "falling", "greedy"]


def run(device: Device, q: np.ndarray, pos: np.ndarray, freq: np.ndarray, kind: str = "f32") -> np.ndarray:
    dev = device.with_constants({"HEAD_DIM": q.shape[2], "ROPE_DIM": 2 * len(freq)})
    buffer = dev.upload(f32_to_bf16(q), "bf16") if kind == "bf16" else dev.upload(q)
    rope_query(dev, buffer, dev.upload(pos), dev.upload(freq), len(pos))
    got = dev.download(buffer)
    return bf16_to_f32(got) if kind == "bf16" else got


def case(R: int, H: int, K: int, r: int, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1000 * R + 100 * H + K + start)
    return rng.standard_normal((R, H, K), np.float32), np.arange(start, start + R, dtype=np.int32), frequencies(r)


# name: rows, heads, width, rope, first position
CASES = {
    "one row at zero": (1, 4, 96, 16, 0),
    "ragged heads": (3, 5, 32, 8, 1),
    "rope wider than a lane's 16 channels": (2, 6, 64, 24, 700),
    "all channels turn": (2, 3, 32, 32, 5),
    "far out": (2, 3, 96, 16, 1_048_574),
    "released row": (1, 64, 512, 64, 100_000),
}


def tolerance(x: np.ndarray) -> np.ndarray:
    """sine and cosine 4 ulp each (8 UNIT), two products, one sum: 11 UNIT of |re| + |im|."""
    pair = np.abs(x.astype(np.float64)).reshape(*x.shape[:-1], -1, 2).sum(-1)
    return 11 * UNIT * np.repeat(pair, 2, axis=-1)


@pytest.mark.parametrize("name", CASES)
def test_queries_turn_as_in_float64(device: Device, name: str) -> None:
    q, pos, freq = case(*CASES[name])
    got = run(device, q, pos, freq)
    within(got, rope(q.astype(np.float64), pos, freq), tolerance(q))
    still = q.shape[2] - 2 * len(freq)
    same_bits(got[..., :still], q[..., :still])


def test_bf16_rounds_once(device: Device) -> None:
    q, pos, freq = case(2, 5, 96, 16, 33)
    q = bf16_to_f32(f32_to_bf16(q))
    want = rope(q.astype(np.float64), pos, freq)
    within(run(device, q, pos, freq, "bf16"), want, tolerance(q) + np.abs(want) * 2.0**-8)


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_a_row_alone_is_the_row_among_eight(device: Device) -> None:
    q, pos, freq = case(8, 5, 64, 24, 11)
    whole = run(device, q, pos, freq)
    same_bits(run(device, q[3:4], pos[3:4], freq), whole[3:4])
