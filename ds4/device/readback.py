"""Words that come back from the device while it goes on: page-locked memory, and an event behind the copy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ds4.device.context import Event
from ds4.device.memory import Buffer
from ds4.errors import DeviceError

if TYPE_CHECKING:
    from ds4.device.client import Device


class Readback:
    """Room for `nbytes` bytes on the host. `submit` queues a copy, `wait` waits for it and for nothing after it."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._context = device.context
        self._context.refuse_in_capture("allocation of host memory")
        self._pointer = int(self._context.call("cuMemAllocHost", max(nbytes, 1)))
        memory = (ctypes.c_uint8 * nbytes).from_address(self._pointer)
        self._bytes: NDArray[np.uint8] = np.ctypeslib.as_array(memory)
        self._done = Event(self._context)
        self._count = 0

    def submit(self, buffer: Buffer) -> None:
        """Queue a copy of the buffer on the main stream.

        Raises:
            DeviceError: it is longer than there is room for, or a graph is being captured.
        """
        self._context.refuse_in_capture("download")
        self._context.refuse_freed(buffer)
        if not 0 < buffer.nbytes <= self._bytes.nbytes:
            raise DeviceError(f"{buffer!r} has {buffer.nbytes} bytes, there is room for {self._bytes.nbytes}")
        self._count = buffer.nbytes
        self._context.call(
            "cuMemcpyDtoHAsync", self._pointer, buffer.ptr, buffer.nbytes, self._context.stream.handle
        )  # fmt: skip
        self._context.stream.after_launch = False
        self._done.record()

    def wait(self) -> NDArray[np.uint8]:
        """The bytes of the last `submit`, a copy.

        Raises:
            DeviceError: nothing was submitted since the last wait.
        """
        if not self._count:
            raise DeviceError("a readback that nothing was submitted to")
        self._done.sync()
        count, self._count = self._count, 0
        return self._bytes[:count].copy()

    def __del__(self) -> None:
        if hasattr(self, "_pointer"):
            self._context.bury_host(self._pointer)
