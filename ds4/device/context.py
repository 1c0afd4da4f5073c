"""What all views of one opened device share: context, streams, memory, pending frees.

Everything is submitted to one stream unless the caller names another, or runs work beside other work (`beside`). A
device belongs to one thread at a time; moving it to another thread is fine, two threads at once are not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds4.device.driver import Driver
from ds4.device.memory import Allocation, Array, Buffer
from ds4.errors import CapacityError, DeviceError

STAGED = 1 << 20  # a larger host array is waited for instead of copied aside
GRAVEYARD = 256 << 20  # bytes of dropped memory that may wait for a synchronisation


@dataclass(frozen=True)
class DeviceInfo:
    """Facts about the device, asked once.

    Attributes:
        name: as the driver says.   driver: "nvidia" or "simt".   cc: compute capability, (12, 1).
        arch: "sm_121".   n_sm: multiprocessors.   smem_per_block: bytes, the opt-in limit.
        threads_per_block, regs_per_block: limits.   memory: bytes.   unified: it is the host's memory.
    """

    name: str
    driver: str
    cc: tuple[int, int]
    arch: str
    n_sm: int
    smem_per_block: int
    threads_per_block: int
    regs_per_block: int
    memory: int
    unified: bool


class Stream:
    """A queue of work; work on different streams is ordered only by events.

    Attributes:
        after_launch: its last work is a launch, and nothing was waited for since: the next launch may go ahead of it.
    """

    def __init__(self, context: Context) -> None:
        self.after_launch = False
        flags = context.driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.context = context
        self.handle = context.call("cuStreamCreate", flags.value)

    def wait(self, event: Event) -> None:
        """Later work of this stream waits for `event`."""
        self.context.call("cuStreamWaitEvent", self.handle, event.handle, 0)
        self.after_launch = False

    def sync(self) -> None:
        """Wait on the host for all work submitted here."""
        self.context.refuse_in_capture("stream.sync()")
        self.context.call("cuStreamSynchronize", self.handle)

    def __del__(self) -> None:
        if not self.context.closed and hasattr(self, "handle"):
            self.context.driver.api.cuStreamDestroy(self.handle)


class Event:
    """A mark in a stream; `timed`: its time is kept too."""

    def __init__(self, context: Context, timed: bool = True) -> None:
        self.context = context
        flags = context.driver.api.CUevent_flags
        self.handle = context.call(
            "cuEventCreate", (flags.CU_EVENT_DEFAULT if timed else flags.CU_EVENT_DISABLE_TIMING).value
        )

    def record(self, stream: Stream | None = None) -> Event:
        """Put the mark after the work submitted so far."""
        self.context.call("cuEventRecord", self.handle, (stream or self.context.stream).handle)
        return self

    def sync(self) -> None:
        """Wait on the host until the mark is passed."""
        self.context.refuse_in_capture("event.sync()")
        self.context.call("cuEventSynchronize", self.handle)

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds from `since` to this; both must be passed."""
        return float(self.context.call("cuEventElapsedTime", since.handle, self.handle))

    def __del__(self) -> None:
        if not self.context.closed and hasattr(self, "handle"):
            self.context.driver.api.cuEventDestroy(self.handle)


class Branch:
    """A side stream and the marks where it leaves another one and comes back."""

    def __init__(self, context: Context) -> None:
        self.stream = Stream(context)
        self.fork, self.join = Event(context, timed=False), Event(context, timed=False)


class Context:
    """The device's primary context and what lives in it.

    Attributes:
        stream: where work goes when no stream is named: `main_stream`, or the side stream of an open branch.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.closed = False
        self.capturing = False
        self.captured: dict[int, Allocation] = {}  # memory that the graph under capture uses
        self.captured_launches = 0
        self.modules: dict[object, Any] = {}
        self.allowed_smem: dict[int, int] = {}  # function -> bytes of dynamic shared memory it may take
        self._dropped: list[tuple[int, int]] = []
        self._dropped_host: list[int] = []
        self._staged: list[Array] = []
        self._bound = threading.local()  # per thread, not by its number: a new thread may get that of one that ended
        device = driver.call("cuDeviceGet", 0)
        self._context = driver.call("cuDevicePrimaryCtxRetain", device)
        self.bind_thread()
        self.info = self._ask(device)
        self.stream = self.main_stream = Stream(self)
        self._branches = [Branch(self)]  # those not in use

    def _ask(self, device: Any) -> DeviceInfo:
        names = self.driver.api.CUdevice_attribute

        def ask(what: str) -> int:
            return int(
                self.driver.call("cuDeviceGetAttribute", getattr(names, f"CU_DEVICE_ATTRIBUTE_{what}"), device)
            )

        cc = ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")
        name = self.driver.call("cuDeviceGetName", 256, device)
        return DeviceInfo(
            name=name.split(b"\0")[0].decode(),
            driver=self.driver.kind,
            cc=cc,
            arch=f"sm_{cc[0]}{cc[1]}",
            n_sm=ask("MULTIPROCESSOR_COUNT"),
            smem_per_block=ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            threads_per_block=ask("MAX_THREADS_PER_BLOCK"),
            regs_per_block=ask("MAX_REGISTERS_PER_BLOCK"),
            memory=int(self.driver.call("cuMemGetInfo")[1]),
            unified=self.driver.kind == "simt" or ask("INTEGRATED") == 1,
        )

    def bind_thread(self) -> None:
        """Make the context current in the calling thread, if it is not."""
        if not hasattr(self._bound, "yes"):
            self.driver.call("cuCtxSetCurrent", self._context)
            self._bound.yes = True

    def close(self) -> None:
        """The process ends: from here on destructors leave the driver alone."""
        self.closed = True

    def call(self, name: str, *args: Any) -> Any:
        """A driver call in this context."""
        self.bind_thread()
        return self.driver.call(name, *args)

    def refuse_in_capture(self, what: str) -> None:
        """Raise if a graph is being captured: `what` would not be part of it, or cannot be."""
        if self.capturing:
            raise DeviceError(f"{what} inside a capture: a graph holds launches, copies and fills only; do it before")

    def refuse_in_branch(self, what: str) -> None:
        """Raise if work is going to a side stream."""
        if self.stream is not self.main_stream:
            raise DeviceError(f"{what} inside work that runs beside other work: do it before or after")

    @contextlib.contextmanager
    def beside(self, work: Callable[[], None]) -> Iterator[None]:
        """See `Device.beside`."""
        outer = self.stream
        branch = self._branches.pop() if self._branches else Branch(self)
        branch.stream.wait(branch.fork.record(outer))
        try:
            self.stream = branch.stream
            try:
                work()
            finally:
                self.stream = outer
            yield
        except BaseException:
            with contextlib.suppress(DeviceError):  # what comes next must not run ahead of the branch
                outer.wait(branch.join.record(branch.stream))
            raise
        else:
            outer.wait(branch.join.record(branch.stream))
        finally:
            self._branches.append(branch)

    # -- memory

    def allocate(self, nbytes: int) -> Allocation:
        """At least one byte of memory, aligned to 256.

        Raises:
            CapacityError: the device has not enough.   DeviceError: a graph is being captured.
        """
        self.refuse_in_capture(f"allocation of {nbytes} bytes")
        if sum(n for _, n in self._dropped) > GRAVEYARD:
            self.sync()
        try:
            ptr = self.call("cuMemAlloc", max(nbytes, 1))
        except DeviceError as e:
            if "OUT_OF_MEMORY" not in str(e):
                raise
            self.sync()  # gives back what was dropped
            try:
                ptr = self.call("cuMemAlloc", max(nbytes, 1))
            except DeviceError as again:
                raise CapacityError(f"no {nbytes:,} bytes of device memory on {self.info.name}: {again}") from again
        return Allocation(self, int(ptr), nbytes)

    def bury(self, ptr: int, nbytes: int) -> None:
        """Free `ptr` at the next synchronisation. May be called by the garbage collector, in any thread."""
        if not self.closed:
            self._dropped.append((ptr, nbytes))

    def bury_host(self, ptr: int) -> None:
        """The same for page-locked host memory."""
        if not self.closed:
            self._dropped_host.append(ptr)

    def free(self, allocation: Allocation) -> None:
        """See `Buffer.free`."""
        self.refuse_in_capture("free")
        if allocation.freed:
            raise DeviceError(f"device memory at {allocation.ptr:#x} is freed twice")
        if allocation.graphs:
            raise DeviceError(
                f"device memory at {allocation.ptr:#x} is used by a captured graph: drop the graph first"
            )
        self.sync()
        allocation.freed = True
        self.call("cuMemFree", allocation.ptr)

    def sync(self) -> None:
        """Wait for all work on all streams; give back dropped memory."""
        self.refuse_in_capture("sync()")
        self.call("cuCtxSynchronize")
        self._staged.clear()
        while self._dropped:
            self.call("cuMemFree", self._dropped.pop()[0])
        while self._dropped_host:
            self.call("cuMemFreeHost", self._dropped_host.pop())

    def write(self, buffer: Buffer, array: Array, offset_bytes: int) -> None:
        """See `Buffer.write`."""
        self.refuse_in_capture("write from the host")
        self.refuse_in_branch("write from the host")
        source = np.ascontiguousarray(array)
        if offset_bytes < 0 or offset_bytes + source.nbytes > buffer.nbytes:
            end = offset_bytes + source.nbytes
            raise DeviceError(
                f"write of bytes {offset_bytes}..{end} reaches outside {buffer!r} of {buffer.nbytes} bytes"
            )
        self.refuse_freed(buffer)
        if source.nbytes == 0:
            return
        large = source.nbytes > STAGED
        if not large:  # the copy may be asynchronous: it reads an array that nobody changes
            source = source.copy() if source is array or source.base is not None else source
            self._staged.append(source)
            if len(self._staged) > 512:
                self.stream.sync()
                self._staged = [source]
        target = buffer.ptr + offset_bytes
        self.call("cuMemcpyHtoDAsync", target, source.ctypes.data, source.nbytes, self.stream.handle)
        self.stream.after_launch = False
        if large:
            self.stream.sync()

    def read(self, buffer: Buffer) -> Array:
        """The buffer's elements on the host, after all work submitted before on the main stream."""
        self.refuse_in_capture("download")
        self.refuse_in_branch("download")
        self.refuse_freed(buffer)
        array = np.empty(buffer.shape, buffer.numpy)
        if array.nbytes:
            self.call("cuMemcpyDtoHAsync", array.ctypes.data, buffer.ptr, array.nbytes, self.stream.handle)
            self.stream.after_launch = False
            self.stream.sync()
            self._staged.clear()  # copied too: they went to the same stream
        return array

    def refuse_freed(self, buffer: Buffer) -> None:
        """Raise if the buffer's memory was given back."""
        if buffer.allocation.freed:
            raise DeviceError(f"{buffer!r} was freed")
