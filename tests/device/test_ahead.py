"""Launches ahead: which ones go, and what the check build says about a kernel that does not keep to the rules."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4.device import Buffer, Device, Kernel
from ds4.device.kernels import all_kernels
from ds4.device.launch import weights_mask
from ds4.errors import DeviceError
from tests.device.rows import SCALE

N = 100  # two blocks, the second one not full
AHEAD = Kernel(
    name="ahead",
    source=str(Path(__file__).with_name("ahead.cu")),
    grid=lambda n: (-(-n // 64), 1, 1),
    block=64,
    args=("y: f32[n]", "w: f32[n]", "x: f32[n]", "n: i32", "kind: i32"),
    weights=("w",),
)
_numbers = itertools.count()  # constants that no view of the shared device has yet


def only_simt(dev: Device) -> None:
    if dev.info.driver != "simt":
        pytest.skip("the CPU driver's check build looks for it")


class Product:
    """y = w x, z = 2 y, u = w z: the second and third launch of `run` follow a launch."""

    def __init__(self, dev: Device) -> None:
        self.dev = dev
        rng = np.random.default_rng(4)
        self.a, self.b = rng.standard_normal((2, N), np.float32)
        self.w, self.x = dev.upload(self.a), dev.upload(self.b)
        self.y, self.z, self.u = (dev.empty(N, "f32") for _ in range(3))
        dev.launch(AHEAD, self.y, self.w, self.x, N, 0)
        dev.launch(SCALE, self.z, self.y, N, 2.0)
        dev.sync()

    def ahead(self, y: Buffer, x: Buffer, kind: int = 0, w: Buffer | None = None) -> None:
        self.dev.launch(AHEAD, y, w or self.w, x, N, kind)

    def run(self) -> None:
        self.ahead(self.y, self.x)
        self.dev.launch(SCALE, self.z, self.y, N, 2.0)
        self.ahead(self.u, self.z)

    def expected(self) -> np.ndarray:
        return self.a * (np.float32(2) * (self.a * self.b))


@pytest.fixture
def dev(device: Device) -> Device:
    return device.with_constants({"WIDTH": 5})


@pytest.fixture
def gone(dev: Device, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many launches went ahead since the last call."""
    api, seen = dev.context.driver.api, [0]
    launch = api.cuLaunchKernelEx

    def counting(config: Any, *rest: Any) -> Any:
        (attribute,) = config.attrs
        assert int(attribute.value.programmaticStreamSerializationAllowed) == 1
        seen[0] += 1
        return launch(config, *rest)

    def since() -> int:
        count, seen[0] = seen[0], 0
        return count

    monkeypatch.setattr(api, "cuLaunchKernelEx", counting)
    return since


@pytest.mark.parametrize("device", ["greedy", "rising", "falling", "fast", "count"], indirect=True)
def test_a_launch_that_follows_a_launch_goes_ahead(dev: Device, gone: Callable[[], int]) -> None:
    p = Product(dev)
    gone()
    dev.fill(p.u, 0)
    p.run()
    assert gone() == 1  # of two: the first follows a fill
    assert np.array_equal(dev.download(p.u), p.expected())
    dev.fill(p.u, 0)
    with dev.capture() as graph:
        p.run()
    assert gone() == 1  # the first begins the graph
    for _ in range(2):
        graph.replay()
        assert np.array_equal(dev.download(p.u), p.expected())


def test_nothing_else_goes_ahead(dev: Device, gone: Callable[[], int]) -> None:
    """Not after a copy, a write, a replay or a wait for another stream; a mark alone is no work."""
    p = Product(dev)
    with dev.capture() as graph:
        dev.launch(SCALE, p.z, p.x, N, 2.0)
    side, event = dev.stream(), dev.event()
    before: list[tuple[Callable[[], Any], int]] = [
        (lambda: None, 1),
        (lambda: event.record(), 1),
        (lambda: dev.copy(p.z, p.y), 0),
        (lambda: dev.fill(p.z, 0), 0),
        (lambda: p.z.write(p.b), 0),
        (lambda: dev.download(p.z), 0),
        (graph.replay, 0),
        (lambda: dev.main_stream.wait(event.record(side)), 0),
        (lambda: dev.launch(SCALE, p.z, p.x, N, 2.0, stream=side), 1),  # another stream's work is none of ours
    ]
    for between, wanted in before:
        dev.sync()
        dev.launch(SCALE, p.z, p.x, N, 2.0)
        dev.sync()
        between()
        gone()
        p.ahead(p.y, p.x)
        assert gone() == wanted
        dev.sync()
    with dev.beside(lambda: p.ahead(p.y, p.x)):  # the first of a branch has waited, the block beside it has not
        p.ahead(p.z, p.x)
    assert gone() == 1
    p.ahead(p.u, p.x)  # after the join
    assert gone() == 0


@pytest.mark.parametrize(("cc", "count"), [((8, 9), 0), ((9, 0), 1), ((12, 1), 1)])
def test_it_is_off_before_sm_90(
    device: Device, gone: Callable[[], int], monkeypatch: pytest.MonkeyPatch, cc: tuple[int, int], count: int
) -> None:
    monkeypatch.setattr(device.context, "info", dataclasses.replace(device.context.info, cc=cc))
    p = Product(device.with_constants({"WIDTH": 5, "OTHER": next(_numbers)}))
    gone()
    device.sync()
    p.run()
    assert gone() == count + (cc >= (9, 0))  # the launch before `run` counts as one
    assert np.array_equal(device.download(p.u), p.expected())


FAULTS = {
    1: r"byte \d+ of allocation #\d+ \(parameter 3\) is read before grid_wait\(\), and the launch table does not "
    r"name it among the weights, at ahead\.cu:\d+",
    2: r"byte \d+ of allocation #\d+ \(parameter 1\) is written before grid_wait\(\), at ahead\.cu:\d+",
    3: r"a thread returns without its grid_wait\(\), in a kernel that may be launched ahead, block \(0,0,0\), thread",
    4: r"grid_release\(\) before grid_wait\(\).*, at ahead\.cu:\d+",
    5: r"gld_nc of parameter 3, which the launch table does not name among the weights.*, at ahead\.cu:\d+",
    6: r"a thread returns without its grid_wait\(\), .* block \(1,0,0\), thread",
    7: r"byte \d+ of allocation #\d+ \(parameter 3\) is read before grid_wait\(\)",
}


@pytest.mark.parametrize("device", ["greedy", "rising", "falling"], indirect=True)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_kernel_that_breaks_the_rules_is_reported(dev: Device, kind: int) -> None:
    only_simt(dev)
    p = Product(dev)
    with pytest.raises(DeviceError, match=f"ahead: {FAULTS[kind]}"):
        p.ahead(p.y, p.x, kind)  # plainly launched: the rules hold for the kernel, not for the place it stands in
    dev.launch(SCALE, p.z, p.y, N, 2.0)
    with pytest.raises(DeviceError, match=f"ahead: {FAULTS[kind]}"):
        p.ahead(p.y, p.x, kind)
    with dev.capture() as graph:
        dev.launch(SCALE, p.z, p.y, N, 2.0)
        p.ahead(p.y, p.x, kind)
    with pytest.raises(DeviceError, match=f"ahead: {FAULTS[kind]}"):
        graph.replay()
    p.run()
    assert np.array_equal(dev.download(p.u), p.expected())


OVERTAKES = (
    r"ahead reads byte 0 of allocation #\d+ \(parameter 2\) before its grid_wait\(\), and the launch before it "
    r"writes it: scale \(parameter 1\)"
)


def test_weights_that_the_launch_before_writes_are_reported(dev: Device) -> None:
    only_simt(dev)
    p = Product(dev)
    dev.launch(SCALE, p.w, p.x, N, 1.0)
    with pytest.raises(DeviceError, match=OVERTAKES):
        p.ahead(p.y, p.x)
    with dev.capture() as graph:
        dev.launch(SCALE, p.w, p.x, N, 1.0)
        p.ahead(p.y, p.x)
    with pytest.raises(DeviceError, match=OVERTAKES):
        graph.replay()


def test_weights_that_an_earlier_launch_wrote_are_fine(dev: Device) -> None:
    """As at placement: every launch but the last one has ended when the next one starts, however many go ahead."""
    p = Product(dev)
    dev.launch(SCALE, p.w, p.x, N, 1.0)
    dev.launch(SCALE, p.z, p.x, N, 1.0)
    p.ahead(p.y, p.x)
    p.w.write(p.a)
    p.ahead(p.u, p.x)
    assert np.array_equal(dev.download(p.y), p.b * p.b) and np.array_equal(dev.download(p.u), p.a * p.b)


def test_weights_are_pointers_to_const(device: Device) -> None:
    only_simt(device)
    fresh = device.with_constants({"OTHER": next(_numbers)})
    buffers = [fresh.zeros(N, "f32") for _ in range(3)]
    for names, words in (
        (("y",), "ahead: parameter 1 cannot hold weights: it is no pointer to const"),
        (("n",), "ahead: weights names 'n', which is no pointer argument"),
        (("v",), "ahead: weights names 'v', which is no pointer argument"),
    ):
        with pytest.raises(DeviceError, match=words):
            fresh.launch(dataclasses.replace(AHEAD, weights=names), *buffers, N, 0)
    fresh.launch(AHEAD, *buffers, N, 0)


def test_every_kernel_of_a_step_with_weights_goes_ahead() -> None:
    rows = [row for row in all_kernels() if row.weights]
    for row in rows:
        assert weights_mask(row) > 0
    names = {row.name.removesuffix("_one").removesuffix("_rows") for row in rows}
    assert names >= {
        "linear_step_q8_0_bf16_bf16", "experts_gate_up_bf16", "experts_down_bf16", "hyper_dots", "hyper_mix",
        "hyper_collapse_bf16", "rms_norm_bf16_bf16", "engram_gate", "route", "window_kv_bf16_fp4",
        "compress_pool_bf16", "index_keys_fp4", "draft_confidence",
    }  # fmt: skip
