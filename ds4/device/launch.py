"""A row of the launch table and its arguments -> one checked launch.

What a row says is worked out once (`signature`); a launch then binds axes, compares dtypes and sizes, packs the
arguments into a block that was allocated once, and makes one driver call. An argument is wrong before anything
runs, and the error names kernel and argument.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import inspect
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from ds4.device.context import Context, Stream
from ds4.device.kernels import Kernel
from ds4.device.memory import NUMPY, Buffer
from ds4.errors import DeviceError

SCALARS = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "f32": "f"}
ARGUMENT = re.compile(r"(?P<name>\w+): (?P<kind>\w+)(?:\[(?P<dims>.*)\](?P<optional>\?)?)?")
ALLOWED = (
    *(ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod),
    *(ast.Name, ast.Load, ast.Constant),
)
UNASKED_SMEM = 48 << 10  # bytes a block may have before more is asked for
AHEAD_FROM = (9, 0)  # compute capability from which a launch may start before the one before it has ended
NO_BUILTINS: dict[str, Any] = {"__builtins__": {}}


@dataclass(frozen=True)
class Argument:
    """One argument as the table says it.

    Attributes:
        dims: None for a scalar; else the texts between the brackets.
        binds: (position, name) of the dimensions that are plain names.
        fixed, names, codes: a pointer needs fixed * product of names * product of codes elements.
    """

    name: str
    kind: str
    dims: tuple[str, ...] | None
    optional: bool
    binds: tuple[tuple[int, str], ...]
    fixed: int
    names: tuple[str, ...]
    codes: tuple[CodeType, ...]


@dataclass(frozen=True)
class Signature:
    """A row, parsed. `known` are all names an axis of a launch may have."""

    arguments: tuple[Argument, ...]
    scalars: tuple[tuple[int, Argument], ...]
    grid: Callable[[Mapping[str, int]], Any]
    smem: Callable[[Mapping[str, int]], int]
    known: frozenset[str]


def expression(text: str) -> CodeType:
    """An integer expression of names, compiled.

    Raises:
        ValueError: it has anything but integers, names, + - * // % and parentheses.
    """
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED) or (isinstance(node, ast.Constant) and type(node.value) is not int):
            raise ValueError(f"{text!r}: only integers, names, + - * // % and parentheses")
    return compile(tree, text, "eval")


def parse_argument(kernel: str, text: str) -> Argument:
    """One text of `Kernel.args`.

    Raises:
        DeviceError: it does not follow the table's grammar.
    """
    m = ARGUMENT.fullmatch(text)
    if m is None:
        raise DeviceError(f'{kernel}: argument {text!r} is not of the form "x: f32[R,D]" or "n: i32"')
    name, kind, inside = m["name"], m["kind"], m["dims"]
    if inside is None:
        if kind not in SCALARS:
            raise DeviceError(f"{kernel}: scalar {text!r} is not one of {', '.join(SCALARS)}")
        return Argument(name, kind, None, False, (), 1, (), ())
    if kind not in NUMPY:
        raise DeviceError(f"{kernel}: pointer {text!r} is not to one of {', '.join(NUMPY)}")
    dims = tuple(d.strip() for d in _split(inside))
    fixed, names, codes = 1, [], []
    for dim in dims:
        if dim == "*":
            continue
        if dim.isidentifier():
            names.append(dim)
        elif dim.isdecimal():
            fixed *= int(dim)
        else:
            try:
                codes.append(expression(dim))
            except (ValueError, SyntaxError) as e:
                raise DeviceError(f"{kernel}: dimension {dim!r} of {text!r}: {e}") from e
    binds = tuple((i, d) for i, d in enumerate(dims) if d.isidentifier())
    return Argument(name, kind, dims, bool(m["optional"]), binds, fixed, tuple(names), tuple(codes))


def _split(text: str) -> list[str]:
    """Split at the commas outside parentheses."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


@functools.cache
def signature(kernel: Kernel) -> Signature:
    """The row `kernel`, parsed."""
    arguments = tuple(parse_argument(kernel.name, text) for text in kernel.args)
    grid, grid_names = _by_name(kernel.name, "grid", kernel.grid)
    if callable(kernel.smem):
        smem, smem_names = _by_name(kernel.name, "smem", kernel.smem)
    else:
        constant: int = kernel.smem
        smem, smem_names = (lambda axes: constant), frozenset()
    traffic_names = parameters(kernel.traffic)[0] if kernel.traffic else frozenset()
    known = grid_names | smem_names | traffic_names | frozenset(kernel.constants)
    for a in arguments:
        known |= {a.name, *a.names, *(n for code in a.codes for n in code.co_names)}
    scalars = tuple((i, a) for i, a in enumerate(arguments) if a.dims is None and a.kind != "f32")
    return Signature(arguments, scalars, grid, smem, known)


def weights_mask(kernel: Kernel) -> int:
    """The positions of `kernel.weights` among its arguments, a bit each.

    Raises:
        DeviceError: a name is no pointer argument of the kernel.
    """
    places = {a.name: i for i, a in enumerate(signature(kernel).arguments) if a.dims is not None}
    for name in kernel.weights:
        if name not in places:
            raise DeviceError(f"{kernel.name}: weights names {name!r}, which is no pointer argument")
    return sum(1 << places[name] for name in set(kernel.weights))


def parameters(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """The parameter names of a row's callable, and whether it takes any others too."""
    kinds = inspect.signature(function).parameters.values()
    rest = any(p.kind is p.VAR_KEYWORD for p in kinds)
    return frozenset(p.name for p in kinds if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)), rest


def required_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The parameters of a row's callable that have no default."""
    found = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in found if p.default is p.empty and p.kind in kinds)


def _by_name(
    kernel: str, what: str, function: Callable[..., Any]
) -> tuple[Callable[[Mapping[str, int]], Any], frozenset[str]]:
    names, rest = parameters(function)
    wanted = tuple(names)
    required = required_parameters(function)

    def call(axes: Mapping[str, int]) -> Any:
        if rest:
            return function(**axes)
        try:
            return function(**{name: axes[name] for name in wanted if name in axes or name in required})
        except KeyError as e:
            raise DeviceError(f"{kernel}: {what} needs axis {e.args[0]}: give it at the launch") from None

    return call, names


def evaluate(kernel: Kernel, what: str, axes: Mapping[str, int]) -> Any:
    """`kernel.grid`, `.smem` or `.traffic` at `axes` (all of them given by name)."""
    function = getattr(kernel, what)
    return _by_name(kernel.name, what, function)[0](axes) if callable(function) else function


class Launcher:
    """One kernel, loaded, for one set of constants."""

    def __init__(self, context: Context, kernel: Kernel, constants: Mapping[str, int], function: Any) -> None:
        self.context = context
        self.kernel = kernel
        self.constants = dict(constants)
        self.function = function
        self.signature = signature(kernel)
        kinds = [a.kind if a.dims is None else "u64" for a in self.signature.arguments]
        # One 8-byte slot an argument: "<i4x f4x Q". The driver copies them during the call.
        form = "".join(SCALARS[k] + ("4x" if k in ("i32", "u32", "f32") else "") for k in kinds)
        self._pack = struct.Struct("<" + form).pack_into
        count = len(kinds)
        self._slots = ctypes.create_string_buffer(8 * max(count, 1))
        base = ctypes.addressof(self._slots)
        self._pointers = (ctypes.c_void_p * max(count, 1))(*(base + 8 * i for i in range(count)))
        self._parameters = ctypes.addressof(self._pointers)
        # Static shared memory (the CPU driver has none) is part of the 48 KB that need no asking. The question also
        # makes a driver that loads functions late load this one now, which it could not in a capture.
        names = context.driver.api.CUfunction_attribute
        static = context.call("cuFuncGetAttribute", names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        self._largest_smem = UNASKED_SMEM - int(static)
        self._launch = context.driver.api.cuLaunchKernel
        weights = weights_mask(kernel)
        context.driver.set_weights(function, weights)
        self._ahead = bool(weights) and context.info.cc >= AHEAD_FROM
        self._configs: dict[tuple[int, ...], Any] = {}
        self._compare(kinds)

    def _compare(self, kinds: list[str]) -> None:
        """The row against the compiled function: number and sizes of the parameters."""
        found: list[int] = []
        while True:
            error, _, size = self.context.driver.api.cuFuncGetParamInfo(self.function, len(found))
            if error:
                break
            found.append(int(size))
        wanted = [NUMPY[k].itemsize for k in kinds]
        if found != wanted:
            raise DeviceError(
                f"{self.kernel.name}: the launch table has {len(wanted)} arguments of {wanted} bytes, the function "
                f"in {self.kernel.source} has {len(found)} of {found} bytes"
            )

    def __call__(self, args: tuple[Any, ...], axes: dict[str, int], stream: Stream | None) -> None:
        sig, context = self.signature, self.context
        if len(args) != len(sig.arguments):
            raise DeviceError(
                f"{self.kernel.name} takes {len(sig.arguments)} arguments "
                f"({', '.join(a.name for a in sig.arguments)}), got {len(args)}"
            )
        if not axes.keys() <= sig.known:
            unknown = sorted(axes.keys() - sig.known)
            raise DeviceError(f"{self.kernel.name}: no argument, grid or size uses axis {', '.join(unknown)}")
        bound = {**self.constants, **axes}
        for i, a in sig.scalars:
            value = args[i]
            if bound.setdefault(a.name, value) != value:
                raise DeviceError(f"{self.kernel.name}: {a.name} is {value} as argument and {bound[a.name]} as axis")
        values: list[Any] = []
        for a, value in zip(sig.arguments, args):
            if a.dims is None:
                values.append(value)
            elif value.__class__ is Buffer:
                values.append(self._pointer(a, value, bound))
            elif value is None and a.optional:
                values.append(0)
            else:
                given = "None" if value is None else type(value).__name__
                raise DeviceError(f"{self.kernel.name}: {a.name} is {given}, expected a Buffer of {a.kind}")
        x, y, z = sig.grid(bound)
        if x <= 0 or y <= 0 or z <= 0:
            raise DeviceError(f"{self.kernel.name}: grid is ({x}, {y}, {z}): there is nothing to do, do not launch")
        smem = sig.smem(bound)
        if smem > self._largest_smem:
            self._allow(smem)
        try:
            self._pack(self._slots, 0, *values)
        except (struct.error, OverflowError) as e:
            raise self._unpackable(args) from e
        where = stream or context.stream
        if self._ahead and where.after_launch:
            (error,) = self._launch_ahead(x, y, z, smem, where)
        else:
            (error,) = self._launch(
                self.function, x, y, z, self.kernel.block, 1, 1, smem, where.handle, self._parameters, 0
            )
        if error:
            raise context.driver.failed(f"launch of {self.kernel.name}", error)
        where.after_launch = True
        if context.capturing:
            context.captured_launches += 1
            for value in args:
                if value.__class__ is Buffer:
                    context.captured[value.allocation.ptr] = value.allocation

    def _launch_ahead(self, x: int, y: int, z: int, smem: int, stream: Stream) -> Any:
        """A launch that may start before the one before it has ended: see `Kernel.weights`."""
        api, key = self.context.driver.api, (x, y, z, smem, int(stream.handle))
        config = self._configs.get(key)
        if config is None:
            attribute = api.CUlaunchAttribute()
            attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config = self._configs[key] = api.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
            config.blockDimX, config.blockDimY, config.blockDimZ = self.kernel.block, 1, 1
            config.sharedMemBytes, config.hStream = smem, stream.handle
            config.attrs, config.numAttrs = [attribute], 1
        return api.cuLaunchKernelEx(config, self.function, self._parameters, 0)

    def _pointer(self, a: Argument, value: Buffer, bound: dict[str, int]) -> int:
        if value.kind != a.kind:
            raise DeviceError(f"{self.kernel.name}: {a.name} is {value!r}, expected {a.kind}")
        if value.allocation.freed:
            raise DeviceError(f"{self.kernel.name}: {a.name} is {value!r}, which was freed")
        need = a.fixed
        for i, name in a.binds:
            if name not in bound:
                if len(value.shape) != len(a.dims or ()):
                    raise DeviceError(
                        f"{self.kernel.name}: {a.name} is {value!r} and cannot bind {name} of "
                        f"[{','.join(a.dims or ())}]; give {name}= at the launch"
                    )
                bound[name] = value.shape[i]
        for name in a.names:
            need *= bound[name]
        for code in a.codes:
            try:
                need *= eval(code, NO_BUILTINS, bound)
            except NameError as e:
                raise DeviceError(f"{self.kernel.name}: the size of {a.name} needs axis {e.name}: give it") from None
        if value.size < need:
            axes = ", ".join(f"{k}={v}" for k, v in bound.items() if k in self.signature.known)
            raise DeviceError(
                f"{self.kernel.name}: {a.name} is {value!r} with {value.size} elements; "
                f"[{','.join(a.dims or ())}] needs {need} ({axes})"
            )
        return value.ptr

    def _allow(self, smem: int) -> None:
        """Ask for more dynamic shared memory; the limit is the function's, whoever launches it, and only rises."""
        allowed, key = self.context.allowed_smem, int(self.function)
        if smem > allowed.get(key, 0):
            attribute = self.context.driver.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            try:
                self.context.call("cuFuncSetAttribute", self.function, attribute, smem)
            except DeviceError as e:
                limit = self.context.info.smem_per_block
                raise DeviceError(
                    f"{self.kernel.name} asks for {smem} bytes of shared memory, a block may have {limit}: {e}"
                ) from e
            allowed[key] = smem
        self._largest_smem = allowed[key]

    def _unpackable(self, args: tuple[Any, ...]) -> DeviceError:
        for a, value in zip(self.signature.arguments, args):
            if a.dims is None:
                try:
                    struct.pack(SCALARS[a.kind], value)
                except (struct.error, OverflowError) as e:
                    return DeviceError(f"{self.kernel.name}: {a.name} is {value!r}, expected {a.kind}: {e}")
        return DeviceError(f"{self.kernel.name}: arguments cannot be packed")
