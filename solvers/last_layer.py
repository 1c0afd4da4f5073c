"""The last layer's experts and the head by hand: what every table of that layer's gains makes of positions read once.

    h = h0 + r sum_k (s_{e_k} - 1) * y_k        r = sum_c pre_c post_c        logits = head (w * h / rms(h))

Nothing at a position, or after it, that reaches this layer's experts depends on their gains (margin_capture.py), so
these are the logits that the engine has with the table mounted, up to the rounding of what is stored between blocks.
The norm's factor is not held fixed here. A small force v on the logits' side of the norm, v = head^T (q - p) for one,
moves the table by

    d(w * h / rms(h) . v) / d s_e[d] = y_k[d] * g[d],      g = r f (w v - f^2 h (h . w v) / D),   f = 1 / rms(h)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.engine import Engine
from ds4.engine.lane import Lane
from ds4.engine.weights import ModelWeights
from ds4.errors import Ds4Error
from ds4.teacher.source import BaseSource
from solvers.margin_capture import Play, Turn

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Float = NDArray[Any]
BLOCK = 512  # positions whose logits are in memory at once


@dataclass(frozen=True)
class Head:
    """rows_VD f32: the output head; norm_D: the output norm's weight."""

    rows_VD: F32
    norm_D: F32
    eps: float

    @staticmethod
    def of(engine: Engine) -> Head:
        """An engine's, as its base has them; float32 rows are 2.6 GB at released size."""
        source = BaseSource(engine.base)
        return Head(source.dense("head.weight"), source.dense("norm.weight"), engine.config.rms_norm_eps)

    def logits(self, h_PD: F64) -> F32:
        """f32 [P, V]."""
        return np.asarray((h_PD * self.factor(h_PD) * self.norm_D).astype(np.float32) @ self.rows_VD.T)

    def factor(self, h_PD: F64) -> F64:
        """1 / rms(h), [P, 1]."""
        return np.asarray(1 / np.sqrt(np.square(h_PD).mean(axis=1, keepdims=True) + self.eps))


@dataclass(frozen=True)
class Places:
    """P positions. y_PKD f32: what each slot adds at a gain of 1 of the table, everything mounted inside; picks_PK
    i32; h_PD f32: what the output norm reads; reach_P f32: r.
    """

    y_PKD: F32
    picks_PK: NDArray[np.int32]
    h_PD: F32
    reach_P: F32

    def __len__(self) -> int:
        return len(self.reach_P)

    def take(self, which: slice | NDArray[np.bool_] | I64) -> Places:
        return Places(*(getattr(self, f.name)[which] for f in fields(Places)))

    @staticmethod
    def join(parts: Sequence[Places]) -> Places:
        return Places(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Places)))

    def moved(self, delta_ED: F64) -> F64:
        """h with gains 1 + delta, f64 [P, D]."""
        added_PD = np.einsum("pkd,pkd->pd", delta_ED[self.picks_PK], self.y_PKD)
        return np.asarray(self.h_PD + self.reach_P[:, None] * added_PD, np.float64)

    def directions(self, head: Head, h_PD: F64, force_PD: Float) -> F32:
        """g of forces v, f32 [P, D], at h."""
        f, wv_PD = head.factor(h_PD), force_PD * head.norm_D
        along_P1 = np.einsum("pd,pd->p", h_PD, wv_PD)[:, None] / h_PD.shape[1]
        return np.asarray(self.reach_P[:, None] * f * (wv_PD - np.square(f) * h_PD * along_P1), np.float32)


def read_places(engine: Engine, weights: ModelWeights, turn: Turn, split: int | None = None) -> tuple[Places, F32]:
    """A turn's decisions, and the logits f32 [P, V] that the engine has there.

    Args:
        split: as MarginReader's; from the turn's end on, all of it goes through prefill, in full.

    Raises:
        Ds4Error: logits that are not finite.
    """
    whole = split is not None and split > len(turn.prompt)
    options = replace(engine.options, prefill="full") if whole else engine.options
    lane = Lane(engine.device, engine.workspace, engine.config, weights, engine.feed, options)
    play = Play(lane, turn, split, ("x", "pre", "post", "y", "picks"))
    logits_PV = play.run()
    if not np.isfinite(logits_PV).all():
        raise Ds4Error("logits are not finite; is the base sound?")
    rows = play.rows()
    h_PD = np.einsum("pc,pcd->pd", rows["pre"].astype(np.float64), rows["x"].astype(np.float64))
    reach_P = np.einsum("pc,pc->p", rows["pre"].astype(np.float64), rows["post"].astype(np.float64))
    places = Places(rows["y"], rows["picks"].astype(np.int32), h_PD.astype(np.float32), reach_P.astype(np.float32))
    return places, logits_PV


def softmax(logits_PV: F32) -> F32:
    p = np.exp(logits_PV - logits_PV.max(axis=1, keepdims=True))
    return np.asarray(p / p.sum(axis=1, keepdims=True))
