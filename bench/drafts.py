"""Rounds of drafts beside plain decode, on the same text: what each acceptance rule keeps, bytes a token, time.

    python bench/drafts.py [-m BASE] [--prompt TEXT] [--tokens 64] [--runs 3] [--temp 0.8]

Without `-m`, the embedded model. Prompts are the beginnings of its judge text, one a domain, unless one is given.
Three requests (greedy, with a seed, without one) are answered by plain decode, by a fixed number of drafts, greedy
by every one, and by the scheduler; the first two must give plain decode's tokens, or the exit code is 1. Acceptance
is by position, of the drafts that were verified. Bytes are those of stored weights, each once a pass, as the session
reports them.

Two schedulers are shown: "scheduler" on the wall clock, and, greedy, "by bytes", whose clock is the bytes read, as on
a device that is bound by nothing else. A scheduler's ledger goes from answer to answer, as an engine's does; answers
to the first prompt warm it up, with graphs and all, before anything is measured. The time is that of greedy answers
by plain decode and by the scheduler, prompt by prompt in turns; where a device is bound by arithmetic the scheduler
should see it and lose nothing. Last, on the CPU driver, a few tokens are launched on the build that counts: all bytes
that launches ask for, and those of them that are no rereads of a buffer. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from embedded import embedded_base
from sessions import session_on
from traffic import WEIGHTS
from watched import Watched

from ds4 import embedded
from ds4.device import Device
from ds4.engine import Engine, Sampling, Session
from ds4.engine.scheduler import DraftLedger, DraftPolicy, FixedDrafts, Scheduler
from ds4.engine.traffic import weight_bytes
from ds4.errors import Ds4Error, UsageError

PROMPT_TOKENS = 64
Ids = list[int]


@dataclass
class Policy:
    """What decides about drafts, request after request.

    Attributes:
        drafts: a fixed number; None: the scheduler.   by_bytes: on a clock of bytes.
        ledger: the scheduler's, of all its requests.
    """

    drafts: int | None
    by_bytes: bool = False
    ledger: DraftLedger = field(default_factory=DraftLedger)

    def session(self, engine: Engine) -> Session:
        """A session of the engine that decides by it."""
        made: list[Session] = []

        def by_bytes() -> float:
            return float(weight_bytes(made[0].lane)) if made else 0.0

        def decide() -> DraftPolicy:
            if self.drafts is not None:
                return FixedDrafts(self.drafts)
            return Scheduler(by_bytes if self.by_bytes else time.perf_counter, self.ledger)

        made.append(engine.session(decide))
        return made[0]


def rules(temperature: float) -> dict[str, Sampling]:
    """The three requests."""
    seeded = Sampling(temperature, top_p=0.95, seed=1)
    return {"greedy": Sampling(), "seed": seeded, "no seed": replace(seeded, seeded=False)}


def policies(rule: str, block: int) -> dict[str, Policy]:
    """Plain decode first."""
    fixed = {f"k {k}": Policy(k) for k in (range(1, block + 1) if rule == "greedy" else (block,))}
    by_bytes = {"by bytes": Policy(None, by_bytes=True)} if rule == "greedy" else {}
    return {"plain": Policy(0), **fixed, "scheduler": Policy(None), **by_bytes}


def prompts(engine: Engine, text: str | None) -> list[Ids]:
    """Ids of `text`, or of the beginnings of the embedded model's judge text."""
    texts = [text] if text else [embedded.slice(domain, "judge")[0] for domain in embedded.domains()]
    bos, encode = engine.config.bos_token_id, engine.tokenizer.encode
    return [[bos, *encode(t)][: PROMPT_TOKENS if text is None else None] for t in texts]


def draw(session: Session, n: int, sampling: Sampling) -> Ids:
    return [session.next(sampling, left=n - i) for i in range(n)]


def answers(engine: Engine, asked: Sequence[Ids], n: int, sampling: Sampling, policy: Policy) -> tuple[Any, Any]:
    """`n` tokens after each prompt; (all of them, the session's report)."""
    if policy.drafts is None:
        session = policy.session(engine)
        session.sync(asked[0])
        draw(session, n, sampling)
        del session  # its graphs go to the next one
    session = policy.session(engine)
    drawn = []
    for ids in asked:
        session.sync(ids)
        drawn.append(draw(session, n, sampling))
    return drawn, session.report()


def compare(engine: Engine, asked: Sequence[Ids], n: int, temperature: float) -> dict[str, Any]:
    """Every rule by every policy, printed."""
    out: dict[str, Any] = {"answers": [], "different": 0}
    for rule, sampling in rules(temperature).items():
        plain: tuple[Any, Any] | None = None
        for name, policy in policies(rule, engine.block).items():
            drawn, report = answers(engine, asked, n, sampling, policy)
            plain = plain or (drawn, report)
            out["different"] += sampling.seeded and drawn != plain[0]
            ratio = round(report["weight_bytes_per_token"] / plain[1]["weight_bytes_per_token"], 3)
            out["answers"].append({"rule": rule, "policy": name, "bytes_over_plain": ratio, **report})
            print(
                f"{rule:8} {name:9} {report['tokens_per_round']:5.2f} tokens a round, bytes {ratio:.3f} of plain, "
                f"acceptance {' '.join(f'{a:.2f}' for a in report['acceptance_by_position'])}",
                flush=True,
            )
    return out


def race(engine: Engine, asked: Sequence[Ids], n: int, runs: int) -> dict[str, Any]:
    """Time of greedy answers by plain decode and by the scheduler, prompt by prompt in turns; the first run, in which
    graphs are captured, is not counted.
    """
    sides = [Policy(0).session(engine), Policy(None).session(engine)]
    taken: list[list[list[float]]] = []  # [run][clock][side], seconds
    for run in range(runs + 1):
        taken.append([[0.0, 0.0], [0.0, 0.0]])
        for i, ids in enumerate(asked):
            for side in (0, 1) if (run + i) % 2 else (1, 0):
                session = sides[side]
                session.sync(ids)
                engine.device.sync()
                wall, cpu = time.perf_counter(), time.process_time()
                draw(session, n, Sampling())
                taken[-1][0][side] += time.perf_counter() - wall
                taken[-1][1][side] += time.process_time() - cpu
    out: dict[str, Any] = {"scheduler_rounds": sides[1].report()["verified_drafts"]}
    for c, clock in enumerate(("wall", "cpu")):
        ratios = [run[c][0] / max(run[c][1], 1e-9) for run in taken[1:]]
        out[f"{clock}_speed"] = round(statistics.median(ratios), 3)
        rate = n * len(asked) / max(statistics.median(run[c][1] for run in taken[1:]), 1e-9)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}, the first run {taken[0][c][0] / taken[0][c][1]:.2f}"
        print(
            f"{clock}: the scheduler's {rate:.1f} tokens/s are {out[f'{clock}_speed']:.2f} of plain decode ({spread})"
        )
    return out


def counted(engine: Engine, ids: Ids, n: int) -> list[dict[str, Any]]:
    """Bytes a token that launches after the prompt ask for, greedy, on the CPU driver's count build."""
    counter = Device.open(simt="count", workers=1)
    out: list[dict[str, Any]] = []
    for k in range(engine.block + 1):
        watched = Watched(counter.with_constants(engine.device.constants))
        session = session_on(engine, watched, graphs=False, policy=partial(FixedDrafts, k))
        session.sync(ids)
        watched.log.seen.clear()
        draw(session, n, Sampling())
        drawn = session.rounds.tokens  # one less: the first came with the prompt
        asked = sum(s.bytes_of() + s.bytes_of(kind="store") for s in watched.log.seen) // drawn
        memory = sum(s.memory_bytes for s in watched.log.seen) // drawn
        # a layer's codebook is read by two launches and counts once
        books = sum(s.memory_bytes_of("codebook") for s in watched.log.seen) // 2
        weights = (sum(s.memory_bytes_of(*WEIGHTS) for s in watched.log.seen) - books) // drawn
        out.append({"k": k, "asked": asked, "memory": memory, "weights": weights, "over_plain": 1.0})
        out[-1]["over_plain"] = round(memory / out[0]["memory"], 3)
        print(
            f"counted, k = {k}: {asked:11,} bytes asked for a token, {memory:11,} without rereads, "
            f"{out[-1]['over_plain']:.3f} of plain; {weights:11,} of weights",
            flush=True,
        )
    return out


def measure(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """All figures, printed as they come; returns what the JSON line says."""
    asked = prompts(engine, args.prompt)
    out: dict[str, Any] = {
        "bench": "drafts", "base": engine.name, "block": engine.block, "prompts": len(asked), "tokens": args.tokens
    }  # fmt: skip
    out |= compare(engine, asked, args.tokens, args.temp)
    out |= race(engine, asked, args.tokens, args.runs)
    if engine.device.info.driver == "simt" and args.count:
        out["counted"] = counted(engine, asked[0], args.count)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure rounds of drafts beside plain decode.")
    parser.add_argument("-m", "--model", metavar="BASE", help="a base file; default: the embedded model's")
    parser.add_argument("--engram-dir", metavar="D", help="folder of its n-gram shards; default: beside the base")
    parser.add_argument("--prompt", metavar="TEXT", help="what is continued; default: judge text of every domain")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens an answer (64)")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="timed runs of each (3)")
    parser.add_argument("--temp", type=float, default=0.8, metavar="T", help="of the two that draw (0.8)")
    parser.add_argument("--count", type=int, default=12, metavar="N", help="tokens to count on the CPU driver (12)")
    parser.add_argument(
        "--most-bytes", type=float, metavar="R", help="exit 1 if a greedy scheduler reads more than R of plain"
    )
    parser.add_argument("--least-speed", type=float, metavar="R", help="exit 1 if its wall time is below R of plain")
    args = parser.parse_args()
    try:
        if args.tokens < 2 or args.runs < 1 or args.count < 0 or args.count == 1:
            raise UsageError("--tokens must be at least 2, --runs at least 1, --count 0 or at least 2")
        base, shards = (args.model, args.engram_dir) if args.model else embedded_base()
        engine = Engine.open(base, engram_dir=shards, dspark=True)
        try:
            if engine.draft is None:
                raise UsageError(f"{base}: the model has no draft head")
            out = measure(args, engine)
        finally:
            engine.close()
    except Ds4Error as e:
        print(f"drafts: {e}", file=sys.stderr)
        return 1
    print(json.dumps(out))
    decided = [a for a in out["answers"] if a["rule"] == "greedy" and a["policy"] in ("scheduler", "by bytes")]
    most = max(round(a["bytes_over_plain"], 2) for a in decided)
    too_many = args.most_bytes is not None and most > args.most_bytes
    too_slow = args.least_speed is not None and out["wall_speed"] < args.least_speed
    return 1 if out["different"] or too_many or too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
