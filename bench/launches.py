"""What a launch costs by itself: a graph of empty kernels against the same launches one by one.

    python bench/launches.py [--launches 217] [--runs 15] [--least 1.5]

217 is what a decoded token of the embedded model launches. Both sides take turns in one run, the device idle before
and after each; the median of the runs counts. That a graph is never slower on a real token is bench/tokens.py's to
show. The exit code is 1 when replay is not --least times as fast. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds4.device import Device, Kernel
from ds4.errors import Ds4Error, UsageError

EMPTY = Kernel(
    name="empty",
    source=str(Path(__file__).with_name("empty.cu")),
    grid=lambda n: (-(-n // 128), 1, 1),
    block=128,
    args=("y: u32[n]", "x: u32[n]", "n: i32", "a: f32"),
)


def seconds(device: Device, work: Callable[[], None]) -> float:
    """Wall time of `work`, the device idle before and after."""
    device.sync()
    began = time.perf_counter()
    work()
    device.sync()
    return time.perf_counter() - began


def measure(n_launches: int, n_runs: int) -> dict[str, Any]:
    """Medians in microseconds, printed; returns what the JSON line says."""
    device = Device.open()
    x, y = device.zeros((128,), "u32"), device.zeros((128,), "u32")

    def direct() -> None:
        for _ in range(n_launches):
            device.launch(EMPTY, y, x, 128, 1.0)

    direct()  # compiles, and prepares the launch
    with device.capture() as graph:
        direct()
    graph.replay()
    runs = [(seconds(device, direct), seconds(device, graph.replay)) for _ in range(n_runs)]
    one_by_one, replayed = (1e6 * statistics.median(side) for side in zip(*runs))
    ratio = one_by_one / replayed
    print(f"{device.info.name}: {graph.n_launches} empty launches, median of {n_runs} runs")
    print(f"    one by one {one_by_one:9.1f} us, {one_by_one / n_launches:6.2f} us a launch")
    print(f"    replayed   {replayed:9.1f} us, {replayed / n_launches:6.2f} us a launch: {ratio:.2f} times as fast")
    return {
        "bench": "launches", "device": device.info.name, "driver": device.info.driver, "launches": graph.n_launches,
        "runs": n_runs, "direct_us": round(one_by_one, 1), "replay_us": round(replayed, 1), "ratio": round(ratio, 3),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure replay against direct launches on empty kernels.")
    parser.add_argument("--launches", type=int, default=217, metavar="N", help="launches of a graph (217)")
    parser.add_argument("--runs", type=int, default=15, metavar="N", help="timed runs of each side (15)")
    parser.add_argument("--least", type=float, default=1.5, metavar="R", help="exit 1 under R times as fast (1.5)")
    args = parser.parse_args()
    try:
        if args.launches < 1 or args.runs < 1:
            raise UsageError("--launches and --runs must be at least 1")
        out = measure(args.launches, args.runs)
    except Ds4Error as e:
        print(f"launches: {e}", file=sys.stderr)
        return 1
    print(json.dumps(out))
    return int(out["ratio"] < args.least)


if __name__ == "__main__":
    sys.exit(main())
