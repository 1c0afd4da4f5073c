"""The launch table: one frozen row a kernel. A kernel that is not in it does not exist.

Rows stand in one module a family (`ds4.device.kernels.norm` for `norm.cu`), as module-level constants;
`all_kernels` walks the package, so a family needs no registration. A row is data: what the launch checks,
how grid and shared memory follow from the axes, and what the documentation prints.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from ds4.errors import DeviceError

Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel: where its source is and how it is launched.

    A callable (`grid`, `smem`, `traffic`) names the axes it wants as its parameters: axes given at the launch or
    bound from a buffer's shape, integer scalar arguments by their names, and the device's constants; `**_` takes
    the rest.

    Attributes:
        name: the symbol, an `extern "C" __global__` function of `source`.
        source: file name inside `cuda/`.
        grid: axes -> blocks (x, y, z).
        block: threads a block.
        args: one text an argument, in order. "y: f32[R,D]" is a pointer to at least R * D elements; a dimension
            is an integer expression, or `*` for any length. A plain name that was not given at the launch is
            bound by its first occurrence, from the shape of the buffer. A trailing "?" allows None (null).
            "width: i32", "eps: f32" are scalars.
        smem: bytes of dynamic shared memory, or axes -> bytes.
        weights: names of pointer arguments that hold weights: written when the model is placed, and by no launch of a
            pass. A kernel that has any is *launched ahead* on compute capability 9.0 and later: it may start while
            the launch before it in its stream still runs, asks for weights, and then waits. So before its
            `grid_wait()` it reads these arguments and no others, writes no global memory, and every thread passes
            the wait on every path: a kernel that did not wait would let the next one run ahead of the one before
            it. `grid_release()` comes after the wait, `gld_nc` reads these arguments only. The check build holds a
            kernel to all of it.
        constants: model-wide sizes the file needs, each compiled in as -DNAME=value.
        defines: more "NAME=VALUE" texts; rows with different defines are different modules.
        traffic: axes -> (bytes read, bytes written) of device memory: the formula of the header's *Traffic*.
        released: the axes of a launch at the released model's shapes, for the table in docs/kernels.md.
        in_flight: bytes that one block keeps in flight while it streams.
        reason: why so few blocks or bytes in flight; required under 48 blocks or 4 KB a multiprocessor.
    """

    name: str
    source: str
    grid: Callable[..., Grid]
    block: int
    args: tuple[str, ...]
    smem: int | Callable[..., int] = 0
    weights: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()
    traffic: Callable[..., tuple[int, int]] | None = None
    released: dict[str, int] | None = None
    in_flight: int = 0
    reason: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.source, self.defines))


@functools.cache
def all_kernels() -> tuple[Kernel, ...]:
    """Every row of every family, sorted by source and name.

    Raises:
        DeviceError: two different rows share a name.
    """
    rows: dict[str, Kernel] = {}
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        family = importlib.import_module(module.name)
        for value in vars(family).values():
            found = value if isinstance(value, (list, tuple)) else [value]
            found = list(value.values()) if isinstance(value, dict) else found
            for row in found:
                if not isinstance(row, Kernel):
                    continue
                if rows.setdefault(row.name, row) is not row:
                    raise DeviceError(f"launch table: two rows are named {row.name!r}; a kernel's name is unique")
    return tuple(sorted(rows.values(), key=lambda row: (row.source, row.name)))


def for_file(source: str) -> tuple[Kernel, ...]:
    """The rows whose source is `source`."""
    return tuple(row for row in all_kernels() if row.source == source)
