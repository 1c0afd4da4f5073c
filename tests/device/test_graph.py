"""Capture and replay: direct = captured = replayed, bit for bit; what a capture refuses."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest

from ds4.device import Device
from ds4.errors import DeviceError
from tests.device.rows import BUMP, REVERSE, SCALE

_numbers = itertools.count()  # constants that no view of the shared device has yet


@pytest.fixture
def dev(device: Device) -> Device:
    """A device that has run every kernel of these tests once: a capture cannot load one."""
    dev = device.with_constants({"WIDTH": 5})
    x, y, n, o = dev.zeros(4, "f32"), dev.empty(4, "f32"), dev.zeros(1, "u32"), dev.zeros(1, "u32")
    dev.launch(SCALE, y, x, 4, 2.0)
    dev.launch(REVERSE, y, x, 4)
    dev.launch(BUMP, n, o, 0)
    return dev


@pytest.mark.parametrize("device", ["greedy", "fast", "count"], indirect=True)
def test_direct_equals_replay_bit_for_bit(dev: Device) -> None:
    rng = np.random.default_rng(3)
    x = dev.upload(rng.standard_normal(500, np.float32))
    y, z, w = (dev.empty(500, "f32") for _ in range(3))

    def work() -> None:
        dev.launch(SCALE, y, x, 500, 1.7)
        dev.launch(REVERSE, z, y, 500)
        dev.copy(w, z)
        dev.fill(w.view(0, (3,)), 0)
        dev.launch(SCALE, y, w, 500, 0.3)

    work()
    direct = dev.download(y), dev.download(w)
    dev.fill(y, 0xFF)
    dev.fill(w, 0xFF)
    with dev.capture() as graph:
        work()
    assert np.isnan(dev.download(w)).all()  # nothing ran
    graph.replay()
    assert np.array_equal(dev.download(y), direct[0]) and np.array_equal(dev.download(w), direct[1])
    assert graph.n_launches == 3
    x.write(np.asarray(dev.download(x)[::-1]))  # a replay reads what is there now
    graph.replay()
    assert not np.array_equal(dev.download(y), direct[0])


def test_a_replay_is_the_work_again(dev: Device) -> None:
    n, o = dev.zeros(1, "u32"), dev.zeros(3, "u32")
    with dev.capture() as graph:
        for i in range(3):
            dev.launch(BUMP, n, o, i)
    for round in range(3):
        graph.replay()
        assert dev.download(o).tolist() == [3 * round + 1, 3 * round + 2, 3 * round + 3]


def test_a_side_stream_joins_the_capture(dev: Device) -> None:
    x, y, z = dev.upload(np.ones(200, np.float32)), dev.empty(200, "f32"), dev.empty(200, "f32")
    side = dev.stream()
    with dev.capture() as graph:
        dev.launch(SCALE, y, x, 200, 2.0)
        side.wait(dev.event().record())
        dev.launch(SCALE, z, y, 200, 2.0, stream=side)
        dev.main_stream.wait(dev.event().record(side))
        dev.launch(SCALE, x, z, 200, 2.0)
    graph.replay()
    assert (dev.download(x) == 8).all() and graph.n_launches == 3


def test_scalars_are_those_of_the_capture(dev: Device) -> None:
    """The driver copies arguments when a launch is recorded; later launches of that kernel do not reach them."""
    x, y = dev.upload(np.ones(4, np.float32)), dev.empty(4, "f32")
    with dev.capture() as graph:
        dev.launch(SCALE, y, x, 4, 2.0)
    dev.launch(SCALE, y, x, 4, 5.0)
    graph.replay()
    assert (dev.download(y) == 2).all()


def test_what_a_graph_cannot_hold_is_refused(dev: Device) -> None:
    x = dev.empty(4, "f32")
    with pytest.raises(DeviceError, match="nothing"), dev.capture() as graph:
        for refused in (
            lambda: dev.empty(4, "f32"),
            lambda: dev.zeros(4, "f32"),
            lambda: dev.upload(np.zeros(4)),
            lambda: dev.download(x),
            lambda: x.write(np.zeros(4, np.float32)),
            lambda: x.free(),
            dev.sync,
            dev.main_stream.sync,
            lambda: graph.replay(),
            lambda: dev.capture().__enter__(),
        ):
            with pytest.raises(DeviceError, match=r"inside a capture|has not ended"):
                refused()
        raise DeviceError("nothing")
    assert not dev.capturing
    assert dev.download(dev.zeros(2, "f32")).tolist() == [0, 0]  # the device works on


def test_a_capture_loads_no_kernel(dev: Device) -> None:
    """Not even of a file that is loaded: a driver may load functions one by one, at their first launch."""
    fresh = dev.with_constants({"WIDTH": 5, "OTHER": next(_numbers)})
    n, o = dev.zeros(1, "u32"), dev.zeros(1, "u32")
    with pytest.raises(DeviceError, match="first launch of bump inside a capture"), fresh.capture():
        fresh.launch(BUMP, n, o, 0)
    assert not fresh.capturing
    fresh.launch(BUMP, n, o, 0)
    with fresh.capture() as graph:
        fresh.launch(BUMP, n, o, 0)
    graph.replay()
    assert dev.download(n).tolist() == [2]


def test_the_driver_itself_refuses_an_allocation_in_capture(dev: Device) -> None:
    if dev.info.driver != "simt":
        pytest.skip("the CPU driver is the strict one")
    api = dev.context.driver.api
    with pytest.raises(DeviceError, match="captur"), dev.capture():
        error, _ = api.cuMemAlloc(64)
        assert error
        raise dev.context.driver.failed("cuMemAlloc", error)
    assert not dev.capturing


def test_an_exception_in_the_block_ends_the_capture(dev: Device) -> None:
    x, y = dev.upload(np.ones(4, np.float32)), dev.zeros(4, "f32")
    with pytest.raises(ValueError, match="mine"), dev.capture() as graph:
        dev.launch(SCALE, y, x, 4, 2.0)
        raise ValueError("mine")
    assert not dev.capturing
    with pytest.raises(DeviceError, match="has not ended well"):
        graph.replay()
    dev.launch(SCALE, y, x, 4, 3.0)
    assert (dev.download(y) == 3).all()


def test_a_graph_holds_its_memory(dev: Device) -> None:
    x, y = dev.upload(np.ones(4, np.float32)), dev.empty(4, "f32")
    with dev.capture() as graph:
        dev.launch(SCALE, y, x, 4, 2.0)
    with pytest.raises(DeviceError, match="drop the graph first"):
        x.free()
    kept = [dev.empty(4, "f32") for _ in range(8)]
    del x
    gc.collect()
    dev.sync()
    kept += [dev.empty(4, "f32") for _ in range(8)]  # would land on x's address if it had been given back
    graph.replay()
    assert (dev.download(y) == 2).all()
    del graph
    gc.collect()
    y.free()
