"""Rows of a MoE block whose best gains are known: what a test of a solver starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from solvers.rows import BlockRows


@dataclass(frozen=True)
class Made:
    rows: BlockRows
    s_ED: np.ndarray  # the gains that the target was made with
    held_out_T: np.ndarray


def made(
    n: int = 1024,
    n_experts: int = 12,
    k: int = 3,
    width: int = 64,
    spread: float = 0.1,
    noise: float = 0.3,
    skew: float = 0.5,
    seed: int = 0,
    kind: Any = np.float32,
) -> Made:
    """Normal outputs in channels of unequal loudness, experts of unequal popularity (`skew`), gains of 1 +- `spread`.

    The target is what the gains give, and noise that no gain can explain. Every fourth 32 rows are held out.
    """
    rng = np.random.default_rng(seed)
    popularity_E = skew * rng.standard_normal(n_experts)
    picks_TK = np.argsort(-(popularity_E + rng.gumbel(size=(n, n_experts))), axis=1)[:, :k].astype(np.int32)
    loudness_D = np.exp(0.5 * rng.standard_normal(width))
    y_TKD = rng.standard_normal((n, k, width)) * loudness_D
    ysh_TD = rng.standard_normal((n, width)) * loudness_D
    s_ED = 1 + spread * rng.standard_normal((n_experts, width))
    target_TD = (y_TKD * s_ED[picks_TK]).sum(axis=1) + ysh_TD + noise * loudness_D * rng.standard_normal((n, width))
    rows = BlockRows(y_TKD.astype(kind), picks_TK, ysh_TD.astype(kind), target_TD.astype(kind), n_experts)
    return Made(rows, s_ED, np.arange(n) // 32 % 4 == 3)


def error(rows: BlockRows, s_ED: np.ndarray, wanted_T: np.ndarray) -> float:
    """Sum of squared errors of the block with gains, in float64 and in the plainest way."""
    y = rows.y_TKD[wanted_T].astype(np.float64) * s_ED[rows.picks_TK[wanted_T]].astype(np.float64)
    out = y.sum(axis=1) + rows.ysh_TD[wanted_T].astype(np.float64)
    return float(np.square(out - rows.target_TD[wanted_T].astype(np.float64)).sum())
