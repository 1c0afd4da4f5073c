"""A launch: what it computes, and every argument that it refuses before anything runs."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ds4.device import Device, Kernel
from ds4.device.kernels.hyper import HYPER_MIX
from ds4.device.launch import evaluate, expression, parse_argument, signature
from ds4.errors import DeviceError
from tests.device.rows import BUMP, REVERSE, SCALE, WIDEN


@pytest.fixture
def dev(device: Device) -> Device:
    return device.with_constants({"WIDTH": 5})


@pytest.mark.parametrize("device", ["greedy", "rising", "falling", "fast", "count"], indirect=True)
def test_a_launch_computes(dev: Device) -> None:
    x = np.arange(300, dtype=np.float32)
    y = dev.empty(300, "f32")
    dev.launch(SCALE, y, dev.upload(x), 300, 2.5)
    assert np.array_equal(dev.download(y), x * np.float32(2.5))


def test_a_constant_is_compiled_in(dev: Device) -> None:
    x = dev.upload(np.arange(32, dtype=np.int32))
    for device, add in ((dev, 5), (dev.with_constants({"WIDTH": 7}), 7), (dev, 5)):
        y = device.empty(32, "i32")
        device.launch(WIDEN, y, x)
        assert np.array_equal(device.download(y), np.arange(32) + add)


def test_more_than_48_kb_of_shared_memory(dev: Device) -> None:
    x = np.random.default_rng(0).standard_normal(20_000, np.float32)
    y = dev.empty(20_000, "f32")
    dev.launch(REVERSE, y, dev.upload(x), 20_000)
    assert np.array_equal(dev.download(y), x[::-1])


def test_another_view_does_not_take_shared_memory_away(dev: Device) -> None:
    """The limit belongs to the function, which two views of a device share."""
    large, small = dev.with_constants({"A": 1}), dev.with_constants({"A": 2})
    x = np.arange(20_000, dtype=np.float32)
    y = dev.empty(20_000, "f32")
    large.launch(REVERSE, y, dev.upload(x), 20_000)
    small.launch(REVERSE, y, dev.upload(x), 13_000)
    large.launch(REVERSE, y, dev.upload(x), 20_000)
    assert np.array_equal(dev.download(y), x[::-1])


def test_another_stream_after_an_event(dev: Device) -> None:
    x, y, z = dev.upload(np.ones(300, np.float32)), dev.empty(300, "f32"), dev.empty(300, "f32")
    side = dev.stream()
    dev.launch(SCALE, y, x, 300, 3.0)
    side.wait(dev.event().record())
    dev.launch(SCALE, z, y, 300, 3.0, stream=side)
    dev.main_stream.wait(dev.event().record(side))
    assert np.array_equal(dev.download(z), np.full(300, 9, np.float32))


def test_another_thread_may_take_the_device(dev: Device) -> None:
    """A server opens the device in one thread and serves from another; the context follows."""
    x = dev.upload(np.ones(300, np.float32))
    with ThreadPoolExecutor(1) as pool:

        def work() -> float:
            y = dev.empty(300, "f32")
            dev.launch(SCALE, y, x, 300, 3.0)
            with dev.capture() as graph:
                dev.launch(SCALE, y, y, 300, 2.0)
            graph.replay()
            return float(dev.download(y).sum())

        assert pool.submit(work).result() == 1800.0
    assert float(dev.download(x).sum()) == 300.0


def test_a_thread_with_the_number_of_one_that_ended(dev: Device) -> None:
    """The context is current a thread, and numbers are used again as soon as a thread has ended."""
    x, sums, numbers = dev.upload(np.ones(300, np.float32)), [], []

    def work() -> None:
        y = dev.empty(300, "f32")
        dev.launch(SCALE, y, x, 300, 3.0)
        sums.append(float(dev.download(y).sum()))
        numbers.append(threading.get_ident())

    for _ in range(4):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert sums == [900.0] * 4
    if len(set(numbers)) == 4:
        pytest.skip("this system did not use a thread's number twice")


def test_workers_move_no_bit(device: Device) -> None:
    if device.info.driver != "simt":
        pytest.skip("threads of the CPU driver")
    x = np.random.default_rng(2).standard_normal(50_000, np.float32)
    found = []
    for workers in (1, 2, 3):
        dev = Device.open(simt="fast", workers=workers).with_constants({"WIDTH": 5})
        y = dev.empty(50_000, "f32")
        dev.launch(SCALE, y, dev.upload(x), 50_000, 1.1)
        found.append(dev.download(y))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def refused(dev: Device, says: str, kernel: Kernel, *args: Any, **axes: Any) -> None:
    with pytest.raises(DeviceError, match=says):
        dev.launch(kernel, *args, **axes)


def test_refusals_name_kernel_and_argument(dev: Device) -> None:
    x, y = dev.empty(300, "f32"), dev.empty(300, "f32")
    refused(dev, r"scale takes 4 arguments \(y, x, n, a\), got 3", SCALE, y, x, 300)
    refused(dev, r"scale: x is Buffer\(i32.*expected f32", SCALE, y, dev.empty(300, "i32"), 300, 1.0)
    refused(
        dev,
        r"scale: x is Buffer\(f32\[299\].*299 elements; \[n\] needs 300",
        SCALE,
        y,
        dev.empty(299, "f32"),
        300,
        1.0,
    )
    refused(dev, r"scale: y is None, expected a Buffer", SCALE, None, x, 300, 1.0)
    refused(dev, r"scale: x is ndarray, expected a Buffer", SCALE, y, np.zeros(300, np.float32), 300, 1.0)
    refused(dev, r"scale: n is 300\.0, expected i32", SCALE, y, x, 300.0, 1.0)
    refused(dev, r"scale: a is 'two', expected f32", SCALE, y, x, 300, "two")
    refused(dev, r"scale: no argument, grid or size uses axis M", SCALE, y, x, 300, 1.0, M=2)
    refused(dev, r"scale: n is 300 as argument and 200 as axis", SCALE, y, x, 300, 1.0, n=200)
    refused(dev, r"scale: grid is \(0, 1, 1\)", SCALE, y, x, 0, 1.0)
    refused(
        dev, r"bump: at is 9223372036854775808, expected i64", BUMP, dev.zeros(1, "u32"), dev.zeros(4, "u32"), 2**63
    )


def test_a_number_of_elements_too_large_for_the_argument(dev: Device) -> None:
    """Checked against the buffer first: the driver never sees a truncated number."""
    x = dev.empty(8, "f32")
    refused(dev, r"needs 4294967304", SCALE, x, x, 2**32 + 8, 1.0)


def test_a_freed_buffer_is_refused(dev: Device) -> None:
    x, y = dev.empty(300, "f32"), dev.empty(300, "f32")
    part = x.view(0, (100,))
    x.free()
    refused(dev, r"scale: x is .*freed", SCALE, y, x, 300, 1.0)
    refused(dev, r"scale: x is .*freed", SCALE, y, part, 100, 1.0)


def test_a_missing_constant_is_named(device: Device) -> None:
    refused(device, "widen is compiled with WIDTH: give them by device.with_constants", WIDEN)


def test_a_row_that_disagrees_with_the_function(dev: Device) -> None:
    """Number and size of arguments are compared with the compiled code, once."""
    x = dev.empty(300, "f32")
    fewer = dataclasses.replace(SCALE, args=SCALE.args[:3])
    refused(
        dev,
        r"launch table has 3 arguments of \[8, 8, 4\] bytes, the function .* has 4 of \[8, 8, 4, 4\]",
        fewer,
        x,
        x,
        1,
    )
    wider = dataclasses.replace(SCALE, args=(*SCALE.args[:2], "n: i64", SCALE.args[3]))
    refused(dev, r"3 of|4 arguments of \[8, 8, 8, 4\] bytes.*\[8, 8, 4, 4\]", wider, x, x, 1, 1.0)


def test_a_kernel_that_is_not_in_its_file(dev: Device) -> None:
    refused(dev, r"probe\.cu has no kernel 'gone'", dataclasses.replace(SCALE, name="gone"))


# -- the table's grammar


def test_dimensions_bind_and_multiply() -> None:
    a = parse_argument("k", "rows: u8[R,cols,hd+hd//32,2]")
    assert a.dims == ("R", "cols", "hd+hd//32", "2")
    assert (a.fixed, a.names, a.binds, len(a.codes)) == (2, ("R", "cols"), ((0, "R"), (1, "cols")), 1)
    assert eval(a.codes[0], {"hd": 64}) == 66
    assert parse_argument("k", "w: u8[*]").fixed == 1 and parse_argument("k", "m: u32[R,*]?").optional
    assert parse_argument("k", "kv: f32[R,(S+1)*D]").dims == ("R", "(S+1)*D")


@pytest.mark.parametrize(
    "text", ["x f32[R]", "x: f32", "x: f64", "x: float[R]", "x: f32[R", "x: f32[f(R)]", "x: f32[R/2]", "n: i32?"]
)
def test_a_bad_argument_text_is_refused(text: str) -> None:
    if text == "x: f32":  # a scalar, and fine
        assert parse_argument("k", text).dims is None
        return
    with pytest.raises(DeviceError, match="k: "):
        parse_argument("k", text)


def test_an_expression_is_arithmetic_only() -> None:
    assert eval(expression("(a + 3) // 2 * b - 7 % 4"), {"a": 4, "b": 5}) == 12
    for bad in ("a.b", "a[0]", "f(a)", "a if b else c", "'x'", "1.5", "True"):
        with pytest.raises(ValueError, match="only integers"):
            expression(bad)


SHAPED = Kernel(
    name="scale",
    source=SCALE.source,
    grid=lambda R, D: (R, D, 1),
    block=128,
    args=("y: f32[R,D]", "x: f32[R,2*D]?", "n: i32", "a: f32"),
    constants=("WIDTH",),
    traffic=lambda R, D, WIDTH: (8 * R * D, 4 * R * WIDTH),
)


def test_axes_bind_from_a_shape_of_the_right_rank(dev: Device) -> None:
    y = dev.empty((3, 4), "f32")
    refused(dev, r"x is .* 23 elements; \[R,2\*D\] needs 24 \(.*R=3, D=4", SHAPED, y, dev.empty(23, "f32"), 0, 1.0)
    flat = dev.empty(12, "f32")
    refused(dev, r"y is .* cannot bind R of \[R,D\]; give R= at the launch", SHAPED, flat, None, 0, 1.0)
    refused(dev, r"y is .* needs 15 ", SHAPED, flat, None, 0, 1.0, R=3, D=5)
    dev.launch(SHAPED, flat, None, 0, 1.0, R=3, D=4)  # null where the row says "?"


def test_rows_evaluate_by_name() -> None:
    assert signature(SHAPED).known >= {"R", "D", "WIDTH", "n"}
    assert evaluate(SHAPED, "traffic", {"R": 2, "D": 3, "WIDTH": 5, "other": 1}) == (48, 40)
    assert evaluate(REVERSE, "smem", {"n": 5}) == 20 and evaluate(SCALE, "smem", {}) == 0
    with pytest.raises(DeviceError, match="scale: grid needs axis R"):
        evaluate(SHAPED, "grid", {"D": 1})


def test_launch_bounds_reach_the_driver(device: Device) -> None:
    """More threads than a kernel was compiled for: the driver refuses, not only the launch table."""
    if device.info.driver != "simt":
        pytest.skip("the CPU driver's own check")
    wide = dataclasses.replace(HYPER_MIX, block=64)
    dev = device.with_constants({"HC": 2})
    out = [dev.empty((1, 2), "f32"), dev.empty((1, 2), "f32"), dev.empty((1, 2, 2), "f32")]
    given = [dev.zeros((1, 1, 9), "f32"), dev.zeros((3,), "f32"), dev.zeros((8,), "f32")]
    with pytest.raises(DeviceError, match="64 threads"):
        dev.launch(wide, *out, *given, 1, 1, 1, 1e-20, 1e-6, R=1, S=2, P=1, M=8)
