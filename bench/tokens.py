"""Tokens per second of prefill and decode on the device that is there, beside the bytes and launches of a token.

    python bench/tokens.py [-m BASE] [--frontiers 64,512] [--tokens 32] [--runs 5] [--no-graph] [--profile]

Without `-m`, the embedded model. At each context frontier a prompt of that many random tokens is read, then tokens
are drawn greedily; every run starts after a warm-up and a flush of the GPU's cache, and median, least and most over
the runs are shown. Captured graphs and direct launches take turns in one run, so that a noisy machine meets both.
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

import numpy as np
from embedded import embedded_base
from watched import Watched

from ds4.device import Buffer, Device, Kernel
from ds4.engine import Engine, Sampling
from ds4.engine.lane import Lane
from ds4.engine.ops.experts import ExpertWeights
from ds4.engine.ops.linear import Weight
from ds4.engine.scratch import Workspace
from ds4.engine.session import Session
from ds4.errors import Ds4Error, UsageError
from ds4.model.config import ModelConfig

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


def session(engine: Engine, *, graphs: bool, device: Device | None = None) -> Session:
    """A session of the engine's weights, with or without captured graphs, on the device or a view of it."""
    dev = device or engine.device
    options = dataclasses.replace(engine.options, graphs=graphs)
    lane = Lane(dev, Workspace(dev), engine.config, engine.weights, engine.feed, options)
    return Session(dev, engine.config, lane)


def prompt(config: ModelConfig, n: int, seed: int) -> list[int]:
    """Random ids; two seeds share no prefix, so nothing of the last prompt is kept."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, config.vocab_size, n)
    ids[0] = 3 + seed % (config.vocab_size - 3)
    return [int(i) for i in ids]


class Bench:
    """One engine under measurement."""

    def __init__(self, engine: Engine, n_tokens: int, n_runs: int, modes: tuple[bool, ...]) -> None:
        self.engine, self.n_tokens, self.n_runs = engine, n_tokens, n_runs
        self.sessions = {graphs: session(engine, graphs=graphs) for graphs in modes}
        self.sampling = Sampling(temperature=0.0)
        gpu = engine.device.info.driver == "nvidia"
        self.flushed = engine.device.empty((FLUSH_MB << 20,), "u8") if gpu else None
        self.seed = 0

    def frontier(self, context: int) -> tuple[Spread, dict[bool, Spread]]:
        """Prefill to `context`, then decode, each mode in turn; the first round is the warm-up."""
        prefills: list[tuple[float, float]] = []
        decodes: dict[bool, list[tuple[float, float]]] = {graphs: [] for graphs in self.sessions}
        for i in range(self.n_runs + 1):
            for graphs, s in self.sessions.items():
                self.seed += 1
                ids = prompt(self.engine.config, context, self.seed)
                self.flush()
                read = timed(self.engine.device, partial(s.sync, ids))
                for _ in range(WARM_UP):
                    s.next(self.sampling)
                self.flush()
                drawn = timed(self.engine.device, partial(self.draw, s))
                if i > 0:
                    prefills.append(read)
                    decodes[graphs].append(drawn)
        return spread(context, prefills), {g: spread(self.n_tokens, runs) for g, runs in decodes.items()}

    def draw(self, s: Session) -> None:
        for _ in range(self.n_tokens):
            s.next(self.sampling)

    def flush(self) -> None:
        """Push everything out of a GPU's second-level cache."""
        if self.flushed is not None:
            self.engine.device.fill(self.flushed, 1)


def step_launches(engine: Engine, context: int, device: Device) -> Watched:
    """The launches of one decoded token after `context` others, written down."""
    watched = Watched(device.with_constants(engine.device.constants))
    s = session(engine, graphs=False, device=watched)
    s.sync(prompt(engine.config, context, 1))
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
    """Bytes of stored weights that one token reads: matrices and vectors whole, the chosen experts, one embedding
    row. What no cache can save at a model's real size.
    """
    c, w = engine.config, engine.weights
    total = w.head.nbytes + w.norm.nbytes + w.embed.nbytes // w.embed.rows
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
    s = session(engine, graphs=False, device=dev)
    s.sync(prompt(engine.config, context, 1))
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
    modes = (False,) if args.no_graph else (True, False)
    bench = Bench(engine, args.tokens, args.runs, modes)
    print(f"{info.name} ({info.driver}, {info.n_sm} multiprocessors), base {Path(engine.base.path).name}")
    out: dict[str, Any] = {
        "bench": "tokens",
        "device": info.name,
        "driver": info.driver,
        "base": Path(engine.base.path).name,
        "runs": args.runs,
        "tokens": args.tokens,
        "frontiers": [],
    }
    for context in args.frontiers:
        read, drawn = bench.frontier(context)
        print(f"context {context:6d}  prefill       {read.text()}")
        point: dict[str, Any] = {"context": context, "prefill": dataclasses.asdict(read)}
        for graphs, rate in drawn.items():
            name = "decode" if graphs else "decode_direct"
            print(f"context {context:6d}  {name:13} {rate.text()}")
            point[name] = dataclasses.asdict(rate)
        if len(modes) == 2:
            point["graph_ratio"] = round(drawn[True].median / drawn[False].median, 3)
            print(f"context {context:6d}  graph over direct launches: {point['graph_ratio']:.2f}")
        out["frontiers"].append(point)
    context = args.frontiers[-1]
    watched = step_launches(engine, context, engine.device)
    n_formula, without = formula_bytes(watched)
    out |= {
        "launches": len(watched.log.seen),
        "weight_bytes": weight_bytes(engine),
        "formula_bytes": n_formula,
        "without_formula": without,
        "copy_gb_s": round(copy_bandwidth(engine.device) / 1e9, 2),
    }
    best = out["frontiers"][-1].get("decode", out["frontiers"][-1]["decode_direct"])["median"]
    out["bandwidth_share"] = round(out["weight_bytes"] * best / 1e9 / out["copy_gb_s"], 4)
    print(f"a token at {context}: {out['launches']} launches, {out['weight_bytes']:,} bytes of weights, ")
    print(f"    {n_formula:,} bytes asked for by the kernels' formulas (caches serve some of them)")
    print(f"copy {out['copy_gb_s']:.1f} GB/s; weights x tokens/s are {100 * out['bandwidth_share']:.1f} % of it")
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
    parser.add_argument("--no-count", action="store_true", help="do not count bytes on the CPU driver")
    parser.add_argument("--profile", action="store_true", help="time by kernel, each launch waited for")
    parser.add_argument("--reach", type=float, metavar="R", help="exit 1 if decode is under R tokens/s")
    args = parser.parse_args()
    try:
        if args.tokens < 1 or args.runs < 1:
            raise UsageError("--tokens and --runs must be at least 1")
        base, shards = (Path(args.model), args.engram_dir) if args.model else embedded_base()
        engine = Engine.open(base, engram_dir=shards)
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
    slowest = min(p.get("decode", p["decode_direct"])["median"] for p in out["frontiers"])
    return 1 if args.reach and slowest < args.reach else 0


if __name__ == "__main__":
    sys.exit(main())
