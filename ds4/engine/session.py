"""One timeline: callers say which tokens the sequence holds, the session works out what to compute.

`sync(tokens)` keeps the common prefix and runs the rest; `next(sampling)` draws the token after the timeline and
appends it; `step(tokens)` feeds known tokens through the decode kernels. A drawn token is run when its successor is
asked for, so the timeline may be one token ahead of the state. With drafts one round yields several tokens: those
that were not asked for yet wait, and the state is ahead of the timeline, until anything but `next` takes them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer, Device
from ds4.engine.choose import Drawn
from ds4.engine.constraint import TokenConstraint
from ds4.engine.draft_state import DraftSnapshot
from ds4.engine.lane import Lane
from ds4.engine.prefill import Cancelled, Reading
from ds4.engine.rounds import Plan, RoundCounts
from ds4.engine.sampling import Sampling
from ds4.engine.scheduler import DraftPolicy, FixedDrafts
from ds4.engine.segments import Tap
from ds4.engine.slots import MAX_ROWS
from ds4.engine.state import Snapshot
from ds4.engine.traffic import weight_bytes
from ds4.errors import Ds4Error, RequestError
from ds4.model.config import ModelConfig

PLAIN: Callable[[], DraftPolicy] = partial(FixedDrafts, 0)  # decode a token a pass


@dataclass(frozen=True)
class SessionSnapshot:
    """A timeline and its state on the host: the first `prompt` tokens were given, the others drawn or stepped;
    `logits` f32 [V] of its last position, if they were known; tokens drawn by `sampling` that wait to be asked for;
    the draft head's state, where there is one.
    """

    tokens: tuple[int, ...]
    prompt: int
    state: Snapshot
    logits: NDArray[np.float32] | None
    waiting: tuple[Drawn, ...]
    sampling: Sampling | None
    draft: DraftSnapshot | None


class Session:
    """One sequence on the device. Not thread-safe: one thread owns the device.

    Attributes:
        tokens: the timeline.   last: what `next` drew last.
    """

    def __init__(
        self, device: Device, config: ModelConfig, lane: Lane, policy: Callable[[], DraftPolicy] = PLAIN
    ) -> None:
        """A sequence without tokens on a lane that nobody else uses. `policy` makes what decides about drafts, one a
        prompt.
        """
        self.device, self.config, self.lane = device, config, lane
        self.state = lane.state
        self._step, self._drafter, self._prefill, self._rounds = lane.step, lane.drafter, lane.prefill, lane.rounds
        self._new_policy = policy
        self.policy = policy()
        self._one_by_one = lane.options.index_keys == "released"
        self._logits: Buffer | None = None  # of the state's last position
        self._waiting: list[Drawn] = []  # drawn by `_sampling`, not asked for yet
        self._sampling: Sampling | None = None
        self._constraint: TokenConstraint | None = None  # has advanced by what waits, too
        self._refused: Exception | None = None  # why it could not
        self.tokens: list[int] = []
        self._prompt = 0
        self.last = Drawn(-1, 0.0)
        self._read_before = self._read()

    @property
    def last_logprob(self) -> float:
        """Log-probability of the token that `next` drew last, under the model's own distribution."""
        return self.last.logprob

    @property
    def position(self) -> int:
        """Tokens that the state holds; `tokens` may be one longer, or shorter while drawn tokens wait."""
        return self.state.position

    @property
    def draft_cold(self) -> int:
        """Runs of the draft head that were the first of their kind, or captured something."""
        return 0 if self._drafter is None else self._drafter.cold

    @property
    def waiting(self) -> int:
        """Tokens that `next` has ready, drawn by the settings of the last one."""
        return len(self._waiting)

    @property
    def counts(self) -> dict[str, int]:
        """Captures, replays and direct steps so far, and launches of a captured step."""
        return dict(vars(self._step.counts))

    @property
    def rounds(self) -> RoundCounts:
        """What the rounds of `next` did so far."""
        return self._rounds.counts

    def report(self) -> dict[str, object]:
        """The same for people (RoundCounts.report), graphs captured, stored weight bytes that decode read for a token
        drawn in rounds, and n-gram rows that were read meanwhile, by whichever sequence.
        """
        captures = self._step.counts.captures + (self._drafter.captures if self._drafter is not None else 0)
        drawn = self._rounds.counts.tokens
        out = {**self._rounds.counts.report(), "captures": captures}
        if drawn:
            out["weight_bytes_per_token"] = round(weight_bytes(self.lane) / drawn)
        if self._step.feed.stores:
            out["engram"] = {name: n - self._read_before[name] for name, n in self._read().items()}
        return out

    def _read(self) -> dict[str, int]:
        feed = self._step.feed
        stats = [store.stats for store in feed.stores]
        return {"reads": sum(s.reads for s in stats), "bytes": sum(s.bytes for s in stats), **vars(feed.counts)}

    def _check(self, tokens: Sequence[int], most: int) -> None:
        if len(tokens) == 0:
            raise RequestError("no tokens: a prompt needs at least one", "prompt")
        if len(tokens) > most:
            raise RequestError(
                f"{len(tokens)} tokens do not fit the context of {self.config.max_position_embeddings}",
                "prompt", "context_length_exceeded",
            )  # fmt: skip
        for i, token in enumerate(tokens):
            if not 0 <= token < self.config.vocab_size:
                raise RequestError(f"token {i} is {token}; ids run from 0 to {self.config.vocab_size - 1}", "prompt")

    def sync(
        self,
        tokens: Sequence[int],
        *,
        logits: str = "last",
        chunk: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        tap: Tap | None = None,
    ) -> NDArray[np.float32] | None:
        """Make the timeline exactly `tokens`, by prefill.

        The longest common prefix is kept if the state can go back to it, else everything is run again. The last token
        is always run, so that its logits exist.

        Args:
            tokens: the whole sequence, at least one id.
            logits: "last" (for `next`), "none", or "all": then f32 [n, V] of the rows that this call ran is returned.
            chunk: positions a pass; any value gives the same bits.
            cancelled: asked before every chunk.

        Raises:
            RequestError: ids out of range, no ids, or more than the context.
            Cancelled: the timeline is then what was finished.
            Any other error leaves an empty timeline.
        """
        reading = self.reading(tokens, logits=logits, chunk=chunk, on_progress=on_progress, tap=tap)
        while True:
            try:
                next(reading)
            except StopIteration as end:
                out: NDArray[np.float32] | None = end.value
                return out
            if cancelled is not None and cancelled():
                reading.close()
                raise Cancelled

    def reading(
        self,
        tokens: Sequence[int],
        *,
        logits: str = "last",
        chunk: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        tap: Tap | None = None,
        part: bool = False,
    ) -> Reading:
        """`sync`, a chunk a `next`: other sessions may run in between, this one not before it is done.

        Args:
            part: a sync that adds more than `sliding_window` tokens follows before anything else: under a bounded
                replay, which then hides their rows, the layers from the last kv source on are left out; the two
                leave the bits of one. Without logits.

        Yields:
            before each chunk: positions run by this call, and all that it will run.

        `close` between two chunks leaves the timeline at what was finished; errors as `sync`.
        """
        tokens = [int(t) for t in tokens]
        self._check(tokens, self.config.max_position_embeddings)
        if chunk is not None and chunk < 1:
            raise RequestError(f"chunk is {chunk}; it must be at least 1", "chunk")
        self.constrain(None)
        keep = 0
        for held, wanted in zip(self.tokens[: self.position], tokens):
            if held != wanted:
                break
            keep += 1
        self._rounds.chooser.forget_text()
        if keep == len(tokens) == self.position and logits == "last" and self._logits is not None:
            self.tokens, self._prompt = tokens, len(tokens)
            return None
        keep = min(keep, len(tokens) - 1)
        if self.state.can_roll_back(keep):
            self._go_back(keep)
        else:
            self._clear()
        if chunk is not None:
            self._prefill.chunk = chunk
        bounded = self._prefill.extent(len(tokens), part).bounded
        self.tokens, self._prompt = tokens, len(tokens)
        start = self.position
        self.policy = self._new_policy()
        try:
            self._rounds.commit()
            out = yield from self._prefill.run(tokens, logits, self.lane.last, on_progress, tap, part)
        except GeneratorExit:  # between chunks: whole ones are kept, unless half of the layers are ahead
            if bounded:
                self._clear()
            self.tokens = tokens[: self.position]
            raise
        except BaseException:  # no memory; or inside a chunk: some layers hold it and some do not
            self._clear()
            self.tokens = []
            raise
        self._published_by_prefill(start, len(tokens))
        if logits != "none":
            self._logits = self.lane.last
        return out

    def _published_by_prefill(self, start: int, end: int) -> None:
        """After a prefill the published index keys are those of its last owner that closed a group in the last
        call.
        """
        for owner in self.config.kv_source_layer_ids:
            ratio = self.config.compress_ratios[owner]
            if end // ratio > start // ratio:
                self.state.published = owner

    def step(self, tokens: Sequence[int], *, logits: bool = True, tap: Tap | None = None) -> NDArray[np.float32]:
        """Append known tokens and run them through the decode kernels, up to 8 rows a pass.

        Returns:
            f32 [n, V], a row a token of this call (and of the drawn token before them, dropped), or [0, V] without
            logits.
        """
        tokens = [int(t) for t in tokens]
        self._check(tokens, self.config.max_position_embeddings - len(self.tokens))
        self.constrain(None)
        self._rounds.chooser.forget_text()
        pending = len(self.tokens) - self.position
        self.tokens = self.tokens + tokens
        rows: list[NDArray[np.float32]] = []
        while self.position < len(self.tokens):
            most = 1 if self._one_by_one else MAX_ROWS
            count = min(most, len(self.tokens) - self.position)
            ahead = min(count + most, len(self.tokens) - self.position)  # this pass and the next one
            self._step.feed.announce(self.tokens[: self.position + ahead], self.position, ahead)
            out = self._run_step(count, tap)
            if logits:
                rows.append(self.device.download(out))
        if not rows:
            return np.zeros((0, self.config.vocab_size), np.float32)
        return np.concatenate(rows)[pending:]

    def _run_step(self, count: int, tap: Tap | None = None) -> Buffer:
        self._logits = None
        out = self._rounds.pass_over(self.tokens[: self.position + count], count, tap, follow=self.policy.follows)
        V = self.config.vocab_size
        self._logits = out.view(4 * V * (count - 1), (1, V), "f32")
        return out

    def _current(self) -> Buffer:
        if not self.tokens:
            raise Ds4Error("the session holds no tokens: sync a prompt first")
        while self.position < len(self.tokens):
            self._run_step(min(1 if self._one_by_one else MAX_ROWS, len(self.tokens) - self.position))
        if self._logits is None:  # synced without logits, or rolled back: run the last position again
            self._go_back(self.position - 1)
            self._run_step(1)
        assert self._logits is not None
        return self._logits

    def logits(self) -> NDArray[np.float32]:
        """f32 [V] after the whole timeline."""
        self._drop_waiting()
        out: NDArray[np.float32] = self.device.download(self._current())[0]
        return out

    def constrain(self, constraint: TokenConstraint | None) -> None:
        """What `next` draws from here on obeys `constraint`, which holds no token yet; None: nothing more.

        It is told of every token drawn. It holds until another one is set, or the timeline becomes what `next` did
        not draw: `sync`, `step`, `rollback` and `restore` end it.
        """
        self._drop_waiting()
        self._constraint, self._refused = constraint, None

    def next(self, sampling: Sampling, *, left: int | None = None) -> int:
        """Draw the token after the timeline, append it, return it; `last` says more about it.

        Args:
            left: tokens that will be asked for at most, this one too: no more are drawn ahead.

        Raises:
            RequestError: the context is full (code context_length_exceeded), or a bias on a token that is not there.
            DeviceError: the logits hold NaN.
        """
        self._settle_on(sampling)
        if not self._waiting:
            self._drew(self._draw(sampling, left))
            self._check_constraint()
        self.last = self._waiting.pop(0)
        self.tokens.append(self.last.token)
        return self.last.token

    def _settle_on(self, sampling: Sampling) -> None:
        """The checks of `next`; other settings take back what was drawn by those of before."""
        self._check_constraint()
        if len(self.tokens) >= self.config.max_position_embeddings:
            raise RequestError("the context is full", "messages", "context_length_exceeded")
        if sampling != self._sampling:
            sampling.penalties.check_vocab(self.config.vocab_size)
            self._drop_waiting()
            self._sampling = sampling

    def _drew(self, drawn: list[Drawn]) -> None:
        self._waiting = drawn
        if self._constraint is None:
            return
        told = 0
        try:
            for one in drawn:
                self._constraint.advance(one.token)
                told += 1
        except Exception as e:  # not the others' of a shared pass: the next `next` says so
            if told:
                self._constraint.rollback(told)
            self._waiting, self._refused = [], e
            self._go_back(len(self.tokens) - 1)

    def _check_constraint(self) -> None:
        if self._refused is not None:
            raise self._refused

    # -- `next` in a pass that several sessions share (together.py): needs_pass, plan, passed, collect; or leave

    def needs_pass(self, sampling: Sampling) -> bool:
        """Whether `next` would run a pass before it can draw. Raises as `next`."""
        self._settle_on(sampling)
        return not self._waiting and 1 <= self.position == len(self.tokens) - 1

    def plan(self, sampling: Sampling, left: int | None, policy: DraftPolicy, most: int) -> Plan:
        """A round of at most `most` drafts whose pass somebody else runs, on what stands in the slots then."""
        self._logits = None
        plan = self._rounds.plan(
            self.tokens, sampling, policy, self._left(left), self._prompt, self._constraint, most
        )  # fmt: skip
        self._step.slots.set(plan.tokens[plan.start :], plan.start)
        return plan

    def follow(self, count: int) -> Buffer | None:
        """Where the pass is to leave its rows for the draft head."""
        return self._rounds.follow(count)

    def passed(self, plan: Plan) -> None:
        """The pass was submitted."""
        self.state.advance(plan.start + 1 + plan.k)
        self._rounds.chooser.submit(plan.k)

    def collect(self, plan: Plan) -> list[Drawn]:
        """What the pass chose.

        Raises:
            DeviceError: a row is no distribution.
        """
        return self._rounds.chooser.chosen(plan.k, plan.start)

    def settle(self, plan: Plan, drawn: list[Drawn], policy: DraftPolicy, *, warm_up: bool) -> None:
        """The round is over; what it drew waits for `next`."""
        self._rounds.settle(plan, drawn, policy, warm_up=warm_up)
        self._drew(drawn)

    def leave(self, start: int) -> None:
        """The pass failed, or its rows: the state is again as it was at position `start`."""
        self._rounds.failed(start)

    def _left(self, left: int | None) -> int:
        """Tokens that may still be drawn."""
        return self.config.max_position_embeddings - len(self.tokens) if left is None else max(1, left)

    def _draw(self, sampling: Sampling, left: int | None) -> list[Drawn]:
        """At least one token after the timeline."""
        left = self._left(left)
        if self.position != len(self.tokens) - 1 or self.position < 1:
            return [self._rounds.after(
                self._current(), self.tokens, sampling, self._prompt, left, self._constraint
            )]  # fmt: skip
        self._logits = None
        drawn = self._rounds.run(
            self.tokens, sampling, self.policy, left, self._prompt, self._constraint
        )  # fmt: skip
        self._logits = self._rounds.last
        return drawn

    def _drop_waiting(self) -> None:
        """Take back what was drawn and not asked for: the state of plain decode, one token behind the timeline."""
        if self._waiting:
            if self._constraint is not None:
                self._constraint.rollback(len(self._waiting))
            self._waiting = []
            self._go_back(len(self.tokens) - 1)

    def _clear(self) -> None:
        self.state.clear()
        self._logits = None
        self._rounds.chooser.forget_text()
        if self._drafter is not None:
            self._drafter.state.clear()

    def snapshot(self) -> SessionSnapshot:
        """The timeline, copied to the host."""
        logits = None if self._logits is None else self.device.download(self._logits)[0]
        draft = None if self._drafter is None else self._drafter.state.snapshot()
        return SessionSnapshot(
            tuple(self.tokens),
            self._prompt,
            self.state.snapshot(),
            logits,
            tuple(self._waiting),
            self._sampling,
            draft,
        )

    def restore(self, snapshot: SessionSnapshot) -> None:
        """Continue from `snapshot` as if nothing had happened since."""
        self.state.restore(snapshot.state)
        if self._drafter is not None:
            self._drafter.state.clear()
            if snapshot.draft is not None:
                self._drafter.state.restore(snapshot.draft)
        self.tokens, self._prompt = list(snapshot.tokens), snapshot.prompt
        self._rounds.chooser.forget_text()
        self._waiting, self._sampling = list(snapshot.waiting), snapshot.sampling
        self._constraint = self._refused = None
        self._refused = None
        self._logits = None
        if snapshot.logits is not None:
            self.lane.last.write(snapshot.logits.reshape(1, -1))
            self._logits = self.lane.last

    def rollback(self, position: int) -> None:
        """Forget the tokens from `position` on; exact, or refused (state.py)."""
        if position > len(self.tokens) or position < 1:
            raise Ds4Error(f"cannot roll back to {position}: the timeline holds {len(self.tokens)} tokens")
        self.constrain(None)
        if position < self.position:
            self._go_back(position)
        self.tokens = self.tokens[:position]
        self._prompt = min(self._prompt, position)
        self._rounds.chooser.forget_text()

    def _go_back(self, position: int) -> None:
        self._rounds.go_back(position)
        self._rounds.chooser.forget_text()
        self._logits = None

    def reserve(self, tokens: int) -> None:
        """Room for a timeline of so many tokens, before any of them is run.

        Raises:
            CapacityError: there is none; what the session holds stays.
        """
        self.state.reserve(tokens)

    def nbytes(self) -> int:
        """Device bytes of this sequence's state."""
        return self.lane.nbytes()
