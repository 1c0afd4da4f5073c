"""Tensor types of the base file: id, name, elements and bytes of a block, and the sizes that follow.

Owns the three ids beyond the `gguf` package's list (42 vqblob, 43 fp4x32, 44 fp8_32x32) beside the standard
ones that a base may hold. Any other id is refused by name. Dims are in GGUF order, fastest axis first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds4.errors import FileFormatError

F32, F16, Q8_0, Q4_K, I32, I64, BF16, VQBLOB, FP4X32, FP8_32X32 = 0, 1, 8, 12, 26, 27, 30, 42, 43, 44


@dataclass(frozen=True)
class TensorType:
    """`elements` values take `bytes` bytes; a row (the fastest axis) holds whole `row` groups."""

    id: int
    name: str
    elements: int
    bytes: int
    row: int  # the row length must be a multiple of this
    columns: int = 1  # the product of the other axes must be a multiple of this


TYPES: dict[int, TensorType] = {
    t.id: t
    for t in (
        TensorType(F32, "f32", 1, 4, 1),
        TensorType(F16, "f16", 1, 2, 1),
        TensorType(Q8_0, "q8_0", 32, 34, 32),
        TensorType(Q4_K, "q4_K", 256, 144, 256),
        TensorType(I32, "i32", 1, 4, 1),
        TensorType(I64, "i64", 1, 8, 1),
        TensorType(BF16, "bf16", 1, 2, 1),
        TensorType(VQBLOB, "vqblob", 1, 1, 1),
        TensorType(FP4X32, "fp4x32", 32, 17, 32),
        TensorType(FP8_32X32, "fp8_32x32", 1024, 1025, 32, 32),
    )
}
DENSE_TYPES = (F32, F16, BF16, Q8_0, Q4_K, FP4X32, FP8_32X32)
PLAIN_TYPES = (F32, F16, BF16)


def type_named(type_id: int, where: str) -> TensorType:
    """The row of `type_id`.

    Raises:
        FileFormatError: an id that a base file cannot hold.
    """
    found = TYPES.get(type_id)
    if found is None:
        known = ", ".join(f"{t.id} {t.name}" for t in TYPES.values())
        raise FileFormatError(f"{where}: unknown tensor type {type_id}; known are {known}")
    return found


def tensor_bytes(type_id: int, dims: tuple[int, ...], where: str) -> int:
    """Bytes that a tensor of this type and these dims takes.

    Raises:
        FileFormatError: the type is unknown or cannot hold a row of that length.
    """
    t = type_named(type_id, where)
    n = math.prod(dims)
    if dims[0] % t.row or (n // dims[0]) % t.columns:
        rule = f"rows of a multiple of {t.row}" + (f" and a multiple of {t.columns} rows" if t.columns > 1 else "")
        raise FileFormatError(f"{where}: {t.name} needs {rule}, dims are {'x'.join(map(str, dims))}")
    return n // t.elements * t.bytes
