"""The toy checkpoints and what their references say, loaded once a process."""

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint.safetensors import load_arrays
from ds4.teacher.source import Source, open_source

DATA = Path(__file__).parent.parent / "data"


@cache
def source(name: str) -> Source:
    return open_source(DATA / name)


@cache
def reference(name: str) -> dict[str, NDArray]:
    return load_arrays(DATA / name / "reference.safetensors")


def whole(a: NDArray, b: NDArray) -> float:
    """Relative L2 of the whole tensor."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    assert a.shape == b.shape
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def worst_row(a: NDArray, b: NDArray) -> float:
    """The largest relative L2 over the last axis: one position, or one stream copy at one position."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    assert a.shape == b.shape
    return float((np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)).max())
