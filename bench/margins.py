"""What the margin solve costs at released dimensions, on synthetic rows.

    python bench/margins.py [--points 73] [--others 3268] [--experts 384] [--width 5120] [--picks 6] [--workers N]
                            [--tau 1] [--rho 1] [--lambda 0.1] [--rounds 10] [--seed 0] [--reach SECONDS]

Slot outputs are a memory-mapped file in a temporary folder, as a capture's are, one position a margin. Experts are
unequally popular, channels unequally loud; a row's expected length is 1: a point that is d logits short asks for
a step of length d in s. Points start 0.1 to 2.1 logits behind; what is to stay leads by 3
logits on average, exponentially spread.
Printed: seconds (wall and CPU) of the rows' reading and the solve together, peak memory of the process, every round,
points flipped and others kept by the stored table. With --reach a longer run fails the command; so do 4 GB. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ds4.base.codebook import Workers, blas_kind
from solvers.margin_rows import MarginRows
from solvers.margins import MarginRule, solve_margins

MOST_BYTES = 4 * 10**9


def captured(folder: Path, args: argparse.Namespace) -> MarginRows:
    """A night's rows: float32 slots written in blocks and mapped, directions in memory."""
    rng = np.random.default_rng(args.seed)
    n, k, width = args.points + args.others, args.picks, args.width
    popularity_E = 0.7 * rng.standard_normal(args.experts)
    picks_NK = np.argsort(-(popularity_E + rng.gumbel(size=(n, args.experts))), axis=1)[:, :k].astype(np.int32)
    loudness_D = np.exp(0.5 * rng.standard_normal(width)).astype(np.float32)
    loudness_D /= np.sqrt(np.square(loudness_D).sum() * k, dtype=np.float32)
    y_NKD = np.lib.format.open_memmap(folder / "y.npy", "w+", np.float32, (n, k, width))
    for at in range(0, n, 256):
        here = slice(at, min(at + 256, n))
        y_NKD[here] = rng.standard_normal((here.stop - at, k, width), np.float32) * loudness_D
    del y_NKD
    margin_N = np.concatenate([-rng.uniform(0.1, 2.1, args.points), rng.exponential(3.0, args.others)])
    return MarginRows(
        np.load(folder / "y.npy", mmap_mode="r"),
        picks_NK,
        np.arange(n),
        rng.standard_normal((n, width), np.float32),
        margin_N,
        np.arange(n) < args.points,
        args.experts,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    rule = MarginRule()
    p = argparse.ArgumentParser(description="Time the margin solve at released dimensions.")
    p.add_argument("--points", type=int, default=73)
    p.add_argument("--others", type=int, default=3268)
    p.add_argument("--experts", type=int, default=384)
    p.add_argument("--width", type=int, default=5120)
    p.add_argument("--picks", type=int, default=6)
    p.add_argument("--tau", type=float, default=rule.tau)
    p.add_argument("--rho", type=float, default=rule.rho)
    p.add_argument("--lambda", type=float, default=rule.lam, dest="lam")
    p.add_argument("--rounds", type=int, default=rule.rounds)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    p.add_argument("--reach", type=float, metavar="SECONDS", help="fail if it takes longer")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rule = MarginRule(tau=args.tau, rho=args.rho, lam=args.lam, rounds=args.rounds)
    print(
        f"{args.points} points, {args.others} to stay, {args.picks} of {args.experts} experts, {args.width} wide: "
        f"{args.experts * args.width:,} unknowns"
    )
    with tempfile.TemporaryDirectory(prefix="ds4-margins-") as folder, Workers(args.workers) as workers:
        rows = captured(Path(folder), args)
        wall, cpu = time.perf_counter(), time.process_time()
        found = solve_margins(rows, rule, workers=workers)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        blas = blas_kind()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for number, r in enumerate(found.rounds):
        print(
            f"round {number + 1}: {r.iterations} iterations to {r.residual:.1e}, {r.raised} targets raised; "
            f"{r.reached} points reach {rule.tau:g}, {r.kept} others stay{' <- kept' * (number == found.best)}"
        )
    verdicts = Counter(found.verdicts)
    print(f"points flipped {found.flipped:.2%}, others kept {found.kept:.2%}; {dict(verdicts)}")
    print(f"{wall:.1f} s wall, {cpu:.1f} s CPU on {args.workers} workers; peak {peak / 1e9:.2f} GB, mapped pages too")
    missed = []
    if args.reach is not None and wall > args.reach:
        missed.append(f"{wall:.1f} s, reach {args.reach:g} s")
    if peak > MOST_BYTES:
        missed.append(f"{peak:,} bytes, reach {MOST_BYTES:,}")
    for line in missed:
        print(f"missed: {line}")
    result: dict[str, Any] = {
        "bench": "margins",
        **{k: v for k, v in vars(args).items() if k != "reach"},
        "blas": blas,
        "wall_s": wall,
        "cpu_s": cpu,
        "peak_bytes": peak,
        "flipped": found.flipped,
        "kept": found.kept,
        "verdicts": dict(verdicts),
        "rounds_run": [asdict(r) for r in found.rounds],
        "missed": len(missed),
    }
    print(json.dumps(result))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
