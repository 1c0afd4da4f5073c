"""attention.cu against float64: windows, picks, sinks, rings, in both families and every mode."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from ds4.checkpoint.codecs import bf16_to_f32, f32_to_bf16, q4kv, q8
from ds4.device import Device
from ds4.engine.ops.attention import attention
from ds4.engine.ops.compress import compress_store
from ds4.engine.ops.kv import KvLayout, window_commit, window_kv
from ds4.engine.scratch import Workspace
from ds4.errors import DeviceError
from tests.reference_attention import UNIT, attention_row, frequencies, rope, same_bits, within

ORDERS = ["rising", "falling", "greedy"]
FAMILIES = ["step", "prefill"]


@dataclass
class Case:
    """T positions; the last R of them are one call, the rest came before (ring and compressed rows)."""

    T: int
    R: int
    heads: int = 5
    K: int = 96
    rope: int = 16
    window: int = 8
    slack: int = 3  # ring rows beyond the window
    topk: int = 6  # 0: a window-only layer
    n_comp: int = 20
    picked: int | None = None  # picks a row; None: a ragged number
    first: int = 0
    sink: float = 0.5
    spread: float = 1.0  # of the queries

    q: np.ndarray = field(init=False)
    rows: np.ndarray = field(init=False)
    comp: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.T * 1009 + self.R * 31 + self.K)
        self.q = (rng.standard_normal((self.R, self.heads, self.K)) * self.spread).astype(np.float32)
        self.rows = rng.standard_normal((self.T, self.K)).astype(np.float32)
        self.comp = rng.standard_normal((self.n_comp, self.K)).astype(np.float32)
        self.sinks = (rng.standard_normal(self.heads) * 0.3 + self.sink).astype(np.float32)
        self.picks = np.full((self.R, max(self.topk, 1)), -1, np.int32)
        for r in range(self.R if self.topk else 0):
            n = (3 * r + 1) % (self.topk + 1) if self.picked is None else self.picked
            self.picks[r, :n] = np.sort(rng.choice(self.n_comp, n, replace=False))
        self.freq = frequencies(self.rope)

    @property
    def start(self) -> int:
        return self.T - self.R

    @property
    def pos(self) -> np.ndarray:
        return np.arange(self.start, self.T, dtype=np.int32)


def run(
    device: Device, c: Case, family: str = "step", kv: str = "f32", kind: str = "f32", rows: slice = slice(None),
    chunks: list[int] | None = None,
) -> np.ndarray:  # fmt: skip
    """Outputs of rows `rows` of the call, made in calls of the lengths `chunks` (one, if None)."""
    dev = device.with_constants({"HEAD_DIM": c.K, "ROPE_DIM": c.rope})
    ws, layout = Workspace(dev), KvLayout(kv, c.K, 32)
    one, still = dev.upload(np.ones(c.K, np.float32)), dev.upload(np.zeros(c.rope // 2, np.float32))
    ring = layout.empty_window(dev, c.window + c.slack)  # poisoned where nobody wrote

    def stored(lo: int, hi: int):
        """Window rows lo .. hi - 1 as the cache holds them; their norm is undone by scaling, they are not turned."""
        chunk = layout.empty_window(dev, hi - lo)
        pos = dev.upload(np.arange(lo, hi, dtype=np.int32))
        window_kv(dev, chunk, dev.upload(c.rows[lo:hi]), one, pos, still, hi - lo, 1e-20)
        return chunk, pos

    comp = picks = None
    if c.topk:
        comp = layout.empty_compressed(dev, c.n_comp)
        at = dev.upload(np.arange(c.n_comp, dtype=np.int32))
        compress_store(dev, comp, dev.upload(c.comp), at, still, c.n_comp, 1)
    lo, hi = c.start + (rows.start or 0), c.start + len(range(c.R)[: rows.stop])
    if lo:
        window_commit(dev, ring, *stored(0, lo), lo)
    outs, at_row = [], lo
    for n in chunks or [hi - lo]:
        i = at_row - c.start
        chunk, pos = stored(at_row, at_row + n)
        q = c.q[i : i + n]
        qb = dev.upload(f32_to_bf16(q), "bf16") if kind == "bf16" else dev.upload(q)
        out = dev.empty(q.shape, kind)
        picks = dev.upload(c.picks[i : i + n]) if c.topk else None
        attention(
            dev, ws, family, out, qb, ring, chunk, comp, picks, dev.upload(c.sinks), pos, dev.upload(c.freq),
            dev.upload(np.array([c.first], np.int32)), n, window=c.window,
        )  # fmt: skip
        window_commit(dev, ring, chunk, pos, n)
        got = dev.download(out)
        outs.append(bf16_to_f32(got) if kind == "bf16" else got)
        at_row += n
    return np.concatenate(outs)


def reference(c: Case, kv: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Float64 outputs, and a size for their bounds: sum_j p_j |K_j| over both channels of a pair."""
    scale = 1 / np.sqrt((c.rows.astype(np.float64) ** 2).mean(-1, keepdims=True))
    rows = (c.rows * scale).astype(np.float32)  # what window_kv's norm makes of them, within a few UNIT
    rows, comp = (q8(rows), q4kv(c.comp)) if kv == "fp4" else (rows, c.comp)
    q = bf16_to_f32(f32_to_bf16(c.q)) if kind == "bf16" else c.q
    outs, sizes = [], []
    for r, p in enumerate(c.pos):
        lowest = max(c.first, p - c.window + 1, 0)
        keys = np.concatenate([rows[lowest : p + 1], comp[c.picks[r][c.picks[r] >= 0]]]).astype(np.float64)
        out, size = attention_row(q[r].astype(np.float64), keys, c.sinks.astype(np.float64), c.K**-0.5)
        outs.append(out)
        sizes.append(size)
    size = np.repeat(np.stack(sizes).reshape(c.R, c.heads, -1, 2).sum(-1), 2, axis=-1)
    return rope(np.stack(outs), c.pos, c.freq, inverse=True), size


def tolerance(c: Case, kv: str, kind: str) -> float:
    """Relative to sum_j p_j |K_j|: error of a score in absolute terms acts as a relative error of its weight."""
    longest = np.sqrt(2 * c.K) * c.spread * 6  # |q| |K| scale is below this at these seeds
    n_keys = c.window + c.topk
    # score: 16 products and 5 sums of rounding against |q| |K|, input rows off by 20 UNIT; twice (numerator and sum);
    # exp 8, rescalings and sums n/4 + 4 each, quotient, rope 11
    return (2 * (21 + 20) * longest + 2 * (8 + n_keys / 2) + 20 + 12) * UNIT


# name: the case, kept small in time, no two axes equal
CASES = {
    "the first token": Case(1, 1),
    "a window not yet full": Case(5, 2),
    "a window just full": Case(8, 1),
    "a window just wrapped": Case(9, 1),
    "all rows older than the ring's turn": Case(30, 3),
    "longer than ring and window": Case(40, 17),
    "first inside the window": Case(12, 3, first=7),
    "first is the row itself": Case(12, 1, first=11),
    "no pick": Case(9, 2, picked=0),
    "every pick": Case(9, 2, picked=6),
    "window only": Case(9, 2, topk=0),
    "window not a multiple of four": Case(25, 3, K=32, rope=8, window=18, topk=7, heads=6),
    "several splits": Case(90, 2, K=64, rope=24, window=70, topk=70, n_comp=80, picked=66),
    "a split without keys": Case(90, 2, K=64, rope=24, window=70, topk=70, n_comp=80, picked=3),
    "a sink above every score": Case(9, 2, sink=30.0),
    "a sink far above": Case(9, 2, sink=1000.0),
    "a sink far below": Case(9, 2, sink=-1000.0),
    "sharp scores": Case(9, 2, spread=20.0),
    "released row": Case(150, 1, heads=64, K=512, rope=64, window=128, topk=512, n_comp=530, picked=512),
}
SMALL = [name for name in CASES if name != "released row"]
MODES = [("f32", "f32"), ("fp4", "f32"), ("f32", "bf16"), ("fp4", "bf16")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SMALL)
def test_outputs_agree_with_float64(device: Device, name: str, family: str) -> None:
    c = CASES[name]
    if family == "step" and c.R > 8:
        pytest.skip("a step has at most eight rows")
    want, size = reference(c, "f32", "f32")
    within(run(device, c, family), want, tolerance(c, "f32", "f32") * size)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kv", "kind"), MODES[1:])
@pytest.mark.parametrize("name", ["a window just wrapped", "window not a multiple of four", "several splits"])
def test_other_modes_agree_with_float64(device: Device, name: str, kv: str, kind: str, family: str) -> None:
    check(device, CASES[name], family, kv, kind)


def check(device: Device, c: Case, family: str, kv: str, kind: str) -> None:
    want, size = reference(c, kv, kind)
    bound = tolerance(c, kv, kind) * size
    if kind == "bf16":  # the output, and on tensor cores every weight, is rounded to bf16
        bound = bound + np.abs(want) * 2.0**-8 + (size * 2.0**-8 if family == "prefill" else 0)
    within(run(device, c, family, kv, kind), want, bound)


@pytest.mark.parametrize("name", SMALL)
def test_tensor_cores_agree_with_float64(device: Device, name: str) -> None:
    check(device, CASES[name], "prefill", "fp4", "bf16")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", [1, 16, 17, 33])
def test_any_number_of_heads(device: Device, heads: int, family: str) -> None:
    check(device, Case(50, 2, heads=heads, K=32, rope=8, window=40), family, "fp4", "bf16")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_released_row(device: Device, family: str) -> None:
    check(device, CASES["released row"], family, "fp4", "bf16")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_at_all_is_zero(device: Device, family: str) -> None:
    """`first` above the row and no pick: the output is 0, not NaN (the sink's share of nothing)."""
    c = Case(9, 1, first=9, picked=0)
    assert not run(device, c, family).any()
    c.sinks[:] = -1e30
    assert not run(device, c, family).any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kv", "kind"), MODES)
def test_a_row_alone_is_the_row_among_eight(device: Device, kv: str, kind: str, family: str) -> None:
    c = Case(21, 8)
    whole = run(device, c, family, kv, kind)
    for r in (0, 5):
        same_bits(run(device, c, family, kv, kind, slice(r, r + 1)), whole[r : r + 1])


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("chunks", [[1] * 17, [2] * 8 + [1], [5, 5, 5, 2], [7, 7, 3], [16, 1]], ids=str)
def test_any_chunking_gives_the_same_bits(device: Device, chunks: list[int], kind: str) -> None:
    c = Case(23, 17)
    same_bits(run(device, c, "prefill", "fp4", kind, chunks=chunks), run(device, c, "prefill", "fp4", kind))


@pytest.mark.parametrize("device", ORDERS, indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_thread_order_moves_no_bit(device: Device, family: str) -> None:
    c = Case(90, 3, K=64, rope=24, window=70, topk=70, n_comp=80)
    whole = run(device, c, family, "fp4", "bf16")
    same_bits(run(device, c, family, "fp4", "bf16", slice(1, 2)), whole[1:2])


def test_pick_order_is_kept(device: Device) -> None:
    """Two picks swapped: the same keys in another order, near but a different sum is allowed; a dropped one shows."""
    c = Case(9, 1, picked=6)
    want = run(device, c)
    c.picks[0, :2] = c.picks[0, 1::-1]
    assert np.abs(run(device, c) - want).max() < 1e-5
    c.picks[0, 5] = -1
    assert np.abs(run(device, c) - want).max() > 1e-3


def test_wrong_calls_are_refused(device: Device) -> None:
    with pytest.raises(DeviceError, match="1 to 8 rows"):
        run(device, Case(9, 9), "step")
    with pytest.raises(DeviceError, match="does not hold a window"):
        run(device, Case(9, 1, slack=-1))


def test_traffic_is_what_the_headers_say(count_device: Device) -> None:
    """Key rows are asked for once per four heads (FMA) or 32 heads (tensor cores), partial sums in whole sectors."""
    c = Case(150, 1, heads=40, K=512, rope=64, window=128, topk=64, n_comp=80, picked=64)
    row, comp_row = c.K + c.K // 32, c.K // 2 + c.K // 16  # without padding
    for family, kernel, ring, times in (
        ("step", "attention_rows_bf16_fp4", 4, 10),
        ("prefill", "attention_mma_h32", 2, 2),
    ):
        count_device.reset_counters()
        run(count_device, c, family, "fp4", "bf16")
        args = count_device.counters()["kernels"][kernel]["args"]
        asked = [args[str(ring + i)]["load"]["bytes"] for i in range(3)]
        # tensor cores: eight lanes share a window scale, two a compressed one, and meet in one request
        assert asked == [times * (c.window - 1) * row, times * row, times * c.topk * comp_row]
        q = args["3" if family == "step" else "1"]["load"]
        assert q["bytes"] == c.heads * c.K * 2 * (3 if family == "step" else 1)
    count_device.reset_counters()
    run(count_device, c, "step", "fp4", "bf16")
    part = count_device.counters()["kernels"]["attention_rows_bf16_fp4"]["args"]["1"]["store"]
    assert part["bytes"] == part["sector_bytes"] == 4 * 3 * c.heads * c.K


@pytest.mark.parametrize("family", FAMILIES)
def test_nan_is_passed_on(device: Device, family: str) -> None:
    """A broken query must not become a row of zeros."""
    c = Case(90, 1, K=64, rope=24, window=70, topk=70, n_comp=80, picked=3)
    c.q[0, 2, 5] = np.nan
    got = run(device, c, family, "fp4", "bf16")
    assert np.isnan(got[0, 2]).all() and np.isfinite(got[0, [0, 1, 3, 4]]).all()
