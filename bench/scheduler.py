"""The draft-length scheduler: what it takes a round, and what it makes of an acceptance on a simulated clock.

    python bench/scheduler.py [--tokens 2048] [--rounds 2000] [--block 5] [--acceptance FILE]

First its own time, on this machine's clock: at most 50 us a round, or the exit code is 1. Then tokens/s of the
released model on a clock that knows only bytes: each pass and each round of drafts takes the stored bytes that it
must read (the base's own plan, each matrix once a pass, each distinct expert once) at 235 GB/s. That is a ceiling
that a device can approach, not a measurement of one. Distinct experts of 1..5 neighbouring tokens are another
engine's counts on the real model, a sixth row adds what the fifth did; a draft stage's picks are taken as
independent. Keys of a long context, engram rows and what kernels write are left out.

Drafts hit with a chance of their own, drawn from a Beta distribution around the row's mean, and the confidence is
the logit of that chance; `sched` is the scheduler, `k` its mean number of verified drafts over all rounds. With
--acceptance, what bench/drafts.py printed, each of its rules is a line more: draft j is right with the chance that
it had there after right ones before it, as far as the longest block that was verified says. The last lines are an
arithmetic-bound device, on which drafting cannot win and the scheduler must see that by itself: at least 0.97 of
plain decode, or the exit code is 1. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from released import released_config

from ds4.base.plan import PlannedTensor, plan
from ds4.engine.scheduler import DraftPolicy, FixedDrafts, Scheduler, most_drafts
from ds4.errors import Ds4Error, UsageError
from ds4.model.config import ModelConfig

MOST_US = 50.0
LEAST_OF_PLAIN = 0.97
GB10_BYTES_S = 235e9
DISTINCT = (6.0, 10.0, 13.3, 17.4, 21.7, 26.0)  # experts a layer that 1..6 neighbouring tokens pick, of 6 each
MEANS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
Maker = Callable[[Callable[[], float]], DraftPolicy]  # of a policy on a clock
SPREAD = 4.0  # a + b of the Beta distribution of a draft's chance


@dataclass(frozen=True)
class Clockwork:
    """Seconds of a pass over 1, 2, ... rows and of drawing a round's drafts."""

    pass_s: tuple[float, ...]
    draft_s: float


def gb10(config: ModelConfig) -> Clockwork:
    """The released base's bytes at GB10's bandwidth."""
    trunk = [t for t in plan(config) if not t.name.startswith(("mtp.", "v.", "engram.", "token_embd"))]
    stages = [t for t in plan(config) if t.name.startswith("mtp.") and "markov" not in t.name]
    (markov,) = (t.nbytes for t in plan(config) if t.name == "mtp.markov_head.weight")
    (head,) = (t.nbytes for t in plan(config) if t.name == "output.weight")
    block, E = config.dspark_block_size, config.dspark_n_routed_experts
    picked = E * (1 - (1 - config.dspark_num_experts_per_tok / E) ** block)
    passes = tuple(_bytes(trunk, n) / GB10_BYTES_S for n in DISTINCT)
    # each draft's bias needs the one before it: the Markov head is read once a draft
    return Clockwork(passes, (_bytes(stages, picked) + head + block * markov) / GB10_BYTES_S)


def _bytes(tensors: list[PlannedTensor], picked: float) -> float:
    dense = sum(t.nbytes for t in tensors if t.kind != "blob" and "_vl." not in t.name)
    return dense + sum(t.nbytes * picked / t.n_expert for t in tensors if t.kind == "blob")


@dataclass(frozen=True)
class Run:
    """What a policy made of a simulated text."""

    tokens_s: float
    per_round: float  # tokens
    k: float  # drafts verified a round


def simulate(make: Maker, device: Clockwork, means: Sequence[float], n: int) -> Run:
    """`n` tokens of a text whose drafts hit with chances around `means`, one a draft, on the clock of `device`."""
    block = len(means)
    rng, now = random.Random(1), 0.0
    policy = make(lambda: now)
    emitted = rounds = verified = 0
    while emitted < n:
        planned = policy.begin(most_drafts(block, n - emitted, n))
        # as many chances a round whatever is drawn: two policies meet the same luck for as long as they agree
        drawn = [rng.betavariate(mean * SPREAD, (1 - mean) * SPREAD) for mean in means]
        chances = [min(max(p, 1e-6), 1 - 1e-6) for p in drawn]
        hits = [rng.random() < p for p in chances]
        k = 0
        if planned:
            now += device.draft_s
            k = policy.choose([math.log(p / (1 - p)) for p in chances[:planned]])
        now += device.pass_s[k]
        accepted = hits[:k].index(False) if False in hits[:k] else k
        policy.settle(accepted, first_hit=hits[0])
        emitted, rounds, verified = emitted + 1 + accepted, rounds + 1, verified + k
    return Run(emitted / now, emitted / rounds, verified / rounds)


def fixed_drafts(k: int) -> Maker:
    """Makes policies that verify `k` drafts and need no clock."""
    return lambda _: FixedDrafts(k)


def line(label: str, device: Clockwork, means: Sequence[float], n: int) -> dict[str, Any]:
    """Tokens/s of a text plain, with each fixed k, with the scheduler."""
    plain = simulate(fixed_drafts(0), device, means, n).tokens_s
    fixed = [simulate(fixed_drafts(k), device, means, n).tokens_s for k in range(1, len(means) + 1)]
    run = simulate(Scheduler, device, means, n)
    return {
        "text": label,
        "plain": round(plain, 2),
        "fixed": [round(rate, 2) for rate in fixed],
        "scheduler": round(run.tokens_s, 2),
        "tokens_per_round": round(run.per_round, 2),
        "k": round(run.k, 2),
        "over_plain": round(run.tokens_s / plain, 3),
    }


def table(device: Clockwork, means: tuple[float, ...], n: int, block: int) -> list[dict[str, Any]]:
    """A line a mean chance, the same for every draft."""
    return [line(f"{mean:.2f}", device, (mean,) * block, n) | {"mean": mean} for mean in means]


def measured(path: str, block: int) -> dict[str, tuple[float, ...]]:
    """Chances by rule from what bench/drafts.py printed: of draft j, when those before it were right.

    Raises:
        UsageError: the file says nothing of the kind.
    """
    try:
        said = json.loads(Path(path).read_text().strip().splitlines()[-1])
        found = {}
        for answer in said["answers"]:
            if answer["policy"] == f"k {said['block']}":
                survival = [1.0, *answer["acceptance_by_position"][:block]]
                chances = [b / a if a else 0.0 for a, b in itertools.pairwise(survival)]
                chances += [0.0] * (block - len(chances))
                found[answer["rule"]] = tuple(min(max(p, 0.01), 0.99) for p in chances)
    except (OSError, ValueError, IndexError, KeyError, TypeError) as e:
        raise UsageError(f"{path}: is not what bench/drafts.py prints ({e!r})") from e
    if not found:
        raise UsageError(f"{path}: has no answers with all drafts verified")
    return found


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(title)
    k = "".join(f"    k={i + 1}" for i in range(len(rows[0]["fixed"])))
    print(f"         hit   plain{k}   sched  sched/plain  tokens a round     k")
    for row in rows:
        fixed = "".join(f"{rate:7.2f}" for rate in row["fixed"])
        print(
            f"    {row['text']:>8} {row['plain']:7.2f}{fixed} {row['scheduler']:7.2f}      {row['over_plain']:7.3f}"
            f"         {row['tokens_per_round']:7.2f}  {row['k']:4.2f}"
        )


def overhead_us(n_rounds: int, block: int) -> float:
    """Microseconds that a round's calls take, the median over batches of 100 rounds, the costs being fitted anew in
    each.
    """
    rng, ticks = random.Random(1), 0.0

    def clock() -> float:  # a device whose rows are nearly free, so that nothing is cut short or paused
        nonlocal ticks
        ticks += rng.uniform(0.9, 1.1)
        return ticks

    policy = Scheduler(clock)
    rounds = [[rng.gauss(2, 1) for _ in range(block)] for _ in range(100)]
    batches = []
    for _ in range(max(1, n_rounds // 100)):
        start = time.perf_counter()
        for confidences in rounds:
            k = policy.choose(confidences[:n]) if (n := policy.begin(most_drafts(block, 1000, 1000))) else 0
            policy.settle(k)
        batches.append((time.perf_counter() - start) / len(rounds))
    return 1e6 * statistics.median(batches)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, printed as they come; returns what the JSON line says."""
    own = overhead_us(args.rounds, args.block)
    print(f"scheduler: {own:.1f} us a round on this machine (at most {MOST_US:g})")
    device = gb10(released_config())
    passes = ", ".join(f"{1e3 * s:.1f}" for s in device.pass_s)
    print(f"released model at 235 GB/s: passes over 1..{len(device.pass_s)} rows take {passes} ms,")
    print(f"    drawing drafts {1e3 * device.draft_s:.1f} ms")
    rows = table(device, MEANS, args.tokens, args.block)
    show(f"simulated tokens/s by bytes, {args.tokens} tokens (not measured)", rows)
    texts = []
    if args.acceptance:
        texts = [line(rule, device, p, args.tokens) for rule, p in measured(args.acceptance, args.block).items()]
        show("with the acceptances measured there, simulated all the same", texts)
    bound = Clockwork(tuple(0.2 + 0.8 * n for n in range(1, args.block + 2)), 2.0)
    slow = table(bound, (0.1, 0.5, 0.9), args.tokens, args.block)
    show("a device bound by arithmetic: plain tokens take 1, a row 0.8, drafts 2", slow)
    return {
        "bench": "scheduler",
        "overhead_us": round(own, 2),
        "pass_ms": [round(1e3 * s, 3) for s in device.pass_s],
        "draft_ms": round(1e3 * device.draft_s, 3),
        "simulated": rows,
        "acceptances": texts,
        "arithmetic_bound": slow,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the draft-length scheduler and simulate what it gains.")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="tokens of a simulated text (2048)")
    parser.add_argument("--rounds", type=int, default=2000, metavar="N", help="rounds timed (2000)")
    parser.add_argument("--block", type=int, default=5, metavar="N", help="drafts a round at most (5)")
    parser.add_argument("--acceptance", metavar="FILE", help="what bench/drafts.py printed: its acceptances too")
    args = parser.parse_args()
    try:
        if args.tokens < 1 or args.rounds < 1 or not 1 <= args.block < len(DISTINCT):
            raise UsageError(f"--tokens and --rounds must be at least 1, --block from 1 to {len(DISTINCT) - 1}")
        out = measure(args)
    except Ds4Error as e:
        print(f"scheduler: {e}", file=sys.stderr)
        return 1
    print(json.dumps(out))
    slowest = min(row["over_plain"] for row in out["arithmetic_bound"])
    return int(out["overhead_us"] > MOST_US or slowest < LEAST_OF_PLAIN)


if __name__ == "__main__":
    sys.exit(main())
