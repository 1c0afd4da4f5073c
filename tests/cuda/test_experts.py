"""experts_plan.cu, experts_step.cu and experts_prefill.cu against float64 and against each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from ds4.device import Buffer, Device
from ds4.device.kernels.experts import EXPERTS_PLAN
from ds4.engine.ops.experts import ExpertWeights, experts, moe_sum, place_experts, swiglu
from ds4.engine.scratch import Workspace
from ds4.errors import DeviceError
from tests.reference_dense import F32, F64, UNIT, assert_within, bf16_bits, bf16_values, clamped_swiglu
from tests.reference_experts import Blob, random_blob
from tests.reference_experts import experts as reference

ORDERS = ["rising", "falling", "greedy"]
LIMIT = 2.5


@dataclass(frozen=True)
class Case:
    """A layer and rows routed through it."""

    blob: Blob
    ew: ExpertWeights
    x: F64
    picks: np.ndarray
    weights: F32
    device: Device
    kind: str

    def data(self, rows: slice) -> Buffer:
        x = self.x[rows].astype(np.float32)
        return self.device.upload(bf16_bits(x), "bf16") if self.kind == "bf16" else self.device.upload(x)

    def run(self, family: str, rows: slice = slice(None)) -> F32:
        picks, weights = self.picks[rows], self.weights[rows]
        R, k = picks.shape
        y = self.device.empty((R, k, self.ew.D), "f32")
        up, wp = self.device.upload(picks), self.device.upload(weights)
        experts(self.device, Workspace(self.device), family, self.ew, y, self.data(rows), up, wp, R)
        got: F32 = self.device.download(y)
        return got


def case(
    device: Device, R: int, k: int, E: int, F: int, D: int, nc: int, kind: str = "f32", limit: float = LIMIT
) -> Case:
    blob = random_blob(E, F, D, nc)
    rng = np.random.default_rng(R + 10 * k + E)
    x = rng.standard_normal((R, D)).astype(np.float32)
    values = bf16_values(bf16_bits(x)) if kind == "bf16" else x.astype(np.float64)
    picks = np.stack([rng.permutation(E)[:k] for _ in range(R)]).astype(np.int32)
    weights = rng.uniform(0.1, 1.0, (R, k)).astype(np.float32)
    return Case(blob, place_experts(device, blob, E, F, D, limit), values, picks, weights, device, kind)


def check(c: Case, got: F32, mma: bool = False) -> None:
    """Steps: 8 columns a lane and 256 a block, 5 shuffles, gain; mma: 16 columns, then a slice, hardware order."""

    def steps(width: int) -> int:
        return -(-width // 16) + 2 * 16 + 2 if mma else -(-width // 256) * 8 + 5 + 2

    want = reference(
        c.blob, c.x, c.picks, c.weights, c.ew.limit, c.kind == "bf16", steps(c.ew.D), steps(c.ew.F), UNIT
    )
    assert_within(got, want.y, want.bound)


# toys have rows of 4 and 8 codes; a plane; a ragged second block of 256 columns; a small codebook
SHAPES = [(1, 2, 7, 32, 64, 4096), (1, 3, 4, 40, 296, 8192), (1, 2, 3, 264, 48, 300)]


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("R, k, E, F, D, nc", SHAPES)
def test_one_row(device: Device, R: int, k: int, E: int, F: int, D: int, nc: int, kind: str) -> None:
    c = case(device, R, k, E, F, D, nc, kind)
    check(c, c.run("step"))


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("R, k, E, F, D, nc", [(8, 3, 5, 32, 64, 4096), (5, 2, 9, 40, 296, 8192)])
def test_some_rows(device: Device, R: int, k: int, E: int, F: int, D: int, nc: int, kind: str) -> None:
    c = case(device, R, k, E, F, D, nc, kind)
    check(c, c.run("step"))


@pytest.mark.parametrize(
    "R, k, E, F, D, nc", [(3, 2, 7, 32, 64, 4096), (150, 2, 3, 40, 72, 8192), (20, 3, 4, 264, 48, 300)]
)
def test_prefill_on_tensor_cores(device: Device, R: int, k: int, E: int, F: int, D: int, nc: int) -> None:
    c = case(device, R, k, E, F, D, nc, "bf16")
    check(c, c.run("prefill"), mma=True)


def test_prefill_in_f32(device: Device) -> None:
    c = case(device, 21, 2, 3, 32, 64, 4096)
    got = c.run("prefill")
    check(c, got)
    assert np.array_equal(c.run("step", slice(20, 21))[0], got[20])
    assert np.array_equal(c.run("prefill", slice(3, 4))[0], got[3])


@pytest.mark.parametrize("device", ORDERS, indirect=True)
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_a_row_alone_is_the_same_row_among_eight(device: Device, kind: str) -> None:
    c = case(device, 8, 2, 5, 40, 296, 8192, kind)
    together = c.run("step")
    for r in (0, 3, 7):
        assert np.array_equal(c.run("step", slice(r, r + 1))[0], together[r])
    assert np.array_equal(c.run("step", slice(2, 5)), together[2:5])


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_a_prefill_row_does_not_depend_on_its_chunk(device: Device) -> None:
    c = case(device, 140, 2, 3, 32, 72, 300, "bf16")
    whole = c.run("prefill")
    for rows in (slice(0, 1), slice(0, 67), slice(67, 140), slice(139, 140)):
        assert np.array_equal(c.run("prefill", rows), whole[rows])


def test_permuted_rows_give_permuted_results(device: Device) -> None:
    c = case(device, 30, 3, 4, 32, 64, 4096, "bf16")
    whole = c.run("prefill")
    order = np.random.default_rng(1).permutation(30)
    turned = Case(c.blob, c.ew, c.x[order], c.picks[order], c.weights[order], device, "bf16")
    assert np.array_equal(turned.run("prefill"), whole[order])


@pytest.mark.parametrize("nc", [4096, 8192])
def test_released_row_lengths(device: Device, nc: int) -> None:
    """Rows of 640 codes in gate and up, of 288 in down, with few of them: 2304 columns meet 8 rows, 5120 meet 16."""
    c = case(device, 1, 1, 1, 16, 5120, nc)
    check(c, c.run("step"))
    c = case(device, 1, 1, 1, 2304, 8, nc, "bf16")
    check(c, c.run("step"))
    check(c, c.run("prefill"), mma=True)


def test_clamps(device: Device) -> None:
    """g is clamped above only, u on both sides: rows that reach far beyond every limit."""
    c = case(device, 1, 1, 1, 32, 64, 4096, limit=0.25)
    x = c.x[0]
    g, u = (c.blob.matrices[0][m].w @ x for m in (0, 1))
    assert (g > 0.25).any() and (g < -0.25).any() and (u > 0.25).any() and (u < -0.25).any()
    check(c, c.run("step"))


@pytest.mark.parametrize("device", ORDERS, indirect=True)
def test_plan(device: Device) -> None:
    """Slots sorted by expert, then by place; items of at most `cap` slots, experts nobody picked left out."""
    rng = np.random.default_rng(3)
    picks = rng.choice([0, 2, 3, 299], 57).astype(np.int32)
    P, E, cap = len(picks), 300, 8
    order, items, count = device.empty((P,), "i32"), device.empty((4 * 57,), "i32"), device.empty((1,), "i32")
    total = device.upload(np.array([5], np.uint32))
    device.launch(EXPERTS_PLAN, order, items, count, total, device.upload(picks), P, E, cap)
    assert device.download(order).tolist() == np.argsort(picks, kind="stable").tolist()
    want, at = [], 0
    for e in range(E):
        n = int((picks == e).sum())
        want += [[e, at + i, min(cap, n - i), 0] for i in range(0, n, cap)]
        at += n
    n_items = int(device.download(count)[0])
    assert n_items == len(want) and device.download(total)[0] == 5 + n_items
    device.launch(EXPERTS_PLAN, order, items, count, None, device.upload(picks), P, E, cap)
    assert device.download(total)[0] == 5 + n_items
    assert device.download(items).reshape(-1, 4)[:n_items].tolist() == want


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_moe_sum_adds_slots_in_order_then_shared(device: Device, kind: str) -> None:
    rng = np.random.default_rng(0)
    slots = rng.standard_normal((3, 5, 40), np.float32)
    shared = rng.standard_normal((3, 40), np.float32)
    data = device.upload(bf16_bits(shared), "bf16") if kind == "bf16" else device.upload(shared)
    y = device.empty((3, 40), kind)
    moe_sum(device, y, device.upload(slots), data, 3)
    total = np.zeros((3, 40), np.float32)
    for j in range(5):
        total += slots[:, j]
    total += bf16_values(bf16_bits(shared)).astype(np.float32) if kind == "bf16" else shared
    assert np.array_equal(device.download(y), bf16_bits(total) if kind == "bf16" else total)


def test_swiglu(device: Device) -> None:
    rng = np.random.default_rng(0)
    g, u = (rng.standard_normal((2, 200)).astype(np.float32) * 9 for _ in range(2))
    h = device.empty((2, 200), "f32")
    swiglu(device, h, device.upload(g), device.upload(u), 2, 200, 7.0)
    want = clamped_swiglu(g.astype(np.float64), u.astype(np.float64), 7.0)
    assert_within(device.download(h), want, 16 * UNIT * np.abs(want))  # exp 8 units, sum, quotient, two products
    bits = [device.upload(bf16_bits(v), "bf16") for v in (g, u)]
    out = device.empty((2, 200), "bf16")
    swiglu(device, out, *bits, 2, 200, 7.0)
    exact = clamped_swiglu(*(bf16_values(bf16_bits(v)) for v in (g, u)), 7.0)
    assert_within(bf16_values(device.download(out)), exact, 2.0**-7.99 * np.abs(exact))


def test_refusals(device: Device) -> None:
    with pytest.raises(DeviceError, match="multiples of 8"):
        place_experts(device, random_blob(1, 8, 8, 300), 1, 12, 8, 1.0)
    with pytest.raises(DeviceError, match="bytes of codes"):
        place_experts(device, random_blob(1, 8, 8, 300), 1, 8, 16, 1.0)
    c = case(device, 9, 1, 2, 8, 16, 300)
    with pytest.raises(DeviceError, match="1 to 8 rows, not 9"):
        c.run("step")
