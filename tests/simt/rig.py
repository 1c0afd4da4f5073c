"""The CPU driver without the client's own checks: raw driver calls, probe kernels, errors as (code, text)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.device import Device
from ds4.device.build import Unit

HERE = Path(__file__).resolve().parent
ORDERS = ("greedy", "rising", "falling")
Array = NDArray[Any]

ctypes_of = {int: ctypes.c_int, float: ctypes.c_float}


class Refused(Exception):
    """A driver call that failed: `code` without its prefix, and the driver's own text."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class Rig:
    """Raw calls in one build of the probes and one thread order."""

    def __init__(self, variant: str, order: str = "greedy", workers: int = 1) -> None:
        self.variant = variant
        self.device = Device.open(driver="simt", simt=variant, order=order, workers=workers)
        self.order = order
        self.workers = workers
        self.api: Any = self.device.context.driver.api
        self.simt: Any = self.device.context.driver.simt

    def use(self) -> Rig:
        """Make the process's driver run in this rig's order."""
        self.device.context.driver.use(self.device.mode)
        return self

    def call(self, name: str, *args: Any) -> Any:
        error, *values = getattr(self.api, name)(*args)
        if int(error):
            raise Refused(error.name.removeprefix("CUDA_ERROR_"), self.simt.ds4simt_last_error_text().decode())
        return None if not values else values[0] if len(values) == 1 else tuple(values)

    @functools.cache  # noqa: B019  rigs live as long as the session
    def function(self, name: str, source: str = "probe.cu", limits: str = "") -> Any:
        path = self.device.builder.host(Unit(str(HERE / source)), self.variant)
        image = f"ds4-simt-image 1\npath={path}\n{limits}".encode() + b"\0"
        return self.call("cuModuleGetFunction", self.call("cuModuleLoadData", image), name.encode())

    def alloc(self, nbytes: int) -> int:
        return int(self.call("cuMemAlloc", nbytes))

    def free(self, pointer: int) -> None:
        self.call("cuMemFree", pointer)

    def upload(self, array: Array) -> int:
        pointer = self.alloc(array.nbytes)
        self.call("cuMemcpyHtoD", pointer, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        return pointer

    def download(self, pointer: int, shape: Sequence[int] | int, dtype: Any) -> Array:
        out = np.empty(shape, dtype)
        self.call("cuMemcpyDtoH", out.ctypes.data, pointer, out.nbytes)
        return out

    def launch(
        self,
        function: Any,
        *args: Any,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (256, 1, 1),
        smem: int = 0,
        stream: int = 0,
    ) -> None:
        """Pointers as Pointer, other ints as i32, floats as f32."""
        self.use()
        if isinstance(function, str):
            function = self.function(function)
        kinds = tuple(ctypes.c_void_p if isinstance(a, Pointer) else ctypes_of[type(a)] for a in args)
        values = tuple(a.address if isinstance(a, Pointer) else a for a in args)
        self.call("cuLaunchKernel", function, *grid, *block, smem, stream, (values, kinds), 0)


class Pointer:
    """Marks a device address among a launch's arguments."""

    def __init__(self, address: int) -> None:
        self.address = int(address)


@functools.cache
def rig(variant: str, order: str = "greedy", workers: int = 1) -> Rig:
    return Rig(variant, order, workers)
