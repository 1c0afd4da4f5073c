"""Buffers: types, views, lifetimes, and what they refuse."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest

from ds4.device import Device
from ds4.device.memory import kind_of
from ds4.errors import DeviceError


@pytest.mark.parametrize("dtype", ["f4", "f2", "i4", "u4", "i8", "u8", "u1", "i1", "u2", "f8"])
def test_a_round_trip_keeps_dtype_shape_and_bytes(device: Device, dtype: str) -> None:
    array = np.random.default_rng(1).integers(0, 100, (3, 5)).astype(dtype)
    buffer = device.upload(array)
    back = device.download(buffer)
    assert back.dtype == array.dtype and buffer.shape == (3, 5) and np.array_equal(back, array)


def test_bf16_is_named_and_held_as_bits(device: Device) -> None:
    bits = np.array([0x3F80, 0xFF80], np.uint16)
    assert device.upload(bits).kind == "u16"
    buffer = device.upload(bits, "bf16")
    assert buffer.kind == buffer.dtype == "bf16" and buffer.size == 2 and buffer.nbytes == 4
    assert np.array_equal(device.download(buffer), bits)
    typed = device.upload(np.array([1.0], ml_dtypes.bfloat16))
    assert typed.kind == "bf16" and device.download(typed)[0] == 0x3F80


def test_unknown_dtypes_are_refused(device: Device) -> None:
    assert kind_of("f32") == kind_of(np.float32) == kind_of(np.dtype("<f4")) == "f32"
    for bad in ("f128", np.complex64, object, "bool"):
        with pytest.raises(DeviceError, match="is not one of"):
            kind_of(bad)
    with pytest.raises(DeviceError, match="element sizes differ"):
        device.upload(np.zeros(4, np.float32), "bf16")


def test_fresh_memory_is_nan_in_the_check_build(device: Device) -> None:
    if device.variant != "check":
        pytest.skip("only the check build poisons")
    assert np.isnan(device.download(device.empty(64, "f32"))).all()
    assert (device.download(device.empty(64, "u8")) == 0xFF).all()
    assert not device.download(device.zeros(64, "f32")).any()


def test_a_view_shares_memory(device: Device) -> None:
    buffer = device.upload(np.arange(12, dtype=np.float32))
    part = buffer.view(16, (2, 3))
    assert np.array_equal(device.download(part), [[4, 5, 6], [7, 8, 9]])
    part.view(4, (1,)).write(np.array([50], np.float32))
    assert device.download(buffer)[5] == 50
    assert np.array_equal(device.download(buffer.view(0, 4, "u32")), np.arange(4, dtype=np.float32).view(np.uint32))
    assert buffer.reshape(3, 4).shape == (3, 4)


def test_a_view_stays_inside_its_buffer_and_aligned(device: Device) -> None:
    buffer = device.empty(12, "f32").view(8, (4,))
    for offset, shape in ((0, (5,)), (4, (4,)), (-4, (1,))):
        with pytest.raises(DeviceError, match="reaches outside"):
            buffer.view(offset, shape)
    with pytest.raises(DeviceError, match="not aligned"):
        buffer.view(2, (1,))
    with pytest.raises(DeviceError, match="4 elements, not 3"):
        buffer.reshape(3, 1)


def test_copies_and_fills(device: Device) -> None:
    a, b = device.upload(np.arange(8, dtype=np.uint8)), device.zeros(8, "u8")
    device.copy(b, a, 3, dst_offset=4, src_offset=2)
    assert device.download(b).tolist() == [0, 0, 0, 0, 2, 3, 4, 0]
    device.copy(b, a)
    device.fill(b.view(2, (2,)), 9)
    assert device.download(b).tolist() == [0, 1, 9, 9, 4, 5, 6, 7]
    for bad in ({"nbytes": 9}, {"dst_offset": 1}, {"nbytes": 1, "src_offset": 8}, {"nbytes": -1}):
        with pytest.raises(DeviceError, match="reaches outside"):
            device.copy(b, a, **bad)
    with pytest.raises(DeviceError, match=r"a byte is 0\.\.255"):
        device.fill(b, 256)


def test_a_write_goes_where_it_says_and_fits(device: Device) -> None:
    b = device.zeros(4, "i32")
    b.write(np.array([7, 8], np.int32), offset_bytes=8)
    assert device.download(b).tolist() == [0, 0, 7, 8]
    b.write(np.arange(8, dtype=np.int32)[::2])  # not contiguous
    assert device.download(b).tolist() == [0, 2, 4, 6]
    with pytest.raises(DeviceError, match="reaches outside"):
        b.write(np.zeros(2, np.int32), offset_bytes=12)


def test_the_host_array_may_change_after_a_write(device: Device) -> None:
    source = np.ones(1000, np.float32)
    buffer = device.upload(source)
    source[:] = 2
    assert (device.download(buffer) == 1).all()


def test_free(device: Device) -> None:
    buffer = device.empty(4, "f32")
    part = buffer.view(0, (2,))
    buffer.free()
    for use in (buffer.free, lambda: device.download(part), lambda: part.write(np.zeros(1, np.float32))):
        with pytest.raises(DeviceError, match="freed"):
            use()
    with pytest.raises(DeviceError, match="freed"):
        device.fill(part, 0)


def test_dropped_memory_comes_back_at_a_sync(device: Device) -> None:
    device.sync()
    buffer = device.empty(1 << 20, "u8")
    ptr, part = buffer.ptr, buffer.view(0, (1,))
    del buffer
    gc.collect()
    assert ptr not in [p for p, _ in device.context._dropped]  # the view holds it
    del part
    gc.collect()
    assert ptr in [p for p, _ in device.context._dropped]  # waits: a kernel may still read it
    device.sync()
    assert device.context._dropped == []


def test_empty_buffers_are_buffers(device: Device) -> None:
    buffer = device.zeros((0, 4), "f32")
    assert device.download(buffer).shape == (0, 4)
    buffer.write(np.zeros(0, np.float32))
    with pytest.raises(DeviceError, match="cannot have shape"):
        device.empty((-1,), "f32")
