"""Rounds of speculative decoding: draft, verify, accept. Several tokens a pass, and what they are does not change.

A round starts where one token is not run yet. The draft head proposes what follows it, the policy says how many of
the proposals are verified, one pass runs the token and them, and the rule of the request (docs/sampling.md) keeps the
leading ones that stand and adds a token of the model's own. What was refused is taken back.

Between the launches the host reads the drafts with their confidences, which it needs to hash n-grams and to choose,
and at the end 16 bytes a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ds4.device import Buffer, Device
from ds4.engine.draft import Drafter
from ds4.engine.ops.accept import accept, accept_prefix
from ds4.engine.ops.sample import DRAFT_STREAM, TARGET_STREAM, pack_params, sample
from ds4.engine.sampling import Sampling
from ds4.engine.scheduler import DraftPolicy, most_drafts
from ds4.engine.step import MAX_ROWS, StepRunner, Tap
from ds4.errors import DeviceError


@dataclass(frozen=True)
class Drawn:
    """A token and its log-probability under the model's own distribution."""

    token: int
    logprob: float


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


class Rounds:
    """Draws the tokens of one sequence, with drafts where there is a draft head and the policy wants some.

    Attributes:
        counts: what the rounds did.
        last: f32 [1, V], the logits that the last round's last token was chosen by, until the next pass.
    """

    def __init__(self, device: Device, step: StepRunner, drafter: Drafter | None, *, argmax: bool) -> None:
        """`argmax`: without a seed too, drafts are the likeliest tokens and not drawn."""
        self.device, self.step, self.drafter, self._argmax = device, step, drafter, argmax
        self.counts = RoundCounts()
        self.last = step.logits.view(0, (1, step.config.vocab_size), "f32")
        # one download: the round's four words, then four words a row
        self._result = device.zeros((1 + MAX_ROWS, 4), "i32")
        self._round = self._result.view(0, (4,), "i32")
        self._params = device.zeros((MAX_ROWS, 8), "i32")
        self._packed: Sampling | None = None
        self._pos = device.zeros((1,), "i32")
        self._token = device.zeros((1,), "i32")
        self._shares = device.empty((2 * MAX_ROWS - 1, 8), "i32")

    def after(self, logits: Buffer, position: int, sampling: Sampling) -> Drawn:
        """The token after the row that gave `logits` f32 [1, V] at `position`, without a pass.

        Raises:
            DeviceError: the logits are no distribution.
        """
        self._settle_on(sampling)
        self._pos.write(np.array([position], np.int32))
        return self._judge(logits, position, self._pos, [], sampling)[0]

    def run(self, tokens: Sequence[int], sampling: Sampling, policy: DraftPolicy, left: int) -> list[Drawn]:
        """One round on a timeline whose last token is not run yet; at least one new token.

        Args:
            left: tokens that may still be drawn, at least 1; no more are returned.

        Raises:
            DeviceError: a row is no distribution; the state is then as it was.
        """
        state, drafter = self.step.state, self.drafter
        start = state.position
        self._settle_on(sampling)
        most = 0
        if drafter is not None and drafter.state.reach == start:
            room = self.step.config.max_position_embeddings - len(tokens)
            most = most_drafts(min(drafter.B, MAX_ROWS - 1), left, room)
        cold = self._cold()
        planned = policy.begin(most)
        drafts: list[int] = []
        k = 0
        if planned and drafter is not None:
            drafts, confidences = self._draft(drafter, tokens[-1], planned)
            k = policy.choose(confidences)
        try:
            logits = self.pass_over([*tokens, *drafts[:k]], 1 + k, follow=policy.follows)
            drawn = self._judge(logits, start, self.step.pos.view(0, (1 + k,), "i32"), drafts[:k], sampling)
        except BaseException:
            if state.position > start:
                self.go_back(start)
            raise
        accepted = len(drawn) - 1
        first_hit = None
        if drafts and not k and _same_noise(sampling):
            first_hit = drafts[0] == drawn[0].token
        policy.settle(accepted, first_hit=first_hit, warm_up=self._cold() != cold)
        self.counts.add(bool(drafts), k, accepted)
        if accepted < k:
            self.go_back(start + 1 + accepted)
        if not drafts:
            self.commit()  # else the next round's drafts pay for it, never a plain step
        V = logits.shape[1]
        self.last = logits.view(4 * V * accepted, (1, V), "f32")
        return drawn

    def pass_over(self, tokens: Sequence[int], count: int, tap: Tap | None = None, *, follow: bool) -> Buffer:
        """StepRunner.run on the last `count` tokens; `follow`: their rows are left for the draft head."""
        drafter, main_hidden = self.drafter, None
        if drafter is not None and follow:
            self.commit()
            main_hidden = drafter.state.expect(self.step.state.position, count)
        return self.step.run(tokens, count, tap, main_hidden=main_hidden)

    def go_back(self, position: int) -> None:
        """Take the newest tokens of both states back."""
        self.step.go_back(position)
        if self.drafter is not None:
            self.drafter.state.rollback(position)

    def commit(self) -> None:
        """Rows of the last pass that still stand become the draft head's keys."""
        if self.drafter is not None and self.drafter.state.pending:
            self.drafter.commit(self.drafter.state.pending)

    def _draft(self, drafter: Drafter, token: int, count: int) -> tuple[list[int], list[float]]:
        self.commit()
        self._token.write(np.array([token], np.int32))
        drafter.draft(self._token)
        told = self.device.download(drafter.told)
        drafts, confidences = told[1 : 1 + drafter.B], told[1 + drafter.B :].view(np.float32)
        return [int(d) for d in drafts[:count]], [float(c) for c in confidences[:count]]

    def _judge(
        self, logits: Buffer, first: int, pos: Buffer, drafts: Sequence[int], sampling: Sampling
    ) -> list[Drawn]:
        """The new tokens of a pass at the positions from `first` on: the drafts that stand and one of the model's."""
        k, drafter, dev = len(drafts), self.drafter, self.device
        rows, ids = self._result.view(16, (1 + k, 4), "i32"), None
        if k and drafter is not None:
            ids = drafter.drafts.view(0, (k,), "i32")
        if ids is None or drafter is None or _same_noise(sampling):
            sample(dev, rows, logits, self._params, pos, 1 + k)
        else:
            drawn_from = None if self._argmax else drafter.logits.view(0, (k, logits.shape[1]), "f32")
            shares = self._shares.view(0, (1 + k if self._argmax else 1 + 2 * k, 8), "i32")
            accept(dev, rows, shares, logits, ids, self._params, pos, 1 + k, draft_logits=drawn_from)
        if ids is not None:
            accept_prefix(dev, self._round, rows, ids, pos)
        told = dev.download(self._result.view(0, (2 + k, 4), "i32"))
        accepted = int(told[0, 0]) if k else 0
        new = told[1 : 2 + accepted]
        if new[-1, 0] < 0:
            raise DeviceError(f"the logits after {first + accepted + 1} tokens hold NaN or no finite value")
        return [Drawn(int(token), float(np.int32(bits).view(np.float32))) for token, bits in new[:, :2]]

    def _settle_on(self, s: Sampling) -> None:
        """Settings on the device, written when they change."""
        if s == self._packed:
            return
        given = (s.device_temperature, s.top_k, s.top_p, s.min_p, s.seed)
        self._params.write(pack_params(MAX_ROWS, *given, TARGET_STREAM))
        if self.drafter is not None:
            stream = TARGET_STREAM if _same_noise(s) else DRAFT_STREAM
            likeliest = s.temperature == 0 or (self._argmax and not s.seeded)
            self.drafter.pick_by(None if likeliest else pack_params(1, *given, stream))
        self._packed = s

    def _cold(self) -> tuple[int, int]:
        return self.step.counts.cold, self.drafter.cold if self.drafter is not None else 0


def _same_noise(sampling: Sampling) -> bool:
    """Whether drafts stand where they are what plain decode says: at temperature 0, and with a seed."""
    return sampling.temperature == 0 or sampling.seeded
