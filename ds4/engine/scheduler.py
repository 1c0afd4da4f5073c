"""How many drafts a round draws, and how many of them the target verifies.

A round runs `begin`, then, if it draws drafts, `choose`, then `settle`. Drafts are accepted up to the first wrong one
and the target adds a token of its own, so k verified drafts yield 1 + (a_1 + ... + a_k) tokens on average, where
a_j = p_1 ... p_j is the chance that draft j survives and p_i = min(1, rho sigmoid(confidence_i)). The scheduler
extends the block while

    rate(k) = (1 + a_1 + ... + a_k) / (draft_s + pass_s + row_s (1 + k))

rises. One rule serves every temperature. rate(k) < rate(k + 1) holds just when a_(k+1) > row_s rate(k); survival
never rises with k and the right side never falls below it again, so the first k at which the rate does not rise is
its argmax, the best length at temperature 0. And draft j is judged by confidences 1..j alone, which the draft head
computes before draft j is drawn (confidence j sees draft j - 1): above temperature 0 a rule that looked further would
keep or drop a draft by what was drawn, and change the distribution of the output.

Everything that outlives a round (costs, rho, whether to draft at all) is settled before the next one begins. What
outlives a request too is a `DraftLedger`: whether drafting pays is more the device's and the model's doing than one
text's, and an attempt costs tokens that a short answer cannot earn back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ds4.engine.costs import CostFit, RoundCosts
from ds4.errors import DeviceError, Ds4Error

CALIBRATION_PRIOR = 4.0  # promised hits, all kept, that rho starts from: one early miss must not end drafting
ONE_ROW_EVERY = 128  # rounds of several rows: then plain decode is timed again, at under 1 % of what drafting gains
LOSS_LIMIT = 8.0  # plain tokens behind its own best moment at which drafting stops
LOSS_SHARE = 0.01  # of a pause that the loss before it may be: what failed attempts cost in the long run
MOST_DOUBLINGS = 3  # of the pause, by attempts that fail in a row
ROWS_AHEAD = 32  # last rounds of a pause whose rows the draft head gets: drafts need some context, a pause is long


def most_drafts(block: int, tokens_left: int, context_left: int) -> int:
    """Drafts that a round may verify: k of them can yield k + 1 tokens.

    Args:
        block: the draft head's block size, or a smaller one that the user set; 0 or more.
        tokens_left: tokens that the request may still emit, at least 1.
        context_left: tokens that the timeline may still grow by, at least 1.

    Returns:
        min(block, tokens_left - 1, context_left - 1)

    Raises:
        Ds4Error: nothing may be emitted, or a negative block.
    """
    if block < 0 or tokens_left < 1 or context_left < 1:
        raise Ds4Error(
            f"no round fits: block {block}, {tokens_left} tokens and {context_left} positions left; "
            "a round emits at least one token"
        )
    return min(block, tokens_left - 1, context_left - 1)


class DraftPolicy(Protocol):
    """What the session asks, round by round. One object serves one request."""

    @property
    def follows(self) -> bool:
        """Whether the draft head should get the rows of the next pass: a round may soon draw drafts."""
        ...

    def begin(self, most: int) -> int:
        """Start a round in which at most `most` drafts fit (`most_drafts`).

        Returns:
            drafts to draw, 0..most; 0 is a plain step: `choose` is then not called.
        """
        ...

    def extend(self, confidences: Sequence[float]) -> bool:
        """Whether to draw and verify one more draft, asked before it is drawn; no earlier answer was no.

        Args:
            confidences: raw logits of the drafts so far and of the one in question, the last.
        """
        ...

    def choose(self, confidences: Sequence[float]) -> int:
        """How many drafts to verify, asked once a round, when the last draft has been drawn.

        Args:
            confidences: a raw logit a draft drawn; none if `extend` refused the first.

        Returns:
            k in 0..len(confidences): the longest prefix of which `extend` says yes at every draft.
        """
        ...

    def settle(self, accepted: int, *, first_hit: bool | None = None, warm_up: bool = False) -> None:
        """End the round.

        Args:
            accepted: drafts accepted, 0..k.
            first_hit: with k = 0 after drafts were drawn, whether the token that came was the first draft, where
                that is known to be the acceptance rule (temperature 0, or noise shared by draft and target).
            warm_up: the round grew scratch, compiled or captured something: its time says nothing.
        """
        ...


class FixedDrafts:
    """`n` drafts a round, or as many as fit; 0 is plain decode. Confidences are counted, not read."""

    def __init__(self, n: int) -> None:
        if n < 0:
            raise Ds4Error(f"{n} drafts a round: expected 0 or more")
        self._n = n

    @property
    def follows(self) -> bool:
        return self._n > 0

    def begin(self, most: int) -> int:
        return min(self._n, most)

    def extend(self, confidences: Sequence[float]) -> bool:
        return len(confidences) <= self._n

    def choose(self, confidences: Sequence[float]) -> int:
        return min(self._n, len(confidences))

    def settle(self, accepted: int, *, first_hit: bool | None = None, warm_up: bool = False) -> None:
        pass


@dataclass
class DraftLedger:
    """What drafting lost against plain decode, in plain tokens, and how long plain decode makes up for it.

    Requests of one model on one device share it: a stretch may end, and a pause may pass, in a later request than the
    one that it began in.

    Attributes:
        loss: behind the best moment of this stretch.   rounds: of this stretch, in which drafts were drawn.
        unpriced: (verified, accepted) of rounds whose costs were not known yet.
        pause: plain rounds until the next stretch; 0: drafting goes on.   last_pause: as it was at its start.
        failures: stretches in a row that were shorter than the pause before them.
    """

    loss: float = 0.0
    rounds: int = 0
    unpriced: list[tuple[int, int]] = field(default_factory=list)
    pause: int = 0
    last_pause: int = 0
    failures: int = 0

    def price(self, costs: RoundCosts) -> None:
        """Count the rounds that came since costs were last known."""
        for k, accepted in self.unpriced:
            self.loss = max(0.0, self.loss + costs.drafted_s(k) / costs.plain_s - (1 + accepted))
        self.unpriced.clear()

    def stop(self) -> None:
        """End the stretch: plain decode runs until the loss is LOSS_SHARE of it."""
        failed = self.rounds <= self.last_pause
        self.failures = min(self.failures + 1, MOST_DOUBLINGS) if failed else 0
        self.pause = self.last_pause = math.ceil(max(1.0, self.loss) / LOSS_SHARE) << self.failures

    def plain_round(self) -> bool:
        """A round of the pause went by; whether it was the last, and a stretch begins."""
        self.pause -= 1
        if self.pause:
            return False
        self.loss, self.rounds = 0.0, 0
        self.unpriced.clear()
        return True


class Scheduler:
    """Fits what rounds cost and yield on this device and text, and chooses by it.

    A stretch of drafting opens, and goes on in a new request, with rounds that verify the longest block, until one
    was timed, and a plain step, unless one was timed before: with these the costs are known. It ends when it is
    LOSS_LIMIT plain tokens behind its best moment, counted in tokens that really came and in fitted costs, or at
    once if even a block that is accepted whole would lose. Then plain decode runs for as long as makes that loss a
    share of LOSS_SHARE, twice as long after each stretch that was shorter than the pause before it. The next
    stretch opens and calibrates anew.

    Args:
        clock: seconds that only rise. Read when a round begins, is drawn and ends; nothing else may be timed between.
        ledger: of the requests before this one; None: there were none.
        whole: a round verifies all drafts or none. Then the first confidence decides, as if every draft were as sure
            as the first: the later ones must not have a say in what becomes of those before them.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        ledger: DraftLedger | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self._clock, self._whole = clock, whole
        self._ledger = DraftLedger() if ledger is None else ledger
        self._fit = CostFit()
        self._costs: RoundCosts | None = None
        self._planned: int | None = None  # drafts of the round that is running; None: no round is
        self._verified: int | None = None
        self._began_s = self._drawn_s = 0.0
        self._first: float | None = None  # sigmoid of this round's first confidence; None: no draft was drawn
        self._new_stretch()

    def _new_stretch(self) -> None:
        self._fit.forget_drafting()
        self._costs = None
        self._hits = self._promised = 0.0
        self._longest = self._since_one_row = 0

    @property
    def costs(self) -> RoundCosts | None:
        """The three costs of this stretch; None while it opens."""
        return self._costs

    @property
    def calibration(self) -> float:
        """rho = first drafts accepted / sum of sigmoid(first confidence), with CALIBRATION_PRIOR in both."""
        return (self._hits + CALIBRATION_PRIOR) / (self._promised + CALIBRATION_PRIOR)

    @property
    def quenched(self) -> bool:
        """Whether drafting is paused because it lost to plain decode."""
        return self._ledger.pause > 0

    @property
    def follows(self) -> bool:
        """DraftPolicy.follows."""
        return self._ledger.pause <= ROWS_AHEAD

    def begin(self, most: int) -> int:
        """DraftPolicy.begin."""
        if most < 0:
            raise Ds4Error(f"at most {most} drafts: expected 0 or more")
        one_row = self._fit.knows_drafting and not self._fit.knows_one_row
        stale = self._since_one_row >= ONE_ROW_EVERY
        self._planned = 0 if self.quenched or one_row or stale else most
        self._verified = None if self._planned else 0
        self._began_s = self._drawn_s = self._clock()
        return self._planned

    def extend(self, confidences: Sequence[float]) -> bool:
        """DraftPolicy.extend. Raises DeviceError for a confidence that is not finite."""
        return self._length(confidences) == len(confidences)

    def choose(self, confidences: Sequence[float]) -> int:
        """DraftPolicy.choose. Raises DeviceError for a confidence that is not finite."""
        self._drawn_s = self._clock()
        if not self._planned or self._verified is not None:
            raise Ds4Error("choose() is asked once in a round that draws drafts: call begin() first")
        k = self._length(confidences)
        self._first = _sigmoid(float(confidences[0])) if len(confidences) else None
        self._verified = k
        return k

    def _length(self, confidences: Sequence[float]) -> int:
        """The first k at which the rate does not rise; all drafts while the stretch opens."""
        if self._planned is None or len(confidences) > self._planned:
            raise Ds4Error(f"{len(confidences)} confidences for {self._planned or 0} drafts of this round")
        values = [float(c) for c in confidences]
        for i, value in enumerate(values):
            if not math.isfinite(value):
                raise DeviceError(
                    f"the confidence of draft {i + 1} is {value}: the draft head's state or weights are broken"
                )
        costs, rho = self._costs, self.calibration
        if costs is None:
            return len(values)
        if self._whole:
            return len(values) if values and self._block_pays(values[0]) else 0
        survival = expected = 1.0
        rate = expected / costs.drafted_s(0)
        for k, value in enumerate(values):
            survival *= min(1.0, rho * _sigmoid(value))
            expected += survival
            longer = expected / costs.drafted_s(k + 1)
            if longer <= rate:
                return k
            rate = longer
        return len(values)

    def _block_pays(self, first: float) -> bool:
        """Whether all planned drafts together yield more tokens a second than none, by the first one's confidence."""
        costs, n = self._costs, self._planned or 0
        assert costs is not None
        p = min(1.0, self.calibration * _sigmoid(first))
        return sum(p**j for j in range(n + 1)) / costs.drafted_s(n) > 1 / costs.drafted_s(0)

    def settle(self, accepted: int, *, first_hit: bool | None = None, warm_up: bool = False) -> None:
        """DraftPolicy.settle."""
        ended_s = self._clock()
        planned, k = self._planned, self._verified
        if planned is None or k is None:
            raise Ds4Error("settle() ends a round: call begin() first, and choose() if it draws drafts")
        if not 0 <= accepted <= k:
            raise Ds4Error(f"{accepted} drafts accepted of {k} verified")
        self._planned = self._verified = None
        if not warm_up:
            self._fit.add_pass(1 + k, ended_s - self._drawn_s)
            if planned:
                self._fit.add_draft(self._drawn_s - self._began_s)
        self._since_one_row = self._since_one_row + 1 if k else 0
        if planned:
            self._longest = max(self._longest, planned)
            self._learn(k, accepted, first_hit)
        elif self.quenched and self._ledger.plain_round():
            self._new_stretch()
            return
        if not self.quenched:
            self._costs = self._fit.costs()
            self._weigh()

    def _learn(self, k: int, accepted: int, first_hit: bool | None) -> None:
        hit = accepted > 0 if k else first_hit
        if hit is not None and self._first is not None:
            self._hits += hit
            self._promised += self._first
        self._ledger.rounds += 1
        self._ledger.unpriced.append((k, accepted))

    def _weigh(self) -> None:
        """Count what drafting lost against plain decode since its best moment, and stop it at the limit."""
        costs = self._costs
        if costs is None:
            return
        self._ledger.price(costs)
        n = self._longest
        hopeless = costs.drafted_s(n) >= (1 + n) * costs.plain_s
        if hopeless or self._ledger.loss > LOSS_LIMIT:
            self._ledger.stop()


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    e = math.exp(x)
    return e / (1.0 + e)
