"""embed.cu: rows of the embedding, exactly, in every format."""

from __future__ import annotations

import numpy as np
import pytest

from ds4.device import Device
from ds4.engine.ops.embed import embed
from ds4.engine.ops.placement import place_weight
from tests.reference_dense import UNIT, decode, random_file

CASES = [
    ("f32", 296),
    ("bf16", 40),
    ("f16", 264),
    ("q8_0", 544),
    ("q4_k", 1280),
    ("fp4x32", 1056),
    ("fp8_32x32", 544),
]


def run(device: Device, format: str, V: int, D: int, S: int, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    raw = random_file(format, V, D, np.random.default_rng(V + D))
    w = place_weight(device, format, raw, V, D)
    x = device.empty((len(ids), S, D), "f32")
    embed(device, w, x, device.upload(np.array(ids, np.int32)), len(ids), S)
    return device.download(x), decode(format, raw, V, D)


@pytest.mark.parametrize("format, D", CASES)
def test_every_stream_gets_the_row(device: Device, format: str, D: int) -> None:
    ids = [31, 0, 7, 31, 18]
    got, table = run(device, format, 32, D, 3, ids)
    want = table[ids].astype(np.float32)
    if format == "q4_k":  # scale * code - minimum: one fused step here, and one rounding in the reference
        assert np.all(np.abs(got[:, 0] - table[ids]) <= UNIT * np.abs(table[ids]))
    else:
        assert np.array_equal(got[:, 0], want)
    assert np.array_equal(got[:, 1], got[:, 0]) and np.array_equal(got[:, 2], got[:, 0])


@pytest.mark.parametrize("device", ["rising", "falling"], indirect=True)
def test_released_width(device: Device) -> None:
    got, table = run(device, "q4_k", 3, 5120, 4, [2])
    assert np.all(np.abs(got[0, 3] - table[2]) <= UNIT * np.abs(table[2]))
