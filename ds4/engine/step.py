"""Decode: 1 to 8 consecutive rows through all layers, and the choice of the next token, as captured graphs.

One set of graphs a (rows, capacity, published keys, rows for the draft head or not): one graph from the embedding to
the first engram layer and one from each engram layer to the next, so that the rows of a later engram layer may still
be on their way while the layers before it run. The last one also holds what chooses the tokens (choose.py), so there
is one of it for each way to choose. Position, ids and n-gram rows live in device slots, so that a replay never needs
another capture. The first step of a kind runs its launches directly, which grows the scratch; the second is captured.

A step may run ahead: the layers before the first n-gram rows need only the token that the step before left on the
device, so they are submitted before the host has seen it (`run_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ds4.device import Buffer, Device, Graph
from ds4.engine.choose import Ending
from ds4.engine.layer import MoeTap, Numerics, Pass, begin, head, run_layer
from ds4.engine.ngrams import NgramFeed, Rows
from ds4.engine.scratch import Workspace
from ds4.engine.slots import MAX_ROWS, Slots
from ds4.engine.state import SequenceState
from ds4.engine.weights import ModelWeights
from ds4.model.config import ModelConfig

# (layer, position of the first row, streams on entry); layer L: streams after the last one
Tap = Callable[[int, int, Buffer], None]
Key = tuple[object, ...]


@dataclass
class StepCounts:
    """What the runner did: launches recorded a step, passes that captured, replayed, ran directly; first segments run
    ahead, and those that the next pass could use. `cold` counts the passes that were the first of their kind or
    captured something: their time says nothing about the next one's. `one_row`: passes of one row.
    """

    captures: int = 0
    replays: int = 0
    direct: int = 0
    launches: int = 0
    cold: int = 0
    one_row: int = 0
    passes: int = 0
    ahead: int = 0
    ahead_used: int = 0


class StepRunner:
    """The step of one sequence. `touched` u32 [layers]: distinct experts of the passes of several rows, by layer.
    `moe_tap` sees each layer's experts; as with a `tap`, launches are then direct ones, with the same bits.
    """

    def __init__(
        self, device: Device, ws: Workspace, config: ModelConfig, numerics: Numerics, weights: ModelWeights,
        state: SequenceState, feed: NgramFeed, *, index_keys: str, graphs: bool, touched: Buffer | None = None,
    ) -> None:  # fmt: skip
        self.device, self.ws, self.config, self.numerics = device, ws, config, numerics
        self.weights, self.state, self.feed = weights, state, feed
        self.index_keys, self.graphs, self.touched = index_keys, graphs, touched
        self.moe_tap: MoeTap | None = None
        self.counts = StepCounts()
        S, D = config.hc_mult, config.hidden_size
        self.slots = Slots(device)
        self.x = device.empty((MAX_ROWS, S, D), "f32")
        self.pre = device.empty((MAX_ROWS, S), "f32")
        self.logits = device.empty((MAX_ROWS, config.vocab_size), "f32")
        self._gathered = device.empty((MAX_ROWS if index_keys == "released" else 0, config.vocab_size), "f32")
        self.one_hot = device.upload(np.tile(np.eye(1, S, dtype=np.float32), (MAX_ROWS, 1)))
        self.engram_rows = tuple(device.zeros(feed.shape(MAX_ROWS), "u8") for _ in config.engram_layer_ids)
        self._bounds = [0, *config.engram_layer_ids, config.num_hidden_layers]
        self._warm: set[Key] = set()
        self._graphs: dict[Key, Graph] = {}
        self._generation = ws.generation, state.generation
        self._last: Key = ()  # of the pass before
        self._ahead: Key | None = None  # the pass whose first segment has run, and what must not have changed since

    def _drop_stale(self) -> None:
        """Captured launches hold addresses: where scratch or state has moved, none of them may run again."""
        generation = self.ws.generation, self.state.generation
        if generation != self._generation:
            self._generation = generation
            self._graphs.clear()
            self._ahead = None

    def run(
        self, tokens: Sequence[int], count: int, tap: Tap | None = None, *, main_hidden: Buffer | None = None,
        ending: Ending | None = None,
    ) -> Buffer:  # fmt: skip
        """Run the `count` tokens that follow the state's position; `tokens` is the whole timeline up to and with
        them.

        Args:
            main_hidden: A [count, targets * D], filled with what the draft head reads of these rows. Always a view of
                the same buffer: captured launches hold its address.
            ending: what comes after the logits.

        Returns:
            Logits f32 [count, V]: a view that the next call overwrites.
        """
        if self.index_keys == "released" and count > 1:
            return self._one_by_one(tokens, count, tap, main_hidden, ending)
        state = self.state
        start = state.position
        rows = self.feed.request(tokens, start, count)
        state.reserve(start + count)
        self._drop_stale()
        ran_ahead = self._is_ahead(tokens[start : start + count], start)
        self.slots.set(tokens[start : start + count], start)
        key = self._key(count, start, tapped=main_hidden is not None)
        p = self._pass(count, self._published(start), main_hidden)
        self.ws.passes += 1
        state.will_write(start + count)  # also if it fails half way
        self._advance(key, p, rows, tap, ending, skip=ran_ahead == key and not self._watched(tap))
        self.counts.passes += 1
        self.counts.one_row += count == 1
        self._last = key
        state.advance(start + count)
        if self.index_keys == "released":
            state.published = self.last_publisher(start, state.published)
        return self.logits.view(0, (count, self.config.vocab_size), "f32")

    def _key(self, count: int, start: int, *, tapped: bool) -> Key:
        """What tells the captured launches of a pass from those of another."""
        return count, self.state.capacity, tuple(sorted(self._published(start).items())), tapped

    def run_ahead(self) -> None:
        """Submit the first segment of one more step, as the last one was, on the id and position that its choice
        leaves in the slots. Nothing of the sequence changes by it but rows of a position that does not count yet; the
        next `run` goes on from there if it is that step, and runs the segment again if not.
        """
        self._drop_stale()
        count, _, _, tapped = self._last
        start = self.state.position
        if count != 1 or start >= min(self.state.capacity, self.config.max_position_embeddings):
            return
        key = self._key(1, start, tapped=bool(tapped))
        graph = self._graphs.get((key, 0))
        if graph is None or len(self._bounds) < 3:
            return
        graph.replay()
        self.state.will_write(start + 1)
        self.counts.ahead += 1
        self._ahead = (key, start, self.ws.passes, self.state.version, self.slots.written)

    def _is_ahead(self, tokens: Sequence[int], start: int) -> Key | None:
        """The key of the pass whose first segment has run on these tokens, and is still as it was left."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[1:] != (start, self.ws.passes, self.state.version, self.slots.written):
            return None
        if len(tokens) != 1 or not self.slots.holds(tokens, start):
            return None
        key = ahead[0]
        assert isinstance(key, tuple)
        return key

    def _one_by_one(
        self, tokens: Sequence[int], count: int, tap: Tap | None, main_hidden: Buffer | None, ending: Ending | None
    ) -> Buffer:
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
        self.slots.set(tokens[start : start + count], start)  # as before a pass over all of them
        if ending is not None:
            ending.prepare()
            ending.launch(logits)
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

    def _pass(self, count: int, published: dict[int, int], main_hidden: Buffer | None) -> Pass:
        c = self.config
        rows = tuple(b.view(0, self.feed.shape(count), "u8") for b in self.engram_rows)
        x = self.x.view(0, (count, c.hc_mult, c.hidden_size), "f32")
        pre = self.pre.view(0, (count, c.hc_mult), "f32")
        pos = self.slots.pos.view(0, (count,), "i32")
        return Pass(
            self.device, self.ws, c, self.numerics, "step", self.state, count, x, pre, pos, rows, published,
            main_hidden, self.touched, self.moe_tap,
        )  # fmt: skip

    def _watched(self, tap: Tap | None) -> bool:
        """Whether somebody looks at what is between the launches, so that none may be replayed."""
        return tap is not None or self.moe_tap is not None

    def _advance(
        self, key: Key, p: Pass, rows: Mapping[int, Rows], tap: Tap | None, ending: Ending | None, *, skip: bool
    ) -> None:
        """All segments; `skip`: the first one has run ahead."""
        last, free = len(self._bounds) - 2, self.graphs and not self._watched(tap)
        replayed = captured = first = False
        for i in range(last + 1):
            if i > 0:
                self.engram_rows[i - 1].write(rows[i - 1].wait())
            segment: Key = (key, i)
            if ending is not None and i == last:
                segment = (key, i, ending.key)
                ending.prepare()
            graph = self._graphs.get(segment) if free else None
            if graph is None and free and segment in self._warm:
                with self.device.capture() as graph:
                    self._segment(p, i, None, ending)
                self._graphs[segment] = graph
                captured = True
            if i == 0 and skip:
                self.counts.ahead_used += 1
            elif graph is not None:
                graph.replay()
                replayed = True
            else:
                self._segment(p, i, tap, ending)
                first |= segment not in self._warm
                self._warm.add(segment)
        self.counts.replays += replayed
        self.counts.direct += not replayed
        self.counts.captures += captured
        self.counts.cold += captured or first
        if captured:
            mine = [(key, i) for i in range(last)] + [segment]
            self.counts.launches = sum(self._graphs[s].n_launches for s in mine if s in self._graphs)
        self._drop_stale()

    def _segment(self, p: Pass, index: int, tap: Tap | None, ending: Ending | None) -> None:
        first, end = self._bounds[index : index + 2]
        if index == 0:
            begin(p, self.weights, self.slots.ids.view(0, (p.R,), "i32"), self.one_hot)
        for layer in range(first, end):
            if tap:
                tap(layer, p.state.position, p.x)
            run_layer(p, self.weights.layers[layer])
        if end == self.config.num_hidden_layers:
            if tap:
                tap(end, p.state.position, p.x)
            logits = self.logits.view(0, (p.R, self.config.vocab_size), "f32")
            head(p, self.weights, logits, 0, p.R)
            if ending is not None:
                ending.launch(logits)

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
