"""index.cu and the selection around it: queries, scores, candidates, picks (model-text 5.6)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from ds4.checkpoint.codecs import q4idx
from ds4.device import Device, Kernel
from ds4.device.kernels.index import INDEX_SCORES, INDEX_SCORES_MMA
from ds4.engine.ops import index as index_ops
from ds4.engine.ops.compress import index_keys
from ds4.engine.ops.index import index_query, index_select, mask_words
from ds4.engine.ops.kv import KvLayout
from ds4.engine.scratch import Workspace
from tests.reference_attention import UNIT, best, candidate_blocks, frequencies, index_scores, rope, same_bits, within

ORDERS = ["rising", "falling", "greedy"]


@dataclass
class Case:
    """R rows from `start` on over keys of one token or group each."""

    R: int
    start: int
    ratio: int = 1
    heads: int = 5
    width: int = 32
    rope: int = 8
    topk: int = 6
    spare: int = 9  # keys of later positions that no row may see

    q: np.ndarray = field(init=False)
    w: np.ndarray = field(init=False)
    keys: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(31 * self.R + self.start + self.width)
        self.n_keys = (self.start + self.R) // self.ratio + self.spare
        self.q = rng.standard_normal((self.R, self.heads, self.width), np.float32)
        self.w = rng.standard_normal((self.R, self.heads), np.float32)
        self.keys = rng.standard_normal((self.n_keys, self.width), np.float32)
        self.factor = np.float32(self.width**-0.5 * self.heads**-0.5)

    @property
    def pos(self) -> np.ndarray:
        return np.arange(self.start, self.start + self.R, dtype=np.int32)

    def lens(self, r: int) -> int:
        return (self.start + r + 1) // self.ratio

    def device(self, device: Device) -> Device:
        return device.with_constants({"INDEX_DIM": self.width, "ROPE_DIM": self.rope, "HEAD_DIM": 32})

    def stored(self, dev: Device, kv: str):
        """The keys as cache rows: written through the kernel at positions that do not turn them, norm undone."""
        rows = KvLayout(kv, 32, self.width).empty_keys(dev, self.n_keys)
        if kv == "f32":
            rows.write(self.keys)
            return rows, self.keys
        x = dev.upload(self.keys)
        flat = dev.upload(np.ones(self.width, np.float32))
        still = dev.upload(np.zeros(self.rope // 2, np.float32))
        pos = dev.upload(np.arange(self.n_keys, dtype=np.int32))
        plain = KvLayout("f32", 32, self.width).empty_keys(dev, self.n_keys)
        for into in (rows, plain):
            index_keys(dev, into, x, flat, pos, still, self.n_keys, 1, 1e-20)
        return rows, q4idx(dev.download(plain))


def scores(
    device: Device, c: Case, kv: str, rows_per_block: int = 1, kernel: Kernel | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the kernel (NaN where nothing was written), and the keys that it read."""
    dev = c.device(device)
    rows, keys = c.stored(dev, kv)
    out = dev.upload(np.full((c.R, c.n_keys), np.nan, np.float32))
    dev.launch(
        kernel or INDEX_SCORES[kv], out, dev.upload(c.q), dev.upload(c.w), rows, dev.upload(c.pos), None, c.R,
        c.heads, c.ratio, c.n_keys, rows_per_block, 1, 1, float(c.factor),
    )  # fmt: skip
    return dev.download(out), keys


CASES = {
    "one row, one key": Case(1, 0),
    "nothing visible yet": Case(1, 0, ratio=2),
    "rows over ratio 2": Case(5, 6, ratio=2),
    "a ragged tile": Case(3, 127),
    "two tiles": Case(2, 139, heads=3),
    "a wide key": Case(3, 20, width=64, rope=24),
    "released row": Case(1, 140, ratio=2, heads=32, width=128, rope=64),
}


@pytest.mark.parametrize("kv", ["fp4", "f32"])
@pytest.mark.parametrize("name", CASES)
def test_scores_agree_with_float64(device: Device, name: str, kv: str) -> None:
    c = CASES[name]
    c.q = q4idx(c.q) if kv == "fp4" else c.q
    got, keys = scores(device, c, kv)
    for r in range(c.R):
        n = c.lens(r)
        w, q, k = c.w[r].astype(np.float64), c.q[r].astype(np.float64), keys[:n].astype(np.float64)
        # a dot: 8 sums in a chain, 2 to join, width/32 blocks, a product: with head weight and sum over heads
        steps = 8 + 2 + c.width // 32 + 1 + 1 + c.heads + 1
        size = np.abs(w * c.factor) @ (np.abs(q) @ np.abs(k).T)
        within(got[r, :n], index_scores(q, w, k, float(c.factor)), steps * UNIT * size + 1e-37)
        assert np.isnan(got[r, n:]).all(), "a score of a row that is not visible was written"


def test_packed_dots_are_exact(device: Device) -> None:
    """One head, weight 1: every block's dot is exact, so the score is the float64 dot rounded once (one block)."""
    c = Case(2, 60, heads=1)
    c.q, c.w[:], c.factor = q4idx(c.q), 1.0, np.float32(1)
    got, keys = scores(device, c, "fp4")
    for r in range(c.R):
        want = np.maximum(c.q[r, 0].astype(np.float64) @ keys[: c.lens(r)].astype(np.float64).T, 0)
        same_bits(got[r, : c.lens(r)], want.astype(np.float32))


def test_negative_weights_and_dots(device: Device) -> None:
    """relu is on the dot only: a negative weight lowers a score below zero."""
    c = Case(1, 40, heads=1)
    c.w[:] = -2.0
    got, keys = scores(device, c, "f32")
    dots = c.q[0, 0].astype(np.float64) @ keys[:41].T
    assert ((got[0, :41] < 0) == (dots > 0)).all() and (got[0, :41][dots <= 0] == 0).all()


@pytest.mark.parametrize("device", ORDERS, indirect=True)
@pytest.mark.parametrize("kv", ["fp4", "f32"])
def test_a_score_does_not_depend_on_the_rows_beside_it(device: Device, kv: str) -> None:
    c = Case(8, 123)
    whole, _ = scores(device, c, kv)
    for group in (3, 8):
        same_bits(scores(device, c, kv, group)[0], whole)


@pytest.mark.parametrize("rows_per_block", [1, 3])
@pytest.mark.parametrize("heads", [1, 5, 8, 14, 32])
def test_tensor_cores_give_the_same_bits(device: Device, heads: int, rows_per_block: int) -> None:
    """Dots of packed blocks are exact in any order, and the rest of the sum is the same by construction."""
    c = Case(4, 260 if heads == 5 else 20, heads=heads, width=64 if heads == 14 else 32)
    c.q = q4idx(c.q)
    got, _ = scores(device, c, "fp4", rows_per_block, INDEX_SCORES_MMA)
    same_bits(got, scores(device, c, "fp4")[0])


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_tensor_cores_at_the_released_row(device: Device) -> None:
    c = Case(3, 300, ratio=2, heads=32, width=128, rope=64)
    c.q = q4idx(c.q)
    got, _ = scores(device, c, "fp4", 2, INDEX_SCORES_MMA)
    same_bits(got, scores(device, c, "fp4")[0])


@pytest.mark.parametrize("kv", ["fp4", "f32"])
@pytest.mark.parametrize(("R", "heads", "width", "r"), [(1, 1, 32, 8), (3, 5, 64, 24), (2, 32, 128, 64)])
def test_queries_turn_and_round(device: Device, R: int, heads: int, width: int, r: int, kv: str) -> None:
    c = Case(R, 33, heads=heads, width=width, rope=r)
    dev, freq = c.device(device), frequencies(r, 160000.0)
    outs = {}
    for mode in ("f32", kv):
        q = dev.upload(c.q)
        index_query(dev, q, dev.upload(c.pos), dev.upload(freq), R, mode)
        outs[mode] = dev.download(q)
    size = np.repeat(np.abs(c.q.astype(np.float64)).reshape(R, heads, -1, 2).sum(-1), 2, axis=-1)
    within(outs["f32"], rope(c.q.astype(np.float64), c.pos, freq), 11 * UNIT * size)
    if kv == "fp4":
        same_bits(outs["fp4"], q4idx(outs["f32"]))


def select(
    device: Device, c: Case, kv: str, family: str, blocks: tuple[int, int] | None = None, rows: slice = slice(None)
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Picks; with `blocks` (size, kept) also the mask's bits and the picks of a later source that uses it."""
    dev = c.device(device)
    ws = Workspace(dev)
    stored, _ = c.stored(dev, kv)
    pos, q, w = c.pos[rows], c.q[rows], c.w[rows]
    R, capacity = len(pos), c.n_keys
    size, kept = blocks or (1, 1)
    words = mask_words(capacity, size)
    mask = dev.empty((R, words), "u32") if blocks else None
    made = []
    for candidates in [("make", mask), ("use", mask)] if blocks else [None]:
        picks = dev.empty((R, c.topk), "i32")
        index_select(
            dev, ws, family, picks, dev.upload(q), dev.upload(w), stored, dev.upload(pos), R, ratio=c.ratio,
            capacity=capacity, factor=float(c.factor), candidates=candidates, block_size=size, topk_blocks=kept,
        )  # fmt: skip
        made.append(dev.download(picks))
    if mask is None:
        return made[0], None, None
    bits = np.unpackbits(dev.download(mask).view(np.uint8), axis=1, bitorder="little")
    return made[0], bits, made[1]


SELECTIONS = {
    "fewer keys than topk": Case(3, 0),
    "nothing visible": Case(1, 0, ratio=2),
    "groups close inside the call": Case(7, 2, ratio=2),
    "more than topk": Case(4, 50, topk=8),
    "released row": Case(1, 140, ratio=2, heads=32, width=128, rope=64, topk=32),
}


@pytest.mark.parametrize("kv", ["fp4", "f32"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_picks_are_the_best_of_the_kernels_own_scores(device: Device, name: str, kv: str) -> None:
    c = SELECTIONS[name]
    c.q = q4idx(c.q) if kv == "fp4" else c.q
    values, _ = scores(device, c, kv)
    size, kept = 4, 3
    got, bits, used = select(device, c, kv, "step", (size, kept))
    assert bits is not None and used is not None
    for r in range(c.R):
        s = values[r, : c.lens(r)].astype(np.float64)
        want = best(s, c.topk)
        assert got[r].tolist() == want + [-1] * (c.topk - len(want)), "the source's own picks ignore its mask"
        chosen = candidate_blocks(s, size, kept)
        assert np.flatnonzero(bits[r]).tolist() == chosen
        inside = np.array([v if j // size in chosen else -np.inf for j, v in enumerate(s)])
        want = best(inside, c.topk)
        assert used[r].tolist() == want + [-1] * (c.topk - len(want))


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_rows_alone_and_in_families_pick_the_same(device: Device) -> None:
    c = Case(8, 61, topk=7)
    c.q = q4idx(c.q)
    step, prefill = select(device, c, "fp4", "step", (4, 3)), select(device, c, "fp4", "prefill", (4, 3))
    alone = select(device, c, "fp4", "step", (4, 3), slice(5, 6))
    for s, p, a in zip(step, prefill, alone):
        assert s is not None and p is not None and a is not None
        same_bits(p, s)
        same_bits(a, s[5:6])


def test_scores_are_held_for_a_bounded_number_of_rows(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    c = Case(21, 30)
    whole = select(device, c, "f32", "prefill", (4, 3))
    monkeypatch.setattr(index_ops, "SCORES_ELEMENTS", 1)  # eight rows at a time: 8, 8, 5
    parts = select(device, c, "f32", "prefill", (4, 3))
    for w, p in zip(whole, parts):
        assert w is not None and p is not None
        same_bits(p, w)


def test_another_owners_keys_are_masked_by_the_row_s_own_count(device: Device) -> None:
    """Released mode: a ratio-2 row scores ratio-1 keys, rows 0 .. (p + 1) // 2 - 1 of them."""
    c = Case(1, 40, ratio=2, spare=60, topk=30)
    got, _, _ = select(device, c, "f32", "step")
    assert got[0, :20].tolist() == list(range(20)) and (got[0, 20:] == -1).all()


def test_traffic_is_what_the_header_says(count_device: Device) -> None:
    """Visible keys once a row group, as a stream of whole sectors; queries once a row and block; no bank conflict."""
    c = Case(4, 252, heads=32, width=128, rope=64, spare=0)
    c.q = q4idx(c.q)
    scores(count_device, c, "fp4", rows_per_block=2)
    counts = count_device.counters()["kernels"]["index_scores_fp4"]
    keys, q, out = counts["args"]["3"]["load"], counts["args"]["1"]["load"], counts["args"]["0"]["store"]
    assert keys["bytes"] == (254 + 256) * 68 and keys["bytes"] >= 0.95 * keys["sector_bytes"]
    assert q["bytes"] == q["sector_bytes"] == 4 * 2 * 4 * 32 * 128
    assert out["bytes"] == 4 * (253 + 254 + 255 + 256)
    for direction in ("load", "store"):
        assert counts["shared"][direction]["wavefronts"] == counts["shared"][direction]["ideal_wavefronts"]
