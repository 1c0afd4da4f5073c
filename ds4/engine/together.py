"""Sessions that draw their next tokens in one pass: a row a session, every weight read once for all of them.

A row's bits are those of a pass of its own: whatever a row alone decides is launched for all rows, and no kernel's
sums depend on how many there are; what touches a sequence's caches is launched for that sequence (layer.Part). The
choice of a token is the session's own chooser, with its own settings, penalties and masks, on its own row. So which
sessions happen to run beside each other changes nothing but the time (tests/engine/test_together.py).

Shared passes draw no drafts, and leave the draft head no rows: with several sessions, rows are better spent on tokens
that are certain. A session that is alone again drafts again, and its draft head gathers context anew.

One set of graphs a set of sessions, by the lanes that they stand on. Sets come and go with requests, so the oldest
are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

from ds4.device import Buffer, Device
from ds4.engine.choose import Ending
from ds4.engine.lane import Lane, SessionOptions
from ds4.engine.layer import Part, Pass
from ds4.engine.ngrams import NgramFeed
from ds4.engine.sampling import Sampling
from ds4.engine.scratch import Workspace
from ds4.engine.segments import Segments, StepCounts, Steps
from ds4.engine.session import Session
from ds4.engine.slots import MAX_ROWS
from ds4.engine.weights import ModelWeights
from ds4.errors import CapacityError
from ds4.model.config import ModelConfig

Members = tuple[tuple[int, int], ...]  # serial and generation of the lanes of a pass
MOST_SETS = 16  # of sessions whose graphs are kept


@dataclass(frozen=True)
class Ask:
    """One session's wish for a token; see Session.next."""

    session: Session
    sampling: Sampling
    left: int | None = None


class Together:
    """Shared passes over one set of weights. Not thread-safe: one thread owns the device.

    Attributes:
        counts: what the passes did.   touched: u32 [layers], see layer.Pass.
    """

    def __init__(
        self, device: Device, ws: Workspace, config: ModelConfig, weights: ModelWeights, feed: NgramFeed,
        options: SessionOptions,
    ) -> None:  # fmt: skip
        self.device, self.ws, self.config, self.weights, self.feed = device, ws, config, weights, feed
        self.options = options
        self._segments = Segments(device, config, weights, feed, graphs=options.graphs)
        self._ids = device.zeros((MAX_ROWS,), "i32")
        self._pos = device.zeros((MAX_ROWS,), "i32")
        self.touched = device.zeros((config.num_hidden_layers + config.num_nextn_predict_layers,), "u32")
        self._generation = ws.generation
        self._lanes: WeakValueDictionary[int, Lane] = WeakValueDictionary()
        self._sets: OrderedDict[Members, None] = OrderedDict()  # the newest last

    @property
    def counts(self) -> StepCounts:
        """What the shared passes did so far."""
        return self._segments.counts

    def draw(self, asks: Sequence[Ask]) -> list[Exception | None]:
        """Run one pass a row each for the sessions that need one; their `next` then returns without a pass.

        A session that needs none, as tokens of its wait already or its prompt was just read, is left alone, and so is
        one that would be alone in the pass: its own `next` may then draft.

        Returns:
            what went wrong, ask by ask: such a session is as it was before.
        """
        errors: list[Exception | None] = [None] * len(asks)
        rows: list[int] = []
        for i, ask in enumerate(asks):
            try:
                if ask.session.needs_pass(ask.sampling) and self._may_share(ask.session):
                    rows.append(i)
            except Exception as e:
                errors[i] = e
        for first in range(0, len(rows), MAX_ROWS):
            self._share([(i, asks[i]) for i in rows[first : first + MAX_ROWS]], errors)
        return errors

    def _may_share(self, session: Session) -> bool:
        # released index keys: a row may read keys that a later layer made of the row before (step.py)
        return session.lane.weights is self.weights and self.options.index_keys == "owner"

    def _share(self, asks: list[tuple[int, Ask]], errors: list[Exception | None]) -> None:
        asks = sorted(asks, key=lambda one: one[1].session.lane.serial)
        fits = []
        for i, ask in asks:
            try:
                ask.session.state.reserve(ask.session.position + 1)
            except CapacityError as e:
                errors[i] = e
            else:
                fits.append((i, ask))
        if len(fits) < 2:
            return
        starts = [ask.session.position for _, ask in fits]
        try:
            self._pass([ask for _, ask in fits])
        except Exception as e:
            for (i, ask), start in zip(fits, starts):
                ask.session.leave(start)
                errors[i] = e
            return
        for (i, ask), start in zip(fits, starts):
            try:
                ask.session.collect(start, ask.left)
            except Exception as e:
                ask.session.leave(start)
                errors[i] = e

    def _pass(self, asks: list[Ask]) -> None:
        """Everything up to the copies of the chosen tokens to the host."""
        sessions = [ask.session for ask in asks]
        endings = [ask.session.join(ask.sampling) for ask in asks]
        rows = [self.feed.request(s.tokens, s.position, 1) for s in sessions]
        parts = tuple(Part(s.state, i, 1, {}, None, i) for i, s in enumerate(sessions))
        R = len(sessions)
        x, pre, engram = self._segments.buffers(R)
        p = Pass(
            self.device, self.ws, self.config, self.options.numerics, "step", sessions[0].state, R, x, pre,
            self._pos.view(0, (R,)), engram, {}, None, self.touched, several=parts,
        )  # fmt: skip
        key = self._key(sessions)
        self.ws.passes += 1
        for s in sessions:
            s.state.will_write(s.position + 1)  # also if it fails half way
        steps = Steps(
            key, p, self._ids.view(0, (R,)), rows, partial(self._gather, [s.lane for s in sessions]), _ends(endings)
        )
        self._segments.run(steps)
        if self.ws.generation != self._generation:  # this pass was direct then: nothing captured may grow scratch
            self._generation = self.ws.generation
            self._segments.forget()
        for s in sessions:
            s.passed()

    def _gather(self, lanes: Sequence[Lane]) -> None:
        """Ids and positions of the rows, from where the sessions' own choices left them."""
        for i, lane in enumerate(lanes):
            self.device.copy(self._ids, lane.step.slots.ids, 4, dst_offset=4 * i)
            self.device.copy(self._pos, lane.step.slots.pos, 4, dst_offset=4 * i)

    def _key(self, sessions: Sequence[Session]) -> Members:
        """What tells the captured launches of this set of sessions from those of others. Sets that cannot come again,
        or did not for long, are forgotten: their graphs hold memory.
        """
        if self.ws.generation != self._generation:
            self._generation = self.ws.generation
            self._segments.forget()
        key = tuple((s.lane.serial, s.state.generation) for s in sessions)
        new = key not in self._sets
        self._sets[key] = None
        self._sets.move_to_end(key)
        if new:
            self._lanes.update((s.lane.serial, s.lane) for s in sessions)
            alive = {serial: lane.state.generation for serial, lane in self._lanes.items()}
            keep = [k for k in self._sets if all(alive.get(serial) == generation for serial, generation in k)]
            self._sets = OrderedDict.fromkeys(keep[-MOST_SETS:])
            self._segments.cool(lambda k: k not in self._sets)
        return key


def _ends(endings: Sequence[Ending]) -> Ending:
    """The choices of all rows, one after the other."""

    def launch(logits: Buffer) -> None:
        V = logits.shape[1]
        for i, ending in enumerate(endings):
            ending.launch(logits.view(4 * V * i, (1, V)))

    def prepare() -> None:
        for ending in endings:
            ending.prepare()

    return Ending(tuple(e.key for e in endings), launch, prepare)
