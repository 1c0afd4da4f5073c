"""A device that writes down its launches: which row of the launch table, at which axes, what was counted.

Works on any device; counted bytes exist on the CPU driver's count build only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ds4.device import Buffer, Device, Kernel
from ds4.device.launch import evaluate, required_parameters, signature


@dataclass(frozen=True)
class Seen:
    """One launch.

    Attributes:
        axes: every name that the row's callables may ask for: given, bound from shapes, scalars, constants.
        counted: the kernel's counters of this launch alone; {} unless the device counts.
        sizes: bytes of each argument's buffer, 0 for a scalar.
    """

    kernel: Kernel
    axes: dict[str, int]
    counted: dict[str, Any]
    sizes: tuple[int, ...] = ()

    @property
    def formula(self) -> tuple[int, int] | None:
        """(bytes read, bytes written) by the row's `traffic`; None without one, or without an axis that it asks for
        and only the data tells.
        """
        if self.kernel.traffic is None or not required_parameters(self.kernel.traffic) <= self.axes.keys():
            return None
        read, written = evaluate(self.kernel, "traffic", self.axes)
        return int(read), int(written)

    def bytes_of(self, argument: str | None = None, kind: str = "load", field: str = "bytes") -> int:
        """Sum of a counter over all arguments, or of one argument by its name in the table."""
        names = [a.name for a in signature(self.kernel).arguments]
        return sum(
            int(tally[kind][field])
            for i, tally in self.counted.get("args", {}).items()
            if argument in (None, names[int(i)]) and kind in tally
        )

    @property
    def memory_bytes(self) -> int:
        """What memory must move: counted bytes read and written, of no buffer more than it holds. What several warps
        ask for (rows of x, a codebook) comes from a cache but once.
        """
        return self.memory_bytes_of(*(a.name for a in signature(self.kernel).arguments))

    def memory_bytes_of(self, *arguments: str) -> int:
        """The same of some arguments, by their names in the table."""
        names = [a.name for a in signature(self.kernel).arguments]
        return sum(
            min(int(tally[kind]["bytes"]), self.sizes[int(i)])
            for i, tally in self.counted.get("args", {}).items()
            for kind in ("load", "store")
            if kind in tally and names[int(i)] in arguments
        )


def bound_axes(
    kernel: Kernel, args: tuple[Any, ...], axes: dict[str, int], constants: dict[str, int]
) -> dict[str, int]:
    """All axes of a launch, as ds4.device.launch binds them."""
    bound = {name: constants[name] for name in kernel.constants} | axes
    for argument, value in zip(signature(kernel).arguments, args):
        if argument.dims is None:
            if argument.kind != "f32":
                bound.setdefault(argument.name, value)
        elif isinstance(value, Buffer) and len(value.shape) == len(argument.dims):
            for i, name in argument.binds:
                bound.setdefault(name, value.shape[i])
    return bound


@dataclass
class Log:
    """Launches in order."""

    seen: list[Seen] = field(default_factory=list)


class Watched(Device):
    """The same device as `device`, with a log of its launches."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.context, device.builder, device.variant, device.mode, device.constants)
        self.log = Log()

    def launch(self, kernel: Kernel, *args: Any, **given: Any) -> None:
        """`Device.launch`, written down."""
        axes = {name: value for name, value in given.items() if name != "stream"}
        counts = self.variant == "count"
        if counts:
            self.reset_counters()
        super().launch(kernel, *args, **given)
        counted = self.counters()["kernels"].get(kernel.name, {}) if counts else {}
        sizes = tuple(a.nbytes if isinstance(a, Buffer) else 0 for a in args)
        self.log.seen.append(Seen(kernel, bound_axes(kernel, args, axes, dict(self.constants)), counted, sizes))
