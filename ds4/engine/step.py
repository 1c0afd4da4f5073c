"""Decode: 1 to 8 consecutive rows of one sequence through all layers, and the choice of the next token.

One set of graphs a (rows, capacity, published keys, rows for the draft head or not); segments.py holds and runs them.
Position, ids and n-gram rows live in device slots, so that a replay never needs another capture.

A step may run ahead: the layers before the first n-gram rows need only the token that the step before left on the
device, so they are submitted before the host has seen it (`run_ahead`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ds4.device import Buffer, Device
from ds4.engine.choose import Ending
from ds4.engine.layer import MoeTap, Numerics, Pass
from ds4.engine.ngrams import NgramFeed
from ds4.engine.scratch import Workspace
from ds4.engine.segments import Key, Segments, StepCounts, Steps, Tap
from ds4.engine.slots import MAX_ROWS, Slots
from ds4.engine.state import SequenceState
from ds4.engine.weights import ModelWeights
from ds4.model.config import ModelConfig


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
        self.index_keys, self.touched = index_keys, touched
        self.moe_tap: MoeTap | None = None
        self.slots = Slots(device)
        self._segments = Segments(device, config, weights, feed, graphs=graphs)
        self.logits = self._segments.logits
        self._gathered = device.empty((MAX_ROWS if index_keys == "released" else 0, config.vocab_size), "f32")
        self._generation = ws.generation, state.generation
        self._last: Key = ()  # of the pass before
        self._ahead: Key | None = None  # the pass whose first segment has run, and what must not have changed since

    @property
    def counts(self) -> StepCounts:
        """What the passes did so far."""
        return self._segments.counts

    def forget_counts(self) -> None:
        """Count from zero."""
        self._segments.counts = StepCounts()

    def drop_stale(self) -> None:
        """Captured launches hold addresses: where scratch or state has moved, none of them may run again."""
        generation = self.ws.generation, self.state.generation
        if generation != self._generation:
            self._generation = generation
            self._segments.forget()
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
        self.drop_stale()
        ran_ahead = self._is_ahead(tokens[start : start + count], start)
        self.slots.set(tokens[start : start + count], start)
        key = self._key(count, start, tapped=main_hidden is not None)
        p = self._pass(count, self._published(start), main_hidden)
        self.ws.passes += 1
        state.will_write(start + count)  # also if it fails half way
        watched = tap is not None or self.moe_tap is not None  # what is between the launches: none may be replayed
        steps = Steps(key, p, self.slots.ids.view(0, (count,), "i32"), [rows], ending=ending)
        self._segments.run(steps, tap, direct=watched, skip=ran_ahead == key and not watched)
        self.drop_stale()
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
        self.drop_stale()
        count, _, _, tapped = self._last
        start = self.state.position
        if count != 1 or start >= min(self.state.capacity, self.config.max_position_embeddings):
            return
        key = self._key(1, start, tapped=bool(tapped))
        graph = self._segments.first(key)
        if graph is None:
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
        x, pre, rows = self._segments.buffers(count)
        pos = self.slots.pos.view(0, (count,), "i32")
        return Pass(
            self.device, self.ws, self.config, self.numerics, "step", self.state, count, x, pre, pos, rows, published,
            main_hidden, self.touched, self.moe_tap,
        )  # fmt: skip

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
