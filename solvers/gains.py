"""Gains of a layer's experts: one factor an expert and output channel, chosen against the original's block output.

    minimise  sum_i | sum_k s_{e_ik} * y_ik + ysh_i - y_i^orig |^2  +  lambda sum_d dbar_d sum_e (s_e[d] - m_e)^2
    dbar_d = mean over all experts of sum_i y_ie[d]^2                 m_e = 1 in the recipe

by Gauss-Seidel over experts with every accepted value on the lattice that files hold (lattice.py). dbar and not an
expert's own energy: then lambda means so many average experts' worth of doubt, and an expert seen twice stays near 1.
lambda is chosen on held-out rows alone, and nothing is mounted that does not lower their error by half a percent.

`RECIPE` is the published procedure; `BEST` is what measured better (docs/solver.md).

Least squares shrinks: where our experts' inputs are no longer the original's, what they add is in part noise, and the
gains that leave the least error make the block quieter than the original's. Layers above are used to its loudness. So
BEST solves once more for f**level times what is wanted, f >= 1 being the original's loudness over ours,

    f^2 = sum_i | y_i^orig - ysh_i |^2 / sum_i | sum_k s_ik y_ik |^2        over fitted rows, s of the chosen lambda

with level 1/2, midway between the least error and the original's loudness; the rulers prefer it to both.

Work is cut into slices of 256
channels whose shapes depend on nothing else, so the bytes do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from ds4.base.codebook import Workers
from ds4.errors import Ds4Error, UsageError
from ds4.sidecar.files import decode_gains, encode_gains
from solvers.rows import BlockRows, Slice, Slots, read_slice
from solvers.sweeps import keep, levels, residual_of, squares, sweep, to_cheapest, to_nearest

T = TypeVar("T")
Float = NDArray[Any]
F32 = NDArray[np.float32]
Mask = NDArray[np.bool_]
Progress = Callable[[int, int], None]  # slices done, slices in all

CHANNELS = 256  # of a slice: fewer cost Python's time, more leave the cache
FEWEST = 8  # fitted rows below which an expert's gains stay exactly 1
LEAST_GAIN = 0.005  # share of held-out error that must go for gains to be mounted
DECADES = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
MEASURED = ("error on fitted rows", "error on held-out rows", "what the experts add on fitted rows")
THIRDS = tuple(float(f"{10 ** (i / 3):.3g}") for i in range(-6, 10))  # of a decade, over the same range


@dataclass(frozen=True)
class Rule:
    """How gains are sought.

    lambdas: candidates.
    free_sweeps: sweeps without the lattice, first; they stop early once nothing moves by 1e-4.
    lattice_sweeps: sweeps on the lattice, rounding fed back; they stop early once nothing moves. With none, what the
        free sweeps found is rounded once at the end: what the others are compared with.
    scale: how a block's power of two is chosen: `nearest` as the writer does, `cheapest` by cost.
    ridge: `mean` scales it by dbar, `own` by each expert's own energy (a guard's other side; not for use).
    own_level: m is not 1 but the factor that serves the expert best on all of a slice's channels together.
    level: solve again for f**level times what is wanted, once lambda is chosen; 0: as the least error has it.
    refit: in that second solve held-out rows are fitted too, with the ridge in the same proportion to a row.
    """

    lambdas: tuple[float, ...] = DECADES
    free_sweeps: int = 0
    lattice_sweeps: int = 3
    scale: Literal["nearest", "cheapest"] = "nearest"
    ridge: Literal["mean", "own"] = "mean"
    own_level: bool = False
    level: float = 0.0
    refit: bool = False

    @property
    def again(self) -> bool:
        """Whether there is a second solve."""
        return self.refit or self.level != 0


RECIPE = Rule()
BEST = Rule(THIRDS, free_sweeps=3, scale="cheapest", own_level=True, level=0.5, refit=True)


@dataclass(frozen=True)
class Candidate:
    """One lambda: squared errors over squared errors with gains of 1, fitted rows and held-out rows."""

    lam: float
    fitted: float
    held_out: float


@dataclass(frozen=True)
class GainSolution:
    """A layer's gains and what their choice rests on."""

    s_ED: F32  # on the file's lattice; of the best lambda also where not mounted
    first_ED: F32  # before a second solve: of fitted rows alone, what the held-out figures are of
    lam: float
    candidates: tuple[Candidate, ...]
    held_out_before: float  # sum of squared errors over held-out rows, gains of 1
    held_out_after: float  # before a second solve
    louder: float  # f**level; 1 without
    n_fitted: int
    n_held_out: int
    n_untouched: int  # experts with too few fitted rows

    @property
    def held_out_gain(self) -> float:
        """Share of the held-out squared error that the gains take away."""
        return 1 - self.held_out_after / self.held_out_before if self.held_out_before else 0.0

    @property
    def mounted(self) -> bool:
        return self.held_out_gain > LEAST_GAIN


def solve_gains(
    rows: BlockRows,
    held_out_T: Mask,
    rule: Rule = RECIPE,
    workers: Workers | None = None,
    progress: Progress | None = None,
) -> GainSolution:
    """The gains of one layer.

    Args:
        rows: the layer's rows, as captured with the layers before mounted.
        held_out_T: bool [T], windows.held_out.
        workers: threads, or their crew, which is sent each slice; a single thread without.
        progress: told about slices of channels.

    Raises:
        UsageError: no rows to fit or to choose on, or a value is not finite.
        Ds4Error: what the writer makes of the gains is not what was solved (a mistake of ours).
    """
    n = len(rows.y_TKD)
    if held_out_T.shape != (n,) or held_out_T.dtype != np.bool_:
        raise UsageError(f"held-out mask: {held_out_T.dtype} {list(held_out_T.shape)}; expected bool [{n}]")
    if held_out_T.all() or not held_out_T.any():
        raise UsageError(f"{int(held_out_T.sum())} of {n} rows are held out; some must be, and some must not")
    workers = workers or Workers(1)
    fitted, held = Slots.of(rows, ~held_out_T), Slots.of(rows, held_out_T)
    n_slices = -(-rows.width // CHANNELS) * (1 + rule.again)
    done: list[int] = []

    def note() -> None:
        done.append(1)
        if progress is not None:
            progress(len(done), n_slices)

    def search(channels: slice) -> tuple[Float, NDArray[np.float64]]:
        found = _search(rows, fitted, held, channels, rule)
        note()
        return found

    crew = workers.crew
    if crew is None:
        parts = workers.map(search, rows.width, CHANNELS)
    else:
        parts = _noted(crew.run(run_search, _GainTasks(rows, held_out_T, rule)), note)
    errors = np.sum([e for _, e in parts], axis=0)  # [1 + lambdas, MEASURED], summed in order of channels
    best = int(np.argmin(errors[1:, 1]))  # the smallest lambda of equals
    lam = rule.lambdas[best]
    louder = _louder(errors[0, 2], errors[1 + best, 2]) ** rule.level
    first_ED = np.concatenate([d[best] for d, _ in parts], axis=1)
    if rule.again:
        wanted = Slots.of(rows, np.ones(n, np.bool_)) if rule.refit else fitted
        scaled = lam * len(fitted.rows_T) / len(wanted.rows_T)

        def again(channels: slice) -> Float:
            delta_EC = _again(rows, wanted, channels, rule, scaled, louder)
            note()
            return delta_EC

        if crew is None:
            deltas = workers.map(again, rows.width, CHANNELS)
        else:
            deltas = _noted(crew.run(run_again, _GainTasks(rows, held_out_T, rule, scaled, louder)), note)
        delta_ED = np.concatenate(deltas, axis=1)
    else:
        delta_ED = first_ED
    before = np.where(errors[0] > 0, errors[0], 1.0)
    return GainSolution(
        s_ED=_as_written(delta_ED),
        first_ED=np.float32(1) + first_ED.astype(np.float32),
        lam=lam,
        candidates=tuple(
            Candidate(candidate, float(e[0] / before[0]), float(e[1] / before[1]))
            for candidate, e in zip(rule.lambdas, errors[1:], strict=True)
        ),
        held_out_before=float(errors[0, 1]),
        held_out_after=float(errors[1 + best, 1]),
        louder=louder,
        n_fitted=len(fitted.rows_T),
        n_held_out=len(held.rows_T),
        n_untouched=int((fitted.counts_E < FEWEST).sum()),
    )


@dataclass(frozen=True)
class GainTask:
    """A slice of a layer's channels, in a process that has nothing else of it; lam, louder: of the second solve."""

    rows: BlockRows
    held_out_T: Mask
    rule: Rule
    lam: float = 0.0
    louder: float = 1.0

    def __str__(self) -> str:
        return f"gains of channels from {self.rows.first}"


def run_search(task: GainTask) -> tuple[Float, NDArray[np.float64]]:
    """See `_search`."""
    fitted, held = Slots.of(task.rows, ~task.held_out_T), Slots.of(task.rows, task.held_out_T)
    return _search(task.rows, fitted, held, slice(0, task.rows.width), task.rule)


def run_again(task: GainTask) -> Float:
    """See `_again`."""
    fitted_T = np.ones_like(task.held_out_T) if task.rule.refit else ~task.held_out_T
    wanted = Slots.of(task.rows, fitted_T)
    return _again(task.rows, wanted, slice(0, task.rows.width), task.rule, task.lam, task.louder)


class _GainTasks(Sequence[GainTask]):
    """Made when they are given out: together they are a copy of all rows."""

    def __init__(self, rows: BlockRows, held_out_T: Mask, rule: Rule, lam: float = 0.0, louder: float = 1.0) -> None:
        self._rows, self._rest = rows, (held_out_T, rule, lam, louder)

    def __len__(self) -> int:
        return -(-self._rows.width // CHANNELS)

    @overload
    def __getitem__(self, at: int) -> GainTask: ...
    @overload
    def __getitem__(self, at: slice) -> list[GainTask]: ...
    def __getitem__(self, at: int | slice) -> GainTask | list[GainTask]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return GainTask(self._rows.part(slice(CHANNELS * at, CHANNELS * (at + 1))), *self._rest)


def _noted(results: Iterator[T], note: Callable[[], None]) -> list[T]:
    out = []
    for result in results:
        out.append(result)
        note()
    return out


def _louder(wanted: float, ours: float) -> float:
    """f: the original's loudness over ours, from sums of squares; 1 where ours is louder or silent."""
    return max(1.0, float(np.sqrt(wanted / ours))) if ours > 0 else 1.0


def wanted_of(part: Slice) -> Float:
    """What the experts together should add, [T, C]: the original's output less the shared expert's."""
    added_TC = part.residual_TC - residual_of(part, np.ones_like(part.energy_EC))
    return np.asarray(part.residual_TC + added_TC)


def ridge_of(part: Slice, lam: float, rule: Rule) -> Float:
    """rho, [E, C]: lambda dbar, dbar the mean over all experts, also those that no row picks."""
    energy_EC = part.energy_EC
    kind = energy_EC.dtype.type
    if rule.ridge == "own":
        return np.asarray(energy_EC * kind(lam))
    dbar_C = energy_EC.mean(axis=0, dtype=np.float64) * lam
    return np.broadcast_to(dbar_C.astype(kind), energy_EC.shape)


def pull_of(part: Slice, rule: Rule) -> Float:
    """m - 1, [E]."""
    if rule.own_level:
        return levels(part, order_of(part.slots))
    return np.zeros(len(part.energy_EC), part.energy_EC.dtype)


def order_of(slots: Slots) -> list[int]:
    """Experts in the order of a sweep, by number, without those that have too few rows."""
    return [int(e) for e in np.flatnonzero(slots.counts_E >= FEWEST)]


def _solve(part: Slice, lam: float, pull_E: Float, rule: Rule) -> tuple[Float, Float]:
    """delta [E, C] of one lambda, and the residual it leaves on the rows that it was fitted on."""
    delta_EC, residual_TC = np.zeros_like(part.energy_EC), part.residual_TC.copy()
    ridge_EC, order = ridge_of(part, lam, rule), order_of(part.slots)
    for _ in range(rule.free_sweeps):
        if sweep(part, delta_EC, residual_TC, ridge_EC, pull_E, order, keep) < 1e-4:
            break
    project = to_cheapest if rule.scale == "cheapest" else to_nearest
    for _ in range(rule.lattice_sweeps):
        if sweep(part, delta_EC, residual_TC, ridge_EC, pull_E, order, project) == 0:
            break
    if not rule.lattice_sweeps:
        delta_EC = project(delta_EC, part.energy_EC + ridge_EC)
        residual_TC = residual_of(part, delta_EC)
    return delta_EC, residual_TC


def _search(
    rows: BlockRows, fitted: Slots, held: Slots, channels: slice, rule: Rule
) -> tuple[Float, NDArray[np.float64]]:
    """Every lambda on a slice: deltas [lambdas, E, C]; sums of squares [1 + lambdas, MEASURED].

    The first row's are of gains of 1, with the energy that is wanted in place of what is added.
    """
    part, unseen = read_slice(rows, fitted, channels), read_slice(rows, held, channels)
    pull_E = pull_of(part, rule)
    wanted_TC = wanted_of(part)
    errors = [tuple(squares(a).sum() for a in (part.residual_TC, unseen.residual_TC, wanted_TC))]
    deltas = []
    for lam in rule.lambdas:
        delta_EC, left_TC = _solve(part, lam, pull_E, rule)
        measured = (left_TC, residual_of(unseen, delta_EC), wanted_TC - left_TC)
        errors.append(tuple(squares(a).sum() for a in measured))
        deltas.append(delta_EC)
    return np.stack(deltas), np.array(errors)


def _again(rows: BlockRows, wanted: Slots, channels: slice, rule: Rule, lam: float, louder: float) -> Float:
    """delta [E, C] for `louder` times what is wanted."""
    part = read_slice(rows, wanted, channels)
    kind = part.residual_TC.dtype.type
    pull_E = (1 + pull_of(part, rule)) * kind(louder) - 1
    part.residual_TC += wanted_of(part) * kind(louder - 1)
    return _solve(part, lam, pull_E, rule)[0]


def _as_written(delta_ED: Float) -> F32:
    """s = 1 + delta as a reader of the file sees it."""
    s_ED: F32 = np.float32(1) + delta_ED.astype(np.float32)
    found = decode_gains(encode_gains(s_ED), s_ED.shape[0], s_ED.shape[1], "gains just solved")
    if not np.array_equal(found, s_ED):
        at = tuple(int(i) for i in np.argwhere(found != s_ED)[0])
        raise Ds4Error(f"gain {at}: solved as {s_ED[at]!r}, a file gives {found[at]!r}; the solver left the lattice")
    return s_ED
