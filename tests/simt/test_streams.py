"""Order between streams: work that nothing orders and that meets in memory is a fault, in graphs and directly; graphs
replay in every order that their edges allow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.simt.rig import Pointer, Refused, Rig, rig

ROW = 1024  # bytes that one launch of `spread` reads and writes


class Streams:
    """Two streams and a few rows of memory; `work` and `copy` go to stream 0 (main) or 1 (side)."""

    def __init__(self, r: Rig) -> None:
        self.r = r.use()
        r.function("spread")
        self.memory = r.upload(np.arange(8 * ROW // 4, dtype=np.float32))
        self.id = 0
        self.streams = [r.call("cuStreamCreate", 1) for _ in range(2)]  # they do not wait for the default stream
        r.call("cuCtxSynchronize")

    def at(self, row: float) -> int:
        return self.memory + int(row * ROW)

    def work(self, stream: int, to: float, source: float) -> None:
        self.r.launch("spread", Pointer(self.at(to)), Pointer(self.at(source)), stream=int(self.streams[stream]))

    def copy(self, stream: int, to: float, source: float) -> None:
        self.r.call("cuMemcpyDtoDAsync", self.at(to), self.at(source), ROW, self.streams[stream])

    def fill(self, stream: int, to: float) -> None:
        self.r.call("cuMemsetD8Async", self.at(to), 0, ROW, self.streams[stream])

    def order(self, first: int, then: int) -> None:
        """What `then` gets from here on comes after what `first` got."""
        event = self.r.call("cuEventCreate", 0)
        self.r.call("cuEventRecord", event, self.streams[first])
        self.r.call("cuStreamWaitEvent", self.streams[then], event, 0)

    def row(self, row: int) -> Any:
        return self.r.download(self.at(row), ROW // 4, np.float32)

    def graph(self, recorded: Callable[[Streams], None]) -> Any:
        """Forked from stream 0 before `recorded` and joined after it, so that the driver takes it."""
        mode = self.r.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.r.call("cuStreamBeginCapture", self.streams[0], mode)
        self.order(0, 1)
        recorded(self)
        self.order(1, 0)
        return self.r.call("cuGraphInstantiate", self.r.call("cuStreamEndCapture", self.streams[0]), 0)

    def replay(self, graph: Any) -> None:
        self.r.call("cuGraphLaunch", graph, self.streams[0])


def spread(parameter: int) -> str:
    return rf"spread \(parameter {parameter}\)"


# what both streams do, unordered; whose accesses the message names
MEETINGS: dict[str, tuple[Callable[[Streams], None], str]] = {
    "written, then read": (
        lambda s: (s.work(1, 1, 0), s.work(0, 2, 1)),
        rf"is written by {spread(1)} and read by {spread(2)}",
    ),
    "read, then written": (
        lambda s: (s.work(1, 2, 1), s.work(0, 1, 0)),
        rf"is read by {spread(2)} and written by {spread(1)}",
    ),
    "written twice": (
        lambda s: (s.work(1, 1, 0), s.work(0, 1, 0)),
        rf"is written by {spread(1)} and written by {spread(1)}",
    ),
    "last bytes alone": (lambda s: (s.work(1, 1, 0), s.work(0, 1 + 1020 / ROW, 3)), r"byte 2044 .* is written by"),
    "a copy reads": (lambda s: (s.work(1, 1, 0), s.copy(0, 2, 1)), rf"written by {spread(1)} and read by a copy"),
    "a copy writes": (lambda s: (s.copy(1, 1, 0), s.work(0, 2, 1)), rf"written by a copy and read by {spread(2)}"),
    "a fill": (lambda s: (s.work(1, 2, 1), s.fill(0, 1)), rf"read by {spread(2)} and written by a fill"),
    "copies": (lambda s: (s.copy(1, 1, 0), s.copy(0, 1.5, 3)), r"byte 1536 .* by a copy and written by a copy"),
    "not the next one": (
        lambda s: (s.work(1, 1, 0), s.work(1, 2, 1), s.work(0, 4, 3), s.work(0, 5, 4), s.work(0, 2, 3)),
        "written by",
    ),
    "ordered the other way": (lambda s: (s.work(1, 1, 0), s.order(0, 1), s.work(0, 2, 1)), "written by"),
    "ordered too early": (
        lambda s: (s.work(1, 4, 3), s.order(1, 0), s.work(1, 1, 0), s.work(0, 2, 1)),
        "written by",
    ),
}  # fmt: skip

FINE: dict[str, Callable[[Streams], None]] = {
    "ordered": lambda s: (s.work(1, 1, 0), s.order(1, 0), s.work(0, 2, 1)),
    "both read": lambda s: (s.work(1, 1, 0), s.work(0, 2, 0)),
    "neighbours": lambda s: (s.work(1, 1, 0), s.work(0, 2, 3), s.copy(1, 4, 0), s.fill(0, 5)),
    "bytes that interleave": lambda s: (s.copy(1, 1, 0), s.copy(0, 2, 0), s.work(1, 4, 1), s.work(0, 5, 2)),
    "ordered through others": lambda s: (s.work(1, 1, 0), s.work(1, 4, 3), s.order(1, 0), s.work(0, 2, 1)),
}


@pytest.fixture
def streams() -> Streams:
    return Streams(rig("check"))


@pytest.mark.parametrize("name", MEETINGS)
def test_unordered_nodes_of_a_graph_that_meet_are_a_fault(streams: Streams, name: str) -> None:
    recorded, words = MEETINGS[name]
    graph = streams.graph(recorded)
    with pytest.raises(Refused, match=words) as caught:
        streams.replay(graph)
    assert caught.value.code == "LAUNCH_FAILED" and "race between streams: byte" in caught.value.text
    with pytest.raises(Refused, match=words):
        streams.replay(graph)  # and again: nothing was forgotten, nothing is stuck


@pytest.mark.parametrize("name", MEETINGS)
def test_unordered_launches_that_meet_are_a_fault(streams: Streams, name: str) -> None:
    recorded, words = MEETINGS[name]
    with pytest.raises(Refused, match=words) as caught:
        recorded(streams)
    assert caught.value.code == "LAUNCH_FAILED"
    streams.r.call("cuCtxSynchronize")
    streams.work(0, 2, 1)  # the host has waited for everything


@pytest.mark.parametrize("name", FINE)
def test_order_and_distance_are_no_fault(streams: Streams, name: str) -> None:
    FINE[name](streams)
    streams.r.call("cuCtxSynchronize")
    graph = streams.graph(FINE[name])
    for _ in range(2):
        streams.replay(graph)


def test_the_message_says_byte_and_allocation(streams: Streams) -> None:
    with pytest.raises(Refused, match=r"race between streams: byte 1024 of allocation #\d+ is written by spread"):
        streams.work(1, 1, 0)
        streams.work(0, 2, 1)


def test_graphs_are_ordered_like_launches(streams: Streams) -> None:
    """A replay is work of its stream: it meets direct work of another one, and other replays."""
    graph = streams.graph(lambda s: (s.work(1, 1, 0), s.work(0, 4, 3)))
    streams.replay(graph)
    with pytest.raises(Refused, match=rf"written by {spread(1)} and read by {spread(2)}"):
        streams.work(1, 2, 1)
    streams.order(0, 1)
    streams.work(1, 2, 1)
    with pytest.raises(Refused, match=rf"read by {spread(2)} and written by {spread(1)}"):
        streams.replay(graph)


@pytest.mark.parametrize("wait", ["stream", "event", "context", "query"])
def test_what_the_host_waited_for_comes_before_all_later_work(streams: Streams, wait: str) -> None:
    r = streams.r
    streams.work(1, 1, 0)
    event = r.call("cuEventCreate", 0)
    r.call("cuEventRecord", event, streams.streams[1])
    match wait:
        case "stream":
            r.call("cuStreamSynchronize", streams.streams[1])
        case "event":
            r.call("cuEventSynchronize", event)
        case "context":
            r.call("cuCtxSynchronize")
        case "query":
            r.call("cuStreamQuery", streams.streams[1])
    streams.work(0, 2, 1)


def test_an_event_covers_what_came_before_it_only(streams: Streams) -> None:
    r = streams.r
    event = r.call("cuEventCreate", 0)
    r.call("cuEventRecord", event, streams.streams[1])
    streams.work(1, 1, 0)
    r.call("cuEventSynchronize", event)
    with pytest.raises(Refused, match="race between streams"):
        streams.work(0, 2, 1)


def test_the_default_stream_and_blocking_ones_wait_for_each_other(streams: Streams) -> None:
    r = streams.r
    blocking = r.call("cuStreamCreate", 0)
    streams.streams[1] = blocking
    streams.work(1, 1, 0)
    r.launch("spread", Pointer(streams.at(2)), Pointer(streams.at(1)))  # the default stream
    streams.work(1, 3, 2)
    with pytest.raises(Refused, match="race between streams"):
        streams.work(0, 4, 3)  # stream 0 does not wait for either


def test_the_fast_build_looks_at_nothing() -> None:
    streams = Streams(rig("fast"))
    streams.work(1, 1, 0)
    streams.work(0, 2, 1)
    streams.replay(streams.graph(lambda s: (s.work(1, 1, 0), s.work(0, 2, 1))))


def replayed(name: str) -> list[float]:
    """Branches of three: side writes 1..3 into row 1, main rows 5..7 times the same; what row 1 held when the whole
    was over, and what the race of both for row 2 left.
    """
    r = rig("fast").use()
    streams = Streams(r)

    def recorded(s: Streams) -> None:
        s.copy(1, 1, 5)
        s.copy(1, 1, 6)
        s.copy(1, 1, 7)
        s.copy(0, 2, 1)
        s.copy(0, 3, 1)
        s.copy(0, 4, 1)

    graph = streams.graph(recorded)
    simt = r.simt
    try:
        assert simt.ds4simt_set_replay(name.encode()) == 0
        streams.replay(graph)
    finally:
        simt.ds4simt_set_replay(b"recorded")
    return [float(streams.row(row)[0]) / (ROW // 4) for row in (2, 3, 4)]


def test_replay_orders_are_all_those_named() -> None:
    """Rows 1, 5, 6 and 7 begin with 1, 5, 6, 7 rows' worth of floats: which one main saw tells when it ran."""
    assert replayed("recorded") == [7, 7, 7]  # the side branch first
    assert replayed("falling") == [1, 1, 1]  # the side branch last
    assert replayed("turns") == [5, 6, 7]  # one of each in turn


def test_a_replay_order_that_is_none_is_refused() -> None:
    simt = rig("fast").simt
    simt.ds4simt_set_replay.argtypes = [ctypes.c_char_p]
    assert simt.ds4simt_set_replay(b"backwards") != 0
    assert "replay order 'backwards' is not recorded, falling or turns" in simt.ds4simt_last_error_text().decode()
