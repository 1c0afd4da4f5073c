"""Decisions of the engine, and what moves them, read on the path that requests take.

A turn is a prompt, the answer's tokens after it, and at most one token that is wanted next. The prompt goes through
prefill, the answer through the decode kernels (`split` moves the border, for comparison). At the prompt's last
position and at every one of the answer the engine decides something: there its logits are read, and of the last
layer what margin rows need: slots, picks, mixes, and the norm's factor from the streams that the head collapses.

    wanted next:   a is wanted             the turn's point, at its last position
    elsewhere:     a is the strongest      a decision that is to stay
    margins        l_a - l_b against one or more other tokens b, the strongest first

Nothing below the last layer's experts depends on their gains, and neither do later positions (what is fed is known,
and no cache holds that layer's output). So slots that were read once hold for every table of that layer, and with
another one mounted only logits and factors are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer
from ds4.engine import Engine
from ds4.engine.lane import Lane
from ds4.engine.layer import MoeBuffers
from ds4.engine.session import Session
from ds4.engine.weights import ModelWeights
from ds4.errors import Ds4Error, UsageError
from ds4.teacher.source import BaseSource
from solvers.margin_rows import MarginRows, direction

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]
Arrays = dict[str, NDArray[Any]]
Progress = Callable[[int, int], None]  # turns read, turns in all

# How far the engine's margin may be from the head's mathematics on what was read, in the length of both tokens'
# products: the head's input and, in prefill, its rows are rounded to A, 2^-9 of each product at most, at random.
ROUNDING = {"bf16": 2.0**-7, "f32": 1e-4}


@dataclass(frozen=True)
class Turn:
    """What is fed: `prompt` by prefill, `answer` by decode; `wanted` is to lead after it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()
    wanted: int | None = None

    def __post_init__(self) -> None:
        """Raises UsageError: no prompt."""
        if not self.prompt:
            raise UsageError("a turn without a prompt: no position decides anything")

    @property
    def n_places(self) -> int:
        """Positions that decide: the prompt's last one and the answer's."""
        return 1 + len(self.answer)


@dataclass(frozen=True)
class Decisions:
    """Of all turns, turn after turn, N of them, and M margins of theirs, decision after decision.

    turn_N, place_N: integers; place 0 is the prompt's last position. point_N: whether a was wanted.
    a_N: tokens. rival_N: the strongest token but a; lead_N: float64, l_a less its logit: a leads where it is above 0.
    pre_NC, post_NC, factor_N: mixes of the last FFN and the output norm's factor, float64.
    at_M, b_M: a margin's decision, and the token that a is held against; margin_M: float64, of float32 logits.
    """

    turn_N: I64
    place_N: I64
    point_N: Mask
    a_N: I64
    rival_N: I64
    lead_N: F64
    pre_NC: F64
    post_NC: F64
    factor_N: F64
    at_M: I64
    b_M: I64
    margin_M: F64

    def __len__(self) -> int:
        return len(self.turn_N)

    def with_rivals(self, of_N: Mask) -> Decisions:
        """With a margin more for those of `of_N` that another token leads, against that token."""
        lost_N = of_N & (self.lead_N <= 0)
        known = set(zip(self.at_M.tolist(), self.b_M.tolist(), strict=True))
        new = [i for i in np.flatnonzero(lost_N).tolist() if (i, int(self.rival_N[i])) not in known]
        at_M = np.concatenate([self.at_M, np.array(new, np.int64)])
        order = np.argsort(at_M, kind="stable")
        return replace(
            self,
            at_M=at_M[order],
            b_M=np.concatenate([self.b_M, self.rival_N[new]])[order],
            margin_M=np.concatenate([self.margin_M, self.lead_N[new]])[order],
        )


@dataclass(frozen=True)
class LastSlots:
    """Slots of the last layer's experts at some decisions: y f32 [P, K, D] with their routing weights and every
    mounted gain inside, picks i32 [P, K], and which decisions they are of, bool [N].
    """

    y_PKD: F32
    picks_PK: I32
    of_N: Mask


class MarginReader:
    """One engine over some turns.

    Args:
        split: the first place of prompt and answer together whose token goes through decode; None: the answer's.
            From a turn's end on, or beyond it: all of it goes through prefill.

    Raises:
        UsageError: no turns, or a token that the model does not have.
    """

    def __init__(self, engine: Engine, turns: Sequence[Turn], split: int | None = None) -> None:
        vocab = engine.config.vocab_size
        for i, turn in enumerate(turns):
            wanted = () if turn.wanted is None else (turn.wanted,)
            for token in (*turn.prompt, *turn.answer, *wanted):
                if not 0 <= token < vocab:
                    raise UsageError(f"turn {i} has token {token}; ids run from 0 to {vocab - 1}")
        if not turns:
            raise UsageError("no turns: there is nothing to read margins from")
        self.engine, self.turns, self.split = engine, tuple(turns), split
        self._source = BaseSource(engine.base)
        self._norm_D = self._source.dense("norm.weight")
        self._ends = np.cumsum([t.n_places for t in turns])

    @property
    def n_decisions(self) -> int:
        return int(self._ends[-1])

    def decisions(
        self, weights: ModelWeights, known: Decisions | None = None, progress: Progress | None = None
    ) -> Decisions:
        """Every decision with `weights` (mount.py).

        Args:
            known: an earlier reading, whose tokens a and b are taken; None: a as above, b the strongest other one.

        Raises:
            Ds4Error: logits are not finite, or are not what the head makes of what was read: then it was not read
                right, and nothing can be solved on it.
        """
        parts: list[Arrays] = []
        lanes: dict[str, Lane] = {}
        for i, turn in enumerate(self.turns):
            play = Play(self._lane(lanes, weights, turn), turn, self.split, ("x", "pre", "post"))
            logits_NV = play.run()
            if not np.isfinite(logits_NV).all():
                raise Ds4Error(f"turn {i}: logits are not finite; is the base sound?")
            parts.append(self._decided(i, turn, logits_NV, play.rows(), known))
            if progress is not None:
                progress(i + 1, len(self.turns))
        return Decisions(**{name: np.concatenate([p[name] for p in parts]) for name in parts[0]})

    def slots(self, weights: ModelWeights, of_N: Mask, progress: Progress | None = None) -> LastSlots:
        """Slots at some decisions, as they are with `weights`."""
        y, picks = [], []
        lanes: dict[str, Lane] = {}
        for i, turn in enumerate(self.turns):
            wanted = of_N[self._places(i)]
            if wanted.any():
                play = Play(self._lane(lanes, weights, turn), turn, self.split, ("y", "picks"))
                play.run()
                rows = play.rows()
                y.append(rows["y"][wanted])
                picks.append(rows["picks"][wanted])
            if progress is not None:
                progress(i + 1, len(self.turns))
        return LastSlots(np.concatenate(y), np.concatenate(picks), of_N)

    def rows(self, found: Decisions, slots: LastSlots) -> tuple[MarginRows, Mask]:
        """What the solve takes, and of which of the M margins: those of decisions whose slots were read."""
        use_M = slots.of_N[found.at_M]
        at_M = found.at_M[use_M]
        place_N = np.cumsum(slots.of_N) - 1
        rows = MarginRows(
            slots.y_PKD, slots.picks_PK, place_N[at_M], self._directions(found, use_M), found.margin_M[use_M],
            found.point_N[at_M], self.engine.config.n_routed_experts,
        )  # fmt: skip
        return rows, use_M

    def _places(self, turn: int) -> slice:
        return slice(int(self._ends[turn]) - self.turns[turn].n_places, int(self._ends[turn]))

    def _decided(
        self, number: int, turn: Turn, logits_NV: F32, rows: Arrays, known: Decisions | None
    ) -> dict[str, NDArray[Any]]:
        """Decisions' fields of one turn."""
        n, where = turn.n_places, self._places(number)
        each = np.arange(n)
        a_N = logits_NV.argmax(axis=1) if known is None else known.a_N[where]
        if known is None and turn.wanted is not None:
            a_N[-1] = turn.wanted
        own_N = logits_NV[each, a_N].astype(np.float64)
        others_NV = logits_NV.copy()
        others_NV[each, a_N] = -np.inf
        rival_N = others_NV.argmax(axis=1)
        if known is None:
            at_M, b_M = each, rival_N
        else:
            mine = slice(*np.searchsorted(known.at_M, (where.start, where.stop)))
            at_M, b_M = known.at_M[mine] - where.start, known.b_M[mine]
        margin_M = own_N[at_M] - logits_NV[at_M, b_M]
        pre_NC, post_NC = (rows[name].astype(np.float64) for name in ("pre", "post"))
        h_ND = np.einsum("nc,ncd->nd", pre_NC, rows["x"].astype(np.float64))
        factor_N = 1 / np.sqrt(np.square(h_ND).mean(axis=1) + self.engine.config.rms_norm_eps)
        self._check(h_ND * factor_N[:, None], a_N[at_M], b_M, at_M, margin_M)
        return {
            "turn_N": np.full(n, number), "place_N": each,
            "point_N": (each == n - 1) & (turn.wanted is not None), "a_N": a_N, "rival_N": rival_N,
            "lead_N": own_N - logits_NV[each, rival_N], "pre_NC": pre_NC, "post_NC": post_NC, "factor_N": factor_N,
            "at_M": at_M + where.start, "b_M": b_M, "margin_M": margin_M,
        }  # fmt: skip

    def _directions(self, found: Decisions, use_M: Mask) -> F32:
        """g of MarginRows, float32 [M, D]."""
        at_M = found.at_M[use_M]
        head_a_MD, head_b_MD = self._head(found.a_N[at_M], found.b_M[use_M])
        mixes = (found.pre_NC[at_M], found.post_NC[at_M], found.factor_N[at_M])
        return direction(head_a_MD, head_b_MD, self._norm_D, *mixes).astype(np.float32)

    def _head(self, *tokens: I64) -> list[F32]:
        """The head's rows of some tokens, each read once."""
        ids, at = np.unique(np.concatenate(tokens), return_inverse=True)
        rows_TD = self._source.rows("head.weight", ids)
        return [rows_TD[part] for part in np.split(at, np.cumsum([len(t) for t in tokens])[:-1])]

    def _check(self, normed_ND: F64, a_M: I64, b_M: I64, at_M: I64, margin_M: F64) -> None:
        """Margins by the head's own rows from the norm's output, against the engine's.

        Raises:
            Ds4Error: they differ by more than rounding.
        """
        input_MD = (normed_ND * self._norm_D)[at_M]
        a_MD, b_MD = (head_MD.astype(np.float64) * input_MD for head_MD in self._head(a_M, b_M))
        by_hand_M = (a_MD - b_MD).sum(axis=1)
        length_M = np.sqrt((np.square(a_MD) + np.square(b_MD)).sum(axis=1))
        off_M = np.abs(by_hand_M - margin_M) - ROUNDING[self.engine.options.numerics.act] * length_M
        if not (off_M <= 1e-4).all():
            worst = int(np.argmax(off_M))
            raise Ds4Error(
                f"a margin is {margin_M[worst]:.4f} by the engine and {by_hand_M[worst]:.4f} by the head from what "
                f"was read, {off_M[worst]:.4f} more apart than rounding explains: it was not read right"
            )

    def _lane(self, lanes: dict[str, Lane], weights: ModelWeights, turn: Turn) -> Lane:
        """As the engine is served; where answers are prefilled too, all of their rows are needed."""
        engine = self.engine
        prefilled = self.split is not None and self.split > len(turn.prompt)
        mode = "full" if prefilled else engine.options.prefill
        if mode not in lanes:
            options = replace(engine.options, prefill=mode)
            lanes[mode] = Lane(engine.device, engine.workspace, engine.config, weights, engine.feed, options)
        lanes[mode].clear()
        return lanes[mode]


class Play:
    """One turn on a lane; rows of `wanted` (x, pre, post, y, picks) at its decisions are kept."""

    def __init__(self, lane: Lane, turn: Turn, split: int | None, wanted: Sequence[str]) -> None:
        self._lane, self._turn, self._split, self._wanted = lane, turn, split, wanted
        self._device, self._config = lane.step.device, lane.step.config
        self._found: dict[str, list[NDArray[Any]]] = {}

    def run(self) -> F32:
        """Logits, f32 [N, V]."""
        turn, lane = self._turn, self._lane
        session = Session(self._device, self._config, lane)
        tokens = [*turn.prompt, *turn.answer]
        cut = len(turn.prompt) if self._split is None else max(1, min(self._split, len(tokens)))
        lane.prefill.moe_tap = lane.step.moe_tap = self._experts
        try:
            logits = session.sync(tokens[:cut], logits="all" if cut > len(turn.prompt) else "last", tap=self._streams)
            logits_NV = session.logits()[None] if logits is None else logits
            if cut < len(tokens):
                logits_NV = np.concatenate([logits_NV, session.step(tokens[cut:], tap=self._streams)])
        finally:
            lane.prefill.moe_tap = lane.step.moe_tap = None
        return logits_NV[-turn.n_places :]

    def rows(self) -> Arrays:
        """What was kept, by name, [N, ...]."""
        return {name: np.concatenate(found)[-self._turn.n_places :] for name, found in self._found.items()}

    def _experts(self, found: MoeBuffers) -> None:
        if found.layer == self._config.num_hidden_layers - 1:
            for name, buffer in (
                ("pre", found.pre), ("post", found.post), ("y", found.slots), ("picks", found.chosen)
            ):  # fmt: skip
                self._keep(name, buffer)

    def _streams(self, layer: int, position: int, x: Buffer) -> None:
        if layer == self._config.num_hidden_layers:
            self._keep("x", x)

    def _keep(self, name: str, buffer: Buffer) -> None:
        if name not in self._wanted:
            return
        rows, most = buffer.shape[0], self._turn.n_places
        skip = max(0, rows - most)  # of a long prompt's chunks only the last rows decide anything
        part = buffer.view(skip * (buffer.nbytes // rows), (rows - skip, *buffer.shape[1:]))
        held = self._found.setdefault(name, [])
        if rows >= most:
            held.clear()
        held.append(self._device.download(part))
