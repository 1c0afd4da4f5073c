"""`Device.beside`: two branches of work, direct and captured; what a missing order between them is called."""

from __future__ import annotations

import numpy as np
import pytest

from ds4.device import Buffer, Device
from ds4.engine.scratch import Workspace
from ds4.errors import DeviceError
from tests.device.rows import BUMP, REVERSE, SCALE

N = 200


@pytest.fixture
def dev(device: Device) -> Device:
    dev = device.with_constants({"WIDTH": 5})
    x, n, o = dev.zeros(4, "f32"), dev.zeros(1, "u32"), dev.zeros(1, "u32")
    dev.launch(SCALE, x, x, 4, 2.0)
    dev.launch(REVERSE, dev.empty(4, "f32"), x, 4)
    dev.launch(BUMP, n, o, 0)
    return dev


class Branches:
    """y = 2 x; beside each other a = 3 y and b = reversed y; then z = 5 a, with b copied over its first half."""

    def __init__(self, dev: Device) -> None:
        self.dev = dev
        self.x = dev.upload(np.arange(N, dtype=np.float32))
        self.y, self.a, self.b, self.z = (dev.empty(N, "f32") for _ in range(4))

    def run(self) -> None:
        dev = self.dev
        dev.launch(SCALE, self.y, self.x, N, 2.0)
        with dev.beside(lambda: dev.launch(SCALE, self.a, self.y, N, 3.0)):
            dev.launch(REVERSE, self.b, self.y, N)
        dev.launch(SCALE, self.z, self.a, N, 5.0)
        dev.copy(self.z, self.b, 2 * N)

    def expected(self) -> np.ndarray:
        x = np.arange(N, dtype=np.float32)
        return np.concatenate([2 * x[::-1][: N // 2], 30 * x[N // 2 :]])


REPLAYS = ["recorded", "falling", "turns"]


@pytest.mark.parametrize("replay", REPLAYS)
def test_branches_equal_one_stream(dev: Device, replay: str) -> None:
    other = Device.open(simt="check", order="greedy", workers=1, replay=replay).with_constants({"WIDTH": 5})
    work = Branches(other)
    work.run()
    assert np.array_equal(other.download(work.z), work.expected())
    other.fill(work.z, 0)
    with other.capture() as graph:
        work.run()
    assert not other.download(work.z).any() and graph.n_launches == 4
    for _ in range(2):
        graph.replay()
        assert np.array_equal(other.download(work.z), work.expected())


def test_branches_nest(dev: Device) -> None:
    x, (a, b, c, d) = dev.upload(np.ones(N, np.float32)), (dev.empty(N, "f32") for _ in range(4))

    def inner() -> None:
        with dev.beside(lambda: dev.launch(SCALE, a, x, N, 2.0)):
            dev.launch(SCALE, b, x, N, 3.0)
        dev.launch(SCALE, c, a, N, 5.0)

    def both() -> None:
        with dev.beside(inner):
            dev.launch(SCALE, d, x, N, 7.0)
        dev.launch(SCALE, x, c, N, 1.0)
        dev.launch(SCALE, x, b, N, 1.0)

    both()
    assert (dev.download(c) == 10).all() and (dev.download(d) == 7).all() and (dev.download(x) == 3).all()
    with dev.capture() as graph:
        both()
    graph.replay()
    assert (dev.download(c) == 30).all() and (dev.download(d) == 21).all()


@pytest.mark.parametrize("captured", [False, True], ids=["direct", "captured"])
def test_branches_that_share_scratch_are_reported(dev: Device, captured: bool) -> None:
    """Both ask the workspace for the same name: the one kernel that overwrites the other's value is named."""
    if dev.info.driver != "simt":
        pytest.skip("the CPU driver's check build looks for it")
    ws = Workspace(dev)
    x, y = dev.upload(np.ones(N, np.float32)), dev.empty(N, "f32")
    ws.get("t", (N,), "f32")

    def branch(factor: float) -> None:
        t = ws.get("t", (N,), "f32")
        dev.launch(SCALE, t, x, N, factor)
        dev.launch(SCALE, y if factor == 2 else dev_z, t, N, 1.0)

    dev_z: Buffer = dev.empty(N, "f32")
    words = r"race between streams: byte 0 of allocation #\d+ is (written|read) by scale \(parameter [12]\) and"
    if not captured:
        with pytest.raises(DeviceError, match=words), dev.beside(lambda: branch(2)):
            branch(3)
    else:
        with dev.capture() as graph, dev.beside(lambda: branch(2)):
            branch(3)
        with pytest.raises(DeviceError, match=words):
            graph.replay()
    branch(2)  # the streams have joined again
    assert (dev.download(y) == 2).all()


def test_a_missing_join_is_reported(dev: Device) -> None:
    if dev.info.driver != "simt":
        pytest.skip("the CPU driver's check build looks for it")
    x, y, z = dev.upload(np.ones(N, np.float32)), dev.empty(N, "f32"), dev.empty(N, "f32")
    with (
        pytest.raises(DeviceError, match=r"written by scale \(parameter 1\) and read by scale \(parameter 2\)"),
        dev.beside(lambda: dev.launch(SCALE, y, x, N, 2.0)),
    ):
        dev.launch(SCALE, z, y, N, 2.0)  # wants what the branch makes
    dev.launch(SCALE, z, y, N, 2.0)
    assert (dev.download(z) == 4).all()


@pytest.mark.parametrize("where", ["branch", "block"])
@pytest.mark.parametrize("captured", [False, True], ids=["direct", "captured"])
def test_an_error_in_either_branch_passes_on_and_leaves_one_stream(dev: Device, where: str, captured: bool) -> None:
    work = Branches(dev)

    def fail() -> None:
        dev.launch(SCALE, work.y, work.x, N, 2.0)
        raise ValueError("mine")

    def nothing() -> None:
        dev.launch(SCALE, work.a, work.x, N, 2.0)

    def both() -> None:
        with dev.beside(fail if where == "branch" else nothing):
            fail() if where == "block" else nothing()

    with pytest.raises(ValueError, match="mine"):
        if captured:
            with dev.capture():
                both()
        else:
            both()
    assert not dev.capturing and dev.context.stream is dev.main_stream
    work.run()
    assert np.array_equal(dev.download(work.z), work.expected())


def test_the_host_stays_out_of_a_branch(dev: Device) -> None:
    """Reads and writes of the host go to the main stream, so inside a branch they would not be ordered with it."""
    x = dev.zeros(4, "f32")
    for refused in (
        lambda: dev.download(x),
        lambda: x.write(np.zeros(4, np.float32)),
        lambda: dev.capture().__enter__(),
    ):
        with pytest.raises(DeviceError, match="inside work that runs beside other work"), dev.beside(refused):
            pass
    assert dev.download(x).tolist() == [0] * 4


def test_what_replays_in_an_order_that_is_none_is_refused() -> None:
    with pytest.raises(DeviceError, match="replay is 'backwards'; expected one of recorded, falling, turns"):
        Device.open(replay="backwards")
