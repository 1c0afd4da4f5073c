"""Sessions that draw their next tokens in one pass: a row a session, every weight read once for all of them.

A row's bits are those of a pass of its own: whatever a row alone decides is launched for all rows, and no kernel's
sums depend on how many there are; what touches a sequence's caches is launched for that sequence (layer.Part). The
choice of a token is the session's own chooser, with its own settings, penalties and masks, on its own row. So which
sessions happen to run beside each other changes nothing but the time (tests/engine/test_together.py).

Where the rows allow it (two sessions: three drafts each, up to four: one) each session's draft head proposes what
follows, and its rows verify it. Whether that pays is not what it is for a session alone, as the weights' bytes are
shared: a policy of its own decides, one for each number of sessions, by times in which a session is charged its own
drafts and its share of the pass.

One set of graphs a set of sessions, by the lanes that they stand on, and of their numbers of rows. Sets come and go
with requests, so the oldest are forgotten.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary, WeakValueDictionary

from ds4.device import Buffer, Device
from ds4.engine.choose import Drawn, Ending
from ds4.engine.lane import Lane, SessionOptions
from ds4.engine.layer import Part, Pass
from ds4.engine.ngrams import NgramFeed
from ds4.engine.rounds import Plan
from ds4.engine.sampling import Sampling
from ds4.engine.scheduler import DraftPolicy
from ds4.engine.scratch import Workspace
from ds4.engine.segments import Segments, StepCounts, Steps
from ds4.engine.session import PLAIN, Session
from ds4.engine.slots import MAX_ROWS
from ds4.engine.weights import ModelWeights
from ds4.model.config import ModelConfig

# of a pass: each lane's serial and generation, its rows, and whether the draft head gets them
Members = tuple[tuple[int, int, int, bool], ...]
MOST_KINDS = 32  # of passes whose graphs are kept


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
        options: SessionOptions, policy: Callable[[int, SharedClock], DraftPolicy],
    ) -> None:  # fmt: skip
        """`policy`: makes what decides about a session's drafts in passes of so many sessions."""
        self.device, self.ws, self.config, self.weights, self.feed = device, ws, config, weights, feed
        self.options = options
        self._segments = Segments(device, config, weights, feed, graphs=options.graphs)
        self._ids = device.zeros((MAX_ROWS,), "i32")
        self._pos = device.zeros((MAX_ROWS,), "i32")
        self.touched = device.zeros((config.num_hidden_layers + config.num_nextn_predict_layers,), "u32")
        self._generation = ws.generation
        self._new_policy, self._clock, self._now = policy, SharedClock(), time.perf_counter
        self._policies: WeakKeyDictionary[Session, tuple[DraftPolicy, dict[int, DraftPolicy]]] = WeakKeyDictionary()
        self._lanes: WeakValueDictionary[int, Lane] = WeakValueDictionary()
        self._passes: OrderedDict[Members, None] = OrderedDict()  # the newest last

    @property
    def counts(self) -> StepCounts:
        """What the shared passes did so far."""
        return self._segments.counts

    def draw(self, asks: Sequence[Ask]) -> list[Exception | None]:
        """Run one pass for the sessions that need one; their `next` then returns without a pass.

        A session that needs none, as tokens of its wait already or its prompt was just read, is left alone, and so is
        one that would be alone in the pass: its own `next` has all rows for its drafts.

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
        if len(asks) < 2:
            return
        most = MAX_ROWS // len(asks) - 1
        turns = []
        for i, ask in sorted(asks, key=lambda one: one[1].session.lane.serial):
            turn = _Turn(i, ask.session, self._policy_of(ask.session, len(asks)), ask.session.position)
            try:
                turn.begin(ask, most, self._clock)
            except Exception as e:
                turn.session.leave(turn.start)
                errors[i] = e
            else:
                turns.append(turn)
        if not turns:
            return
        began, cold = self._now(), self.counts.cold
        try:
            self._pass(turns)
        except Exception as e:
            for turn in turns:
                turn.session.leave(turn.start)
                errors[turn.index] = e
            return
        for turn in turns:
            try:
                turn.drawn = turn.session.collect(turn.plan)
            except Exception as e:
                turn.session.leave(turn.start)
                errors[turn.index] = e
        share_s, warm_up = (self._now() - began) / len(turns), self.counts.cold != cold
        for turn in turns:
            if turn.drawn is not None:
                self._clock.now = turn.drafted_s + share_s
                turn.session.settle(turn.plan, turn.drawn, turn.policy, warm_up=warm_up or turn.cold)

    def _policy_of(self, session: Session, n: int) -> DraftPolicy:
        """The session's policy among n: of its prompt, as its own policy is."""
        if MAX_ROWS // n < 2:
            return PLAIN()
        own, policies = self._policies.get(session, (None, {}))
        if own is not session.policy:
            policies = {}
            self._policies[session] = session.policy, policies
        if n not in policies:
            policies[n] = self._new_policy(n, self._clock)
        return policies[n]

    def _pass(self, turns: Sequence[_Turn]) -> None:
        """Everything up to the copies of the chosen tokens to the host."""
        parts: list[Part] = []
        rows = []
        for turn in turns:
            s, count = turn.session, 1 + turn.plan.k
            rows.append(self.feed.request(turn.plan.tokens, turn.start, count))
            hidden = s.follow(count) if turn.policy.follows else None
            first = parts[-1].first + parts[-1].R if parts else 0
            parts.append(Part(s.state, first, count, {}, hidden, len(parts)))
        R = parts[-1].first + parts[-1].R
        x, pre, engram = self._segments.buffers(R)
        p = Pass(
            self.device, self.ws, self.config, self.options.numerics, "step", parts[0].state, R, x, pre,
            self._pos.view(0, (R,)), engram, {}, None, self.touched, several=tuple(parts),
        )  # fmt: skip
        key = self._key(turns, parts)
        self.ws.passes += 1
        for part, turn in zip(parts, turns):
            part.state.will_write(turn.start + part.R)  # also if it fails half way
        gather = partial(self._gather, [t.session.lane for t in turns], parts)
        ending = _ends([t.plan.ending for t in turns], parts)
        self._segments.run(Steps(key, p, self._ids.view(0, (R,)), rows, gather, ending))
        if self.ws.generation != self._generation:  # this pass was direct then: nothing captured may grow scratch
            self._generation = self.ws.generation
            self._segments.forget()
        for turn in turns:
            turn.session.passed(turn.plan)

    def _gather(self, lanes: Sequence[Lane], parts: Sequence[Part]) -> None:
        """Ids and positions of the rows, from the sessions' own slots."""
        for lane, part in zip(lanes, parts):
            for to, slots in ((self._ids, lane.step.slots.ids), (self._pos, lane.step.slots.pos)):
                self.device.copy(to, slots, 4 * part.R, dst_offset=4 * part.first)

    def _key(self, turns: Sequence[_Turn], parts: Sequence[Part]) -> Members:
        """What tells the captured launches of this pass from those of others. Passes that cannot come again, or did
        not for long, are forgotten: their graphs hold memory.
        """
        if self.ws.generation != self._generation:
            self._generation = self.ws.generation
            self._segments.forget()
        lanes = [turn.session.lane for turn in turns]
        key = tuple(
            (lane.serial, part.state.generation, part.R, part.main_hidden is not None)
            for lane, part in zip(lanes, parts)
        )
        new = key not in self._passes
        self._passes[key] = None
        self._passes.move_to_end(key)
        if new:
            self._lanes.update((lane.serial, lane) for lane in lanes)
            alive = {serial: lane.state.generation for serial, lane in self._lanes.items()}
            keep = [k for k in self._passes if all(alive.get(m[0]) == m[1] for m in k)]
            self._passes = OrderedDict.fromkeys(keep[-MOST_KINDS:])
            self._segments.cool(lambda k: k not in self._passes)
        return key


@dataclass
class _Turn:
    """A session's part in a pass. `cold`: its drafts were captured, their time says nothing."""

    index: int
    session: Session
    policy: DraftPolicy
    start: int
    plan: Plan = field(init=False)
    drafted_s: float = 0.0
    cold: bool = False
    drawn: list[Drawn] | None = None

    def begin(self, ask: Ask, most: int, clock: SharedClock) -> None:
        """Drafts, and room for the rows.

        Raises:
            CapacityError: there is none.   DeviceError: the draft head is broken.
        """
        s = self.session
        s.state.reserve(min(self.start + 1 + most, s.config.max_position_embeddings))
        cold, began = s.draft_cold, time.perf_counter()
        clock.begin()
        self.plan = s.plan(ask.sampling, ask.left, self.policy, most)
        self.drafted_s = time.perf_counter() - began
        self.cold = s.draft_cold != cold


class SharedClock:
    """Seconds of one session's round: its own while it drafts, then its share of the pass, when `now` is set.

    Scheduler asks it when a round begins, is drawn and ends.
    """

    def __init__(self) -> None:
        self.now: float | None = None
        self._began = 0.0

    def begin(self) -> None:
        """A round begins."""
        self.now, self._began = None, time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._began if self.now is None else self.now


def _ends(endings: Sequence[Ending], parts: Sequence[Part]) -> Ending:
    """The choices of all rows, one session after the other."""

    def launch(logits: Buffer) -> None:
        for ending, part in zip(endings, parts):
            ending.launch(part.rows(logits))

    def prepare() -> None:
        for ending in endings:
            ending.prepare()

    return Ending(tuple(e.key for e in endings), launch, prepare)
