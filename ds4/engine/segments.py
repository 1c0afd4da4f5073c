"""Launches of a decode pass, from the embedding to the choice of a token, as captured graphs.

A pass is cut where rows of n-gram tables are uploaded: one graph from the embedding to the first engram layer and one
from each engram layer to the next, so that the rows of a later engram layer may still be on their way while the
layers before it run. The last graph also holds what chooses the tokens (choose.py), so there is one of it for each
way to choose. The first pass of a kind runs its launches directly, which grows the scratch; the second is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ds4.device import Buffer, Device, Graph
from ds4.engine.choose import Ending
from ds4.engine.layer import Pass, begin, head, run_layer
from ds4.engine.ngrams import NgramFeed, Rows
from ds4.engine.slots import MAX_ROWS
from ds4.engine.weights import ModelWeights
from ds4.model.config import ModelConfig

# (layer, position of the first row, streams on entry); layer L: streams after the last one
Tap = Callable[[int, int, Buffer], None]
Key = tuple[object, ...]


@dataclass
class StepCounts:
    """What passes did: launches recorded a pass, passes that captured, replayed, ran directly; first segments run
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


@dataclass(frozen=True)
class Steps:
    """One pass for `Segments.run`.

    Attributes:
        key: what tells its captured launches from another pass's.
        ids: i32 [R].
        rows: n-gram rows by slot, for each part of the pass in order, on their way.
        opening: launches before all others.
        ending: what comes after the logits.
    """

    key: Key
    p: Pass
    ids: Buffer
    rows: Sequence[Mapping[int, Rows]]
    opening: Callable[[], None] | None = None
    ending: Ending | None = None


class Segments:
    """Buffers of up to eight rows, and the graphs that were captured on them.

    Attributes:
        x f32 [8, S, D], pre f32 [8, S], logits f32 [8, V], engram_rows u8 [8, columns, row bytes] a slot.
        counts: what the passes did.
    """

    def __init__(
        self, device: Device, config: ModelConfig, weights: ModelWeights, feed: NgramFeed, *, graphs: bool
    ) -> None:
        self.device, self.config, self.weights, self.feed, self.graphs = device, config, weights, feed, graphs
        S, D = config.hc_mult, config.hidden_size
        self.x = device.empty((MAX_ROWS, S, D), "f32")
        self.pre = device.empty((MAX_ROWS, S), "f32")
        self.logits = device.empty((MAX_ROWS, config.vocab_size), "f32")
        self.engram_rows = tuple(device.zeros(feed.shape(MAX_ROWS), "u8") for _ in config.engram_layer_ids)
        self.counts = StepCounts()
        self._one_hot = device.upload(np.tile(np.eye(1, S, dtype=np.float32), (MAX_ROWS, 1)))
        self._bounds = [0, *config.engram_layer_ids, config.num_hidden_layers]
        self._warm: set[Key] = set()
        self._graphs: dict[Key, Graph] = {}

    def buffers(self, rows: int) -> tuple[Buffer, Buffer, tuple[Buffer, ...]]:
        """x, pre and n-gram rows of a pass of `rows` rows."""
        c = self.config
        return (
            self.x.view(0, (rows, c.hc_mult, c.hidden_size)),
            self.pre.view(0, (rows, c.hc_mult)),
            tuple(b.view(0, self.feed.shape(rows)) for b in self.engram_rows),
        )

    def forget(self, stale: Callable[[Key], bool] = lambda key: True) -> None:
        """Drop the graphs of passes whose key is `stale`: addresses that they hold have moved."""
        for segment in [s for s in self._graphs if stale(_pass_key(s))]:
            del self._graphs[segment]

    def cool(self, stale: Callable[[Key], bool]) -> None:
        """`forget`, and that such passes ran at all: they will not come again soon."""
        self.forget(stale)
        self._warm = {s for s in self._warm if not stale(_pass_key(s))}

    def first(self, key: Key) -> Graph | None:
        """The first segment of a pass, where it can run before the pass is known whole."""
        return self._graphs.get((key, 0)) if len(self._bounds) > 2 else None

    def run(self, steps: Steps, tap: Tap | None = None, *, direct: bool = False, skip: bool = False) -> None:
        """All segments; logits are left in `logits`.

        Args:
            tap: sees every layer's entry streams.   direct: nothing is captured or replayed.
            skip: the first segment has run ahead.
        """
        last, free = len(self._bounds) - 2, self.graphs and not direct
        replayed = captured = first = False
        ending = steps.ending
        segment: Key = ()
        for i in range(last + 1):
            if i > 0:
                self._upload(i - 1, steps)
            segment = (steps.key, i)
            if ending is not None and i == last:
                segment = (steps.key, i, ending.key)
                ending.prepare()
            graph = self._graphs.get(segment) if free else None
            if graph is None and free and segment in self._warm:
                with self.device.capture() as graph:
                    self._segment(steps, i, None)
                self._graphs[segment] = graph
                captured = True
            if i == 0 and skip:
                self.counts.ahead_used += 1
            elif graph is not None:
                graph.replay()
                replayed = True
            else:
                self._segment(steps, i, tap)
                first |= segment not in self._warm
                self._warm.add(segment)
        self.counts.replays += replayed
        self.counts.direct += not replayed
        self.counts.captures += captured
        self.counts.cold += captured or first
        if captured:
            mine = [(steps.key, i) for i in range(last)] + [segment]
            self.counts.launches = sum(self._graphs[s].n_launches for s in mine if s in self._graphs)
        self.counts.passes += 1
        self.counts.one_row += steps.p.R == 1

    def _upload(self, slot: int, steps: Steps) -> None:
        """The n-gram rows of one table, as soon as they are there."""
        buffer = self.engram_rows[slot]
        row_bytes = buffer.nbytes // MAX_ROWS
        for part, rows in zip(steps.p.parts, steps.rows):
            buffer.write(rows[slot].wait(), row_bytes * part.first)

    def _segment(self, steps: Steps, index: int, tap: Tap | None) -> None:
        p, ending = steps.p, steps.ending
        first, end = self._bounds[index : index + 2]
        if index == 0:
            if steps.opening is not None:
                steps.opening()
            begin(p, self.weights, steps.ids, self._one_hot)
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


def _pass_key(segment: Key) -> Key:
    key = segment[0]
    assert isinstance(key, tuple)
    return key
