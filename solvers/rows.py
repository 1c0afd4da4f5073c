"""What a layer's gains are solved on: the outputs of its MoE block's parts, row by row, beside the original's.

    block output of row i = sum_k y_ik + ysh_i         y_ik: what the expert in slot k adds, routing weight inside

That is how the engine's down projection leaves a slot, since the routing weight stands before it; a gain s_e[d] on
that expert's output channel d makes it s_e[d] * y_ik[d]. Arrays may be memory-mapped and are read in slices of
channels: at released size 8,192 rows of 6 slots x 5,120 in float32 take a gigabyte, of which a slice of 256 channels
is 50 MB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint.codecs import bf16_to_f32
from ds4.errors import UsageError
from solvers.lattice import BLOCK

Float = NDArray[Any]
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class BlockRows:
    """One layer's rows. Floating arrays are float32, or bfloat16 as uint16; float64 where a reference is made.

    y_TKD: [T, K, D] what each slot adds, routing weight inside.
    picks_TK: integers [T, K], the experts of the slots, all different in a row.
    ysh_TD: [T, D] the shared expert's output.
    target_TD: [T, D] the original's block output at the same positions.
    first: number of the first channel, where these are a part of a layer's.
    """

    y_TKD: Float
    picks_TK: NDArray[np.integer]
    ysh_TD: Float
    target_TD: Float
    n_experts: int
    first: int = 0

    def __post_init__(self) -> None:
        """Raises UsageError: shapes or kinds that do not belong together, an unknown expert, one twice in a row."""
        shape, n = self.y_TKD.shape, len(self.y_TKD)
        if self.y_TKD.ndim != 3 or not n or not shape[1]:
            raise UsageError(f"slot outputs are {list(shape)}; expected [rows, slots, channels]")
        if shape[2] % BLOCK:
            raise UsageError(f"the block is {shape[2]} wide; gains are stored in blocks of {BLOCK} channels")
        for name, found, want in (
            ("picks", self.picks_TK, shape[:2]),
            ("the shared expert's output", self.ysh_TD, (n, shape[2])),
            ("the original's output", self.target_TD, (n, shape[2])),
        ):
            if found.shape != want:
                raise UsageError(f"{name}: {list(found.shape)} beside slot outputs {list(shape)}, not {list(want)}")
        for name, array in (("slot outputs", self.y_TKD), ("shared", self.ysh_TD), ("original", self.target_TD)):
            if array.dtype not in (np.float32, np.float64, np.uint16):
                raise UsageError(f"{name}: {array.dtype}; expected float32, or bfloat16 as uint16")
        low, high = int(self.picks_TK.min()), int(self.picks_TK.max())
        if low < 0 or high >= self.n_experts:
            raise UsageError(f"picks go from {low} to {high}; the layer has experts 0 to {self.n_experts - 1}")
        ordered = np.sort(self.picks_TK, axis=1)
        twice = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if len(twice):
            raise UsageError(f"row {twice[0]} picks {self.picks_TK[twice[0]].tolist()}: an expert twice")

    @property
    def width(self) -> int:
        return int(self.y_TKD.shape[2])

    def part(self, channels: slice) -> BlockRows:
        """These channels alone, copied: what another process needs to work on them."""
        y, ysh, target = (np.ascontiguousarray(a[..., channels]) for a in (self.y_TKD, self.ysh_TD, self.target_TD))
        return BlockRows(y, np.asarray(self.picks_TK), ysh, target, self.n_experts, self.first + channels.start)


@dataclass(frozen=True)
class Slots:
    """Where the slots of some rows stand when sorted by expert; the same for every slice of channels."""

    rows_T: I64  # which rows of the block
    order_S: I64  # flat slot numbers (place in rows_T * K + slot), by expert, then by row
    row_S: I64  # place in rows_T of each sorted slot
    starts_E: I64  # [E + 1]: expert e has sorted slots starts[e] .. starts[e + 1]

    @staticmethod
    def of(rows: BlockRows, wanted_T: NDArray[np.bool_]) -> Slots:
        rows_T = np.flatnonzero(wanted_T)
        picks_S = np.asarray(rows.picks_TK[rows_T], np.int64).reshape(-1)
        order_S = np.argsort(picks_S, kind="stable")
        counts_E = np.bincount(picks_S, minlength=rows.n_experts)
        starts_E = np.concatenate([[0], np.cumsum(counts_E)])
        return Slots(rows_T, order_S, order_S // rows.picks_TK.shape[1], starts_E)

    @property
    def counts_E(self) -> I64:
        return np.diff(self.starts_E)


@dataclass
class Slice:
    """Some rows and some channels, sorted by expert. C: channels of the slice, S: slots of the rows."""

    u_SC: Float  # what each slot adds
    residual_TC: Float  # target - shared - sum of slots: what gains of 1 leave
    slots: Slots
    energy_EC: Float  # sum of u^2 over an expert's slots


def read_slice(rows: BlockRows, slots: Slots, channels: slice) -> Slice:
    """Gather a slice; float32, or float64 if the rows are.

    Raises:
        UsageError: a value is not finite.
    """
    y_TKC = _read(rows.y_TKD, slots.rows_T, channels)
    n, n_slots, width = y_TKC.shape
    residual_TC = _read(rows.target_TD, slots.rows_T, channels) - _read(rows.ysh_TD, slots.rows_T, channels)
    for k in range(n_slots):
        residual_TC -= y_TKC[:, k]
    if not np.isfinite(residual_TC).all():
        row, channel = np.argwhere(~np.isfinite(residual_TC))[0]
        raise UsageError(
            f"row {slots.rows_T[row]}, channel {rows.first + channels.start + channel}: an output of the block, of "
            "its parts or of the original's is not finite"
        )
    u_SC = np.take(y_TKC.reshape(n * n_slots, width), slots.order_S, axis=0)
    energy_EC = np.zeros((rows.n_experts, width), u_SC.dtype)
    for e in np.flatnonzero(slots.counts_E):
        part = u_SC[slots.starts_E[e] : slots.starts_E[e + 1]]
        energy_EC[e] = np.square(part).sum(axis=0)
    return Slice(u_SC, residual_TC, slots, energy_EC)


def _read(array: Float, rows_T: I64, channels: slice) -> Float:
    part = np.asarray(array[..., channels][rows_T])  # the slice is a view, so only its channels are copied
    return bf16_to_f32(part) if part.dtype == np.uint16 else np.ascontiguousarray(part)
