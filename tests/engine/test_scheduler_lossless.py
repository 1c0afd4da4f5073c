"""What the scheduler must not be able to change: tokens at temperature 0, the distribution above it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

from ds4.engine.scheduler import DraftPolicy, FixedDrafts, Scheduler, most_drafts
from tests.engine.rounds import Clock, logit, opened


def test_a_draft_is_judged_by_what_was_known_before_it_was_drawn() -> None:
    """Asked draft by draft, or at the end whatever the later confidences are: the same answers."""
    rng, lengths = random.Random(2), set()
    bench = opened()
    for _ in range(200):
        known = [rng.gauss(0.5, 2) for _ in range(5)]
        bench.scheduler.begin(5)
        drawn = 0
        while drawn < 5 and bench.scheduler.extend(known[: drawn + 1]):
            drawn += 1
        lengths.add(drawn)
        assert bench.scheduler.choose(known[:drawn]) == drawn
        for _ in range(5):
            bench.scheduler.begin(5)
            # confidence `drawn` refused draft `drawn + 1`; what comes after it was not known then
            later = known[: drawn + 1] + [rng.gauss(0, 30) for _ in range(4 - drawn)]
            assert bench.scheduler.choose(later) == drawn
    assert lengths >= {0, 1, 2, 5}


# A text of two positions over three tokens, and a drafter that is wrong about both. Each table is exact.
P1 = [Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)]
Q1 = [Fraction(2, 10), Fraction(2, 10), Fraction(6, 10)]
P2 = [[Fraction(n, 10) for n in row] for row in ([6, 3, 1], [2, 2, 6], [1, 8, 1])]
Q2 = [[Fraction(n, 10) for n in row] for row in ([1, 8, 1], [3, 3, 4], [4, 4, 2])]
FIRST = logit(0.8)
SECOND = [logit(0.95), logit(0.05), logit(0.4)]  # of draft 2, by what draft 1 turned out to be


def residual(p: Sequence[Fraction], q: Sequence[Fraction]) -> list[Fraction]:
    left = [max(Fraction(0), a - b) for a, b in zip(p, q)]
    return [x / sum(left) for x in left]


def outcomes(k_of: Callable[[int], int]) -> dict[tuple[int, int], Fraction]:
    """The exact distribution of two emitted tokens when `k_of(draft 1)` drafts are verified.

    A round draws both drafts, accepts draft i with min(1, p / q), draws from the residual at the first rejection and
    from the target after the last verified draft. A token that the round does not yield comes by plain decode.
    """
    out = dict.fromkeys(itertools.product(range(3), repeat=2), Fraction(0))

    def then(first: int, chance: Fraction, second: Sequence[Fraction]) -> None:
        for b in range(3):
            out[first, b] += chance * second[b]

    for d1, d2 in itertools.product(range(3), repeat=2):
        drawn = Q1[d1] * Q2[d1][d2]
        k = k_of(d1)
        if k == 0:
            for a in range(3):
                then(a, drawn * P1[a], P2[a])
            continue
        ok = min(Fraction(1), P1[d1] / Q1[d1])
        if ok < 1:
            for a, r in enumerate(residual(P1, Q1)):
                then(a, drawn * (1 - ok) * r, P2[a])
        if k == 1:
            then(d1, drawn * ok, P2[d1])
            continue
        ok2 = min(Fraction(1), P2[d1][d2] / Q2[d1][d2])
        then(d1, drawn * ok * ok2, [Fraction(int(b == d2)) for b in range(3)])
        if ok2 < 1:
            then(d1, drawn * ok * (1 - ok2), residual(P2[d1], Q2[d1]))
    return out


def test_looking_past_a_draft_changes_the_distribution_and_this_rule_does_not() -> None:
    """The other rule takes the best of k = 0, 1, 2 by a table in which two rows cost what three do. So it verifies
    draft 1 only if draft 2 looks good, which depends on what draft 1 is.
    """
    plain = {(a, b): P1[a] * P2[a][b] for a in range(3) for b in range(3)}
    bench = opened(block=2)

    def scheduled(d1: int) -> int:
        bench.scheduler.begin(2)
        return bench.scheduler.choose([FIRST, SECOND[d1]])

    def looks_ahead(d1: int) -> int:
        first, second = (1 / (1 + math.exp(-c)) for c in (FIRST, SECOND[d1]))
        rates = (1 / 1.25, (1 + first) / 2.3, (1 + first + first * second) / 2.3)
        return rates.index(max(rates))

    assert [scheduled(d) for d in range(3)] == [2, 1, 2]  # draft 1 always, draft 2 by what draft 1 is
    assert outcomes(scheduled) == plain
    assert [looks_ahead(d) for d in range(3)] == [2, 0, 2]
    biased = outcomes(looks_ahead)
    assert sum(biased.values()) == 1
    first = [sum(biased[a, b] for b in range(3)) for a in range(3)]
    # draft 1 = token 1 is never verified: then token 1 comes by plain decode, three times out of ten only
    assert first != P1 and abs(first[1] - P1[1]) > Fraction(1, 10)


def test_timing_never_changes_a_token_at_temperature_zero() -> None:
    """A greedy text under clocks that differ wildly: lengths differ, tokens do not."""

    def after(text: Sequence[int]) -> int:
        return (7 * text[-1] + 3 * text[-2] + len(text)) % 11

    def write(policy: DraftPolicy, clock: Clock, seed: int) -> tuple[list[int], set[int]]:
        text, noise, lengths = [1, 2], random.Random(seed), set()
        while len(text) < 402:
            drafts: list[int] = []
            for _ in range(policy.begin(most_drafts(5, 402 - len(text), 10**6))):
                right = after(text + drafts)
                drafts.append(right if (len(text) + len(drafts)) % 5 else (right + 1) % 11)
            clock.now += noise.expovariate(1)
            k = policy.choose([noise.gauss(1, 2) for _ in drafts]) if drafts else 0
            clock.now += noise.expovariate(1) * (1 + k)
            accepted = 0
            while accepted < k and drafts[accepted] == after(text + drafts[:accepted]):
                accepted += 1
            text = text + drafts[:accepted]
            text = text + [after(text)]
            policy.settle(accepted)
            lengths.add(k)
        return text, lengths

    want, _ = write(FixedDrafts(0), Clock(), 0)
    assert len(want) == 402
    seen = set()
    for seed in range(6):
        clock = Clock()
        got, lengths = write(Scheduler(clock), clock, seed)
        assert got == want
        seen |= lengths
    assert seen == {0, 1, 2, 3, 4, 5}
    assert write(FixedDrafts(5), Clock(), 0)[0] == want
