"""The draft-length scheduler: its rule, its opening, its calibration, and when it stops drafting."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

from ds4.engine.costs import RoundCosts
from ds4.engine.scheduler import (
    CALIBRATION_PRIOR,
    LOSS_LIMIT,
    LOSS_SHARE,
    ONE_ROW_EVERY,
    ROWS_AHEAD,
    DraftLedger,
    FixedDrafts,
    Scheduler,
    most_drafts,
)
from ds4.errors import DeviceError, Ds4Error
from tests.engine.rounds import ARITHMETIC, BYTES, SURE, Bench, Clock, logit, opened


@pytest.mark.parametrize(
    ("block", "tokens", "context", "most"),
    [(5, 100, 100, 5), (5, 6, 100, 5), (5, 5, 100, 4), (5, 1, 100, 0), (5, 100, 3, 2), (5, 100, 1, 0), (0, 9, 9, 0)],
    ids=["block", "just fits", "max_tokens", "last token", "context", "last position", "no drafts"],
)
def test_drafts_are_clipped_where_the_text_ends(block: int, tokens: int, context: int, most: int) -> None:
    assert most_drafts(block, tokens, context) == most
    for policy in (FixedDrafts(5), Scheduler(Clock())):
        planned = policy.begin(most)
        assert planned == most
        assert (policy.choose([SURE] * planned) if planned else 0) == most


@pytest.mark.parametrize("bad", [(-1, 1, 1), (5, 0, 9), (5, 9, 0)])
def test_a_round_needs_room_for_a_token(bad: tuple[int, int, int]) -> None:
    with pytest.raises(Ds4Error, match="no round fits"):
        most_drafts(*bad)


def exact_argmax(costs: RoundCosts, chances: Sequence[float]) -> int:
    """The shortest of the best lengths, by trying all of them in exact arithmetic."""
    rates = []
    for k in range(len(chances) + 1):
        survivals = [math.prod(map(Fraction, chances[:j])) for j in range(1, k + 1)]
        cost = Fraction(costs.draft_s) + Fraction(costs.pass_s) + Fraction(costs.row_s) * (1 + k)
        rates.append((1 + sum(survivals)) / cost)
    return rates.index(max(rates))


@pytest.mark.parametrize("costs", [BYTES, RoundCosts(0.1, 1.0, 0.5), RoundCosts(0.0, 1.0, 0.05)], ids=str)
def test_stopping_where_the_rate_stops_rising_is_the_argmax(costs: RoundCosts) -> None:
    rng, lengths = random.Random(1), set()
    bench = opened(costs)
    for _ in range(300):
        chances = [rng.random() ** rng.choice([0.2, 1.0]) for _ in range(5)]
        fitted = bench.scheduler.costs
        assert fitted is not None
        bench.scheduler.begin(5)
        k = bench.scheduler.choose([logit(p) for p in chances])
        lengths.add(k)
        assert k == exact_argmax(fitted, [1 / (1 + math.exp(-logit(p))) for p in chances]), chances
        bench.scheduler.begin(0)  # the round is given up: nothing is learnt
    assert {0, 1, 5} <= lengths


def test_the_opening_verifies_the_longest_block_and_then_one_row() -> None:
    bench = Bench(BYTES)
    bench.round([-9.0] * 5, [False] * 5, warm_up=True)
    bench.round([-9.0] * 5, [False] * 5, warm_up=True)
    assert bench.scheduler.costs is None
    bench.round([-9.0] * 5, [False] * 5)
    bench.round([-9.0] * 5, [False] * 5, warm_up=True)
    assert bench.scheduler.costs is None
    bench.round([-9.0] * 5, [False] * 5)
    assert bench.rounds == [(5, 5)] * 3 + [(0, 0)] * 2
    costs = bench.scheduler.costs
    assert costs is not None
    assert [costs.draft_s, costs.pass_s, costs.row_s] == pytest.approx([0.25, 0.83, 0.17])
    bench.round([-9.0] * 5, [False] * 5)
    assert bench.rounds[-1] == (5, 0)


def test_warm_up_is_not_in_the_costs() -> None:
    """A capture takes a hundred times a replay: with it the long pass would look hopeless."""
    bench = Bench(BYTES)
    bench.jitter = lambda: 100.0
    bench.round([SURE] * 5, [True] * 5, warm_up=True)
    bench.jitter = lambda: 1.0
    bench.round([SURE] * 5, [True] * 5)
    bench.round([SURE] * 5, [True] * 5)
    costs = bench.scheduler.costs
    assert costs is not None and costs.row_s == pytest.approx(0.17)


def test_a_plain_step_that_was_timed_is_not_timed_again() -> None:
    bench = Bench(BYTES)
    bench.round([], [False], most=0)
    bench.round([0.0] * 5, [False] * 5)
    assert bench.scheduler.costs is not None


def test_a_clock_that_stands_still_leaves_the_opening_open() -> None:
    stopped = Bench(RoundCosts(0.0, 0.0, 0.0))
    for _ in range(5):
        stopped.round([0.0] * 5, [True] * 5)
    assert stopped.rounds == [(5, 5)] * 5


def test_calibration_is_hits_over_promises() -> None:
    bench = opened()
    hits, promised = 1.0, 1.0  # of the opening
    rng = random.Random(3)
    for _ in range(400):
        p = rng.uniform(0.6, 0.95)
        hit = rng.random() < 0.7 * p  # the drafter promises too much
        bench.round([logit(p)] * 5, [hit] * 5)
        if bench.rounds[-1][0]:
            hits, promised = hits + hit, promised + p
    prior = CALIBRATION_PRIOR
    assert bench.scheduler.calibration == pytest.approx((hits + prior) / (promised + prior))
    assert bench.scheduler.calibration == pytest.approx(0.7, abs=0.08)


def test_calibration_shortens_and_lengthens() -> None:
    def length_after(hit: bool) -> int:
        bench = opened()
        for _ in range(6):
            bench.round([logit(0.75)] * 5, [hit] + [False] * 4)
        bench.scheduler.begin(5)
        return bench.scheduler.choose([logit(0.7)] * 5)

    assert length_after(False) < length_after(True)


def test_a_survival_is_never_above_one() -> None:
    bench = opened()
    for _ in range(50):
        bench.round([logit(0.4)] * 5, [True] * 5)  # promises too little: rho is above 2
    assert bench.scheduler.calibration > 1.5
    costs, rho = bench.scheduler.costs, bench.scheduler.calibration
    assert costs is not None
    bench.scheduler.begin(5)
    # two sure drafts and one of 0.2; unclipped, they would be worth rho, rho^2 and rho^2 / 5
    assert bench.scheduler.choose([SURE, SURE, logit(0.2 / rho)]) == exact_argmax(costs, [1.0, 1.0, 0.2]) == 2


def test_the_first_draft_teaches_without_being_verified() -> None:
    """At temperature 0 a draft that was not verified can still be compared with the token that came."""
    bench = opened()
    before = bench.scheduler.calibration
    bench.round([-3.0] * 5, [True] * 5)
    assert bench.rounds[-1] == (5, 0)
    assert bench.scheduler.calibration > before
    known = bench.scheduler.calibration
    bench.scheduler.begin(5)
    bench.scheduler.choose([-3.0] * 5)
    bench.scheduler.settle(0)  # above it nobody knows
    assert bench.scheduler.calibration == known
    bench.scheduler.begin(5)
    assert not bench.scheduler.extend([-3.0])
    assert bench.scheduler.choose([]) == 0  # refused before it was drawn: there is nothing to compare
    bench.scheduler.settle(0, first_hit=True)
    assert bench.scheduler.calibration == known


def test_drafting_pays_where_a_pass_is_mostly_weights() -> None:
    for chance, least in ((0.95, 2.5), (0.8, 1.6), (0.6, 1.1)):
        bench = Bench(BYTES)
        bench.text(2000, chance)
        assert bench.tokens * BYTES.plain_s / bench.clock.now > least, chance
        best = 0.0
        for k in range(6):
            fixed = Bench(BYTES, FixedDrafts(k))
            fixed.text(2000, chance)
            best = max(best, fixed.tokens / fixed.clock.now)
        assert bench.tokens / bench.clock.now > 0.95 * best


@pytest.mark.parametrize("chance", [0.02, 0.3, 0.7, 0.98])
def test_a_device_bound_by_arithmetic_is_seen_at_once(chance: float) -> None:
    """Never below 0.97 of plain decode, whatever is accepted, the opening and one warm-up round included."""
    bench = Bench(ARITHMETIC)
    bench.round([logit(chance)] * 5, [False] * 5, warm_up=True)
    bench.text(1000, chance)
    assert bench.tokens * ARITHMETIC.plain_s / bench.clock.now > 0.97
    bench.text(2500, chance)
    assert bench.tokens * ARITHMETIC.plain_s / bench.clock.now > 0.98
    drafted = [i for i, (planned, _) in enumerate(bench.rounds) if planned]
    assert drafted[:2] == [0, 1] and drafted[2] > 100


def test_a_loss_is_bounded_where_drafts_are_wrong() -> None:
    """Drafts that promise everything and hit nothing."""
    bench = Bench(BYTES)
    while bench.tokens < 3000:
        bench.round([SURE] * 5, [False] * 5)
    first_pause = next(i for i in range(2, len(bench.rounds)) if bench.rounds[i][0] == 0)
    a_round = BYTES.drafted_s(5) / BYTES.plain_s - 1  # what a whole block of wrong drafts loses
    assert first_pause - 1 > LOSS_LIMIT / a_round  # the plain step of the opening lost nothing
    lost = bench.clock.now / BYTES.plain_s - bench.tokens
    assert LOSS_LIMIT < lost < 0.03 * bench.tokens


def pauses(bench: Bench) -> list[int]:
    """Lengths of the runs of plain steps, without single ones (the opening's, and those that time plain decode)."""
    runs = [
        len(list(group)) for plain, group in itertools.groupby(planned == 0 for planned, _ in bench.rounds) if plain
    ]
    return [n for n in runs if n > 1]


def test_it_tries_again_and_backs_off() -> None:
    bench = Bench(BYTES)
    while bench.tokens < 20000:
        bench.round([SURE] * 5, [False] * 5)
    lengths = pauses(bench)[:-1]  # the last was cut short
    assert len(lengths) >= 4
    assert lengths[0] >= LOSS_LIMIT / LOSS_SHARE
    assert all(1.5 < b / a < 2.5 for a, b in itertools.pairwise(lengths[:4]))
    assert max(lengths) <= 2 * 16 * LOSS_LIMIT / LOSS_SHARE


def test_it_comes_back_when_drafts_get_better() -> None:
    bench = Bench(BYTES)
    while not bench.scheduler.quenched:
        bench.round([SURE] * 5, [False] * 5)
    assert bench.scheduler.begin(5) == 0
    bench.text(1000, 0.9)
    assert not bench.scheduler.quenched
    assert bench.scheduler.calibration > 0.9  # what was learnt before the pause is gone
    bench.rounds.clear()
    bench.text(1000, 0.9, seed=1)
    assert bench.tokens / len(bench.rounds) > 3
    assert sum(planned == 0 for planned, _ in bench.rounds) <= 1 + len(bench.rounds) // ONE_ROW_EVERY


def test_the_draft_head_gets_rows_again_before_a_pause_ends() -> None:
    bench, heard = Bench(BYTES), []
    assert bench.scheduler.follows
    while not bench.scheduler.quenched:
        bench.round([SURE] * 5, [False] * 5)
    while bench.scheduler.quenched:
        heard.append(bench.scheduler.follows)
        bench.round([SURE] * 5, [False] * 5)
    assert heard[-ROWS_AHEAD:] == [True] * ROWS_AHEAD and not any(heard[:-ROWS_AHEAD]) and len(heard) > ROWS_AHEAD
    assert bench.scheduler.follows
    assert FixedDrafts(1).follows and not FixedDrafts(0).follows


def test_a_new_stretch_fits_its_own_costs() -> None:
    bench = Bench(ARITHMETIC)
    bench.text(10, 0.5)
    assert bench.scheduler.quenched
    bench.costs = BYTES
    while bench.scheduler.quenched:
        bench.round([0.0] * 5, [False] * 5)
    assert bench.scheduler.costs is None
    bench.round([0.0] * 5, [False] * 5)
    assert bench.rounds[-1] == (5, 5)
    costs = bench.scheduler.costs
    assert costs is not None
    assert [costs.draft_s, costs.pass_s, costs.row_s] == pytest.approx([0.25, 0.83, 0.17])


def test_a_long_success_resets_the_back_off() -> None:
    bench = Bench(BYTES)
    first = None
    for _ in range(2):  # two failures: the second pause is doubled
        while not bench.scheduler.quenched:
            bench.round([SURE] * 5, [False] * 5)
        while bench.scheduler.quenched:
            bench.round([SURE] * 5, [False] * 5)
        first = first or pauses(bench)[0]
    assert pauses(bench)[1] > 1.5 * first
    bench.text(8000, 0.9)
    bench.rounds.clear()
    while not bench.scheduler.quenched:
        bench.round([SURE] * 5, [False] * 5)
    assert len(bench.rounds) < 12  # and what was gained before is no credit
    while bench.scheduler.quenched:
        bench.round([SURE] * 5, [False] * 5)
    assert pauses(bench)[0] < 1.5 * first


def test_plain_decode_is_timed_now_and_then() -> None:
    bench = Bench(BYTES)
    for _ in range(3 * ONE_ROW_EVERY + 10):
        bench.round([SURE] * 5, [True] * 5)
    plain = [i for i, (planned, _) in enumerate(bench.rounds) if planned == 0]
    assert plain == [1, 2 + ONE_ROW_EVERY, 3 + 2 * ONE_ROW_EVERY, 4 + 3 * ONE_ROW_EVERY]


def test_noise_does_not_stop_drafting_that_pays() -> None:
    rng = random.Random(5)
    bench = Bench(BYTES, jitter=lambda: rng.lognormvariate(0, 0.2))
    bench.text(4000, 0.85)
    assert bench.tokens * BYTES.plain_s / bench.clock.now > 1.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_confidence_that_is_not_finite_is_refused(value: float) -> None:
    for bench in (Bench(BYTES), opened()):
        bench.scheduler.begin(5)
        with pytest.raises(DeviceError, match=rf"confidence of draft 3 is {value}"):
            bench.scheduler.extend([0.0, 0.0, value])
        with pytest.raises(DeviceError, match=rf"confidence of draft 3 is {value}"):
            bench.scheduler.choose([SURE, SURE, value, 0.0, 0.0])


def test_extreme_confidences_are_numbers() -> None:
    bench = opened()
    for value, length in ((-3e38, 0), (3e38, 5)):
        bench.scheduler.begin(5)
        assert bench.scheduler.choose([value] * 5) == length
        bench.scheduler.settle(length, first_hit=False)


def test_calls_out_of_order_are_refused() -> None:
    scheduler = Scheduler(Clock())
    with pytest.raises(Ds4Error, match="begin"):
        scheduler.settle(0)
    with pytest.raises(Ds4Error, match="begin"):
        scheduler.choose([0.0])
    with pytest.raises(Ds4Error, match="-1 drafts"):
        scheduler.begin(-1)
    scheduler.begin(2)
    with pytest.raises(Ds4Error, match="choose"):
        scheduler.settle(0)
    with pytest.raises(Ds4Error, match="3 confidences for 2 drafts"):
        scheduler.choose([0.0] * 3)
    scheduler.choose([0.0] * 2)
    with pytest.raises(Ds4Error, match="once"):
        scheduler.choose([0.0] * 2)
    with pytest.raises(Ds4Error, match="3 drafts accepted of 2"):
        scheduler.settle(3)
    scheduler.settle(2)
    with pytest.raises(Ds4Error, match="begin"):
        scheduler.settle(0)


def test_fixed_lengths() -> None:
    with pytest.raises(Ds4Error, match="-1 drafts a round"):
        FixedDrafts(-1)
    for n in (0, 1, 3, 5):
        bench = Bench(BYTES, FixedDrafts(n))
        bench.text(60, 0.5)
        assert set(bench.rounds) == {(n, n)}
        bench.round([0.0] * 2, [True] * 2)
        assert bench.rounds[-1] == (min(n, 2), min(n, 2))
        assert [bench.policy.extend([0.0] * i) for i in range(1, 6)] == [i <= n for i in range(1, 6)]


# -- from one request to the next


def requests(costs: RoundCosts, n_tokens: int, n_requests: int, chance: float, ledger: DraftLedger | None) -> float:
    """Plain decode's time over that of `n_requests` answers of `n_tokens`, each by a scheduler of its own."""
    taken = tokens = 0.0
    for i in range(n_requests):
        bench = Bench(costs)
        bench.policy = Scheduler(bench.clock, ledger)
        rng = random.Random(i)
        while bench.tokens < n_tokens:
            hits = [rng.random() < chance for _ in range(5)]
            bench.round([logit(chance)] * 5, hits, most=most_drafts(5, n_tokens - bench.tokens, 1000))
        taken, tokens = taken + bench.clock.now, tokens + bench.tokens
    return tokens * costs.plain_s / taken


@pytest.mark.parametrize("n_tokens", [3, 20, 60])
def test_short_requests_lose_no_more_than_a_long_one(n_tokens: int) -> None:
    """Each would pay an opening that it cannot earn back; with a ledger all of them pay one in a while."""
    n = 4000 // n_tokens
    assert requests(ARITHMETIC, n_tokens, n, 0.5, DraftLedger()) > 0.98
    assert requests(ARITHMETIC, n_tokens, n, 0.5, None) < 0.95


def test_a_stretch_goes_on_in_the_next_request() -> None:
    """A request that ends before LOSS_LIMIT, or before its costs are known, still counts."""
    for n_tokens in (2, 4):
        ledger, drafted = DraftLedger(), []
        for _ in range(60):
            bench = Bench(BYTES)
            bench.policy = Scheduler(bench.clock, ledger)
            while bench.tokens < n_tokens:
                bench.round([SURE] * 5, [False] * 5)
            drafted.append(any(planned for planned, _ in bench.rounds))
        quenched_at = drafted.index(False)
        assert LOSS_LIMIT / 4 < quenched_at < 3 * LOSS_LIMIT
        assert not any(drafted[quenched_at:]) and ledger.pause > 0


def test_a_pause_runs_out_in_a_later_request() -> None:
    ledger = DraftLedger()
    requests(BYTES, 100, 1, 0.02, ledger)
    left = ledger.pause
    assert left > 100
    requests(BYTES, 100, 1, 0.9, ledger)
    assert ledger.pause == left - 100
    requests(BYTES, 100, left // 100 - 1, 0.9, ledger)
    assert 0 < ledger.pause < 100
    assert requests(BYTES, 400, 4, 0.9, ledger) > 1.5
    assert ledger.pause == 0


def test_where_drafting_pays_a_request_is_as_fast_with_a_ledger() -> None:
    assert requests(BYTES, 100, 20, 0.9, DraftLedger()) == pytest.approx(
        requests(BYTES, 100, 20, 0.9, None), rel=1e-9
    )


def in_a_round(whole: bool, costs: RoundCosts) -> Scheduler:
    """A scheduler that knows these costs, in a round of five drafts."""
    bench = Bench(costs)
    bench.policy = Scheduler(bench.clock, whole=whole)
    for _ in range(3):
        bench.round([SURE] * 5, [True] * 5)
    assert bench.scheduler.costs is not None
    assert bench.scheduler.begin(5) == 5
    return bench.scheduler


@pytest.mark.parametrize("first", [-3.0, -1.0, 0.0, 1.0, 4.0])
def test_whole_blocks_are_decided_by_the_first_confidence(first: float) -> None:
    """All or none; what the later drafts are worth has no say."""
    answers = {in_a_round(True, BYTES).choose([first, *[later] * 4]) for later in (-SURE, 0.0, SURE)}
    assert len(answers) == 1 and answers <= {0, 5}
    p = 1 / (1 + math.exp(-first))  # calibration is 1: every hit was promised
    pays = sum(p**j for j in range(6)) / BYTES.drafted_s(5) > 1 / BYTES.drafted_s(0)
    assert answers == {5 if pays else 0}


def test_whole_blocks_pay_and_do_not() -> None:
    assert in_a_round(True, BYTES).choose([SURE] * 5) == 5
    assert in_a_round(True, BYTES).choose([-SURE] * 5) == 0
    assert in_a_round(False, BYTES).choose([SURE, SURE, -SURE, SURE, SURE]) == 2  # not whole: cut where it says
