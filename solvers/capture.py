"""What an engine's experts do on a text: captures from its own prefill, one layer at a time.

A window is one prefill pass of a session that begins with it, through the kernels that read a served prompt; the pass
ends at the layer that is asked for. Slot outputs, picks, weights, the shared expert's output and the block's are the
engine's own numbers (`Prefill.moe_tap`). Selection scores are the kernel's formula on the engine's router logits, and
must choose what the kernel chose. The first layers are run anew for each layer: half the layers of one prefill a
layer, which at released size is minutes for all of them beside an hour of solving, and needs no state between two.

Folders of layer files are put on without opening the base again (ds4/engine/mount.py): 1 MB a layer is uploaded, and
every capture has a sequence of its own on the weights as they are then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint.codecs import bf16_to_f32, f32_to_bf16
from ds4.engine import Engine
from ds4.engine.lane import Lane
from ds4.engine.layer import MoeBuffers
from ds4.engine.mount import Mounted, mount
from ds4.engine.session import Session
from ds4.errors import Ds4Error, UsageError
from rulers.text import Text
from solvers.bias import select

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Progress = Callable[[int, int], None]  # windows read, windows in all

LEAST_SUMS = 0.9999  # share of the block's values that the sum of its parts must give
LEAST_SETS = 0.999  # share of rows whose scores must choose what the kernel chose: rounding decides near ties only


@dataclass(frozen=True)
class Captured:
    """One layer's experts on T rows, all float32 (the shared expert's output and the block's are bf16 values).

    Attributes:
        slots_TKD: what the expert in each slot adds, its routing weight inside. picks_TK: i32, by falling score.
        weights_TK: routing weights. scores_TE: selection scores without a sidecar's bias, the base's own included.
        shared_TD, output_TD: the shared expert's output; the block's.
        sums, sets: shares of values and rows that agreed, see LEAST_SUMS and LEAST_SETS.
    """

    layer: int
    slots_TKD: F32
    picks_TK: I32
    weights_TK: F32
    scores_TE: F32
    shared_TD: F32
    output_TD: F32
    sums: float
    sets: float


class _Reached(Exception):
    """The layer that was asked for is done."""


class Captures:
    """One engine over one text.

    Raises:
        UsageError: the engine is not as it is served, or has a sidecar on already.
    """

    def __init__(self, engine: Engine, text: Text) -> None:
        numerics = engine.options.numerics
        if engine.mounted is not None:
            raise UsageError("captures begin on the base alone; open the engine without a sidecar")
        if (numerics.act, numerics.kv, engine.options.prefill) != ("bf16", "fp4", "full"):
            raise UsageError(
                f"captures are of the engine as it is served, bf16 and fp4 with full prefill, not {numerics.act}, "
                f"{numerics.kv}, {engine.options.prefill}"
            )
        self.engine, self.text = engine, text
        self._bare = self._weights = engine.weights
        self._biases: dict[int, F32] = {}

    def mount(self, zchain: Path | None, posttrain: Path | None = None) -> None:
        """Compute with the layer files of a sidecar, and of a post-training folder on it, from now on, read as a load
        reads them; without either with the base alone.

        Slots then have both folders' gains inside.

        Raises:
            FileFormatError: a file is unknown, broken, or of other dimensions, or `posttrain` is of another sidecar.
        """
        self._weights, self._biases = self._bare, {}
        if zchain is None and posttrain is None:
            return
        mounted = Mounted.open(self.engine.config, zchain, posttrain)
        self._weights = mount(self._bare, mounted, self.engine.device)
        for layer in range(self.engine.config.num_hidden_layers):
            bias = mounted.stack.bias(layer)
            if bias is not None:
                self._biases[layer] = bias

    def layer(self, layer: int, windows: Sequence[int] | None = None, progress: Progress | None = None) -> Captured:
        """One layer's experts over the text's windows, or over some of them.

        Raises:
            Ds4Error: the parts do not add up to the block's output, or the scores do not choose what was chosen: then
                the captures are not what the engine computes, and nothing can be solved on them.
            CapacityError: no memory for a window's pass.
        """
        chosen = range(len(self.text.slices)) if windows is None else windows
        parts = [self.text.slices[w] for w in chosen]
        c = self.engine.config
        n, k, D, E = sum(s.stop - s.start for s in parts), c.num_experts_per_tok, c.hidden_size, c.n_routed_experts
        out = Captured(
            layer, np.empty((n, k, D), np.float32), np.empty((n, k), np.int32), np.empty((n, k), np.float32),
            np.empty((n, E), np.float32), np.empty((n, D), np.float32), np.empty((n, D), np.float32), 0.0, 0.0,
        )  # fmt: skip
        engine = self.engine
        # a lane of its own: one of the engine's would keep weights that are not the engine's
        lane = Lane(engine.device, engine.workspace, c, self._weights, engine.feed, engine.options)
        session = Session(engine.device, c, lane)
        at = 0
        for number, part in enumerate(parts):
            size = part.stop - part.start
            self._read(session, lane, self.text.ids[part], layer, out, slice(at, at + size))
            at += size
            if progress is not None:
                progress(number + 1, len(parts))
        return self._checked(out)

    def _read(
        self, session: Session, lane: Lane, ids: NDArray[np.int32], layer: int, out: Captured, rows: slice
    ) -> None:
        """One window as far as the layer; its rows of `out` are filled."""
        download = self.engine.device.download

        def tap(found: MoeBuffers) -> None:
            if found.layer != layer:
                return
            out.slots_TKD[rows] = download(found.slots)
            out.picks_TK[rows] = download(found.chosen)
            out.weights_TK[rows] = download(found.weights)
            out.scores_TE[rows] = self._scores(layer, download(found.logits))
            out.shared_TD[rows] = bf16_to_f32(download(found.shared))
            out.output_TD[rows] = bf16_to_f32(download(found.out))
            raise _Reached

        lane.prefill.moe_tap = tap
        try:
            session.sync(ids.tolist(), logits="none", chunk=len(ids))
        except _Reached:
            return  # the session has cleared itself
        raise Ds4Error(f"layer {layer}: a pass over all layers did not meet its experts")

    def _scores(self, layer: int, logits_RE: F32) -> F32:
        """router.cu's selection scores, without a sidecar's bias."""
        u = logits_RE / np.float32(self.engine.config.gate_temp)
        with np.errstate(over="ignore"):
            soft = np.where(u > 20, u, np.log1p(np.exp(u)))
        bias: F32 = self.engine.device.download(self._bare.layers[layer].router_bias).reshape(-1)
        scores: F32 = np.sqrt(soft).astype(np.float32) + bias
        return scores

    def _checked(self, found: Captured) -> Captured:
        n, k = found.picks_TK.shape
        equal = 0
        for first in range(0, n, 256):
            part = slice(first, first + 256)
            total = np.zeros_like(found.shared_TD[part])
            for slot in range(k):
                total += found.slots_TKD[part, slot]
            rounded = bf16_to_f32(f32_to_bf16(total + found.shared_TD[part]))
            equal += int((rounded == found.output_TD[part]).sum())
        sums = equal / found.output_TD.size
        if sums < LEAST_SUMS:
            raise Ds4Error(
                f"layer {found.layer}: experts and shared expert add up to the block's output on {sums:.4%} of its "
                f"values; at least {LEAST_SUMS:.2%} must: the captures are not what the engine computes"
            )
        scores_TE = found.scores_TE + self._biases.get(found.layer, np.float32(0))
        ours_TK = np.nonzero(select(scores_TE, k))[1].reshape(n, k)
        sets = float((np.sort(found.picks_TK, axis=1) == ours_TK).all(axis=1).mean())
        if sets < LEAST_SETS:
            raise Ds4Error(
                f"layer {found.layer}: selection scores choose what the router chose at {sets:.3%} of positions; at "
                f"least {LEAST_SETS:.1%} must"
            )
        return Captured(**{**vars(found), "sums": sums, "sets": sets})
