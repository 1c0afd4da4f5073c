"""One layer's part of a solve: capture, solve gains, write, mount, and look at what the engine then computes.

What a sidecar ② (sidecar.py) and a post-training folder ③ (refit.py) have in common. A file is written beside its
name, read back by the reader that a load uses, mounted, and kept only if the kernels then give what was solved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.base.codebook import Workers
from ds4.errors import Ds4Error
from ds4.sidecar.files import encode_gains, gain_path, read_gains
from ds4.teacher.moe import route
from ds4.teacher.run import Teacher
from solvers.capture import Captured, Captures
from solvers.fixture import Target
from solvers.gains import GainSolution, Rule, solve_gains
from solvers.rows import BlockRows
from solvers.workfolder import WorkFolder

F32 = NDArray[np.float32]
Mask = NDArray[np.bool_]
Progress = Callable[[int, int], None]  # thousandths of layers done, in all

LEAST_ROUTING = (
    0.99  # share of rows at which the original's router, on the input that is kept, must choose as is kept
)
MOUNTED_WITHIN = 1e-5  # of a slot's largest value: factors and base gains multiply in another order than here


def within(progress: Progress | None, done: int, of: int) -> Callable[[float], None]:
    """Tells of a share of one layer, with `done` layers of `of` behind it."""

    def tell(share: float) -> None:
        if progress is not None:
            progress(int(1000 * (done + share)), 1000 * of)

    return tell


@dataclass
class LayerWork:
    """One layer's work, with those before it mounted.

    Attributes:
        work: the folder that is made. Beside it: what `mount` puts under it.
        mount: puts the folder on, as it is now.
        held_T: bool [T], rows that are not fitted.
        tell: hears the share of the layer that is done.
    """

    captures: Captures
    work: WorkFolder
    mount: Callable[[], None]
    teacher: Teacher
    layer: int
    held_T: Mask
    workers: Workers | None
    tell: Callable[[float], None]

    def capture(self, start: float) -> Captured:
        """The layer as it is now; takes a quarter of its time from `start` on."""
        return self.captures.layer(self.layer, progress=lambda done, n: self.tell(start + 0.25 * done / n))

    def solve_gains(self, found: Captured, target: Target, rule: Rule, wanted_T: Mask | None = None) -> GainSolution:
        """Gains on the captured rows, or on some of them, bool [T], which are copied."""
        E, held_T = self.captures.engine.config.n_routed_experts, self.held_T
        rows = BlockRows(found.slots_TKD, found.picks_TK, found.shared_TD, target.output_TD, E)
        if wanted_T is not None and not wanted_T.all():
            held_T = held_T[wanted_T]
            rows = BlockRows(
                found.slots_TKD[wanted_T], found.picks_TK[wanted_T], found.shared_TD[wanted_T],
                target.output_TD[wanted_T], E,
            )  # fmt: skip
        return solve_gains(rows, held_T, rule, self.workers, lambda done, n: self.tell(0.5 + 0.5 * done / n))

    def put_gains(self, found: Captured, gains: GainSolution) -> dict[str, str]:
        """Write gains, mount them, and compare what the engine makes of them; the file's name and hash.

        Raises:
            CapacityError: the disk is full.
            Ds4Error: a reader, or the engine, makes something else of the file, which is gone again.
        """
        path = gain_path(self.work.folder, self.layer)
        mark = self.work.put(path.name, encode_gains(gains.s_ED), lambda p: _same_gains(p, gains))
        self.mount()
        self._check_gains(found, gains)
        return {path.name: mark}

    def original_routing(self, target: Target) -> float:
        """Share of rows at which the original's router chooses, from the input that is kept, what is kept.

        Raises:
            Ds4Error: of too few.
        """
        nm, config = self.teacher.nm, self.teacher.config
        moe = self.teacher.stream.layer(f"layers.{self.layer}").moe
        picks, _ = route(nm, config, moe, nm.to_xp(target.input_TD), None, config.num_experts_per_tok)
        share = float((np.sort(target.picks_Tk, axis=1) == nm.to_host(picks)).all(axis=1).mean())
        if share < LEAST_ROUTING:
            raise Ds4Error(
                f"layer {self.layer}: the original's router chooses what the fixture says at {share:.2%} of its "
                f"rows; at least {LEAST_ROUTING:.0%} must: fixture and checkpoint do not belong together"
            )
        return share

    def _check_gains(self, found: Captured, gains: GainSolution) -> None:
        """The engine's kernels, with the file on, give each slot of the first window times its factor.

        Raises:
            Ds4Error: they do not; the file is gone again.
        """
        again = self.captures.layer(self.layer, [0])
        n = len(again.picks_TK)
        want_TKD = found.slots_TKD[:n] * gains.s_ED[found.picks_TK[:n]]
        off_TKD = np.abs(again.slots_TKD - want_TKD)
        limit_TK1 = MOUNTED_WITHIN * np.abs(want_TKD).max(axis=2, keepdims=True)
        if np.array_equal(again.picks_TK, found.picks_TK[:n]) and (off_TKD <= limit_TK1).all():
            return
        self.work.drop(gain_path(self.work.folder, self.layer).name)
        raise Ds4Error(
            f"layer {self.layer}: with the gains mounted the engine's slots are off by up to {off_TKD.max():.3g} "
            "from what was solved; the file is not kept"
        )


def _same_gains(path: Path, gains: GainSolution) -> bool:
    return bool(np.array_equal(read_gains(path, *gains.s_ED.shape), gains.s_ED))


def block_error(found: Captured, output_TD: F32, wanted_T: Mask) -> float:
    """Sum of squared differences of the block's parts, unrounded, from the original's output on some rows."""
    total = 0.0
    wanted = np.flatnonzero(wanted_T)
    for first in range(0, len(wanted), 256):
        rows = wanted[first : first + 256]
        off = found.slots_TKD[rows].sum(axis=1) + found.shared_TD[rows] - output_TD[rows]
        total += float(np.square(off, dtype=np.float64).sum())
    return total


def gains_record(gains: GainSolution) -> dict[str, Any]:
    """What a manifest says of a layer's gains."""
    return {
        "written": gains.mounted, "lambda": gains.lam, "louder": gains.louder, "held_out_gain": gains.held_out_gain,
        "fitted_rows": gains.n_fitted, "untouched_experts": gains.n_untouched,
        "by_lambda": [{"lambda": c.lam, "fitted": c.fitted, "held_out": c.held_out} for c in gains.candidates],
    }  # fmt: skip


def taken(error: Mapping[str, float]) -> float:
    """Share of the held-out error before a layer's files that they take away."""
    return 1 - error["with_gains"] / error["before"] if error["before"] else 0.0
