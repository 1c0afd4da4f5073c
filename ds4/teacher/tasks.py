"""A walk's work in tasks: a range of a layer's experts on the rows that chose them, and a window's logits.

Each task opens the original by its path and has what the command alone would multiply: the same matrices with the
same rows, so the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ds4.model.config import ModelConfig
from ds4.teacher.moe import expert
from ds4.teacher.numerics import F32, Numerics
from ds4.teacher.run import Teacher
from ds4.teacher.source import open_source
from ds4.teacher.stream import Stream
from ds4.work.tasks import Crew, ranges

EXPERTS = 4  # of a task: at released size 100 MB of rows, a quarter of a minute of work
SMALL = 1 << 20  # weights of an expert, below which sending its rows to a process takes longer than using them
Array = NDArray[Any]


@dataclass(frozen=True)
class MixTask:
    """Experts of one layer. rows: for each, f32 [r, D] of its input; mix: f32 [r], their weights."""

    source: str
    arith: str
    prefix: str
    experts: tuple[int, ...]
    rows: tuple[F32, ...]
    mix: tuple[F32, ...]

    def __str__(self) -> str:
        return f"{self.prefix}, experts {self.experts[0]} to {self.experts[-1]}"


@dataclass(frozen=True)
class LogitsTask:
    """One window's streams after the last layer, f32 [R, S, D] and [R, S]."""

    source: str
    arith: str
    window: int
    x_RSD: F32
    pre_RS: F32

    def __str__(self) -> str:
        return f"logits of window {self.window}"


def run_mix(task: MixTask) -> list[F32]:
    """What each expert adds to its rows, f32 [r, D]."""
    nm, source = Numerics.of(task.arith), open_source(task.source)
    stream, limit = Stream(nm, source), source.config.swiglu_limit
    return [
        expert(nm, stream.expert(task.prefix, e), rows, limit, mix)
        for e, rows, mix in zip(task.experts, task.rows, task.mix, strict=True)
    ]


def run_logits(task: LogitsTask) -> F32:
    """f32 [R, V].

    Raises:
        Ds4Error: a value is not finite.
    """
    return Teacher(open_source(task.source), task.arith).head(task.x_RSD, task.pre_RS, 0)


def worth(crew: Crew | None, config: ModelConfig) -> Crew | None:
    """The crew; None where it is processes of this machine and the model is too small to gain by them."""
    if crew is not None and not crew.remote and 3 * config.hidden_size * config.moe_intermediate_size < SMALL:
        return None
    return crew


class _MixTasks(Sequence[MixTask]):
    """Made when they are given out: together they would hold every row as often as it has experts."""

    def __init__(self, helpers: Helpers, prefix: str, z_TD: F32, picks_Tk: Array, mix_Tk: F32) -> None:
        self._helpers, self._prefix, self._z_TD, self._mix_Tk = helpers, prefix, z_TD, mix_Tk
        found = [(e, *np.nonzero(picks_Tk == e)) for e in np.unique(picks_Tk).tolist()]
        self.parts = [[found[i] for i in part] for part in ranges(len(found), EXPERTS)]

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, at: int) -> MixTask: ...
    @overload
    def __getitem__(self, at: slice) -> list[MixTask]: ...
    def __getitem__(self, at: int | slice) -> MixTask | list[MixTask]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        part = self.parts[at]
        return MixTask(
            self._helpers.source, self._helpers.arith, self._prefix, tuple(e for e, _, _ in part),
            tuple(self._z_TD[rows] for _, rows, _ in part), tuple(self._mix_Tk[rows, k] for _, rows, k in part),
        )  # fmt: skip


@dataclass(frozen=True)
class Helpers:
    """A crew, the path under which it finds the original, and where activations are rounded."""

    crew: Crew
    source: str
    arith: str

    def mix(self, prefix: str, z_TD: F32, picks_Tk: Array, mix_Tk: F32) -> F32:
        """What routed experts add up to, f32 [T, D], in rising order of experts as `moe.mix` has it."""
        tasks = _MixTasks(self, prefix, z_TD, picks_Tk, mix_Tk)
        total = np.zeros_like(z_TD)
        for part, made in zip(tasks.parts, self.crew.run(run_mix, tasks), strict=True):
            for (_, rows, _), added in zip(part, made, strict=True):
                total[rows] += added
        return total

    def logits(self, windows: Sequence[tuple[int, F32, F32]]) -> Iterator[F32]:
        """Of each (number, streams [R, S, D], mixing [R, S]): f32 [R, V], in order."""
        return self.crew.run(run_logits, [LogitsTask(self.source, self.arith, *w) for w in windows])
