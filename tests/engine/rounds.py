"""Rounds of a draft policy on a simulated device, for the scheduler's tests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from ds4.engine.costs import RoundCosts
from ds4.engine.scheduler import DraftPolicy, Scheduler

BYTES = RoundCosts(0.25, 0.83, 0.17)  # a pass is mostly weights: drafting pays
ARITHMETIC = RoundCosts(2.0, 0.2, 0.8)  # every row is work: it cannot
SURE = 40.0  # a confidence whose sigmoid is 1.0 in float64


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A policy on a device that takes `costs`; every round is written down as (drafts drawn, verified)."""

    def __init__(
        self, costs: RoundCosts, policy: DraftPolicy | None = None, jitter: Callable[[], float] | None = None
    ):
        self.clock, self.costs, self.jitter = Clock(), costs, jitter or (lambda: 1.0)
        self.policy = policy or Scheduler(self.clock)
        self.rounds: list[tuple[int, int]] = []
        self.tokens = 0

    @property
    def scheduler(self) -> Scheduler:
        assert isinstance(self.policy, Scheduler)
        return self.policy

    def round(
        self, confidences: Sequence[float], hits: Sequence[bool], *, most: int | None = None, warm_up: bool = False
    ) -> int:
        """Run one round; returns the tokens that it yields."""
        planned = self.policy.begin(len(confidences) if most is None else most)
        k = 0
        if planned:
            self.clock.now += self.costs.draft_s * self.jitter()
            k = self.policy.choose(confidences[:planned])
        self.clock.now += (self.costs.pass_s + self.costs.row_s * (1 + k)) * self.jitter()
        accepted = next((i for i in range(k) if not hits[i]), k)
        self.policy.settle(accepted, first_hit=hits[0] if planned else None, warm_up=warm_up)
        self.rounds.append((planned, k))
        self.tokens += 1 + accepted
        return 1 + accepted

    def text(self, n: int, chance: float, seed: int = 0, block: int = 5) -> None:
        """`n` tokens more whose drafts hit with `chance`, as the confidences say."""
        rng, end = random.Random(seed), self.tokens + n
        while self.tokens < end:
            hits = [rng.random() < chance for _ in range(block)]
            self.round([math.log(chance / (1 - chance))] * block, hits)


def opened(costs: RoundCosts = BYTES, block: int = 5) -> Bench:
    """A scheduler that knows `costs`, with rho exactly 1."""
    bench = Bench(costs)
    bench.round([SURE] * block, [True] * block)
    bench.round([SURE] * block, [True] * block)
    assert bench.rounds == [(block, block), (0, 0)]
    assert bench.scheduler.calibration == 1.0
    return bench


def logit(p: float) -> float:
    return math.log(p / (1 - p))
