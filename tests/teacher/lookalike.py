"""A numpy look-alike as strict as a GPU array library: host and device arrays never meet.

`module()` stands in for cupy: its arrays are `Device`, and an operation, function or index that mixes them
with plain numpy arrays raises. It is how the teacher's one source is known to run on both.
"""

from types import ModuleType
from typing import Any

import numpy as np


class Device(np.ndarray):
    """An array that refuses plain ndarrays beside it; numpy scalars are fine."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        _refuse_host(inputs, ufunc.__name__)
        out = kwargs.pop("out", None)
        if out is not None:
            _refuse_host(out, ufunc.__name__)
            kwargs["out"] = tuple(_plain(o) for o in out)
        return _device(getattr(ufunc, method)(*(_plain(i) for i in inputs), **kwargs))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        _refuse_host(args, func.__name__)
        return _device(func(*_deep(args), **{k: _plain(v) for k, v in kwargs.items()}))

    def __getitem__(self, key: Any) -> Any:
        _refuse_host(key if isinstance(key, tuple) else (key,), "index")
        return _device(_plain(self)[_deep(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse_host([*(key if isinstance(key, tuple) else (key,)), value], "assignment")
        _plain(self)[_deep(key)] = _plain(value)


def _plain(x: Any) -> Any:
    return x.view(np.ndarray) if isinstance(x, Device) else x


def _deep(x: Any) -> Any:
    return type(x)(_deep(v) for v in x) if isinstance(x, (tuple, list)) else _plain(x)


def _device(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_device(v) for v in x)
    return x.view(Device) if isinstance(x, np.ndarray) else x


def _refuse_host(values: Any, where: str) -> None:
    for v in values:
        if isinstance(v, (tuple, list)):
            _refuse_host(v, where)
        elif isinstance(v, np.ndarray) and not isinstance(v, Device) and v.ndim:
            raise TypeError(f"{where}: a host array of shape {v.shape} meets a device array")


def module() -> ModuleType:
    """The array module: numpy's names over `Device` arrays, asarray and asnumpy as the only doors."""

    def wrap(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            _refuse_host(args, getattr(function, "__name__", "call"))
            return _device(function(*_deep(args), **{k: _plain(v) for k, v in kwargs.items()}))

        return call

    class Module(ModuleType):
        def __getattr__(self, name: str) -> Any:
            found = getattr(np, name)
            return wrap(found) if callable(found) and not isinstance(found, type) else found

    xp = Module("lookalike")
    xp.asarray = lambda x, dtype=None: np.array(_plain(x), dtype=dtype).view(Device)
    xp.asnumpy = lambda x: np.array(_plain(x))
    return xp
