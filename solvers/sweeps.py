"""Gauss-Seidel over experts on one slice of channels: the arithmetic of the gains.

Channels do not meet in the objective (but through a block's shared lattice scale), and for the gains of one expert,
all others fixed, it is a parabola a channel, with its least value at

    t_e[d] = (sum_i u_i r_i + a_e[d] delta_e[d] + rho[d] m_e) / w_e[d]        w = a + rho

    u_i  what the expert adds on row i        r  the residual with all gains as they stand
    a_e  sum_i u_i^2                          rho, m  the ridge and the delta that it pulls to, 0 in the recipe

and J(delta_e) = sum_d w_e[d] (delta_e[d] - t_e[d])^2 + what does not depend on it. So a projection onto the lattice
that weighs its errors by w is the best that this expert can do, and the residual then holds what rounding left for
the next expert to mend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solvers.lattice import cheapest, nearest
from solvers.rows import Slice

Float = NDArray[Any]
Project = Callable[[Float, Float], Float]  # (t, w) -> what is kept, all [C]


def keep(target_C: Float, weight_C: Float) -> Float:
    """No projection."""
    return target_C


def to_nearest(target_C: Float, weight_C: Float) -> Float:
    """The writer's rounding."""
    return nearest(target_C)


def to_cheapest(target_C: Float, weight_C: Float) -> Float:
    """The scale that costs the objective least."""
    return cheapest(target_C, weight_C)


def sweep(
    part: Slice,
    delta_EC: Float,
    residual_TC: Float,
    ridge_EC: Float,
    pull_E: Float,
    order: Sequence[int],
    project: Project,
) -> float:
    """Visit each expert of `order` once; delta_EC and residual_TC move in place.

    Args:
        part: u, its slots and energies.
        delta_EC: s - 1, [E, C].
        residual_TC: what delta_EC leaves of part.residual_TC.
        ridge_EC: rho, [E, C] (broadcast views are fine).
        pull_E: m, [E].
        order: experts; those left out stay as they are.

    Returns:
        The largest change of a delta.
    """
    starts, largest = part.slots.starts_E, 0.0
    for e in order:
        here = slice(starts[e], starts[e + 1])
        u, rows = part.u_SC[here], part.slots.row_S[here]
        r = np.take(residual_TC, rows, axis=0)
        energy, ridge, before = part.energy_EC[e], ridge_EC[e], delta_EC[e]
        weight = energy + ridge
        reach = np.einsum("sc,sc->c", u, r) + energy * before + ridge * pull_E[e]
        # a channel on which nobody adds anything has no weight, and any gain does; 1 is as good
        target = np.divide(reach, weight, out=np.zeros_like(reach), where=weight > 0)
        after = project(target, weight)
        change = after - before
        step = float(np.abs(change).max())
        if step == 0.0:
            continue
        largest = max(largest, step)
        delta_EC[e] = after  # not += change, which may miss the lattice by a rounding
        r -= u * change
        residual_TC[rows] = r
    return largest


def levels(part: Slice, order: Sequence[int], sweeps: int = 4) -> Float:
    """The delta of each expert that serves all channels of the slice best, without a ridge; [E], 0 outside `order`.

    Gauss-Seidel too, on E unknowns for all channels together, each of which has many rows times many channels to it:
    what is left after four sweeps is far below what the gains themselves are known to.
    """
    starts, residual_TC = part.slots.starts_E, part.residual_TC.copy()
    out = np.zeros(len(part.energy_EC), part.energy_EC.dtype)
    energy_E = part.energy_EC.sum(axis=1, dtype=np.float64)
    for _ in range(sweeps):
        for e in order:
            here = slice(starts[e], starts[e + 1])
            u, rows = part.u_SC[here], part.slots.row_S[here]
            r = np.take(residual_TC, rows, axis=0)
            step = out.dtype.type(np.einsum("sc,sc->c", u, r).sum(dtype=np.float64) / max(energy_E[e], 1e-300))
            out[e] += step
            residual_TC[rows] = r - u * step
    return out


def residual_of(part: Slice, delta_EC: Float) -> Float:
    """What gains of 1 + delta leave, computed afresh; [T, C]."""
    out = part.residual_TC.copy()
    starts = part.slots.starts_E
    for e in np.flatnonzero(part.slots.counts_E):
        if delta_EC[e].any():
            here = slice(starts[e], starts[e + 1])
            out[part.slots.row_S[here]] -= part.u_SC[here] * delta_EC[e]
    return out


def squares(residual_TC: Float) -> NDArray[np.float64]:
    """Sum of squares of each channel, float64 [C]."""
    return np.asarray(np.square(residual_TC).sum(axis=0, dtype=np.float64))


def normal_equations(part: Slice, ridge_EC: Float, pull_E: Float, experts: Sequence[int]) -> NDArray[np.float64]:
    """The same minimum without a lattice, by solving its normal equations channel by channel; float64 [E, C].

    For checks: cubic in the number of experts. Others than `experts` keep a delta of 0.
    """
    n, (n_experts, width) = len(part.residual_TC), delta_shape(part)
    out = np.zeros((n_experts, width))
    chosen = np.asarray(experts, np.int64)
    expert_S = np.repeat(np.arange(n_experts), part.slots.counts_E)
    for c in range(width):
        a = np.zeros((n, n_experts))
        a[part.slots.row_S, expert_S] = part.u_SC[:, c]
        a = a[:, chosen]
        ridge = np.asarray(ridge_EC[chosen, c], np.float64)
        right = a.T @ part.residual_TC[:, c].astype(np.float64) + ridge * pull_E[chosen]
        out[chosen, c] = np.linalg.solve(a.T @ a + np.diag(ridge), right)
    return out


def delta_shape(part: Slice) -> tuple[int, int]:
    """(experts, channels) of a slice."""
    n_experts, width = part.energy_EC.shape
    return int(n_experts), int(width)
