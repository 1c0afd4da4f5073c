"""kv.cu: window rows against float64 and, bit for bit, against the reference quantiser; the ring."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ds4.checkpoint.codecs import bf16_to_f32, f32_to_bf16, pack_q8, q8
from ds4.device import Buffer, Device
from ds4.engine.ops.kv import KvLayout, kv_layout, window_commit, window_kv
from ds4.errors import UsageError
from ds4.model.config import ModelConfig
from tests.reference_attention import UNIT, frequencies, rms_norm, rope, same_bits, within

ORDERS = ["rising", "falling", "greedy"]
EPS = 1e-20


def sized(device: Device, K: int, r: int) -> Device:
    return device.with_constants({"HEAD_DIM": K, "ROPE_DIM": r})


def run(
    device: Device, x: np.ndarray, w: np.ndarray, pos: np.ndarray, freq: np.ndarray, kv: str, kind: str = "f32"
) -> np.ndarray:
    R, K = x.shape
    dev = sized(device, K, 2 * len(freq))
    chunk = KvLayout(kv, K, 32).empty_window(dev, R)
    data = dev.upload(f32_to_bf16(x), "bf16") if kind == "bf16" else dev.upload(x)
    window_kv(dev, chunk, data, dev.upload(w), dev.upload(pos), dev.upload(freq), R, EPS)
    return dev.download(chunk)


def case(R: int, K: int, r: int, start: int, scale: float = 1.0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(100 * R + K + start)
    x = (rng.standard_normal((R, K)) * scale).astype(np.float32)
    w = rng.uniform(0.5, 2.0, K).astype(np.float32)
    return x, w, np.arange(start, start + R, dtype=np.int32), frequencies(r)


def packed(row_bytes: int, x: np.ndarray) -> np.ndarray:
    """Rows as kvrows.cuh lays them out, from the reference quantiser."""
    codes, scales = pack_q8(x)
    rows = np.zeros((x.shape[0], row_bytes), np.uint8)
    rows[:, : codes.shape[1]] = codes
    rows[:, codes.shape[1] : codes.shape[1] + scales.shape[1]] = scales
    return rows


# name: rows, width, rope, first position, scale of the input
CASES = {
    "one row at zero": (1, 96, 16, 0, 1.0),
    "a ragged block": (5, 32, 8, 3, 1.0),
    "rope across blocks of 32": (3, 64, 24, 1000, 1.0),
    "eps decides": (2, 96, 16, 7, 1e-10),
    "released row": (1, 512, 64, 70_000, 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_normed_and_turned_as_in_float64(device: Device, name: str) -> None:
    x, w, pos, freq = case(*CASES[name])
    K = x.shape[1]
    want = rope(rms_norm(x.astype(np.float64), w.astype(np.float64), EPS), pos, freq)
    # Norm: 16 products and sums in a lane, 5 shuffles, mean and eps: halved by the root (11), root, quotient, two
    # products: 15 UNIT. Rope: 11 UNIT of the pair's |re| + |im|.
    size = np.abs(rms_norm(x.astype(np.float64), w.astype(np.float64), EPS)).reshape(len(x), -1, 2).sum(-1)
    within(run(device, x, w, pos, freq, "f32"), want, 26 * UNIT * np.repeat(size, 2, axis=-1).reshape(len(x), K))


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_packed_rows_are_the_reference_quantisers(device: Device, name: str, kind: str) -> None:
    """The f32 row of the same launch, packed on the host: every byte equal, padding zero."""
    x, w, pos, freq = case(*CASES[name])
    x = bf16_to_f32(f32_to_bf16(x))
    row_bytes = KvLayout("fp4", x.shape[1], 32).window_bytes
    same_bits(run(device, x, w, pos, freq, "fp4", kind), packed(row_bytes, run(device, x, w, pos, freq, "f32", kind)))


def test_quantiser_edges_reach_the_codes(device: Device) -> None:
    """Wide spreads, near ties, blocks of zeros, the floor of the scale and both signs of zero, at position 0."""
    K = 96
    x = np.zeros((3, K), np.float32)
    x[0, :8] = [0.1, -0.37, 1.25, -2.6, 0.015, 3.3, -0.7, 0.0]
    x[0, 32:64] = np.linspace(-448, 448, 32)
    x[1, :4] = [1.0, 1.0625, 1.1875, -0.0]  # halfway between e4m3 neighbours after scaling
    x[1, 40] = 1e-6
    x[2, 5] = 1.0
    w = np.ones(K, np.float32)
    pos, freq = np.zeros(3, np.int32), frequencies(16)
    got = run(device, x, w, pos, freq, "fp4")
    same_bits(got, packed(112, run(device, x, w, pos, freq, "f32")))
    assert np.all(got[2, K + 1 : K + 3] == 127 - 22), "blocks of zeros keep the floor's scale, 1e-4 / 448 up to 2^-22"


def test_fake_quantised_values_come_back(device: Device) -> None:
    x, w, pos, freq = case(2, 64, 24, 9)
    rows = run(device, x, w, pos, freq, "fp4")
    plain = run(device, x, w, pos, freq, "f32")
    same_bits(rows, packed(80, q8(plain)))  # rounding is idempotent: what was stored is what the teacher rounds


@pytest.mark.parametrize("device", ORDERS, indirect=True)
@pytest.mark.parametrize("kv", ["fp4", "f32"])
def test_a_row_alone_is_the_row_among_eight(device: Device, kv: str) -> None:
    x, w, pos, freq = case(8, 96, 16, 40)
    whole = run(device, x, w, pos, freq, kv)
    same_bits(run(device, x[6:7], w, pos[6:7], freq, kv), whole[6:7])


def ring_of(device: Device, kv: str, ring_rows: int, lengths: list[int]) -> np.ndarray:
    """A ring after calls of the given lengths; row p holds the number p."""
    dev = sized(device, 32, 8)
    layout = KvLayout(kv, 32, 32)
    ring = layout.empty_window(dev, ring_rows)
    ring.write(np.zeros(layout.window_shape(ring_rows), ring.numpy))
    at = 0
    for n in lengths:
        pos = np.arange(at, at + n, dtype=np.int32)
        rows = np.broadcast_to(pos[:, None] + 1, layout.window_shape(n)).astype(ring.numpy)
        window_commit(dev, ring, dev.upload(rows), dev.upload(pos), n)
        at += n
    return dev.download(ring)


@pytest.mark.parametrize("kv", ["fp4", "f32"])
@pytest.mark.parametrize(
    "lengths",
    [[1], [8], [9], [8, 1], [3, 3, 3, 3], [20], [1] * 19, [5, 16, 7]],
    ids=["one", "full", "just wrapped", "wrapped by one", "straddling", "longer than the ring", "steps", "mixed"],
)
def test_the_ring_holds_the_newest_rows(device: Device, kv: str, lengths: list[int]) -> None:
    total, ring_rows = sum(lengths), 8
    want = np.zeros(ring_rows)
    for p in range(max(0, total - ring_rows), total):
        want[p % ring_rows] = p + 1
    got = ring_of(device, kv, ring_rows, lengths)
    assert np.array_equal(got, np.broadcast_to(want[:, None], got.shape))


def test_layout_of_the_released_shape() -> None:
    config = ModelConfig.load("tests/data/published/config.json")
    layout = kv_layout(config, "fp4")
    assert (layout.window_bytes, layout.compressed_bytes, layout.key_bytes) == (528, 288, 68)
    rows_per_token = sum(1 / config.compress_ratios[s] for s in config.kv_source_layer_ids)
    assert rows_per_token * (layout.compressed_bytes + layout.key_bytes) == 890
    plain = kv_layout(config, "f32")
    assert (plain.window_bytes, plain.compressed_bytes, plain.key_bytes) == (2048, 2048, 512)


def test_unknown_mode_is_refused() -> None:
    config = ModelConfig.load("tests/data/published/config.json")
    with pytest.raises(UsageError, match="'fp4'"):
        kv_layout(config, "fp8")


def test_widths_that_no_kernel_takes_are_refused() -> None:
    config = ModelConfig.load("tests/data/published/config.json")
    for change in ({"head_dim": 1024}, {"index_head_dim": 256}):
        with pytest.raises(UsageError, match=next(iter(change))):
            kv_layout(dataclasses.replace(config, **change), "fp4")


def test_buffers_of_a_layout(device: Device) -> None:
    made: Buffer = KvLayout("fp4", 96, 32).empty_keys(device, 3)
    assert (made.shape, made.dtype) == ((3, 20), "u8")
