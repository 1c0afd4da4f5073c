"""Every temporary of a forward pass, by name: grown before capture, never inside one.

A workspace owns one buffer a name. `get` returns a view of the wanted shape; when the buffer is too small it is
replaced by a larger one (twice as large at least), which is refused while a graph is being captured: a captured
launch keeps the address it was recorded with. Graphs recorded before a growth must therefore be thrown away;
`generation` rises with every growth so that their owner can tell.

A name is one piece of memory: of two branches of work that run beside each other (`Device.beside`) neither may write
scratch that the other names. The check build reports it where they do.
"""

from __future__ import annotations

import math

from ds4.device import Buffer, Device
from ds4.errors import DeviceError


class Workspace:
    """Named scratch buffers on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.generation = 0
        self.passes = 0  # begun by anyone who works in this scratch: what one pass left here, the next writes over
        self._buffers: dict[tuple[str, str], Buffer] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
        """A buffer of `shape` and `dtype`; contents are whatever the last user left.

        Raises:
            DeviceError: it would have to grow while a graph is being captured.
        """
        count = math.prod(shape)
        held = self._buffers.get((name, dtype))
        if held is None or held.size < count:
            if self.device.capturing:
                raise DeviceError(
                    f"scratch {name!r} must grow to {count} elements inside a capture: run once directly"
                )
            self._buffers[(name, dtype)] = held = self.device.empty(
                (max(count, 2 * (held.size if held else 0)),), dtype
            )
            self.generation += 1
        return held.view(0, shape, dtype)

    def part(self, index: int) -> Workspace:
        """The same workspace under names of its own, for one of several sequences that run beside each other."""
        return _Part(self, index) if index else self

    def nbytes(self) -> int:
        """Bytes held by all scratch buffers."""
        return sum(b.nbytes for b in self._buffers.values())


class _Part(Workspace):
    """Scratch of another workspace, by other names."""

    def __init__(self, whole: Workspace, index: int) -> None:
        self._whole, self._suffix = whole, f"_{index}"

    def get(self, name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
        return self._whole.get(name + self._suffix, shape, dtype)
