"""draft.cu and the stage attention against float64: taps, biases, choices, confidences, a block that sees itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from ds4.checkpoint.codecs import bf16_to_f32, f32_to_bf16, q8
from ds4.device import Device, Kernel
from ds4.device.kernels.draft import DRAFT_ARGMAX, DRAFT_BIAS, DRAFT_CONFIDENCE, DRAFT_TAP
from ds4.device.launch import evaluate
from ds4.engine.ops.draft import draft_argmax, draft_attention, draft_bias, draft_confidence, draft_tap
from ds4.engine.ops.kv import KvLayout, window_commit, window_kv
from ds4.engine.scratch import Workspace
from ds4.errors import DeviceError
from tests.reference_attention import UNIT, attention_row, frequencies, rope, within

ORDERS = ["rising", "falling", "greedy"]
F32 = np.float32


def streams(R: int, S: int, D: int) -> np.ndarray:
    return np.random.default_rng(100 * R + 10 * S + D).standard_normal((R, S, D)).astype(F32)


def run_tap(device: Device, x: np.ndarray, slots: int, slot: int, kind: str = "f32") -> np.ndarray:
    R, S, D = x.shape
    dev = device.with_constants({"HC": S})
    y = dev.zeros((R, slots * D), kind)
    draft_tap(dev, y, dev.upload(x), slot, R)
    return dev.download(y)


@pytest.mark.parametrize("device", ORDERS, indirect=True)
@pytest.mark.parametrize(("R", "S", "D", "slot"), [(1, 4, 64, 0), (3, 3, 257, 1), (2, 2, 132, 2), (1, 4, 5120, 1)])
def test_a_tap_is_the_mean_of_the_streams_in_its_columns(device: Device, R: int, S: int, D: int, slot: int) -> None:
    x = streams(R, S, D)
    got = run_tap(device, x, 3, slot)
    here = slice(slot * D, (slot + 1) * D)
    within(got[:, here], x.astype(float).mean(1), S * UNIT * np.abs(x).sum(1) / S)
    assert not np.delete(got, np.r_[here], axis=1).any(), "other columns are other layers'"
    assert np.array_equal(run_tap(device, x, 3, slot, "bf16")[:, here], f32_to_bf16(got[:, here]))


def test_a_tap_outside_its_rows_is_refused(device: Device) -> None:
    with pytest.raises(DeviceError, match="slot 2 of 64 columns is outside rows of 128"):
        run_tap(device, streams(1, 4, 64), 2, 2)


@pytest.mark.parametrize("device", ORDERS, indirect=True)
@pytest.mark.parametrize("V", [1, 331, 1024, 1025, 2500])
def test_a_bias_is_one_addition(device: Device, V: int) -> None:
    dev = device.with_constants({"HC": 4})
    rng = np.random.default_rng(V)
    a, b = (rng.standard_normal((1, V)).astype(F32) for _ in range(2))
    logits = dev.upload(a)
    draft_bias(dev, logits, dev.upload(b))
    assert np.array_equal(dev.download(logits), a + b)


def argmax(device: Device, logits: np.ndarray) -> int:
    dev = device.with_constants({"HC": 4})
    token = dev.upload(np.array([-5], np.int32))
    draft_argmax(dev, token, dev.upload(logits.astype(F32).reshape(1, -1)))
    return int(dev.download(token)[0])


@pytest.mark.parametrize("device", ORDERS, indirect=True)
@pytest.mark.parametrize("V", [1, 31, 1024, 1025, 9001])
def test_the_largest_logit_is_chosen(device: Device, V: int) -> None:
    logits = np.random.default_rng(V).standard_normal(V)
    assert argmax(device, logits) == logits.astype(F32).argmax()
    assert argmax(device, -1e30 - np.arange(V) * 1e26) == 0  # all negative, falling
    assert argmax(device, np.arange(V)) == V - 1


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_equals_go_to_the_lowest_id_and_nan_ranks_last(device: Device) -> None:
    logits = np.zeros(9001)
    logits[[8200, 5000, 40 + 1024, 40 + 2048]] = 2.0
    assert argmax(device, logits) == 40 + 1024
    assert argmax(device, np.where(np.arange(100) % 2, 0.0, -0.0)) == 0
    assert argmax(device, np.full(70, -np.inf)) == 0
    logits[:] = np.nan
    assert argmax(device, logits) == 0, "still an id, which the next row of the Markov table is read by"
    logits[8999] = -np.inf
    assert argmax(device, logits) == 8999
    logits[17] = np.inf
    assert argmax(device, logits) == 17


@pytest.mark.parametrize("device", ["fast"], indirect=True)
def test_the_released_vocabulary(device: Device) -> None:
    logits = np.random.default_rng(3).standard_normal(129_280)
    assert argmax(device, logits) == logits.astype(F32).argmax()


@pytest.mark.parametrize("device", ORDERS, indirect=True)
@pytest.mark.parametrize(("B", "S", "D", "K"), [(1, 4, 64, 32), (5, 3, 257, 40), (4, 4, 5120, 256)])
def test_a_confidence_is_one_dot(device: Device, B: int, S: int, D: int, K: int) -> None:
    rng = np.random.default_rng(B)
    x, pre = streams(B, S, D), rng.random((B, S)).astype(F32)
    e, w = rng.standard_normal((B, K)).astype(F32), rng.standard_normal(D + K).astype(F32)
    dev = device.with_constants({"HC": S})
    conf = dev.empty((B,), "f32")
    draft_confidence(dev, conf, *(dev.upload(a) for a in (w, x, pre, e)), B)
    terms = np.concatenate([(pre[:, :, None].astype(float) * x).sum(1), e.astype(float)], axis=1)
    sizes = np.concatenate([(pre[:, :, None].astype(float) * np.abs(x)).sum(1), np.abs(e)], axis=1)
    # S roundings a column, ceil(n / 256) fused steps of a thread, 5 shuffles, 8 warps
    bound = (S + -(-(D + K) // 256) + 13) * UNIT * (sizes * np.abs(w)).sum(1)
    within(dev.download(conf), (terms * w).sum(1), bound)


@dataclass
class Case:
    """T committed rows, then a block of B."""

    T: int
    B: int
    heads: int = 5
    K: int = 96
    rope: int = 16
    window: int = 8
    slack: int = 9
    first: int = 0


# name: the case; no two axes equal
CASES = {
    "one committed": Case(1, 4),
    "a window not yet full": Case(6, 4),
    "a window just full": Case(8, 4),
    "a window just wrapped": Case(9, 4),
    "the ring wrapped": Case(40, 3),
    "one row": Case(12, 1),
    "keys missing": Case(12, 4, first=7),
    "no key but the block": Case(12, 4, first=12),
    "a window of one": Case(3, 2, window=1),
    "eight rows": Case(30, 8, K=32, rope=8, window=18, heads=6),
    "several splits": Case(90, 5, K=64, rope=24, window=70, heads=9),
}


def run_attention(device: Device, c: Case, kv: str, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs, what they should be, and a size for their bounds."""
    rng = np.random.default_rng(c.T * 1009 + c.B)
    rows = rng.standard_normal((c.T + c.B, c.K)).astype(F32)
    q = rng.standard_normal((c.B + 1, c.heads, c.K)).astype(F32)
    sinks, freq = (rng.standard_normal(c.heads) * 0.3).astype(F32), frequencies(c.rope)
    q[0] = np.nan  # nobody reads the row before the block's
    dev = device.with_constants({"HEAD_DIM": c.K, "ROPE_DIM": c.rope})
    layout = KvLayout(kv, c.K, 32)
    ring, chunk = layout.empty_window(dev, c.window + c.slack), layout.empty_window(dev, c.B + 1)
    one, still = dev.upload(np.ones(c.K, F32)), dev.upload(np.zeros(c.rope // 2, F32))
    at = np.arange(c.T + c.B, dtype=np.int32)
    for lo, hi in ((0, c.T), (c.T, c.T + c.B)):
        pos = dev.upload(at[lo:hi])
        made = chunk if lo else layout.empty_window(dev, hi)
        window_kv(dev, made, dev.upload(rows[lo:hi]), one, pos, still, hi - lo, 1e-20)
        if not lo:
            window_commit(dev, ring, made, pos, hi)
    out = dev.empty((c.B, c.heads, c.K), kind)
    ends = dev.upload(np.array([c.T] + [c.T + c.B - 1] * c.B, np.int32))
    queries = dev.upload(f32_to_bf16(q), "bf16") if kind == "bf16" else dev.upload(q)
    draft_attention(
        dev, Workspace(dev), out, queries, ring, chunk, dev.upload(sinks), dev.upload(at[c.T :]), ends,
        dev.upload(freq), dev.upload(np.array([c.first], np.int32)), c.B, window=c.window,
    )  # fmt: skip
    got = dev.download(out)
    keys = (rows / np.sqrt((rows.astype(float) ** 2).mean(-1, keepdims=True))).astype(F32)
    keys = (q8(keys) if kv == "fp4" else keys)[max(c.first, c.T - c.window, 0) :].astype(float)
    asked = bf16_to_f32(f32_to_bf16(q)) if kind == "bf16" else q
    found = [attention_row(asked[r + 1].astype(float), keys, sinks.astype(float), c.K**-0.5) for r in range(c.B)]
    size = np.repeat(np.stack([f[1] for f in found]).reshape(c.B, c.heads, -1, 2).sum(-1), 2, axis=-1)
    want = rope(np.stack([f[0] for f in found]), at[c.T :], freq, inverse=True)
    return bf16_to_f32(got) if kind == "bf16" else got, want, size


def attention_bound(c: Case) -> float:
    """As tests/cuda/test_attention.py: an absolute error of a score is a relative one of its weight."""
    longest, n_keys = np.sqrt(2 * c.K) * 6, c.window + c.B
    return (2 * (21 + 20) * longest + 2 * (8 + n_keys / 2) + 20 + 12) * UNIT


@pytest.mark.parametrize("device", ORDERS, indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_every_row_sees_the_anchors_window_and_the_whole_block(device: Device, name: str) -> None:
    got, want, size = run_attention(device, CASES[name], "f32", "f32")
    within(got, want, attention_bound(CASES[name]) * size)


@pytest.mark.parametrize(("kv", "kind"), [("fp4", "f32"), ("f32", "bf16"), ("fp4", "bf16")])
@pytest.mark.parametrize("name", ["a window just wrapped", "several splits"])
def test_other_modes_agree_with_float64(device: Device, name: str, kv: str, kind: str) -> None:
    got, want, size = run_attention(device, CASES[name], kv, kind)
    bound = attention_bound(CASES[name]) * size
    within(got, want, bound + np.abs(want) * 2.0**-8 if kind == "bf16" else bound)


def test_a_ring_below_the_window_is_refused(device: Device) -> None:
    with pytest.raises(DeviceError, match="a ring of 7 rows does not hold a window of 8"):
        run_attention(device, Case(5, 2, slack=-1), "f32", "f32")


def test_traffic_is_the_headers(count_device: Device) -> None:
    dev = count_device.with_constants({"HC": 4})
    B, S, D, K, V = 3, 4, 512, 64, 3072
    x, row = dev.upload(streams(B, S, D)), dev.zeros((1, V), "f32")
    axes = {"R": B, "B": B, "S": S, "D": D, "K": K, "V": V}
    launches: list[tuple[Kernel, Callable[[], None]]] = [
        (DRAFT_TAP["f32"], lambda: draft_tap(dev, dev.zeros((B, 2 * D), "f32"), x, 1, B)),
        (DRAFT_TAP["bf16"], lambda: draft_tap(dev, dev.zeros((B, 2 * D), "bf16"), x, 1, B)),
        (DRAFT_BIAS, lambda: draft_bias(dev, row, dev.zeros((1, V), "f32"))),
        (DRAFT_ARGMAX, lambda: draft_argmax(dev, dev.zeros((1,), "i32"), row)),
        (
            DRAFT_CONFIDENCE,
            lambda: draft_confidence(
                dev, dev.zeros((B,), "f32"), dev.zeros((D + K,), "f32"), x, dev.zeros((B, S), "f32"),
                dev.zeros((B, K), "f32"), B,
            ),
        ),
    ]  # fmt: skip
    for kernel, launch in launches:
        dev.reset_counters()
        launch()
        args = dev.counters()["kernels"][kernel.name]["args"].values()
        found = sum(a["load"]["bytes"] for a in args), sum(a["store"]["bytes"] for a in args)
        assert found == evaluate(kernel, "traffic", axes), kernel.name
