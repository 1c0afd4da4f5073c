"""Rounds of speculative decoding: draft, verify, accept. Several tokens a pass, and what they are does not change.

A round starts where one token is not run yet. The draft head proposes what follows it, the policy says how many of
the proposals are verified, one pass runs the token and them, and the rule of the request (docs/sampling.md) keeps the
leading ones that stand and adds a token of the model's own. What was refused is taken back.

Between the launches the host reads the drafts with their confidences, which it needs to hash n-grams and to choose,
and at the end 16 bytes a row. N-gram rows are asked for the moment a token or a draft is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ds4.device import Buffer, Device
from ds4.engine.choose import Chooser, Drawn, Ending, same_noise
from ds4.engine.constraint import TokenConstraint
from ds4.engine.draft import Drafter
from ds4.engine.sampling import Sampling
from ds4.engine.scheduler import DraftPolicy, most_drafts
from ds4.engine.segments import Tap
from ds4.engine.slots import MAX_ROWS
from ds4.engine.step import StepRunner


@dataclass
class RoundCounts:
    """What rounds did so far. A round that drew no drafts is a plain step.

    Attributes:
        rounds: passes.   tokens: what they yielded.   drawn: rounds in which drafts were drawn.
        verified: verified[k] rounds ran k drafts.
        accepted: accepted[j] rounds kept draft j + 1.
    """

    rounds: int = 0
    tokens: int = 0
    drawn: int = 0
    verified: list[int] = field(default_factory=lambda: [0] * MAX_ROWS)
    accepted: list[int] = field(default_factory=lambda: [0] * (MAX_ROWS - 1))

    def add(self, drawn: bool, verified: int, accepted: int) -> None:
        self.rounds += 1
        self.tokens += 1 + accepted
        self.drawn += drawn
        self.verified[verified] += 1
        for j in range(accepted):
            self.accepted[j] += 1

    def report(self) -> dict[str, object]:
        """For people: tokens a round, acceptance of draft j where drafts up to it were verified, rounds by k."""
        offered = [sum(self.verified[j + 1 :]) for j in range(MAX_ROWS - 1)]
        return {
            "rounds": self.rounds,
            "tokens_per_round": round(self.tokens / self.rounds, 4) if self.rounds else 0.0,
            "acceptance_by_position": [round(a / n, 4) for a, n in zip(self.accepted, offered) if n],
            "verified_drafts": {str(k): n for k, n in enumerate(self.verified) if n},
        }


@dataclass(frozen=True)
class Plan:
    """A round before its pass.

    Attributes:
        tokens: the timeline and the k drafts that are verified: the pass runs its last 1 + k tokens.
        start: the position of the pass's first row.   left: see Rounds.plan.
        planned: drafts that the policy asked for; `drafts`: those that were drawn.
        ending: what chooses.   same_noise: whether drafts that stand are what plain decode says.
    """

    tokens: list[int]
    start: int
    left: int
    planned: int
    drafts: tuple[int, ...]
    k: int
    ending: Ending
    same_noise: bool


class Rounds:
    """Draws the tokens of one sequence, with drafts where there is a draft head and the policy wants some.

    Attributes:
        counts: what the rounds did.
        last: f32 [1, V], the logits that the last round's last token was chosen by, until the next pass.
    """

    def __init__(self, device: Device, step: StepRunner, drafter: Drafter | None, *, argmax: bool) -> None:
        """`argmax`: without a seed too, drafts are the likeliest tokens and not drawn."""
        self.device, self.step, self.drafter = device, step, drafter
        self.chooser = Chooser(device, step.config.vocab_size, step.slots, drafter, argmax=argmax)
        self.counts = RoundCounts()
        self.last = step.logits.view(0, (1, step.config.vocab_size), "f32")
        self._token = step.slots.ids.view(0, (1,), "i32")

    def after(
        self, logits: Buffer, tokens: Sequence[int], sampling: Sampling, prompt: int, left: int,
        constraint: TokenConstraint | None = None,
    ) -> Drawn:  # fmt: skip
        """The token after `tokens`, whose last row gave `logits` f32 [1, V], without a pass; see `run`.

        Raises:
            DeviceError: the logits are no distribution.
        """
        self.chooser.settle_on(sampling, tokens, prompt)
        drawn = self.chooser.choose_after(logits, len(tokens) - 1, constraint)
        if left > 1:
            self.step.feed.announce([*tokens, drawn.token], len(tokens), 1)
        return drawn

    def run(
        self, tokens: Sequence[int], sampling: Sampling, policy: DraftPolicy, left: int, prompt: int,
        constraint: TokenConstraint | None = None,
    ) -> list[Drawn]:  # fmt: skip
        """One round on a timeline whose last token is not run yet; at least one new token. Arguments as `plan`.

        Raises:
            DeviceError: a row is no distribution; the state is then as it was.
        """
        start = self.step.state.position
        cold = self._cold()
        try:
            plan = self.plan(tokens, sampling, policy, left, prompt, constraint)
            logits = self.pass_over(plan.tokens, 1 + plan.k, follow=policy.follows, ending=plan.ending)
            self.chooser.submit(plan.k)
            if not plan.drafts:
                self.commit()  # else the next round's drafts pay for it, never a plain step
            if not plan.planned and left > 1:
                self.step.run_ahead()  # behind the commit, which reads what a segment may write over
            drawn = self.chooser.chosen(plan.k, start)
        except BaseException:
            self.failed(start)
            raise
        self.settle(plan, drawn, policy, warm_up=self._cold() != cold)
        V = logits.shape[1]
        self.last = logits.view(4 * V * (len(drawn) - 1), (1, V), "f32")
        return drawn

    def plan(
        self, tokens: Sequence[int], sampling: Sampling, policy: DraftPolicy, left: int, prompt: int,
        constraint: TokenConstraint | None = None, most: int = MAX_ROWS - 1,
    ) -> Plan:  # fmt: skip
        """A round up to its pass: drafts are drawn, and the device's slots hold the rows.

        Args:
            tokens: the timeline; all but its last token have been run.
            left: tokens that may still be drawn, at least 1; no more are returned.
            prompt: how many tokens of the timeline are not the answer's own.
            constraint: what the new tokens obey; it is asked, and not told what came. Of the drafts that it forbids
                the first is verified like any other and falls: to leave it out would be to choose by what was drawn,
                and give its probability to tokens that do not follow it. Those behind it are never reached.
            most: drafts at most, as far as others leave rows.
        """
        drafter, start = self.drafter, self.step.state.position
        self.chooser.settle_on(sampling, tokens, prompt)
        can = 0
        if drafter is not None and drafter.state.reach == start:
            room = self.step.config.max_position_embeddings - len(tokens)
            can = most_drafts(min(drafter.B, most), left, room)
        planned = policy.begin(can)
        drafts: list[int] = []
        k = 0
        if planned and drafter is not None:
            drafts, confidences = self._draft(drafter, tokens, planned)
            if constraint is not None:
                confidences = confidences[: constraint.valid(drafts) + 1]
            k = policy.choose(confidences)
            self.step.feed.announce([*tokens, *drafts[:k]], start + 1, k)
            self.step.slots.take_drafts(drafter.drafts, drafts[:k])
        shared = same_noise(sampling)
        return Plan(
            [*tokens, *drafts[:k]], start, left, planned, tuple(drafts), k,
            self.chooser.ending(k, constraint, drafts[:k]), shared,
        )  # fmt: skip

    def settle(self, plan: Plan, drawn: Sequence[Drawn], policy: DraftPolicy, *, warm_up: bool) -> None:
        """The end of a round whose pass drew `drawn`: what was refused is taken back. `warm_up`: as
        DraftPolicy.settle's.
        """
        accepted, n = len(drawn) - 1, len(plan.tokens) - plan.k
        if plan.left > len(drawn):  # the next pass begins with the token that nobody has run
            timeline = [*plan.tokens[:n], *(d.token for d in drawn)]
            self.step.feed.announce(timeline, plan.start + 1 + accepted, 1)
        first_hit = None
        if plan.drafts and not plan.k and plan.same_noise:
            first_hit = plan.drafts[0] == drawn[0].token
        policy.settle(accepted, first_hit=first_hit, warm_up=warm_up)
        self.counts.add(bool(plan.drafts), plan.k, accepted)
        if accepted < plan.k:
            self.go_back(plan.start + 1 + accepted)

    def failed(self, start: int) -> None:
        """A pass from position `start` on failed somewhere: the state is as it was, the slots hold who knows what."""
        self.step.slots.changed()
        self.chooser.forget_text()
        if self.drafter is not None:
            self.drafter.state.forget_rows()
        if self.step.state.position > start:
            self.go_back(start)

    def follow(self, count: int) -> Buffer | None:
        """Where the pass of `count` rows that comes now is to leave rows for the draft head; those of the pass before
        are its keys by then.
        """
        if self.drafter is None:
            return None
        self.commit()
        return self.drafter.state.expect(self.step.state.position, count)

    def pass_over(
        self, tokens: Sequence[int], count: int, tap: Tap | None = None, *, follow: bool, ending: Ending | None = None
    ) -> Buffer:
        """StepRunner.run on the last `count` tokens; `follow`: their rows are left for the draft head."""
        main_hidden = self.follow(count) if follow else None
        try:
            return self.step.run(tokens, count, tap, main_hidden=main_hidden, ending=ending)
        except BaseException:
            if self.drafter is not None and main_hidden is not None:
                self.drafter.state.forget_rows()
            raise

    def go_back(self, position: int) -> None:
        """Take the newest tokens of both states back."""
        self.step.go_back(position)
        if self.drafter is not None:
            self.drafter.state.rollback(position)

    def commit(self) -> None:
        """Rows of the last pass that still stand become the draft head's keys."""
        if self.drafter is not None and self.drafter.state.pending:
            self.drafter.commit(self.drafter.state.pending)

    def _draft(self, drafter: Drafter, tokens: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        self.commit()
        self.step.slots.set(tokens[-1:], len(tokens) - 1)
        drafter.draft(self._token)
        told = self.device.download(drafter.told)
        drafts, confidences = told[1 : 1 + drafter.B], told[1 + drafter.B :].view(np.float32)
        return [int(d) for d in drafts[:count]], [float(c) for c in confidences[:count]]

    def _cold(self) -> tuple[int, int]:
        return self.step.counts.cold, self.drafter.cold if self.drafter is not None else 0
