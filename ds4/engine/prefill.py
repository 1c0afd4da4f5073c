"""Prefill: many positions in chunks, through the same layer with the prefill kernels.

`full` runs every layer for every position. `replay` is the bounded replay of model-text 8.2: layers below the last kv
source, and that source's compressor and index keys, run for all positions of one `sync`; the source itself and the
layers after it run only for its last `sliding_window` positions. Start and extent are functions of the sync alone, so
any chunking of it leaves the same bits. Rows that were not computed have no logits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer, Device
from ds4.engine.draft import Drafter
from ds4.engine.layer import (
    MoeTap,
    Numerics,
    Pass,
    apply_engram,
    attend,
    attention_input,
    begin,
    feed_forward,
    head,
    publish,
)
from ds4.engine.layer import run_layer as run_whole_layer
from ds4.engine.ngrams import NgramFeed
from ds4.engine.scratch import Workspace
from ds4.engine.segments import Tap
from ds4.engine.state import SLACK, SequenceState
from ds4.engine.weights import ModelWeights
from ds4.model.config import ModelConfig

HEAD_ROWS = 32  # rows of logits at a time
MOST_ROWS = 65535  # of a pass: rows are an axis of many grids that a GPU limits to this


Reading = Generator[tuple[int, int], None, NDArray[np.float32] | None]


class Cancelled(Exception):
    """The caller's `cancelled` said so; the state holds the chunks that were finished."""


@dataclass(frozen=True)
class Extent:
    """One sync's plan: positions start..end, and where the decoder half begins (start: everywhere)."""

    start: int
    end: int
    replay_from: int

    @property
    def bounded(self) -> bool:
        return self.replay_from > self.start


@dataclass
class Prefill:
    """Runs syncs of one sequence. Where there is a draft head, the rows that it can reach become its keys. `moe_tap`
    sees each layer's experts, chunk by chunk.
    """

    device: Device
    ws: Workspace
    config: ModelConfig
    numerics: Numerics
    weights: ModelWeights
    state: SequenceState
    feed: NgramFeed
    mode: str
    chunk: int
    drafter: Drafter | None = None
    moe_tap: MoeTap | None = None

    def extent(self, end: int, part: bool = False) -> Extent:
        """What a sync up to `end` will run; of a `part` nothing is replayed."""
        start = self.state.position
        if self.mode == "replay" and self.config.last_kv_source >= 0:
            return Extent(start, end, end if part else max(start, end - self.config.sliding_window))
        return Extent(start, end, start)

    def run(
        self,
        tokens: Sequence[int],
        logits: str,
        last: Buffer,
        on_progress: Callable[[int, int], None] | None = None,
        tap: Tap | None = None,
        part: bool = False,
    ) -> Reading:
        """Run `tokens` from the state's position to their end, a chunk a `next`.

        Between two chunks other sequences may run in the same scratch: what this one needs later is its own.

        Args:
            logits: "none", "last" (into `last`, f32 [1, V]), or "all" (returned; `last` is filled too).
            tap: sees every layer's entry streams, chunk by chunk, of the rows that the layer runs.
            part: the beginning of a longer sync, without logits (Session.reading).

        Yields:
            before each chunk, and before what a bounded replay runs last: positions run, and all of them.

        Returns:
            f32 [n, V] for "all", NaN where a bounded replay computed no row; else None.
        """
        ext = self.extent(len(tokens), part)
        self.state.reserve(ext.end)
        out: NDArray[np.float32] | None = None
        if logits == "all":
            out = np.full((ext.end - ext.start, self.config.vocab_size), np.nan, np.float32)
        below = self.config.last_kv_source if ext.bounded else None
        held = self._held(ext) if ext.bounded else None
        slots = [g for g, layer in enumerate(self.config.engram_layer_ids) if below is None or layer <= below]
        chunk = min(self.chunk, MOST_ROWS)
        tickets = self.feed.read(tokens, ext.start, min(chunk, ext.end - ext.start), slots)
        at = ext.start
        while at < ext.end:
            yield at - ext.start, ext.end - ext.start
            self.ws.passes += 1
            count = min(chunk, ext.end - at)
            mine = tickets
            ahead = at + count
            if ahead < ext.end:
                tickets = self.feed.read(tokens, ahead, min(chunk, ext.end - ahead), slots)
            p = self._pass(at, count)
            for g, ticket in mine.items():
                p.engram_rows[g].write(ticket.wait().reshape(-1))
            begin(p, self.weights, self._ids(tokens, at, count), self._one_hot(count))
            if held is None or below is None:
                self._ask_main_hidden(p, at, ext)
                self._layers(p, 0, at, tap)
                self._seed(p, at, ext)
                self._logits(p, at, ext, logits, last, out)
            else:
                self._encoder_half(p, at, ext, below, held, tap)
            self.device.sync()
            at += count
            if not ext.bounded:
                self.state.advance(at)
            if on_progress:
                on_progress(at - ext.start, ext.end - ext.start)
        if ext.bounded and part:  # what follows hides the rows that are not there
            self.state.set_first(self.state.first[0], ext.end)
            self.state.replayed_to = ext.end
            self.state.advance(ext.end)
        elif held is not None and below is not None:
            yield ext.end - ext.start, ext.end - ext.start
            self.ws.passes += 1
            self._decoder_half(tokens, ext, below, held, logits, last, out, tap)
            self.state.advance(ext.end)
        return out

    def _pass(self, at: int, count: int) -> Pass:
        c, ws = self.config, self.ws
        pos = ws.get("prefill_pos", (count,), "i32")
        pos.write(np.arange(at, at + count, dtype=np.int32))
        rows = tuple(ws.get(f"engram_rows_{g}", self.feed.shape(count), "u8") for g in range(len(c.engram_layer_ids)))
        x = ws.get("prefill_x", (count, c.hc_mult, c.hidden_size), "f32")
        pre = ws.get("prefill_pre", (count, c.hc_mult), "f32")
        return Pass(
            self.device, ws, c, self.numerics, "prefill", self.state, count, x, pre, pos, rows, {},
            moe_tap=self.moe_tap,
        )  # fmt: skip

    def _ask_main_hidden(self, p: Pass, at: int, ext: Extent) -> None:
        """Room for what the draft head reads of these rows, if it can ever reach them."""
        c = self.config
        if self.drafter is not None and at + p.R > ext.end - c.sliding_window - SLACK:
            p.main_hidden = p.temp("draft_main_hidden", p.R, len(c.dspark_target_layer_ids) * c.hidden_size)

    def _seed(self, p: Pass, at: int, ext: Extent) -> None:
        if self.drafter is not None and p.main_hidden is not None:
            self.drafter.seed(p.main_hidden, at, ext.end)

    def _ids(self, tokens: Sequence[int], at: int, count: int) -> Buffer:
        ids = self.ws.get("prefill_ids", (count,), "i32")
        ids.write(np.asarray(tokens[at : at + count], np.int32))
        return ids

    def _one_hot(self, count: int) -> Buffer:
        buffer = self.ws.get("prefill_one_hot", (count, self.config.hc_mult), "f32")
        buffer.write(np.tile(np.eye(1, self.config.hc_mult, dtype=np.float32), (count, 1)))
        return buffer

    def _layers(self, p: Pass, first: int, at: int, tap: Tap | None) -> None:
        for lw in self.weights.layers[first:]:
            if tap:
                tap(lw.layer, at, p.x)
            run_whole_layer(p, lw)
        if tap:
            tap(self.config.num_hidden_layers, at, p.x)

    def _encoder_half(
        self, p: Pass, at: int, ext: Extent, split: int, held: tuple[Buffer, Buffer], tap: Tap | None
    ) -> None:
        """Layers below the split, then the split's engram, compressor and index keys; keep the replayed rows'
        streams in `held`.
        """
        for lw in self.weights.layers[:split]:
            if tap:
                tap(lw.layer, at, p.x)
            run_whole_layer(p, lw)
        lw = self.weights.layers[split]
        if tap:
            tap(split, at, p.x)
        apply_engram(p, lw)
        publish(p, lw, attention_input(p, lw))
        first = max(at, ext.replay_from)
        count = at + p.R - first
        if count <= 0:
            return
        S, D = self.config.hc_mult, self.config.hidden_size
        for kept, source, width in ((held[0], p.x, 4 * S * D), (held[1], p.pre, 4 * S)):
            self.device.copy(
                kept, source, count * width,
                dst_offset=(first - ext.replay_from) * width, src_offset=(first - at) * width,
            )  # fmt: skip

    def _held(self, ext: Extent) -> tuple[Buffer, Buffer]:
        """Streams f32 [n, S, D] of the rows that are replayed, and what collapses them, f32 [n, S]: of this sync
        alone, as another sequence's may run between its chunks.
        """
        n, c = ext.end - ext.replay_from, self.config
        x = self.device.empty((n, c.hc_mult, c.hidden_size), "f32")
        return x, self.device.empty((n, c.hc_mult), "f32")

    def _decoder_half(
        self, tokens: Sequence[int], ext: Extent, split: int, held: tuple[Buffer, Buffer], logits: str, last: Buffer,
        out: NDArray[np.float32] | None, tap: Tap | None,
    ) -> None:  # fmt: skip
        """The split layer's attention and everything after it, for the last window of positions."""
        count = ext.end - ext.replay_from
        slots = [g for g, layer in enumerate(self.config.engram_layer_ids) if layer > split]
        tickets = self.feed.read(tokens, ext.replay_from, count, slots)
        self.state.set_first(self.state.first[0], ext.replay_from)
        self.state.replayed_to = ext.end
        p = self._pass(ext.replay_from, count)
        for to, kept in zip((p.x, p.pre), held):
            self.device.copy(to, kept, kept.nbytes)
        for g, ticket in tickets.items():
            p.engram_rows[g].write(ticket.wait().reshape(-1))
        lw = self.weights.layers[split]
        self._ask_main_hidden(p, ext.replay_from, ext)
        attend(p, lw, attention_input(p, lw))
        feed_forward(p, lw)
        self._layers(p, split + 1, ext.replay_from, tap)
        self._seed(p, ext.replay_from, ext)
        self._logits(p, ext.replay_from, ext, logits, last, out)
        self.device.sync()

    def _logits(
        self, p: Pass, at: int, ext: Extent, logits: str, last: Buffer, out: NDArray[np.float32] | None
    ) -> None:
        if out is not None:
            for first in range(0, p.R, HEAD_ROWS):
                count = min(HEAD_ROWS, p.R - first)
                block = self.ws.get("prefill_logits", (count, self.config.vocab_size), "f32")
                head(p, self.weights, block, first, count)
                row = at - ext.start + first
                out[row : row + count] = self.device.download(block)
        if logits != "none" and at + p.R == ext.end:
            head(p, self.weights, last, p.R - 1, 1)
