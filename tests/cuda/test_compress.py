"""compress.cu and the index keys: groups, their latents, their rows; chunk borders anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from ds4.checkpoint.codecs import bf16_to_f32, f32_to_bf16, pack_q4idx, pack_q4kv
from ds4.device import Device
from ds4.engine.ops.compress import compress_commit, compress_pool, compress_store, index_keys
from ds4.engine.ops.kv import KvLayout
from ds4.errors import DeviceError
from tests.reference_attention import BF16_UNIT, UNIT, frequencies, pool, rms_norm, rope, same_bits, within

ORDERS = ["rising", "falling", "greedy"]
EPS = 1e-20
K, ROPE, WIDTH = 96, 16, 64


@dataclass
class Result:
    lat: np.ndarray
    comp: np.ndarray
    keys: np.ndarray
    partial: np.ndarray | None


@dataclass
class Case:
    """T positions from `start` on of one layer: inputs of the compressor, and the index-key linear's output a row."""

    T: int
    ratio: int
    start: int = 0
    K: int = K
    rope: int = ROPE
    width: int = WIDTH
    scale: float = 1.0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(97 * self.T + self.ratio)
        n = self.start + self.T
        self.a = (rng.standard_normal((n, self.K)) * self.scale).astype(np.float32)
        self.g = (rng.standard_normal((n, self.K)) * 3).astype(np.float32)
        self.k = (rng.standard_normal((n, self.width)) * self.scale).astype(np.float32)
        self.w = rng.uniform(0.5, 2.0, self.K).astype(np.float32)
        self.kw = rng.uniform(0.5, 2.0, self.width).astype(np.float32)
        self.freq = frequencies(self.rope, 160000.0)

    def closing(self) -> np.ndarray:
        """Positions that close a group."""
        p = np.arange(self.start, self.start + self.T)
        return p[(p + 1) % self.ratio == 0]


def run(
    device: Device, c: Case, chunks: list[int], kv: str = "f32", kind: str = "f32", slots: int | None = None
) -> Result:
    """All positions of the case in calls of the given lengths, as a layer makes them."""
    dev = device.with_constants({"HEAD_DIM": c.K, "ROPE_DIM": c.rope, "INDEX_DIM": c.width})
    layout = KvLayout(kv, c.K, c.width)
    groups = (c.start + c.T) // c.ratio + 1
    comp, keys = layout.empty_compressed(dev, groups), layout.empty_keys(dev, groups)
    for rows in (comp, keys):
        rows.write(np.zeros(rows.shape, rows.numpy))
    slots = slots or c.ratio
    partial = dev.zeros((2, slots, c.K), "f32") if c.ratio > 1 else None
    w, kw, freq = dev.upload(c.w), dev.upload(c.kw), dev.upload(c.freq)
    lat, at = [], c.start
    for n in chunks:
        pos = dev.upload(np.arange(at, at + n, dtype=np.int32))
        a, k = dev.upload(c.a[at : at + n]), dev.upload(c.k[at : at + n])
        g = dev.upload(c.g[at : at + n]) if c.ratio > 1 else None
        out = dev.empty((n, c.K), kind)
        compress_pool(dev, out, a, g, partial, w, pos, n, c.ratio, EPS)
        if partial is not None and g is not None:
            compress_commit(dev, partial, a, g, pos, n)
        index_keys(dev, keys, k, kw, pos, freq, n, c.ratio, EPS)
        compress_store(dev, comp, out, pos, freq, n, c.ratio)
        lat.append(dev.download(out))
        at += n
    assert at == c.start + c.T
    stacked = np.concatenate(lat)
    return Result(stacked, dev.download(comp), dev.download(keys), dev.download(partial) if partial else None)


def latents(c: Case) -> tuple[np.ndarray, np.ndarray]:
    """Normed latents of whole groups in float64, and a size that their errors scale with."""
    a = c.a.astype(np.float64)
    pooled = pool(a, c.g.astype(np.float64) if c.ratio > 1 else None, c.ratio)
    most = np.abs(a[: len(pooled) * c.ratio]).reshape(len(pooled), c.ratio, c.K).max(1)
    lat = rms_norm(pooled, c.w.astype(np.float64), EPS)
    rms = np.sqrt((pooled * pooled).mean(-1, keepdims=True) + EPS)
    return lat, most * c.w / rms


# name: positions, ratio, width
CASES = {
    "one token, ratio 1": Case(1, 1),
    "one open group": Case(1, 2),
    "one closed group": Case(2, 2),
    "odd count": Case(7, 2),
    "groups of three": Case(8, 3, K=32, rope=8, width=32),
    "eps decides": Case(4, 2, scale=1e-10),
    "released rows": Case(2, 2, K=512, rope=64, width=128),
}


@pytest.mark.parametrize("name", CASES)
def test_latents_agree_with_float64(device: Device, name: str) -> None:
    c = CASES[name]
    got = run(device, c, [c.T]).lat
    lat, size = latents(c)
    # Softmax over t tokens: exp 8 UNIT (4 ulp) plus its argument's rounding |g| UNIT <= 20 UNIT, in numerator and
    # denominator, t products and sums: 60 UNIT of max |a|. The norm adds 15 UNIT of itself and half the pool's error.
    bound = (60 * 1.5 + 15) * UNIT * (size + np.abs(lat))
    for r, p in enumerate(range(c.start, c.start + c.T)):
        if (p + 1) % c.ratio == 0:
            within(got[r], lat[p // c.ratio], bound[p // c.ratio])
        else:
            assert not got[r].any(), f"row {r} closes no group and must be zero"


def test_gates_far_apart_choose_one_token(device: Device) -> None:
    """A gate of -200 beside 0 leaves the other token's channel exactly; equal gates average."""
    c = Case(2, 2)
    c.g[:] = 0.0
    c.g[0, ::2] = -200.0
    c.w[:] = 1.0
    want = c.a[1].astype(np.float64)
    want[1::2] = (c.a[0].astype(np.float64) + c.a[1])[1::2] / 2
    within(run(device, c, [2]).lat[1], rms_norm(want, np.ones(K), EPS), 20 * UNIT * 4)


def test_bf16_rounds_the_pool_and_the_latent(device: Device) -> None:
    c = Case(4, 2)
    got = bf16_to_f32(run(device, c, [4], kind="bf16").lat)[1::2]
    rounded = bf16_to_f32(f32_to_bf16(pool(c.a.astype(np.float64), c.g.astype(np.float64), 2).astype(np.float32)))
    want = rms_norm(rounded.astype(np.float64), c.w.astype(np.float64), EPS)
    # half a bf16 step of the result; a pool within 1e-6 of a tie may round the other way, one step of the pool
    near = np.abs(want) * BF16_UNIT * 1.01
    assert np.mean(np.abs(got - want) <= near) > 0.98
    within(got, want, near * 3.01)


@pytest.mark.parametrize("name", CASES)
def test_stored_rows_are_turned_at_the_first_position(device: Device, name: str) -> None:
    c = CASES[name]
    got = run(device, c, [c.T])
    groups = c.closing() // c.ratio
    first = groups * c.ratio
    lat = got.lat[c.closing() - c.start].astype(np.float64)
    size = np.repeat(np.abs(lat).reshape(len(lat), c.K // 2, 2).sum(-1), 2, axis=-1)
    within(got.comp[groups], rope(lat, first, c.freq), 11 * UNIT * size)
    normed = rms_norm(c.k[c.closing()].astype(np.float64), c.kw.astype(np.float64), EPS)
    size = np.repeat(np.abs(normed).reshape(len(lat), c.width // 2, 2).sum(-1), 2, axis=-1)
    within(got.keys[groups], rope(normed, first, c.freq), 26 * UNIT * size)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_packed_rows_are_the_reference_quantisers(device: Device, name: str, kind: str) -> None:
    """The f32 rows of the same calls, packed on the host: every byte equal, padding zero."""
    c = CASES[name]
    plain, got = run(device, c, [c.T], "f32", kind), run(device, c, [c.T], "fp4", kind)
    same_bits(got.lat, plain.lat)
    for j in c.closing() // c.ratio:
        for rows, values, pack in ((got.comp, plain.comp, pack_q4kv), (got.keys, plain.keys, pack_q4idx)):
            codes, scales = pack(values[j : j + 1])
            want = np.zeros((1, rows.shape[1]), np.uint8)
            want[:, : codes.shape[1]] = codes
            want[:, codes.shape[1] : codes.shape[1] + scales.shape[1]] = scales
            same_bits(rows[j : j + 1], want)


def test_rows_of_open_groups_are_not_touched(device: Device) -> None:
    c = Case(7, 2)
    got = run(device, c, [7])
    assert not got.comp[3].any() and not got.keys[3].any(), "group 3 is open: its row must not be written"


def test_tiny_and_huge_latents_keep_to_the_scale_s_range(device: Device) -> None:
    """Norm weights of 1e-6 fall under Q4kv's least scale, 1e4 saturates it; Q4idx has no such ends."""
    for factor in (1e-6, 1e4):
        c = Case(2, 1)
        c.w *= np.float32(factor)
        c.kw *= np.float32(factor)
        plain, got = run(device, c, [2], "f32"), run(device, c, [2], "fp4")
        codes, scales = pack_q4kv(plain.comp[:2])
        same_bits(got.comp[:2, : K // 2], codes)
        same_bits(got.comp[:2, K // 2 : K // 2 + K // 16], scales)
        assert set(np.unique(scales)) == {1 if factor < 1 else 0x7E}
        codes, scales = pack_q4idx(plain.keys[:2])
        same_bits(got.keys[:2, : WIDTH // 2], codes)
        same_bits(got.keys[:2, WIDTH // 2 : WIDTH // 2 + WIDTH // 32], scales)


SPLITS = {
    "ones": [1] * 17,
    "twos": [2] * 8 + [1],
    "fives": [5, 5, 5, 2],
    "sevens": [7, 7, 3],
    "sixteen": [16, 1],
    "one then the rest": [1, 16],
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("ratio", "slots"), [(1, None), (2, 2), (2, 6), (3, 3)])
def test_any_chunking_leaves_the_same_bits(device: Device, split: str, ratio: int, slots: int | None) -> None:
    c = Case(17, ratio)
    whole, parts = run(device, c, [17], "fp4", slots=slots), run(device, c, SPLITS[split], "fp4", slots=slots)
    same_bits(parts.lat, whole.lat)
    same_bits(parts.comp, whole.comp)
    same_bits(parts.keys, whole.keys)
    if whole.partial is not None and parts.partial is not None:
        same_bits(parts.partial, whole.partial)


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_thread_order_moves_no_bit(device: Device) -> None:
    c = Case(7, 2)
    got = run(device, c, [3, 4], "fp4", "bf16")
    want = run(device, c, [1] * 7, "fp4", "bf16")
    same_bits(got.lat, want.lat)
    same_bits(got.comp, want.comp)
    same_bits(got.keys, want.keys)


def test_partial_keeps_the_newest_positions(device: Device) -> None:
    c = Case(17, 2)
    partial = run(device, c, [9, 8], slots=6).partial
    assert partial is not None
    for p in range(11, 17):
        same_bits(partial[0, p % 6], c.a[p])
        same_bits(partial[1, p % 6], c.g[p])


def test_missing_gates_are_refused(device: Device) -> None:
    dev = device.with_constants({"HEAD_DIM": K, "ROPE_DIM": ROPE})
    a, pos = dev.zeros((2, K), "f32"), dev.zeros((2,), "i32")
    with pytest.raises(DeviceError, match="needs gates"):
        compress_pool(dev, dev.empty((2, K), "f32"), a, None, None, dev.zeros((K,), "f32"), pos, 2, 2, EPS)
