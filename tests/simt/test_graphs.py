"""Streams, events, captures and replays of the CPU driver, and what a capture forbids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.simt.rig import Pointer, Refused, Rig, rig


@pytest.fixture
def fast() -> Rig:
    return rig("fast").use()


class Chain:
    """y = x + 1 over 256 floats, recorded as often as wanted."""

    def __init__(self, r: Rig) -> None:
        self.r = r
        r.function("spread")  # loading a module is not for captures
        self.x = np.arange(256, dtype=np.float32)
        self.a, self.b = r.upload(self.x), r.alloc(1024)
        self.streams = [r.call("cuStreamCreate", 0) for _ in range(2)]
        self.events = [r.call("cuEventCreate", 0) for _ in range(2)]

    def add(self, to: int, source: int, stream: Any) -> None:
        self.r.launch("spread", Pointer(to), Pointer(source), stream=int(stream))

    def begin(self, stream: Any) -> None:
        mode = self.r.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.r.call("cuStreamBeginCapture", stream, mode)

    def end(self, stream: Any) -> Any:
        return self.r.call("cuStreamEndCapture", stream)

    def values(self, pointer: int) -> Any:
        return self.r.download(pointer, 256, np.float32)


@pytest.fixture
def chain(fast: Rig) -> Iterator[Chain]:
    made = Chain(fast)
    yield made
    for stream in made.streams:  # a failed test must not leave its capture to the next
        with contextlib.suppress(Refused):
            made.end(stream)


def test_capture_runs_nothing_and_replay_runs_it_all(chain: Chain) -> None:
    r, s = chain.r, chain.streams[0]
    r.call("cuMemsetD8", chain.b, 0, 1024)
    chain.begin(s)
    assert int(r.call("cuStreamIsCapturing", s)) == 1
    chain.add(chain.b, chain.a, s)
    chain.add(chain.a, chain.b, s)
    r.call("cuMemcpyDtoDAsync", chain.b, chain.a, 512, s)
    graph = chain.end(s)
    assert int(r.call("cuStreamIsCapturing", s)) == 0
    assert not chain.values(chain.b).any()
    assert r.call("cuGraphGetNodes", graph)[1] == 3
    runnable = r.call("cuGraphInstantiate", graph, 0)
    r.call("cuGraphDestroy", graph)
    for _ in range(3):
        r.call("cuGraphLaunch", runnable, s)
    assert np.array_equal(chain.values(chain.a), chain.x + 6)
    assert np.array_equal(chain.values(chain.b)[:128], chain.x[:128] + 6)
    assert np.array_equal(chain.values(chain.b)[128:], chain.x[128:] + 5)
    r.call("cuGraphExecDestroy", runnable)
    with pytest.raises(Refused, match="a destroyed executable graph"):
        r.call("cuGraphLaunch", runnable, s)


def test_another_stream_joins_and_is_joined(chain: Chain) -> None:
    r, (s, side), (fork, join) = chain.r, chain.streams, chain.events
    chain.begin(s)
    chain.add(chain.b, chain.a, s)
    r.call("cuEventRecord", fork, s)
    r.call("cuStreamWaitEvent", side, fork, 0)
    chain.add(chain.a, chain.b, side)
    r.call("cuEventRecord", join, side)
    r.call("cuStreamWaitEvent", s, join, 0)
    chain.add(chain.b, chain.a, s)
    graph = chain.end(s)
    assert r.call("cuGraphGetNodes", graph)[1] == 3
    assert r.call("cuGraphGetEdges", graph)[3] == 2 + 1  # the last comes after both
    r.call("cuGraphLaunch", r.call("cuGraphInstantiate", graph, 0), s)
    assert np.array_equal(chain.values(chain.b), chain.x + 3)


def test_a_side_stream_left_behind(chain: Chain) -> None:
    r, (s, side), (fork, _) = chain.r, chain.streams, chain.events
    chain.begin(s)
    r.call("cuEventRecord", fork, s)
    r.call("cuStreamWaitEvent", side, fork, 0)
    chain.add(chain.b, chain.a, side)
    with pytest.raises(Refused, match="STREAM_CAPTURE_UNJOINED"):
        chain.end(s)
    chain.add(chain.b, chain.a, side)  # both streams are themselves again
    assert np.array_equal(chain.values(chain.b), chain.x + 1)


FORBIDDEN: dict[str, tuple[Callable[[Chain], Any], str]] = {
    "allocation": (lambda c: c.r.alloc(64), "STREAM_CAPTURE_UNSUPPORTED: an allocation"),
    "free": (lambda c: c.r.free(c.b), "STREAM_CAPTURE_UNSUPPORTED: cuMemFree"),
    "synchronous copy": (lambda c: c.values(c.a), "STREAM_CAPTURE_UNSUPPORTED: a synchronous copy"),
    "synchronous fill": (lambda c: c.r.call("cuMemsetD8", c.a, 0, 4), "a synchronous fill"),
    "context sync": (lambda c: c.r.call("cuCtxSynchronize"), "cuCtxSynchronize while"),
    "stream sync": (lambda c: c.r.call("cuStreamSynchronize", c.streams[0]), "on a stream that is being captured"),
    "stream query": (lambda c: c.r.call("cuStreamQuery", c.streams[0]), "on a stream that is being captured"),
    "default stream": (lambda c: c.add(c.b, c.a, 0), "STREAM_CAPTURE_IMPLICIT"),
    "capture again": (lambda c: c.begin(c.streams[0]), "on a stream that is being captured"),
    "module": (
        lambda c: c.r.call("cuModuleUnload", c.r.call("cuFuncGetModule", c.r.function("spread"))),
        "unloading",
    ),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_capture_forbids(chain: Chain, name: str) -> None:
    call, word = FORBIDDEN[name]
    s = chain.streams[0]
    chain.add(chain.b, chain.a, s)  # the kernel is loaded
    chain.begin(s)
    with pytest.raises(Refused) as caught:
        call(chain)
    assert word in str(caught.value)
    with pytest.raises(Refused, match="STREAM_CAPTURE_INVALIDATED"):
        chain.add(chain.b, chain.a, s)
    with pytest.raises(Refused, match="STREAM_CAPTURE_INVALIDATED"):
        chain.end(s)
    chain.add(chain.b, chain.a, s)


def test_events_of_a_capture(chain: Chain) -> None:
    r, (s, side), (e, _) = chain.r, chain.streams, chain.events
    chain.begin(s)
    r.call("cuEventRecord", e, s)
    with pytest.raises(Refused, match="CAPTURED_EVENT"):
        r.call("cuEventSynchronize", e)
    with pytest.raises(Refused, match="STREAM_CAPTURE_INVALIDATED"):
        chain.end(s)
    with pytest.raises(Refused, match="capture that has ended"):
        r.call("cuStreamWaitEvent", side, e, 0)
    r.call("cuEventRecord", e, s)
    chain.begin(s)
    with pytest.raises(Refused, match="STREAM_CAPTURE_ISOLATION"):
        r.call("cuStreamWaitEvent", s, e, 0)
    with pytest.raises(Refused, match="STREAM_CAPTURE_INVALIDATED"):
        chain.end(s)


def test_ending_what_was_not_begun(chain: Chain) -> None:
    s, side = chain.streams
    with pytest.raises(Refused, match="STREAM_CAPTURE_UNMATCHED"):
        chain.end(s)
    with pytest.raises(Refused, match="default stream cannot be captured"):
        chain.begin(0)
    chain.begin(s)
    chain.r.call("cuEventRecord", chain.events[0], s)
    chain.r.call("cuStreamWaitEvent", side, chain.events[0], 0)
    with pytest.raises(Refused, match="began in another stream"):
        chain.end(side)
    with pytest.raises(Refused, match="STREAM_CAPTURE_INVALIDATED"):
        chain.end(s)


def test_a_replay_notices_freed_memory(chain: Chain) -> None:
    r, s = chain.r, chain.streams[0]
    chain.begin(s)
    chain.add(chain.b, chain.a, s)
    runnable = r.call("cuGraphInstantiate", chain.end(s), 0)
    r.call("cuGraphLaunch", runnable, s)
    r.free(chain.a)
    with pytest.raises(Refused, match=r"spread: parameter 2 \(of 2\) points to .* 1024 bytes, which was freed"):
        r.call("cuGraphLaunch", runnable, s)


def test_a_fault_inside_a_replay(chain: Chain) -> None:
    r = rig("check").use()
    s, p = chain.streams[0], Pointer(r.alloc(1024))
    function = r.function("skip_barrier")
    chain.begin(s)
    r.launch(function, p, stream=int(s))
    runnable = r.call("cuGraphInstantiate", chain.end(s), 0)
    with pytest.raises(Refused, match=r"LAUNCH_FAILED: skip_barrier: divergent barrier"):
        r.call("cuGraphLaunch", runnable, s)


def test_times_between_events(chain: Chain) -> None:
    r, (a, b) = chain.r, chain.events
    with pytest.raises(Refused, match="was not recorded"):
        r.call("cuEventElapsedTime", a, b)
    r.call("cuEventRecord", a, 0)
    chain.add(chain.b, chain.a, 0)
    r.call("cuEventRecord", b, 0)
    r.call("cuEventSynchronize", b)
    assert r.call("cuEventElapsedTime", a, b) >= 0
