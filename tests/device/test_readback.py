"""Words come back while the device goes on; wrong use is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ds4.device import Device, Readback
from ds4.errors import DeviceError


def test_words_are_those_of_the_moment_they_were_submitted(device: Device) -> None:
    buffer = device.upload(np.arange(12, dtype=np.int32))
    back = Readback(device, 40)
    back.submit(buffer.view(8, (5,), "i32"))
    buffer.write(np.zeros(12, np.int32))  # behind the copy
    assert back.wait().view(np.int32).tolist() == [2, 3, 4, 5, 6]
    back.submit(buffer.view(0, (1,), "i32"))
    first = back.wait()
    back.submit(buffer.view(0, (1,), "i32"))
    back.wait()[:] = 255
    assert first.tolist() == [0] * 4  # a copy


def test_host_memory_is_given_back_at_the_next_synchronisation(device: Device) -> None:
    """A destructor may run in any thread and inside a capture, where the driver must be left alone."""
    freed = []
    context = device.context
    device.sync()
    back = Readback(device, 64)
    pointer = back._pointer
    with device.capture():
        del back
    assert context._dropped_host == [pointer]
    real, context.call = context.call, lambda name, *args: (freed.append(name), real(name, *args))[1]  # type: ignore[method-assign]
    try:
        device.sync()
    finally:
        del context.call
    assert "cuMemFreeHost" in freed and not context._dropped_host


def test_wrong_use_is_refused(device: Device) -> None:
    buffer, back = device.zeros((12,), "i32"), Readback(device, 40)
    with pytest.raises(DeviceError, match="nothing was submitted"):
        back.wait()
    with pytest.raises(DeviceError, match="48 bytes, there is room for 40"):
        back.submit(buffer)
    with device.capture(), pytest.raises(DeviceError, match="inside a capture"):
        back.submit(buffer.view(0, (1,), "i32"))
    freed = device.zeros((2,), "i32")
    freed.free()
    with pytest.raises(DeviceError, match="was freed"):
        back.submit(freed)
