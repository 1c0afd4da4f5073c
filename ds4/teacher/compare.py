"""Where two runs part: the first layer and position at which their residual streams differ.

Layers are looked at in order, positions within a layer in order, so the answer names the earliest
computation that can be at fault. Pure arrays; files and printing are the command's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.errors import FileFormatError

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class LayerDifference:
    """One entry of streams_LTSD: layer n is what enters layer n, the last is what leaves the model."""

    layer: int
    n_bits_differ: int  # positions that are not bit-equal
    n_apart: int  # positions whose relative difference exceeds the tolerance
    first_bits: int | None
    first_apart: int | None
    worst: float  # largest relative L2 of one stream copy at one position
    worst_position: int | None
    worst_copy: int | None


@dataclass(frozen=True)
class Comparison:
    """`first_bits` and `first_apart` are (layer, position); None: the runs agree in that sense."""

    n_positions: int
    n_left_out: int  # positions that only the longer run has
    n_skipped: int  # positions that one side did not compute (NaN rows)
    tolerance: float
    layers: tuple[LayerDifference, ...]
    first_bits: tuple[int, int] | None
    first_apart: tuple[int, int] | None
    first_hash: tuple[int, int, int] | None  # position, engram layer's index, column
    logits_worst: float
    logits_worst_position: int | None

    @property
    def agree(self) -> bool:
        if self.n_left_out:
            return False
        return self.first_apart is None and self.first_hash is None and self.logits_worst <= self.tolerance


def relative(a: F32, b: F32) -> NDArray[np.float64]:
    """|a - b| / |b| over the last axis in float64; 0 where both vanish, infinity where only b does."""
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.linalg.norm(a.astype(np.float64) - b.astype(np.float64), axis=-1)
    size = np.linalg.norm(b.astype(np.float64), axis=-1)
    ratio = np.divide(distance, size, out=np.where(distance > 0, np.inf, 0.0), where=size > 0)
    return np.where(np.isnan(ratio), np.inf, ratio)


def compare(a: Mapping[str, NDArray[Any]], b: Mapping[str, NDArray[Any]], tolerance: float = 0.0) -> Comparison:
    """Compare two results made with `--streams`; b is the reference of relative differences.

    The longer run is cut to the shorter one's positions, and the two do not agree then. At tolerance 0 any
    differing bit but the sign of a zero is apart.

    Raises:
        FileFormatError: streams are missing, or the shapes belong to two different models.
    """
    for side, result in (("first", a), ("second", b)):
        if "streams_LTSD" not in result or result["streams_LTSD"].ndim != 4:
            raise FileFormatError(f"the {side} file has no streams_LTSD; make it with --streams")
    sa, sb = a["streams_LTSD"], b["streams_LTSD"]
    if sa.shape[0] != sb.shape[0] or sa.shape[2:] != sb.shape[2:]:
        raise FileFormatError(f"streams of two different models: {list(sa.shape)} and {list(sb.shape)}")
    n = min(sa.shape[1], sb.shape[1])
    left_out = max(sa.shape[1], sb.shape[1]) - n
    skipped: set[int] = set()
    layers = []
    for layer in range(sa.shape[0]):
        x, y = sa[layer, :n], sb[layer, :n]
        missing = np.isnan(x).all(axis=(1, 2)) | np.isnan(y).all(axis=(1, 2))
        skipped.update(np.nonzero(missing)[0].tolist())
        layers.append(_layer(layer, x, y, ~missing, tolerance))
    bits = next(((d.layer, d.first_bits) for d in layers if d.first_bits is not None), None)
    apart = next(((d.layer, d.first_apart) for d in layers if d.first_apart is not None), None)
    worst, at = _logits(a, b, n)
    return Comparison(n, left_out, len(skipped), tolerance, tuple(layers), bits, apart, _hash(a, b, n), worst, at)


def _layer(layer: int, x_TSD: F32, y_TSD: F32, there_T: NDArray[np.bool_], tolerance: float) -> LayerDifference:
    same = x_TSD.view(np.uint32) == y_TSD.view(np.uint32)
    bits_T = ~same.all(axis=(1, 2)) & there_T
    apart_TS = np.where(there_T[:, None], relative(x_TSD, y_TSD), 0.0)
    apart_T = apart_TS.max(axis=1) > tolerance
    worst = float(apart_TS.max(initial=0.0))
    at = np.unravel_index(int(apart_TS.argmax()), apart_TS.shape) if worst > 0 else (None, None)
    return LayerDifference(
        layer, int(bits_T.sum()), int(apart_T.sum()), _first(bits_T), _first(apart_T), worst,
        None if at[0] is None else int(at[0]), None if at[1] is None else int(at[1]),
    )  # fmt: skip


def _first(flags: NDArray[np.bool_]) -> int | None:
    return int(flags.argmax()) if flags.any() else None


def _hash(a: Mapping[str, NDArray[Any]], b: Mapping[str, NDArray[Any]], n: int) -> tuple[int, int, int] | None:
    if "hash_rows_TGN" not in a or "hash_rows_TGN" not in b:
        return None
    ha, hb = a["hash_rows_TGN"][:n], b["hash_rows_TGN"][:n]
    if ha.shape != hb.shape:
        raise FileFormatError(f"hash rows of two different models: {list(ha.shape)} and {list(hb.shape)}")
    where = np.argwhere(ha != hb)
    return None if len(where) == 0 else (int(where[0, 0]), int(where[0, 1]), int(where[0, 2]))


def _logits(a: Mapping[str, NDArray[Any]], b: Mapping[str, NDArray[Any]], n: int) -> tuple[float, int | None]:
    if "logits_TV" not in a or "logits_TV" not in b:
        return 0.0, None
    la, lb = a["logits_TV"][:n], b["logits_TV"][:n]
    if la.shape != lb.shape:
        raise FileFormatError(f"logits of two different models: {list(la.shape)} and {list(lb.shape)}")
    missing = np.isnan(la).all(axis=1) | np.isnan(lb).all(axis=1)
    rows = np.where(missing, 0.0, relative(la, lb))
    worst = float(rows.max(initial=0.0))
    return worst, int(rows.argmax()) if worst > 0 else None
