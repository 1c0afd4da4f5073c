"""What the driver below refuses, as the client reports it: limits of the profile, stale and foreign memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from ds4.device import Buffer, Device, Kernel
from ds4.device.memory import Allocation
from ds4.errors import CapacityError, DeviceError
from tests.device.rows import REVERSE, SCALE


@pytest.fixture
def dev(device: Device) -> Device:
    if device.info.driver != "simt":
        pytest.skip("NVIDIA's driver has its own limits, and no mercy for stale pointers")
    return device.with_constants({"WIDTH": 5})


def at(dev: Device, ptr: int) -> Buffer:
    """A buffer of 64 floats at any address, as a bug above would make it."""
    allocation = Allocation(dev.context, ptr, 256)
    return Buffer(allocation, 0, (64,), "f32")


def forget(buffer: Buffer) -> None:
    buffer.allocation.freed = True  # nothing to give back


OVER: dict[str, tuple[Kernel, dict[str, Any], str]] = {
    "threads": (SCALE, {"block": 2048}, r"launch of scale: .*2048"),
    "grid": (SCALE, {"grid": lambda n: (1, 70_000, 1)}, r"launch of scale: .*70000"),
    "shared memory": (
        REVERSE,
        {"smem": 100 * 1024},
        r"reverse asks for 102400 bytes of shared memory, a block may have 101376",
    ),
}


@pytest.mark.parametrize("what", OVER)
def test_a_launch_over_the_profile_is_refused(dev: Device, what: str) -> None:
    row, changes, says = OVER[what]
    x = dev.zeros(4, "f32")
    args = (x, x, 4, 1.0)[: len(row.args)]
    with pytest.raises(DeviceError, match=says):
        dev.launch(dataclasses.replace(row, **changes), *args)
    dev.launch(SCALE, x, x, 4, 1.0)  # the device works on


def test_a_larger_gpu_allows_what_the_default_refuses(dev: Device) -> None:
    x = np.arange(30_000, dtype=np.float32)  # 120 KB of shared memory
    large = Device.open(simt="check", workers=1, profile="h100").with_constants({"WIDTH": 5})
    y = large.empty(30_000, "f32")
    large.launch(REVERSE, y, large.upload(x), 30_000)
    assert np.array_equal(large.download(y), x[::-1])
    with pytest.raises(DeviceError, match="reverse"):
        dev.launch(REVERSE, y, y, 30_000)


@pytest.mark.parametrize("build", ["fast", "check"])
def test_a_dangling_pointer_is_refused(dev: Device, build: str) -> None:
    device = Device.open(simt=build, workers=1).with_constants({"WIDTH": 5})
    y, gone = device.empty(64, "f32"), device.empty(64, "f32")
    gone.free()  # and nothing allocated since: the address is nobody's
    stale = at(device, gone.ptr)
    with pytest.raises(DeviceError, match="launch of scale"):
        device.launch(SCALE, y, stale, 64, 1.0)
    with pytest.raises(DeviceError, match="cuMemcpyDtoH"):
        device.download(stale)
    forget(stale)


def test_a_foreign_pointer_is_refused(dev: Device) -> None:
    host = np.zeros(64, np.float32)
    foreign = at(dev, host.ctypes.data)
    with pytest.raises(DeviceError, match="launch of scale"):
        dev.launch(SCALE, dev.empty(64, "f32"), foreign, 64, 1.0)
    with pytest.raises(DeviceError):
        dev.copy(dev.empty(64, "f32"), foreign)
    forget(foreign)


def test_more_memory_than_there_is(dev: Device) -> None:
    with pytest.raises(CapacityError, match=r"no 1,125,899,906,842,624 bytes of device memory"):
        dev.empty(1 << 50, "u8")


def test_a_kernels_fault_is_the_launchs_error(dev: Device) -> None:
    """Out of bounds, as the CPU driver words it: kernel, place, and which buffer."""
    short = dataclasses.replace(SCALE, args=("y: f32[*]", *SCALE.args[1:]))
    x, y = dev.zeros(300, "f32"), dev.zeros(299, "f32")
    with pytest.raises(DeviceError, match=r"launch of scale: .*scale"):
        dev.launch(short, y, x, 300, 1.0)
    with dev.capture() as graph:
        dev.launch(short, y, x, 300, 1.0)
    with pytest.raises(DeviceError, match=r"cuGraphLaunch: .*scale"):
        graph.replay()
    dev.launch(short, y, x, 299, 1.0)  # the device works on


def test_counters(dev: Device) -> None:
    """Launches in every build; bytes and sectors in the count build, by formula."""
    count = Device.open(simt="count", workers=1).with_constants({"WIDTH": 5})
    x, y = count.zeros(256, "f32"), count.empty(256, "f32")
    count.reset_counters()
    for _ in range(3):
        count.launch(SCALE, y, x, 256, 2.0)
    found = count.counters()
    assert found["launches"] == 3 and found["kernels"]["scale"]["launches"] == 3
    args = found["kernels"]["scale"]["args"]
    for index, way in (("0", "store"), ("1", "load")):  # y, then x: 256 floats a launch, whole sectors
        assert args[index][way]["bytes"] == args[index][way]["sector_bytes"] == 3 * 256 * 4
    count.reset_counters()
    assert count.counters()["launches"] == 0
