"""`Device`: the one client of the CUDA driver. Above it nobody can tell which driver runs below."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ds4.device.build import Builder, Unit, default_cuda_dir, defines_of
from ds4.device.context import Context, DeviceInfo, Event, Stream
from ds4.device.driver import PROFILES, Mode, load
from ds4.device.graph import Graph, capture
from ds4.device.kernels import Kernel, for_file
from ds4.device.launch import Launcher
from ds4.device.memory import NUMPY, Array, Buffer, kind_of
from ds4.errors import DeviceError
from ds4.settings import ORDERS, REPLAYS, VARIANTS, device_settings

MAX_WORKERS = 64

_contexts: list[Context] = []  # one a process: the driver's primary context


class Device:
    """Memory, launches, graphs and events of one GPU, real or played by the CPU driver.

    Attributes:
        info: facts about the device.
        constants: sizes compiled into kernels that ask for them; see `with_constants`.
        variant: "fast", "check" or "count" on the CPU driver, "gpu" on NVIDIA's.
    """

    def __init__(
        self, context: Context, builder: Builder, variant: str, mode: Mode, constants: Mapping[str, int]
    ) -> None:
        """Use `Device.open`."""
        self.context = context
        self.builder = builder
        self.variant = variant
        self.mode = mode
        self.info: DeviceInfo = context.info
        self.constants: Mapping[str, int] = MappingProxyType(dict(constants))
        self._launchers: dict[int, Launcher] = {}
        self._views: dict[tuple[tuple[str, int], ...], Device] = {}

    @classmethod
    def open(
        cls,
        *,
        driver: str | None = None,
        simt: str | None = None,
        order: str | None = None,
        replay: str | None = None,
        workers: int | None = None,
        profile: str | None = None,
        cuda_dir: Path | None = None,
        cache: Path | None = None,
    ) -> Device:
        """The device of this process; what is None comes from the environment (see ds4/settings.py).

        Several devices may be opened: they share driver and memory and differ in how the CPU driver runs kernels.

        Args:
            driver: "auto", "nvidia" or "simt" (the CPU driver).
            simt: build of the kernels for the CPU driver: "fast", "check" or "count".
            order: order of a block's threads there: "greedy", "rising" or "falling".
            replay: order of a graph's nodes there, as far as its edges leave it open: "recorded", "falling" (always
                the last recorded that may run) or "turns" (first and last in turn).
            workers: its threads; 0: one a core.
            profile: the GPU whose limits it enforces: "gb10", "h100", "b200" or "rtx5090".
            cuda_dir, cache: sources and build cache.

        Raises:
            DeviceError: no such driver here, two drivers asked for in one process, the cache is unusable.
            BuildError: the CPU driver cannot be built (no C++ compiler).
        """
        settings = device_settings()
        variant = _choice("simt", simt or settings.simt, VARIANTS)
        count = settings.workers if workers is None else workers
        mode = Mode(
            order=_choice("order", order or settings.order, ORDERS),
            replay=_choice("replay", replay or settings.replay, REPLAYS),
            workers=min(count or os.cpu_count() or 1, MAX_WORKERS),
            profile=_choice("profile", profile or PROFILES[0], PROFILES),
            poison=variant == "check",
        )
        wanted = _choice("driver", driver or settings.driver, ("auto", "nvidia", "simt"))
        builder = _builder(cuda_dir or settings.cuda_dir or default_cuda_dir(), cache or settings.cache, settings.cxx)
        loaded = load(wanted, builder)
        loaded.use(mode)
        if not _contexts:
            _contexts.append(Context(loaded))
            atexit.register(_contexts[0].close)
        return cls(_contexts[0], builder, variant if loaded.kind == "simt" else "gpu", mode, {})

    def with_constants(self, constants: Mapping[str, int]) -> Device:
        """The same device with more compile-time sizes: a kernel that lists NAME is built with -DNAME=value."""
        for name, value in constants.items():
            if not name.isidentifier():
                raise DeviceError(f"constant {name!r} is not a C++ name")
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise DeviceError(f"constant {name} is {value!r}, not an integer")
        merged = {**self.constants, **{name: int(value) for name, value in constants.items()}}
        key = tuple(sorted(merged.items()))
        if key not in self._views:  # a view keeps its prepared launches: ask twice, prepare once
            self._views[key] = Device(self.context, self.builder, self.variant, self.mode, merged)
        return self._views[key]

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.context.capturing

    # -- memory

    def free_bytes(self) -> int:
        """What the driver calls free now. On unified memory it does not count what the page cache would give back."""
        return int(self.context.call("cuMemGetInfo")[0])

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Buffer:
        """Memory as the driver gives it; under the check build every byte is 0xFF, which is NaN in a float type."""
        made = self._allocate(shape, dtype)
        if self.mode.poison and self.variant == "gpu" and made.nbytes:  # the CPU driver does it by itself
            self._fill(made, 0xFF)
        return made

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Buffer:
        """Memory of zero bytes."""
        made = self._allocate(shape, dtype)
        if made.nbytes:
            self._fill(made, 0)
        return made

    def upload(self, array: Array, dtype: Any = None) -> Buffer:
        """A copy of a host array on the device.

        Args:
            array: any shape. Its dtype is kept; a Python or numpy scalar becomes one element.
            dtype: the element type where numpy has no name for it: "bf16" for a uint16 array of bit patterns.
        """
        source = np.asarray(array)
        kind = kind_of(source.dtype if dtype is None else dtype)
        made = self._allocate(source.shape, kind)
        if made.nbytes != source.nbytes:
            raise DeviceError(f"upload of {source.dtype} as {kind}: element sizes differ")
        made.write(source)
        return made

    def download(self, buffer: Buffer) -> Array:
        """The elements on the host (bf16 as uint16 bit patterns), after all work submitted before."""
        return self.context.read(buffer)

    def copy(
        self, dst: Buffer, src: Buffer, nbytes: int | None = None, *, dst_offset: int = 0, src_offset: int = 0,
        stream: Stream | None = None,
    ) -> None:  # fmt: skip
        """Copy bytes between buffers, in stream order. `nbytes`: all of `src` after its offset."""
        count = src.nbytes - src_offset if nbytes is None else nbytes
        for buffer, offset in ((dst, dst_offset), (src, src_offset)):
            self.context.refuse_freed(buffer)
            if offset < 0 or count < 0 or offset + count > buffer.nbytes:
                raise DeviceError(
                    f"copy of bytes {offset}..{offset + count} reaches outside {buffer!r} ({buffer.nbytes})"
                )
        if count:
            where = stream or self.context.stream
            self.context.call("cuMemcpyDtoDAsync", dst.ptr + dst_offset, src.ptr + src_offset, count, where.handle)
            where.after_launch = False
            self._captured(dst, src)

    def fill(self, buffer: Buffer, byte: int) -> None:
        """Set every byte of the buffer, in stream order."""
        self.context.refuse_freed(buffer)
        if not 0 <= byte <= 255:
            raise DeviceError(f"fill with {byte}: a byte is 0..255")
        if buffer.nbytes:
            self._fill(buffer, byte)
            self._captured(buffer)

    def _allocate(self, shape: int | tuple[int, ...], dtype: Any) -> Buffer:
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
        if any(n < 0 for n in shape):
            raise DeviceError(f"a buffer cannot have shape {shape}")
        kind = kind_of(dtype)
        nbytes = int(np.prod(shape, dtype=object)) * NUMPY[kind].itemsize
        self.context.driver.use(self.mode)
        return Buffer(self.context.allocate(nbytes), 0, shape, kind)

    def _fill(self, buffer: Buffer, byte: int) -> None:
        where = self.context.stream
        self.context.call("cuMemsetD8Async", buffer.ptr, byte, buffer.nbytes, where.handle)
        where.after_launch = False

    def _captured(self, *buffers: Buffer) -> None:
        if self.context.capturing:
            self.context.captured |= {b.allocation.ptr: b.allocation for b in buffers}

    # -- work

    def launch(self, kernel: Kernel, *args: Any, stream: Stream | None = None, **axes: int) -> None:
        """Run `kernel`: args in the table's order, axes by name.

        Raises:
            DeviceError: an argument's count, dtype or size is wrong, an axis is missing, or the driver refuses; on
                the CPU driver also every fault of the kernel itself.
            BuildError: the kernel does not compile.
        """
        launcher = self._launchers.get(id(kernel))
        if launcher is None:
            launcher = self._prepare(kernel)
        context = self.context
        context.driver.use(self.mode)
        context.bind_thread()
        launcher(args, axes, stream)

    def _prepare(self, kernel: Kernel) -> Launcher:
        missing = [name for name in kernel.constants if name not in self.constants]
        if missing:
            raise DeviceError(
                f"{kernel.name} is compiled with {', '.join(missing)}: give them by device.with_constants"
            )
        self.context.refuse_in_capture(f"the first launch of {kernel.name}")  # it loads the kernel
        constants = {name: self.constants[name] for name in kernel.constants}
        unit = Unit(kernel.source, defines_of(constants, kernel.defines))
        key = (self.builder, unit, self.variant)
        module = self.context.modules.get(key)
        if module is None:
            module = self.context.modules[key] = self.context.call("cuModuleLoadData", self._image(unit))
        try:
            function = self.context.call("cuModuleGetFunction", module, kernel.name.encode())
        except DeviceError as e:
            raise DeviceError(f"{kernel.source} has no kernel {kernel.name!r}: {e}") from e
        made = self._launchers[id(kernel)] = Launcher(self.context, kernel, self.constants, function)
        return made

    def _image(self, unit: Unit) -> bytes:
        if self.variant == "gpu":
            return self.builder.gpu(unit, self.info.arch)[0]
        lines = ["ds4-simt-image 1", f"path={self.builder.host(unit, self.variant)}"]
        lines += [
            f"max_threads.{row.name}={row.block}" for row in for_file(unit.source) if isinstance(row.block, int)
        ]
        return "\n".join([*lines, ""]).encode() + b"\0"

    def capture(self) -> contextlib.AbstractContextManager[Graph]:
        """`with device.capture() as graph:` records what is submitted inside; `graph.replay()` runs it."""
        self.context.driver.use(self.mode)
        return capture(self.context, self.mode)

    def stream(self) -> Stream:
        """A new stream beside the main one."""
        return Stream(self.context)

    def beside(self, work: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """`with device.beside(work):` submits what `work()` submits beside what the block submits.

        Both come after all that was submitted before, and what follows the block comes after both; between them
        nothing is ordered, so neither may touch what the other writes: the check build reports it. In a capture the
        two become parallel branches of the graph. May be nested.
        """
        return self.context.beside(work)

    @property
    def main_stream(self) -> Stream:
        """The stream that work goes to when no other is named and no `beside` is open."""
        return self.context.main_stream

    def event(self) -> Event:
        """A new event, not recorded yet."""
        return Event(self.context)

    def sync(self) -> None:
        """Wait for all work; memory that was dropped meanwhile is given back."""
        self.context.sync()

    # -- what the CPU driver saw

    def counters(self) -> dict[str, Any]:
        """{"launches": n, "kernels": {name: {...}}} since the last reset; sectors and lines in the count build."""
        return self.context.driver.counters()

    def reset_counters(self) -> None:
        """Set all counters to zero."""
        self.context.driver.reset_counters()


@functools.cache
def _builder(cuda_dir: Path, cache: Path, cxx: str) -> Builder:
    return Builder(cuda_dir, cache, cxx)  # shared, so that devices share loaded modules


def _choice(what: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise DeviceError(f"{what} is {value!r}; expected one of {', '.join(allowed)}")
    return value
