"""Launches recorded once and replayed with one call.

A graph keeps the addresses and scalars it was recorded with; what changes between replays is read from device
memory. It holds the memory it uses, so dropping a buffer that a graph uses is harmless.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds4.device.context import Context, Stream
from ds4.device.driver import Mode
from ds4.device.memory import Allocation
from ds4.errors import DeviceError


class Graph:
    """A captured sequence of launches, copies and fills. Ready when its `with` block has ended."""

    def __init__(self, context: Context, mode: Mode) -> None:
        self.context = context
        self._mode = mode
        self.n_launches = 0
        self._executable: Any = None
        self._memory: list[Allocation] = []

    def replay(self, stream: Stream | None = None) -> None:
        """Submit all of it again.

        Raises:
            DeviceError: the capture has not ended (or failed), another one is under way, or the driver refuses.
        """
        if self._executable is None:
            raise DeviceError("replay of a graph whose capture has not ended well")
        self.context.refuse_in_capture("replay")
        self.context.driver.use(self._mode)
        where = stream or self.context.stream
        self.context.call("cuGraphLaunch", self._executable, where.handle)
        where.after_launch = False

    def _finish(self, graph: Any) -> None:
        try:
            self._executable = self.context.call("cuGraphInstantiate", graph, 0)
        finally:
            self.context.driver.api.cuGraphDestroy(graph)
        self.n_launches = self.context.captured_launches
        self._memory = list(self.context.captured.values())
        for allocation in self._memory:
            allocation.graphs += 1

    def __del__(self) -> None:
        for allocation in self._memory:
            allocation.graphs -= 1
        if self._executable is not None and not self.context.closed:
            self.context.driver.api.cuGraphExecDestroy(self._executable)


@contextmanager
def capture(context: Context, mode: Mode) -> Iterator[Graph]:
    """Record what is submitted to the main stream (and to streams that wait for it, or run beside it) inside the
    `with` block.

    Nothing runs until `replay`. An exception in the block ends the capture, drops the graph, and passes on.

    Raises:
        DeviceError: a capture is under way already, or the driver found something in it that a graph cannot hold.
    """
    context.refuse_in_capture("capture")
    context.refuse_in_branch("capture")
    local = context.driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    context.call("cuStreamBeginCapture", context.main_stream.handle, local)
    context.capturing, context.captured, context.captured_launches = True, {}, 0
    context.main_stream.after_launch = False  # the graph begins with what follows
    made = Graph(context, mode)
    try:
        yield made
    except BaseException:
        context.capturing = False
        error, graph = context.driver.api.cuStreamEndCapture(context.main_stream.handle)
        if not error and int(graph):
            context.driver.api.cuGraphDestroy(graph)
        raise
    else:
        context.capturing = False
        made._finish(context.call("cuStreamEndCapture", context.main_stream.handle))
    finally:
        context.captured = {}
        context.main_stream.after_launch = False
