"""Rounds of drafts beside plain decode, on one text: what each acceptance rule keeps, bytes a token, time.

    python bench/drafts.py [-m BASE] [--prompt TEXT] [--tokens 64] [--runs 3] [--temp 0.8]

Without `-m`, the embedded model. Three requests (greedy, with a seed, without one) are answered by plain decode, by
every fixed number of drafts, and by the scheduler; the first two must give plain decode's tokens, or the exit code is
1. Acceptance is by position, of the drafts that were verified. Bytes are those that the CPU driver counts in all
launches after the prompt, drafting too, over the tokens drawn. The time is that of greedy answers by plain decode and
by the scheduler, taken in turns, the median over the runs; where a device is bound by arithmetic the scheduler should
see it and lose nothing. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from embedded import embedded_base
from watched import Watched

from ds4.device import Device
from ds4.engine import Engine, Sampling, Session
from ds4.engine.scheduler import DraftPolicy, FixedDrafts, Scheduler
from ds4.engine.scratch import Workspace
from ds4.errors import Ds4Error, UsageError

TEXT = "Once upon a time there was a little girl who lived in a village near the forest."
Policy = Callable[[], DraftPolicy]


@dataclass(frozen=True)
class Answer:
    """Tokens of one answer and what its rounds did; bytes a token, None where nothing counts."""

    tokens: list[int]
    report: dict[str, object]
    bytes: int | None


def rules(temperature: float) -> dict[str, Sampling]:
    """The three requests."""
    seeded = Sampling(temperature, top_p=0.95, seed=1)
    return {"greedy": Sampling(), "seed": seeded, "no seed": replace(seeded, seeded=False)}


def policies(block: int) -> dict[str, Policy]:
    """Plain decode first."""
    fixed: dict[str, Policy] = {f"k {k}": partial(FixedDrafts, k) for k in range(1, block + 1)}
    return {"plain": partial(FixedDrafts, 0), **fixed, "scheduler": Scheduler}


def watched_session(engine: Engine, device: Watched, policy: Policy) -> Session:
    """A session that launches directly on a device that counts."""
    config = replace(engine.config, dspark_block_size=engine.block)
    options = replace(engine.options, graphs=False)
    return Session(
        device, Workspace(device), config, engine.weights, engine.feed, options, engine.draft, policy
    )  # fmt: skip


def answer(
    engine: Engine, ids: list[int], n: int, sampling: Sampling, policy: Policy, counter: Device | None
) -> Answer:
    """`n` tokens after the prompt; with a counting device, on that."""
    watched = None if counter is None else Watched(counter.with_constants(engine.device.constants))
    session = engine.session(policy) if watched is None else watched_session(engine, watched, policy)
    session.sync(ids)
    if watched is not None:
        watched.log.seen.clear()
    tokens = [session.next(sampling, left=n - i) for i in range(n)]
    counted = None
    if watched is not None:
        counted = sum(s.bytes_of() + s.bytes_of(kind="store") for s in watched.log.seen) // n
    return Answer(tokens, session.report(), counted)


def decode_s(engine: Engine, ids: list[int], n: int, policy: Policy) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of `n` greedy tokens after the prompt."""
    session = engine.session(policy)
    session.sync(ids)
    engine.device.sync()
    wall, cpu = time.perf_counter(), time.process_time()
    for i in range(n):
        session.next(Sampling(), left=n - i)
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """All figures, printed as they come; returns what the JSON line says."""
    ids = [engine.config.bos_token_id, *engine.tokenizer.encode(args.prompt)]
    counts = engine.device.info.driver == "simt" and not args.no_count
    counter = Device.open(simt="count", workers=1) if counts else None
    out: dict[str, Any] = {"bench": "drafts", "base": engine.name, "block": engine.block, "tokens": args.tokens}
    out |= {"answers": [], "different": 0}
    for rule, sampling in rules(args.temp).items():
        plain: Answer | None = None
        for name, policy in policies(engine.block).items():
            got = answer(engine, ids, args.tokens, sampling, policy, counter)
            plain = plain or got
            out["different"] += sampling.seeded and got.tokens != plain.tokens
            ratio = None if got.bytes is None or plain.bytes is None else round(got.bytes / plain.bytes, 3)
            out["answers"].append(
                {"rule": rule, "policy": name, "bytes_a_token": got.bytes, "bytes_over_plain": ratio, **got.report}
            )
            print(
                f"{rule:8} {name:9} {got.report['tokens_per_round']:5.2f} tokens a round, acceptance "
                f"{got.report['acceptance_by_position']}" + ("" if ratio is None else f", bytes {ratio:.3f} of plain")
            )
    runs: dict[str, list[tuple[float, float]]] = {"plain": [], "scheduler": []}
    for _ in range(args.runs):
        for name, taken in runs.items():
            taken.append(decode_s(engine, ids, args.tokens, policies(engine.block)[name]))
    for i, clock in enumerate(("wall", "cpu")):
        plain_s, drafted_s = (statistics.median(run[i] for run in taken) for taken in runs.values())
        out[f"{clock}_speed"] = round(plain_s / max(drafted_s, 1e-9), 3)
        rate = args.tokens / max(drafted_s, 1e-9)
        print(f"{clock}: the scheduler's {rate:.1f} tokens/s are {out[f'{clock}_speed']:.2f} of plain decode")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure rounds of drafts beside plain decode.")
    parser.add_argument("-m", "--model", metavar="BASE", help="a base file; default: the embedded model's")
    parser.add_argument("--engram-dir", metavar="D", help="folder of its n-gram shards; default: beside the base")
    parser.add_argument("--prompt", default=TEXT, metavar="TEXT", help="what is continued")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens an answer (64)")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="timed runs of each (3)")
    parser.add_argument("--temp", type=float, default=0.8, metavar="T", help="of the two that draw (0.8)")
    parser.add_argument("--no-count", action="store_true", help="do not count bytes on the CPU driver")
    parser.add_argument(
        "--most-bytes", type=float, metavar="R", help="exit 1 if greedy's scheduler reads more of plain"
    )
    parser.add_argument("--least-speed", type=float, metavar="R", help="exit 1 if its wall time is below R of plain")
    args = parser.parse_args()
    try:
        if args.tokens < 2 or args.runs < 1:
            raise UsageError("--tokens must be at least 2, --runs at least 1")
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
    (by_scheduler,) = (a for a in out["answers"] if (a["rule"], a["policy"]) == ("greedy", "scheduler"))
    ratio = by_scheduler["bytes_over_plain"]
    too_many = args.most_bytes is not None and ratio is not None and ratio > args.most_bytes
    too_slow = args.least_speed is not None and out["wall_speed"] < args.least_speed
    return 1 if out["different"] or too_many or too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
