"""A reading: the five figures of every position of a text, one engine against the original. A file, `.npz`.

ids, documents, windows   i32 [n], the text (text.py)
figures                   f64 [5, m], rows as in numbers.FIGURES, of the m positions whose next token is known
floor                     f64 [5, k], by the other path: the positions `floor_positions` i64 [k], indices into the m
same_experts              u8 [L, m]: whether a layer's set of experts is the original's; L is 0 where not measured
meta                      u8, JSON: what read, what was read, by which version

It holds no logits, so it is small, and everything that `compare` and `report` say comes from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.errors import FileFormatError
from ds4.teacher.files import save_results
from rulers.numbers import FIGURES, Numbers, clustered_mean, summarise
from rulers.scores import Meta, load_arrays, meta_text, text_of
from rulers.text import Text

F64 = NDArray[np.float64]
VERSION = 1
ARRAYS = ("ids", "documents", "windows", "figures", "floor", "floor_positions", "same_experts", "meta")


@dataclass(frozen=True)
class Floor:
    """What two readings differ by when nothing differs but the path: the same weights, the same text.

    `differences` f64 [5, k]: by the other path minus by this one; `documents` i32 [k].
    """

    differences: F64
    documents: NDArray[np.int32]

    @cached_property
    def numbers(self) -> Numbers:
        return summarise(self.differences, self.documents)


@dataclass(frozen=True)
class Reading:
    """`teacher` and `ours` say whose logits were compared; figures as in the module's text."""

    text: Text
    figures: F64
    floor_figures: F64
    floor_positions: NDArray[np.int64]
    same_experts: NDArray[np.uint8]
    teacher: Meta
    ours: Meta

    @property
    def documents(self) -> NDArray[np.int32]:
        """i32 [m], the document of every figure."""
        return self.text.documents[self.text.scored]

    @cached_property
    def numbers(self) -> Numbers:
        return summarise(self.figures, self.documents)

    @cached_property
    def floor(self) -> Floor | None:
        """None where it was not measured."""
        if len(self.floor_positions) == 0:
            return None
        at = self.floor_positions
        return Floor(self.floor_figures - self.figures[:, at], self.documents[at])

    def to_json(self) -> dict[str, object]:
        """What `ds4 ruler run --json` prints."""
        out: dict[str, object] = {"domain": self.ours.domain, **self.numbers.to_json()}
        out["floor"] = None if self.floor is None else self.floor.numbers.to_json()
        out["routing"] = self.routing_json()
        return out | {
            "split": self.ours.split, "length": self.ours.length, "path": self.ours.path, "model": self.ours.model,
            "text": self.text.digest, "teacher": self.teacher.weights, "teacher_arithmetic": self.teacher.arithmetic,
            "weights": self.ours.weights, "arithmetic": self.ours.arithmetic,
        }  # fmt: skip

    def routing_json(self) -> list[dict[str, object]] | None:
        """A layer's share of positions with the original's set of experts; None where not measured."""
        if not len(self.same_experts):
            return None
        shares = [clustered_mean(row.astype(np.float64), self.documents) for row in self.same_experts]
        return [{"layer": i, "same_experts": {"mean": m.value, "se": m.se}} for i, m in enumerate(shares)]

    def save(self, path: str | Path) -> None:
        """Write a reading, whole or not at all.

        Raises:
            CapacityError: the disk is full. Ds4Error: it cannot be written.
        """
        meta = {"version": VERSION, "teacher": asdict(self.teacher), "ours": asdict(self.ours)}
        packed = np.frombuffer(json.dumps(meta, sort_keys=True, ensure_ascii=False).encode(), np.uint8)
        t = self.text
        save_results(
            path,
            {
                "ids": t.ids, "documents": t.documents, "windows": t.windows, "figures": self.figures,
                "floor": self.floor_figures, "floor_positions": self.floor_positions,
                "same_experts": self.same_experts, "meta": packed,
            },
        )  # fmt: skip

    @staticmethod
    def load(path: str | Path) -> Reading:
        """Raises FileFormatError: unreadable, cut short, or not such a file; names file and array."""
        arrays = load_arrays(path, ARRAYS)
        text = text_of(arrays, path)
        teacher, ours = _metas(meta_text(arrays, path), path)
        m, positions = len(text.scored), arrays["floor_positions"]
        shapes: dict[str, tuple[type, tuple[int, ...]]] = {
            "figures": (np.float64, (len(FIGURES), m)),
            "floor_positions": (np.int64, (positions.size,)),
            "floor": (np.float64, (len(FIGURES), positions.size)),
            "same_experts": (np.uint8, (len(arrays["same_experts"]) if arrays["same_experts"].ndim else 0, m)),
        }
        for name, (dtype, shape) in shapes.items():
            array = arrays[name]
            if array.dtype != dtype or array.shape != shape:
                got = f"{array.dtype} {list(array.shape)}"
                raise FileFormatError(f"{path}: {name} is {got}; expected {np.dtype(dtype)} {list(shape)}")
            if dtype == np.float64 and not np.isfinite(array).all():
                raise FileFormatError(f"{path}: {name} has values that are not finite")
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < m:
            raise FileFormatError(f"{path}: floor_positions lie outside the {m} figures")
        return Reading(
            text, arrays["figures"], arrays["floor"], positions, arrays["same_experts"], teacher, ours
        )  # fmt: skip


def _metas(text: str, path: str | Path) -> tuple[Meta, Meta]:
    try:
        raw = json.loads(text)
    except ValueError as e:
        raise FileFormatError(f"{path}: meta is no JSON ({e})") from e
    if not isinstance(raw, dict) or set(raw) != {"version", "teacher", "ours"}:
        raise FileFormatError(f"{path}: meta must have exactly version, teacher, ours")
    if raw["version"] != VERSION:
        raise FileFormatError(f"{path}: a reading of version {raw['version']!r}; this ds4 reads version {VERSION}")
    teacher, ours = (Meta.from_json(json.dumps(raw[side]), f"{path}: {side}") for side in ("teacher", "ours"))
    for name in (f.name for f in fields(Meta) if f.name in ("model", "domain", "split", "length")):
        if getattr(teacher, name) != getattr(ours, name):
            raise FileFormatError(
                f"{path}: {name} is {getattr(teacher, name)!r} for the original and {getattr(ours, name)!r} for ours"
            )
    return teacher, ours
