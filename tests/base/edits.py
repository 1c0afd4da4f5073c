"""Edits of a toy base: metadata and tensors changed, the file written anew."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ds4.base.gguf import Container, Value, header_bytes, read_container
from tests.base.toys import toy_base


def rebuild(
    tmp_path: Path, edit: Callable[[dict[str, Value], dict[str, tuple[int, tuple[int, ...], bytes]]], None]
) -> Path:
    """The base of oracle-a with its metadata and tensors edited, written anew."""
    source = read_container(toy_base("oracle-a", 9))
    meta = {k: Value(source.kinds[k], v) for k, v in source.metadata.items()}
    raw = source.path.read_bytes()
    tensors = {t.name: (t.type_id, t.dims, raw[t.offset : t.offset + t.nbytes]) for t in in_order(source)}
    edit(meta, tensors)
    head, offsets, size = header_bytes(meta, [(n, t, dims) for n, (t, dims, _) in tensors.items()])
    out = bytearray(head.ljust(size, b"\0"))
    for offset, (_, _, data) in zip(offsets, tensors.values(), strict=True):
        out[offset : offset + len(data)] = data
    path = tmp_path / "edited.gguf"
    path.write_bytes(out)
    return path


def in_order(c: Container) -> list[Any]:
    return sorted(c.tensors.values(), key=lambda t: t.offset)


def drop(name: str) -> Any:
    return lambda meta, tensors: tensors.pop(name)


def retype(name: str, type_id: int, dims: tuple[int, ...], n: int) -> Any:
    return lambda meta, tensors: tensors.update({name: (type_id, dims, bytes(n))})


def put(key: str, kind: str, value: Any) -> Any:
    return lambda meta, tensors: meta.update({key: Value(kind, value)})


def forget(key: str) -> Any:
    return lambda meta, tensors: meta.pop(key)


def poke(name: str, dtype: str, place: int, value: Any) -> Any:
    def edit(meta: Any, tensors: Any) -> None:
        type_id, dims, raw = tensors[name]
        a = np.frombuffer(raw, dtype).copy()
        a[place] = value
        tensors[name] = (type_id, dims, a.tobytes())

    return edit


P = "deepseek4."
