"""Device memory: an `Allocation` owns bytes, a `Buffer` is a typed, shaped window into one.

Memory is given back when the last buffer on it is gone, and not before the device has passed all work submitted
until then: a dropped allocation waits in its owner's graveyard for the next synchronisation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ds4.errors import DeviceError

if TYPE_CHECKING:
    from ds4.device.context import Context

Array = NDArray[Any]

NUMPY: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32), "bf16": np.dtype(np.uint16), "f16": np.dtype(np.float16),
    "i32": np.dtype(np.int32), "u32": np.dtype(np.uint32), "i64": np.dtype(np.int64), "u64": np.dtype(np.uint64),
    "u8": np.dtype(np.uint8), "i8": np.dtype(np.int8), "u16": np.dtype(np.uint16), "f64": np.dtype(np.float64),
}  # fmt: skip
KINDS = {dtype.name: kind for kind, dtype in NUMPY.items() if kind != "bf16"} | {"bfloat16": "bf16"}


def kind_of(dtype: Any) -> str:
    """Our name of a dtype: "f32", "bf16", ... from that name or anything numpy takes (ml_dtypes' bfloat16 too).

    Raises:
        DeviceError: the device layer does not know it.
    """
    if isinstance(dtype, str) and dtype in NUMPY:
        return dtype
    try:
        return KINDS[np.dtype(dtype).name]
    except (KeyError, TypeError):
        raise DeviceError(f"dtype {dtype!r} is not one of {', '.join(NUMPY)}") from None


class Allocation:
    """Bytes of device memory. Freed by `free`, or some time after the last reference is gone."""

    __slots__ = ("__weakref__", "context", "freed", "graphs", "nbytes", "ptr")

    def __init__(self, context: Context, ptr: int, nbytes: int) -> None:
        self.context = context
        self.ptr = ptr
        self.nbytes = nbytes
        self.freed = False
        self.graphs = 0  # live captured graphs that hold this address

    def __del__(self) -> None:
        if not self.freed:
            self.freed = True
            self.context.bury(self.ptr, self.nbytes)


class Buffer:
    """A typed array in device memory.

    Attributes:
        shape: axis lengths.   size: elements.   nbytes: bytes of this view.
        dtype, kind: our name of the element type ("f32", "bf16", ...); `numpy` is the numpy dtype that holds it.
        ptr: device address of the first element.
    """

    __slots__ = ("allocation", "dtype", "kind", "nbytes", "numpy", "ptr", "shape", "size")

    def __init__(self, allocation: Allocation, offset: int, shape: tuple[int, ...], kind: str) -> None:
        self.allocation = allocation
        self.ptr = allocation.ptr + offset
        self.shape = shape
        self.kind = self.dtype = kind
        self.numpy = NUMPY[kind]
        self.size = math.prod(shape)
        self.nbytes = self.size * self.numpy.itemsize

    def __repr__(self) -> str:
        return f"Buffer({self.kind}{list(self.shape)} at {self.ptr:#x})"

    def view(self, offset_bytes: int, shape: int | tuple[int, ...], dtype: Any = None) -> Buffer:
        """A window that starts `offset_bytes` into this buffer and shares its memory.

        Raises:
            DeviceError: it reaches outside this buffer, or is not aligned to its element.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = self.kind if dtype is None else kind_of(dtype)
        start = self.ptr - self.allocation.ptr + offset_bytes
        made = Buffer(self.allocation, start, shape, kind)
        if offset_bytes < 0 or offset_bytes + made.nbytes > self.nbytes:
            end = offset_bytes + made.nbytes
            raise DeviceError(f"view of bytes {offset_bytes}..{end} reaches outside {self!r} of {self.nbytes} bytes")
        if made.ptr % made.numpy.itemsize:
            raise DeviceError(f"view at byte {offset_bytes} of {self!r} is not aligned to {kind}")
        return made

    def reshape(self, *shape: int) -> Buffer:
        """The same elements under another shape."""
        made = self.view(0, shape)
        if made.size != self.size:
            raise DeviceError(f"{self!r} has {self.size} elements, not {made.size} as {list(shape)}")
        return made

    def write(self, array: Array, offset_bytes: int = 0) -> None:
        """Copy a host array's bytes here, in stream order. The array may be changed as soon as this returns.

        Raises:
            DeviceError: it does not fit, or a graph is being captured.
        """
        self.allocation.context.write(self, array, offset_bytes)

    def free(self) -> None:
        """Give the memory back now (all views of it die with it); waits until the device has passed it.

        Raises:
            DeviceError: it is freed already, a graph is being captured, or a captured graph uses it.
        """
        self.allocation.context.free(self.allocation)
