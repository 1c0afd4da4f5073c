"""A device on paper: memory is counted and never taken, launches and graphs are recorded and never run.

What the engine places, grows and keeps is decided by its own code; run on this device it says how much that will be,
before anything is loaded and without a second formula for it. Everything that is read back is zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from ds4.device.build import Builder
from ds4.device.client import Device
from ds4.device.context import GRAVEYARD, Branch, Context, DeviceInfo, Stream
from ds4.device.driver import Driver, Mode
from ds4.device.kernels import Kernel
from ds4.device.memory import Allocation, Array, Buffer
from ds4.errors import DeviceError

ALIGNED = 256  # addresses, as a driver's


class _Nothing:
    """Every entry of a driver that does nothing: a value of 0, a call that succeeds."""

    value = 0

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any) -> tuple[int]:
        return (0,)


class _PaperDriver:
    """A `Driver` without a library."""

    kind = "paper"
    simt = None

    def __init__(self) -> None:
        self.api = _Nothing()

    def use(self, mode: Mode) -> None:
        """There is nothing to set."""

    def set_weights(self, function: Any, mask: int) -> None:
        """No launch goes ahead of another."""


class PaperContext(Context):
    """Counts what a context would hold.

    Attributes:
        held: bytes allocated and not given back, dropped ones that wait for a synchronisation too.   peak: its most.
    """

    def __init__(self, info: DeviceInfo) -> None:
        self.driver = cast("Driver", _PaperDriver())
        self.info = info
        self.closed = self.capturing = False
        self.captured: dict[int, Allocation] = {}
        self.captured_launches = 0
        self.modules: dict[object, Any] = {}
        self.allowed_smem: dict[int, int] = {}
        self._dropped: list[tuple[int, int]] = []
        self._dropped_host: list[int] = []
        self._staged: list[Array] = []
        self._bound = threading.local()
        self._host: dict[int, Any] = {}
        self._next = ALIGNED
        self.held = self.peak = 0
        self.stream = self.main_stream = Stream(self)
        self._branches: list[Branch] = []

    def bind_thread(self) -> None:
        """No thread is special."""

    def call(self, name: str, *args: Any) -> Any:
        """Success; page-locked host memory is real, because the host reads it."""
        if name == "cuMemAllocHost":
            memory = (ctypes.c_uint8 * args[0])()
            self._host[ctypes.addressof(memory)] = memory
            return ctypes.addressof(memory)
        return 0

    @contextlib.contextmanager
    def beside(self, work: Callable[[], None]) -> Iterator[None]:
        """One after the other."""
        work()
        yield

    def allocate(self, nbytes: int) -> Allocation:
        """Counted; there is always room."""
        self.refuse_in_capture(f"allocation of {nbytes} bytes")
        if sum(n for _, n in self._dropped) > GRAVEYARD:
            self.sync()
        ptr = self._next
        self._next += -(-max(nbytes, 1) // ALIGNED) * ALIGNED
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        return Allocation(self, ptr, nbytes)

    def free(self, allocation: Allocation) -> None:
        """See `Buffer.free`."""
        if allocation.freed:
            raise DeviceError(f"device memory at {allocation.ptr:#x} is freed twice")
        allocation.freed = True
        self.held -= allocation.nbytes

    def sync(self) -> None:
        """What was dropped counts no more."""
        self.held -= sum(n for _, n in self._dropped)
        self._dropped.clear()
        self._dropped_host.clear()

    def write(self, buffer: Buffer, array: Array, offset_bytes: int) -> None:
        """Checked as a write is, and not done."""
        self.refuse_freed(buffer)
        if offset_bytes < 0 or offset_bytes + array.nbytes > buffer.nbytes:
            raise DeviceError(f"write of {array.nbytes} bytes at {offset_bytes} reaches outside {buffer!r}")

    def read(self, buffer: Buffer) -> Array:
        """Zeros."""
        return np.zeros(buffer.shape, buffer.numpy)


class PaperDevice(Device):
    """`Device` over a `PaperContext`; `info` is that of the device it stands for."""

    context: PaperContext

    def __init__(
        self, info: DeviceInfo, constants: Mapping[str, int] | None = None, context: PaperContext | None = None
    ) -> None:
        self.context = PaperContext(info) if context is None else context
        self.builder = cast("Builder", None)  # nothing is built
        self.variant, self.mode, self.info = "gpu", Mode(), info
        self.constants = MappingProxyType(dict(constants or {}))

    def with_constants(self, constants: Mapping[str, int]) -> PaperDevice:
        """The same memory; sizes are compiled into nothing."""
        return PaperDevice(self.info, {**self.constants, **constants}, self.context)

    def launch(self, kernel: Kernel, *args: Any, stream: Stream | None = None, **axes: int) -> None:
        """Nothing runs; a graph under capture keeps the memory that it would keep."""
        context = self.context
        if context.capturing:
            context.captured_launches += 1
            context.captured |= {b.allocation.ptr: b.allocation for b in args if isinstance(b, Buffer)}
