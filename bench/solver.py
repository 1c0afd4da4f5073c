"""What a layer's gains cost to solve, and how near the recipe comes to the minimum, on synthetic captures.

    python bench/solver.py [--experts 384] [--width 5120] [--rows 8192] [--picks 6] [--workers N] [--reach SECONDS]

The defaults are a layer at released dimensions. Captures are memory-mapped files in a temporary folder, as a
fixture's are. Experts are unequally popular, channels unequally loud; the target is made with gains of 1 +- 0.1 and
with noise. Printed: seconds (wall and CPU) and peak memory of the recipe and of our best rule; then on --subset
channels, at the recipe's lambda, how far three sweeps are from the minimum, how far sweeps iterated to 1e-8 are from
the normal equations, what the lattice costs, and the ridge by dbar against the ridge by an expert's own energy. With
--reach a solve that takes longer fails the command; so do 8 GB, and 1e-5 from the normal equations. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ds4.base.codebook import Workers, blas_kind
from solvers.gains import BEST, RECIPE, GainSolution, Rule, order_of, pull_of, ridge_of, solve_gains
from solvers.rows import BlockRows, Slice, Slots, read_slice
from solvers.sweeps import keep, normal_equations, residual_of, squares, sweep
from solvers.windows import held_out

MOST_BYTES = 8 * 10**9
MOST_APART = 1e-5


def captures(folder: Path, args: argparse.Namespace) -> BlockRows:
    """Files of a layer's rows, written in blocks and mapped."""
    rng = np.random.default_rng(args.seed)
    n, k, n_experts, width = args.rows, args.picks, args.experts, args.width
    popularity_E = 0.7 * rng.standard_normal(n_experts)
    picks_TK = np.argsort(-(popularity_E + rng.gumbel(size=(n, n_experts))), axis=1)[:, :k].astype(np.int32)
    loudness_D = np.exp(0.5 * rng.standard_normal(width)).astype(np.float32)
    s_ED = (1 + 0.1 * rng.standard_normal((n_experts, width), np.float32)).astype(np.float32)
    shapes = {"y": (n, k, width), "shared": (n, width), "target": (n, width)}
    files = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, shape)
        for name, shape in shapes.items()
    }
    for at in range(0, n, 256):
        here = slice(at, min(at + 256, n))
        count = here.stop - at
        y = rng.standard_normal((count, k, width), np.float32) * loudness_D
        shared = rng.standard_normal((count, width), np.float32) * loudness_D
        noise = rng.standard_normal((count, width), np.float32) * loudness_D
        files["y"][here], files["shared"][here] = y, shared
        files["target"][here] = (y * s_ED[picks_TK[here]]).sum(axis=1) + shared + np.float32(args.noise) * noise
    del files
    mapped = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in shapes}
    return BlockRows(mapped["y"], picks_TK, mapped["shared"], mapped["target"], n_experts)


def timed(rows: BlockRows, held_T: np.ndarray, rule: Rule, workers: Workers) -> tuple[GainSolution, dict[str, Any]]:
    """A solve and what it took; `peak_bytes` is the process's, mapped pages included."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = solve_gains(rows, held_T, rule, workers)
    out = {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "lambda": found.lam,
        "held_out_gain": found.held_out_gain,
        "untouched": found.n_untouched,
    }
    return found, out


def settle(part: Slice, lam: float, sweeps: int, least: float) -> tuple[np.ndarray, int]:
    """delta without a lattice after `sweeps` sweeps, or once nothing moves by `least`; and how many it took."""
    delta_EC, residual_TC = np.zeros_like(part.energy_EC), part.residual_TC.copy()
    ridge_EC, pull_E, order = ridge_of(part, lam, RECIPE), pull_of(part, RECIPE), order_of(part.slots)
    done, moved = 0, np.inf
    while done < sweeps and moved >= least:
        moved = sweep(part, delta_EC, residual_TC, ridge_EC, pull_E, order, keep)
        done += 1
    return delta_EC, done


def near(rows: BlockRows, held_T: np.ndarray, lam: float, n_channels: int) -> dict[str, Any]:
    """Distances from the minimum on the first channels, in float64; deltas are of s, so absolute."""
    some = slice(0, n_channels)
    subset = BlockRows(
        np.asarray(rows.y_TKD[..., some], np.float64),
        rows.picks_TK,
        np.asarray(rows.ysh_TD[..., some], np.float64),
        np.asarray(rows.target_TD[..., some], np.float64),
        rows.n_experts,
    )
    part = read_slice(subset, Slots.of(rows, ~held_T), slice(0, n_channels))
    unseen = read_slice(subset, Slots.of(rows, held_T), slice(0, n_channels))
    three, _ = settle(part, lam, 3, 0.0)
    settled, n_sweeps = settle(part, lam, 1000, 1e-8)
    direct = normal_equations(part, ridge_of(part, lam, RECIPE), pull_of(part, RECIPE), order_of(part.slots))
    one = squares(unseen.residual_TC).sum()
    free = 1 - squares(residual_of(unseen, three)).sum() / one
    out: dict[str, Any] = {
        "channels": n_channels,
        "sweeps_to_1e-8": n_sweeps,
        "settled_from_direct": float(np.abs(settled - direct).max()),
        "three_from_settled": float(np.abs(three - settled).max()),
        "three_from_settled_rms": float(np.sqrt(np.square(three - settled).mean() / np.square(settled).mean())),
        "free_gain": float(free),
    }
    for name, rule in (
        ("lattice_gain", RECIPE),
        ("rounded_gain", Rule(free_sweeps=3, lattice_sweeps=0)),
        ("cheapest_gain", Rule(free_sweeps=3, scale="cheapest")),
        ("own_energy_gain", Rule(ridge="own")),
    ):
        narrow = replace(rule, lambdas=(lam,), level=0.0, refit=False)
        found = solve_gains(subset, held_T, narrow)
        out[name] = found.held_out_gain
        if name in ("lattice_gain", "own_energy_gain"):
            out[name.replace("gain", "fitted")] = 1 - found.candidates[0].fitted
    return out


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Time the solve of a layer's gains, and its distance from the minimum.")
    p.add_argument("--experts", type=int, default=384)
    p.add_argument("--width", type=int, default=5120)
    p.add_argument("--rows", type=int, default=8192)
    p.add_argument("--picks", type=int, default=6)
    p.add_argument("--noise", type=float, default=0.5, help="of the target, in units of an expert's output (0.5)")
    p.add_argument("--subset", type=int, default=32, help="channels for the distances, a multiple of 32 (32)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    p.add_argument("--reach", type=float, metavar="SECONDS", help="fail if a solve takes longer")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    n_bytes = 4 * args.rows * args.width * (args.picks + 2)
    print(f"{args.rows} rows, {args.picks} of {args.experts} experts, {args.width} channels: {n_bytes:,} bytes")
    result: dict[str, Any] = {"bench": "solver", **{k: v for k, v in vars(args).items() if k != "reach"}}
    missed = []
    with tempfile.TemporaryDirectory(prefix="ds4-solver-") as folder, Workers(args.workers) as workers:
        result["blas"] = blas_kind()
        rows = captures(Path(folder), args)
        n = np.arange(args.rows)
        held_T = held_out(n // 1024, n // 4096)
        for name, rule in (("recipe", RECIPE), ("best", BEST)):
            _, took = timed(rows, held_T, rule, workers)
            result[name] = took
            print(
                f"{name:7} {took['wall_s']:.1f} s wall, {took['cpu_s']:.1f} s CPU on {args.workers} workers, peak "
                f"{took['peak_bytes'] / 1e9:.2f} GB; lambda {took['lambda']:g}, held-out error "
                f"{-100 * took['held_out_gain']:+.2f} %, {took['untouched']} experts untouched"
            )
            if args.reach is not None and took["wall_s"] > args.reach:
                missed.append(f"{name}: {took['wall_s']:.1f} s, reach {args.reach:g} s")
            if took["peak_bytes"] > MOST_BYTES:
                missed.append(f"{name}: {took['peak_bytes']:,} bytes, reach {MOST_BYTES:,}")
        at = near(rows, held_T, result["recipe"]["lambda"], args.subset)
    result["near"] = at
    print(
        f"{args.subset} channels, lambda {result['recipe']['lambda']:g}, no lattice: three sweeps are "
        f"{at['three_from_settled']:.1e} from the minimum at most, {at['three_from_settled_rms']:.1e} of s - 1 in "
        f"the mean square; {at['sweeps_to_1e-8']} sweeps until nothing moves by 1e-8, then "
        f"{at['settled_from_direct']:.1e} from the normal equations"
    )
    print(
        f"held-out error taken away: {at['free_gain']:.4%} without a lattice, {at['lattice_gain']:.4%} on it, "
        f"{at['rounded_gain']:.4%} rounded afterwards, {at['cheapest_gain']:.4%} on it by the cheapest scales"
    )
    print(
        f"ridge by dbar: fitted {at['lattice_fitted']:.4%}, held out {at['lattice_gain']:.4%}; by an expert's own "
        f"energy: fitted {at['own_energy_fitted']:.4%}, held out {at['own_energy_gain']:.4%}"
    )
    if at["settled_from_direct"] > MOST_APART:
        missed.append(f"{at['settled_from_direct']:.1e} from the normal equations, reach {MOST_APART:g}")
    for line in missed:
        print(f"missed: {line}")
    print(json.dumps({**result, "missed": len(missed)}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
