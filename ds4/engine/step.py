"""Decode: 1 to 8 consecutive rows through all layers, as captured graphs.

One set of graphs a (rows, capacity, published keys, rows for the draft head or not): one graph from the embedding to
the first engram layer and one from each engram layer to the next, so that the rows of a later engram layer may still
be on their way while the layers before it run. Position, ids and n-gram rows live in device slots that are written
before a replay, so a replay never re-captures. The first step of a kind runs its launches directly, which grows the
scratch; the second is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ds4.device import Buffer, Device, Graph
from ds4.engine.layer import Numerics, Pass, begin, head, run_layer
from ds4.engine.ngrams import NgramFeed
from ds4.engine.scratch import Workspace
from ds4.engine.state import SequenceState
from ds4.engine.weights import ModelWeights
from ds4.engram.store import Ticket
from ds4.model.config import ModelConfig

MAX_ROWS = 8
# (layer, position of the first row, streams on entry); layer L: streams after the last one
Tap = Callable[[int, int, Buffer], None]


@dataclass
class StepCounts:
    """What the runner did: launches recorded a step, captures, replays, steps run directly. `cold` counts the passes
    that were the first of their kind or captured something: their time says nothing about the next one's.
    """

    captures: int = 0
    replays: int = 0
    direct: int = 0
    launches: int = 0
    cold: int = 0


class StepRunner:
    """The step of one sequence."""

    def __init__(
        self, device: Device, ws: Workspace, config: ModelConfig, numerics: Numerics, weights: ModelWeights,
        state: SequenceState, feed: NgramFeed, *, index_keys: str, graphs: bool,
    ) -> None:  # fmt: skip
        self.device, self.ws, self.config, self.numerics = device, ws, config, numerics
        self.weights, self.state, self.feed = weights, state, feed
        self.index_keys, self.graphs = index_keys, graphs
        self.counts = StepCounts()
        S, D = config.hc_mult, config.hidden_size
        self.ids = device.zeros((MAX_ROWS,), "i32")
        self.pos = device.zeros((MAX_ROWS,), "i32")
        self.x = device.empty((MAX_ROWS, S, D), "f32")
        self.pre = device.empty((MAX_ROWS, S), "f32")
        self.logits = device.empty((MAX_ROWS, config.vocab_size), "f32")
        self._gathered = device.empty((MAX_ROWS if index_keys == "released" else 0, config.vocab_size), "f32")
        self.one_hot = device.upload(np.tile(np.eye(1, S, dtype=np.float32), (MAX_ROWS, 1)))
        self.engram_rows = tuple(device.zeros(feed.shape(MAX_ROWS), "u8") for _ in config.engram_layer_ids)
        self._warm: set[tuple[object, ...]] = set()
        self._graphs: dict[tuple[object, ...], list[Graph]] = {}
        self._generation = ws.generation

    def forget_graphs(self) -> None:
        """Captured launches hold addresses; called when a buffer that they name has moved."""
        self._graphs.clear()
        self._warm.clear()

    def run(
        self, tokens: Sequence[int], count: int, tap: Tap | None = None, *, main_hidden: Buffer | None = None
    ) -> Buffer:
        """Run the `count` tokens that follow the state's position; `tokens` is the whole timeline up to and with
        them.

        Args:
            main_hidden: A [count, targets * D], filled with what the draft head reads of these rows. Always a view of
                the same buffer: captured launches hold its address.

        Returns:
            Logits f32 [count, V]: a view that the next call overwrites.
        """
        if self.index_keys == "released" and count > 1:
            return self._one_by_one(tokens, count, tap, main_hidden)
        state = self.state
        start = state.position
        if state.reserve(start + count):
            self.forget_graphs()
        tickets = self.feed.request(tokens, start, count, range(len(self.engram_rows)))
        self.ids.write(np.asarray(tokens[start : start + count], np.int32))
        self.pos.write(np.arange(start, start + count, dtype=np.int32))
        published = self._published(start)
        if self.ws.generation != self._generation:
            self.forget_graphs()
            self._generation = self.ws.generation
        key = (count, state.capacity, tuple(sorted(published.items())), main_hidden is not None)
        p = self._pass(count, published)
        if main_hidden is not None:
            p.main_hidden = main_hidden
        self._advance(key, p, tickets, tap)
        state.advance(start + count)
        if self.index_keys == "released":
            state.published = self.last_publisher(start, state.published)
        return self.logits.view(0, (count, self.config.vocab_size), "f32")

    def _one_by_one(self, tokens: Sequence[int], count: int, tap: Tap | None, main_hidden: Buffer | None) -> Buffer:
        """Released index keys: a source may score keys that a later layer made of the row before, so every row is a
        pass. Each leaves its row where a pass of one row does; it is moved to its place from there.
        """
        start, V, ends = self.state.position, self.config.vocab_size, range(1, count + 1)
        logits = self._gathered.view(0, (count, V), "f32")
        if main_hidden is None:
            for end in ends:
                out = self.run(tokens[: start + end], 1, tap)
                self.device.copy(logits, out, 4 * V, dst_offset=4 * V * (end - 1))
        else:
            width = main_hidden.shape[1]
            rows = self.ws.get("rows_main_hidden", (count, width), main_hidden.dtype)
            one = main_hidden.view(0, (1, width), main_hidden.dtype)
            for end in ends:
                out = self.run(tokens[: start + end], 1, tap, main_hidden=one)
                self.device.copy(logits, out, 4 * V, dst_offset=4 * V * (end - 1))
                self.device.copy(rows, one, one.nbytes, dst_offset=one.nbytes * (end - 1))
            self.device.copy(main_hidden, rows, rows.nbytes)
        self.pos.write(np.arange(start, start + count, dtype=np.int32))  # as after a pass over all of them
        return logits

    def go_back(self, position: int) -> None:
        """Take the newest tokens back; the published index keys are again those of the last publisher before
        `position`.

        Raises:
            Ds4Error: too far (SequenceState.rollback).
        """
        self.state.rollback(position)
        self.state.published = None
        for p in range(max(0, position - max(self.config.compress_ratios)), position):
            self.state.published = self.last_publisher(p, self.state.published)

    def _pass(self, count: int, published: dict[int, int]) -> Pass:
        c = self.config
        rows = tuple(b.view(0, self.feed.shape(count), "u8") for b in self.engram_rows)
        x = self.x.view(0, (count, c.hc_mult, c.hidden_size), "f32")
        pre = self.pre.view(0, (count, c.hc_mult), "f32")
        pos = self.pos.view(0, (count,), "i32")
        return Pass(
            self.device, self.ws, c, self.numerics, "step", self.state, count, x, pre, pos, rows, published
        )  # fmt: skip

    def _advance(self, key: tuple[object, ...], p: Pass, tickets: Mapping[int, Ticket], tap: Tap | None) -> None:
        bounds = [0, *self.config.engram_layer_ids, self.config.num_hidden_layers]
        graphs = self._graphs.get(key) if tap is None and self.graphs else None
        capture = graphs is None and tap is None and self.graphs and key in self._warm
        if capture:
            graphs = []
        self.counts.cold += capture or (graphs is None and key not in self._warm)
        for i in range(len(bounds) - 1):
            if i > 0:
                self.engram_rows[i - 1].write(tickets[i - 1].wait().reshape(-1))
            if capture:
                assert graphs is not None
                with self.device.capture() as graph:
                    self._segment(p, bounds[i], bounds[i + 1], i, None)
                graphs.append(graph)
            if graphs is not None:
                graphs[i].replay()
            else:
                self._segment(p, bounds[i], bounds[i + 1], i, tap)
        if graphs is None:
            self.counts.direct += 1
            if self.ws.generation == self._generation:
                self._warm.add(key)
        else:
            self.counts.replays += 1
        if capture and graphs is not None:
            self._graphs[key] = graphs
            self.counts.captures += 1
            self.counts.launches = sum(g.n_launches for g in graphs)
        if self.ws.generation != self._generation:
            self.forget_graphs()
            self._generation = self.ws.generation

    def _segment(self, p: Pass, first: int, end: int, index: int, tap: Tap | None) -> None:
        if index == 0:
            begin(p, self.weights, self.ids.view(0, (p.R,), "i32"), self.one_hot)
        for layer in range(first, end):
            if tap:
                tap(layer, p.state.position, p.x)
            run_layer(p, self.weights.layers[layer])
        if end == self.config.num_hidden_layers:
            if tap:
                tap(end, p.state.position, p.x)
            head(p, self.weights, self.logits.view(0, (p.R, self.config.vocab_size), "f32"), 0, p.R)

    def _publishes(self, owner: int, position: int) -> bool:
        return (position + 1) % self.config.compress_ratios[owner] == 0

    def _published(self, position: int) -> dict[int, int]:
        """Index sources that score another owner's keys at `position` (model-text 6); empty in owner mode."""
        if self.index_keys != "released":
            return {}
        out = {}
        for source in self.config.index_source_layer_ids:
            at = self.state.published
            for owner in self.config.kv_source_layer_ids:
                if owner <= source and self._publishes(owner, position):
                    at = owner
            owner_of_source = self.config.kv_owner(source)
            if at is not None and at != owner_of_source:
                out[source] = at
        return out

    def last_publisher(self, position: int, before: int | None) -> int | None:
        """Whose index keys stand published once `position` is decoded; `before`: those before it (model-text 6)."""
        here = [o for o in self.config.kv_source_layer_ids if self._publishes(o, position)]
        return here[-1] if here else before
