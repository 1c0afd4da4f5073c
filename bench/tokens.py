"""Tokens per second of prefill and decode on the device that is there, beside the bytes and launches of a token.

    python bench/tokens.py [-m BASE] [--frontiers 64,512] [--tokens 32] [--runs 5] [--no-dspark] [--profile]

Without `-m`, the embedded model. At each context frontier a prompt of that many tokens is read, a piece of the
embedded model's judge text, then tokens are drawn greedily; every run starts after a warm-up and a flush of the GPU's
cache, and median, least and most over the runs are shown. Captured graphs, direct launches and rounds of drafts, with
the scheduler that an engine has, take turns on the same prompts, so that a noisy machine meets all of them. A table
has tokens/s, bytes of weights a token, and the share of the copy bandwidth that both make, plain and with drafts.

On the CPU driver CPU time is shown too: it says what the wall clock would say on an idle machine. There, and for a
model that fits the cache of a GPU, the share of the copy bandwidth says nothing. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from embedded import embedded_base
from sessions import session_on
from watched import Watched

from ds4 import embedded
from ds4.device import Buffer, Device, Kernel
from ds4.engine import Engine, Sampling
from ds4.engine.ops.experts import ExpertWeights
from ds4.engine.ops.linear import Weight
from ds4.engine.scheduler import DraftLedger, Scheduler
from ds4.engine.session import Session
from ds4.engine.traffic import weight_bytes as weights_read
from ds4.errors import Ds4Error, UsageError

WARM_UP = 4  # drawn tokens: a direct step, a capture, two replays
COPY_MB = {"simt": 64, "nvidia": 1024}
FLUSH_MB = 256


@dataclass(frozen=True)
class Spread:
    """Several runs of one thing, in tokens per second."""

    median: float
    least: float
    most: float
    cpu_ms: float  # CPU milliseconds a token, all threads, median

    def text(self) -> str:
        return f"{self.median:8.1f} [{self.least:.1f} .. {self.most:.1f}] tokens/s, {self.cpu_ms:.2f} ms CPU a token"


def spread(n_tokens: int, runs: list[tuple[float, float]]) -> Spread:
    """From (wall seconds, CPU seconds) of each run."""
    rates = [n_tokens / wall for wall, _ in runs]
    cpu = statistics.median(cpu for _, cpu in runs)
    figures = (statistics.median(rates), min(rates), max(rates), 1e3 * cpu / n_tokens)
    return Spread(*(round(figure, 3) for figure in figures))


def timed(device: Device, work: Callable[[], Any]) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of `work`, the device idle before and after."""
    device.sync()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    device.sync()
    return time.perf_counter() - wall, time.process_time() - cpu


def prompt(engine: Engine, n: int, seed: int) -> list[int]:
    """`n` ids of the embedded model's judge text, from a place that the seed tells."""
    text = "\n".join(document for domain in embedded.domains() for document in embedded.slice(domain, "judge"))
    start = seed * 7919 % len(text)
    text, n_chars = text[start:] + text[:start], 8 * n
    while len(ids := engine.tokenizer.encode(text[:n_chars])) < n:
        if n_chars >= len(text):
            text += text
        n_chars *= 2
    return [int(i) for i in ids[:n]]


@dataclass
class Decode:
    """One way to decode, by frontier: its runs, and what they read.

    Attributes:
        runs: (wall seconds, CPU seconds) of each.   n_bytes, n_tokens, rounds: of all of them together.
    """

    session: Session
    runs: list[tuple[float, float]]
    n_bytes: int = 0
    n_tokens: int = 0
    rounds: int = 0

    def draw(self, n: int) -> None:
        for i in range(n):
            self.session.next(Sampling(), left=n - i)

    def timed(self, n: int) -> None:
        """Draw `n` tokens against the clock."""
        s, before = self.session, self.session.rounds.rounds
        read = weights_read(s.lane)
        self.runs.append(timed(s.device, lambda: self.draw(n)))
        self.n_bytes += weights_read(s.lane) - read
        self.n_tokens, self.rounds = self.n_tokens + n, self.rounds + s.rounds.rounds - before


class Bench:
    """One engine under measurement."""

    def __init__(self, engine: Engine, n_tokens: int, n_runs: int, *, graphs: bool) -> None:
        """`graphs`: captured graphs too, else direct launches alone; with drafts if the engine has a draft head."""
        self.engine, self.n_tokens, self.n_runs = engine, n_tokens, n_runs
        dev, ledger = engine.device, DraftLedger()
        self.sessions = {"decode": session_on(engine, dev, graphs=True)} if graphs else {}
        self.sessions["decode_direct"] = session_on(engine, dev, graphs=False)
        if engine.draft is not None:
            self.sessions["decode_drafts"] = session_on(
                engine, dev, graphs=graphs, policy=lambda: Scheduler(ledger=ledger)
            )
        gpu = engine.device.info.driver == "nvidia"
        self.flushed = engine.device.empty((FLUSH_MB << 20,), "u8") if gpu else None
        self.seed = 0

    def frontier(self, context: int) -> tuple[Spread, dict[str, Decode]]:
        """Prefill to `context`, then decode, each way in turn; the first round is the warm-up."""
        prefills: list[tuple[float, float]] = []
        decodes = {name: Decode(s, []) for name, s in self.sessions.items()}
        for i in range(self.n_runs + 1):
            self.seed += 1
            ids = prompt(self.engine, context, self.seed)
            for decode in decodes.values():
                self.flush()
                read = timed(self.engine.device, partial(decode.session.sync, ids))
                decode.draw(WARM_UP)
                self.flush()
                if i > 0:
                    prefills.append(read)
                    decode.timed(self.n_tokens)
                else:
                    decode.draw(self.n_tokens)
        return spread(context, prefills), decodes

    def flush(self) -> None:
        """Push everything out of a GPU's second-level cache."""
        if self.flushed is not None:
            self.engine.device.fill(self.flushed, 1)


def step_launches(engine: Engine, context: int, device: Device) -> Watched:
    """The launches of one decoded token after `context` others, written down."""
    watched = Watched(device.with_constants(engine.device.constants))
    s = session_on(engine, watched, graphs=False)
    s.sync(prompt(engine, context, 1))
    s.next(Sampling())
    watched.log.seen.clear()
    s.next(Sampling())
    return watched


def formula_bytes(watched: Watched) -> tuple[int, list[str]]:
    """Bytes read and written by the kernels' own formulas, and the kernels that have none."""
    total, without = 0, set()
    for seen in watched.log.seen:
        if seen.formula is None:
            without.add(seen.kernel.name)
        else:
            total += sum(seen.formula)
    return total, sorted(without)


def weight_bytes(engine: Engine) -> int:
    """Bytes of stored weights that one token reads: matrices and vectors whole, and the chosen experts; a row of the
    embedding is left out, as in a session's report. What no cache can save at a model's real size.
    """
    c, w = engine.config, engine.weights
    total = w.head.nbytes + w.norm.nbytes
    return total + sum(_bytes_of(layer, c.num_experts_per_tok / c.n_routed_experts) for layer in w.layers)


def _bytes_of(thing: object, picked: float) -> int:
    if isinstance(thing, ExpertWeights):
        return thing.codebook.nbytes + int(picked * (thing.nbytes - thing.codebook.nbytes))
    if isinstance(thing, (Weight, Buffer)):
        return thing.nbytes
    if dataclasses.is_dataclass(thing):
        return sum(_bytes_of(getattr(thing, f.name), picked) for f in dataclasses.fields(thing))
    return 0


def copy_bandwidth(device: Device) -> float:
    """Bytes read and written per second by a copy of a large buffer, the median of nine."""
    n = COPY_MB[device.info.driver] << 20
    a, b = device.zeros((n,), "u8"), device.zeros((n,), "u8")
    runs = [timed(device, lambda: device.copy(b, a))[0] for _ in range(10)]
    return 2 * n / statistics.median(runs[1:])


class Timed(Watched):
    """A device that waits after each launch and adds up the time by kernel."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.seconds: dict[str, float] = defaultdict(float)
        self.launches: Counter[str] = Counter()

    def launch(self, kernel: Kernel, *args: Any, **given: Any) -> None:
        wall, cpu = timed(self, partial(super().launch, kernel, *args, **given))
        self.seconds[kernel.name] += cpu if self.info.driver == "simt" else wall
        self.launches[kernel.name] += 1


def profile(engine: Engine, context: int, n_tokens: int) -> list[dict[str, Any]]:
    """Time a token by kernel, the slowest first (CPU time on the CPU driver). Each launch is waited for, so the sum
    is above a step's time.
    """
    dev = Timed(engine.device)
    s = session_on(engine, dev, graphs=False)
    s.sync(prompt(engine, context, 1))
    for _ in range(WARM_UP):
        s.next(Sampling())
    dev.seconds.clear()
    dev.launches.clear()
    for _ in range(n_tokens):
        s.next(Sampling())
    total = sum(dev.seconds.values())
    return [
        {
            "kernel": name,
            "launches": dev.launches[name] / n_tokens,
            "us": round(1e6 * spent / n_tokens, 1),
            "share": round(spent / total, 4),
        }
        for name, spent in sorted(dev.seconds.items(), key=lambda item: -item[1])[:12]
    ]


def measure(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """All figures, printed as they come; returns what the JSON line says."""
    info = engine.device.info
    bench = Bench(engine, args.tokens, args.runs, graphs=not args.no_graph)
    print(f"{info.name} ({info.driver}, {info.n_sm} multiprocessors), base {Path(engine.base.path).name}")
    out: dict[str, Any] = {
        "bench": "tokens",
        "device": info.name,
        "driver": info.driver,
        "base": Path(engine.base.path).name,
        "runs": args.runs,
        "tokens": args.tokens,
        "weight_bytes": weight_bytes(engine),
        "copy_gb_s": round(copy_bandwidth(engine.device) / 1e9, 2),
        "frontiers": [],
    }
    for context in args.frontiers:
        out["frontiers"].append(frontier_figures(bench, context, out))
    table(out)
    context = args.frontiers[-1]
    watched = step_launches(engine, context, engine.device)
    n_formula, without = formula_bytes(watched)
    out |= {"launches": len(watched.log.seen), "formula_bytes": n_formula, "without_formula": without}
    out["bandwidth_share"] = plain_of(out["frontiers"][-1])["share"]
    print(f"a token at {context}: {out['launches']} launches, {out['weight_bytes']:,} bytes of weights, ")
    print(f"    {n_formula:,} bytes asked for by the kernels' formulas (caches serve some of them)")
    if info.driver == "simt" and not args.no_count:
        counter = Device.open(simt="count", workers=1)
        out["counted_bytes"] = sum(
            s.bytes_of() + s.bytes_of(kind="store") for s in step_launches(engine, context, counter).log.seen
        )
        print(f"    {out['counted_bytes']:,} bytes counted by the CPU driver")
    if args.profile:
        out["profile"] = profile(engine, context, args.tokens)
        for line in out["profile"]:
            print(
                f"    {line['kernel']:40} {line['launches']:5.1f} x {line['us']:9.1f} us a token {line['share']:6.1%}"
            )
    return out


def frontier_figures(bench: Bench, context: int, out: dict[str, Any]) -> dict[str, Any]:
    """One context: its spreads, and what each way to decode reads."""
    read, decodes = bench.frontier(context)
    print(f"context {context:6d}  prefill       {read.text()}")
    point: dict[str, Any] = {"context": context, "prefill": dataclasses.asdict(read)}
    for name, decode in decodes.items():
        rate = spread(bench.n_tokens, decode.runs)
        print(f"context {context:6d}  {name:13} {rate.text()}", flush=True)
        drafts = name == "decode_drafts"
        n_bytes = decode.n_bytes / decode.n_tokens
        share = round(n_bytes * rate.median / 1e9 / out["copy_gb_s"], 4)
        point[name] = dataclasses.asdict(rate) | {"bytes": round(n_bytes), "share": share}
        if drafts:
            point[name]["tokens_per_round"] = round(decode.n_tokens / decode.rounds, 3)
    if "decode" in point:
        point["graph_ratio"] = round(point["decode"]["median"] / point["decode_direct"]["median"], 3)
        print(f"context {context:6d}  graph over direct launches: {point['graph_ratio']:.2f}")
    if "decode_drafts" in point:
        point["drafts_ratio"] = round(point["decode_drafts"]["median"] / plain_of(point)["median"], 3)
        print(f"context {context:6d}  drafts over plain decode: {point['drafts_ratio']:.2f}")
    return point


def plain_of(point: dict[str, Any]) -> dict[str, Any]:
    """Plain decode of a frontier, the better way that was measured."""
    found: dict[str, Any] = point.get("decode", point["decode_direct"])
    return found


def table(out: dict[str, Any]) -> None:
    """Plain and speculative decode by context, this device and the other kind."""
    here, other = ("CPU driver", "GPU") if out["driver"] == "simt" else (out["device"], "CPU driver")
    print(f"copy {out['copy_gb_s']:.1f} GB/s; a share is weights x tokens/s over it")
    print(f"| context | decode | {here}: tokens/s | bytes a token | share | {other} |")
    print("|---|---|---|---|---|---|")
    for point in out["frontiers"]:
        for name, what in (("plain", plain_of(point)), ("drafts", point.get("decode_drafts"))):
            if what is None:
                print(f"| {point['context']} | {name} | not measured | | | not measured |")
                continue
            label = f"{name}, {what['tokens_per_round']:.2f} tokens a round" if name == "drafts" else name
            print(
                f"| {point['context']} | {label} | {what['median']:.1f} | {what['bytes']:,} | {what['share']:.1%} "
                "| not measured |"
            )


def numbers(text: str) -> list[int]:
    """--frontiers"""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, like 64,512") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError("a frontier has at least one token")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure tokens per second of prefill and decode.")
    parser.add_argument("-m", "--model", metavar="BASE", help="a base file; default: the embedded model's")
    parser.add_argument("--engram-dir", metavar="D", help="folder of its n-gram shards; default: beside the base")
    parser.add_argument("--frontiers", type=numbers, default=[64, 512], metavar="N,N", help="contexts (64,512)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens a run decodes (32)")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="runs after the warm-up (5)")
    parser.add_argument("--no-graph", action="store_true", help="direct launches only")
    parser.add_argument("--no-dspark", action="store_true", help="no rounds of drafts")
    parser.add_argument("--no-count", action="store_true", help="do not count bytes on the CPU driver")
    parser.add_argument("--profile", action="store_true", help="time by kernel, each launch waited for")
    parser.add_argument("--reach", type=float, metavar="R", help="exit 1 if decode is under R tokens/s")
    parser.add_argument(
        "--least-graph", type=float, metavar="R", help="exit 1 if graphs are under R of direct launches"
    )
    args = parser.parse_args()
    try:
        if args.tokens < 1 or args.runs < 1:
            raise UsageError("--tokens and --runs must be at least 1")
        base, shards = (Path(args.model), args.engram_dir) if args.model else embedded_base()
        engine = Engine.open(base, engram_dir=shards, dspark=not args.no_dspark)
        try:
            need = max(args.frontiers) + WARM_UP + args.tokens
            if need > engine.config.max_position_embeddings:
                raise UsageError(f"{need} tokens do not fit a context of {engine.config.max_position_embeddings}")
            out = measure(args, engine)
        finally:
            engine.close()
    except Ds4Error as e:
        print(f"tokens: {e}", file=sys.stderr)
        return 1
    print(json.dumps(out))
    slowest = min(plain_of(p)["median"] for p in out["frontiers"])
    too_slow = args.reach is not None and slowest < args.reach
    graphs = [p["graph_ratio"] for p in out["frontiers"] if "graph_ratio" in p]
    return int(too_slow or (args.least_graph is not None and min(graphs, default=0.0) < args.least_graph))


if __name__ == "__main__":
    sys.exit(main())
