"""The stages of bench/gpu_check.sh: each a process of its own with its share of the time, then one table.

A stage that hangs or dies costs its own time only; what it had finished still counts. Nothing here imports ds4, so
that a broken import is a failed stage and not the end of the report.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("numpy", "pytest", "cuda.bindings", "tokenizers", "threadpoolctl", "rich")
# stage -> test files, and the seconds it may have of 340 in all; what a stage leaves over goes to the next
TESTS: dict[str, tuple[tuple[str, ...], float]] = {
    "device": (
        tuple(f"tests/device/test_{name}.py" for name in ("launch", "graph", "beside", "ahead", "memory")),
        25,
    ),
    "kernels": (("tests/cuda",), 120),
    "bits": (tuple(f"tests/engine/test_{name}.py" for name in ("beside", "bits", "session")), 75),
    "teacher": (("tests/engine/test_against_teacher.py",), 60),
}
HOST_ONLY = (
    "test_compile.py",
    "test_compiled_ahead.py",
    "test_traffic_weights.py",
    "test_traffic_caches.py",
    "test_reads_once.py",
)  # compile for others; count
LAUNCHES_SECONDS, TOKENS_SECONDS = 20.0, 60.0
IMPORT = re.compile(r"^(?:import|from) (\w+)", re.M)
HERE = ("ds4", "tests", "rulers", "solvers")


@dataclass
class Stage:
    """What one stage came to. `broken` says how it ended if not by itself."""

    name: str
    collected: int = 0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    broken: str = ""
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failed and not self.broken and self.passed > 0


def has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def runnable(files: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Test files whose imports are here, and the others with what they lack."""
    found = [p for f in files for p in (sorted((ROOT / f).glob("test_*.py")) if (ROOT / f).is_dir() else [ROOT / f])]
    run, left = [], []
    for path in found:
        if path.name in HOST_ONLY:
            continue
        lacks = sorted({m for m in IMPORT.findall(path.read_text()) if m not in HERE and not has(m)})
        if lacks:
            left.append(f"{path.name} (no {', '.join(lacks)})")
        else:
            run.append(str(path.relative_to(ROOT)))
    return run, left


def run_tests(stage: Stage, files: tuple[str, ...], seconds: float, env: dict[str, str], out: Path) -> None:
    """Run pytest over `files` for at most `seconds` and read what it wrote."""
    report = out / f"{stage.name}.jsonl"
    report.write_text("")
    selected, stage.left_out = runnable(files)
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_report", *selected]
    limits = {"GPU_CHECK_REPORT": str(report), "GPU_CHECK_STOP": str(time.time() + seconds - 5)}
    code, text = bounded(command, seconds + 5, env | limits)
    stage.seconds = time.monotonic() - started
    (out / f"{stage.name}.txt").write_text(text)
    begun: list[str] = []
    for line in map(json.loads, report.read_text().splitlines()):
        if line["event"] == "collected":
            stage.collected = line["count"]
        elif line["event"] == "begin":
            begun.append(line["test"])
        else:
            begun = [test for test in begun if test != line["test"]]
            stage.passed += line["outcome"] == "passed"
            stage.skipped += line["outcome"] == "skipped"
            if line["outcome"] in ("failed", "error"):
                stage.failed += 1
                stage.failures.append(line["test"])
                print(f"--- {line['test']}\n{line['text']}", flush=True)
    rest = stage.collected - stage.passed - stage.failed - stage.skipped
    if code is None:
        stage.broken = f"out of time in {begun[-1] if begun else 'collection'}"
    elif code not in (0, 1, 2):
        stage.broken = f"exit code {code} in {begun[-1] if begun else 'collection'}: {text[-300:]}"
    elif rest > 0:
        stage.broken = f"out of time, {rest} tests not run"


def bounded(command: list[str], seconds: float, env: dict[str, str]) -> tuple[int | None, str]:
    """(exit code, output); the code is None if it had to be stopped."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        text, _ = process.communicate(timeout=max(seconds, 1.0))
        return process.returncode, text
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        return None, text


def run_bench(stage: Stage, script: str, args: list[str], seconds: float, env: dict[str, str], out: Path) -> Any:
    """One of the benches; its JSON line, {} if it failed."""
    started = time.monotonic()
    code, text = bounded([sys.executable, str(ROOT / "bench" / script), *args], seconds, env)
    stage.seconds = time.monotonic() - started
    stage.collected = 1
    (out / f"{stage.name}.txt").write_text(text)
    print(text, flush=True)
    if code == 0:
        stage.passed = 1
        return json.loads(text.strip().splitlines()[-1])
    stage.failed = 1
    stage.broken = "out of time" if code is None else f"exit code {code}"
    return {}


def tokens_args(driver: str, quick: bool) -> list[str]:
    long = ",4096" if driver == "nvidia" else ""  # minutes on the CPU driver
    size = ["--runs", "1", "--tokens", "4", "--frontiers", "32"] if quick else ["--frontiers", f"64,512{long}"]
    return ["--profile", *size]


def device_line(env: dict[str, str]) -> tuple[bool, str]:
    """What the device client says it opened."""
    code = "from ds4.device import Device\ni = Device.open().info\nprint(i.name, i.driver, i.arch, i.n_sm, sep='; ')"
    ended, text = bounded([sys.executable, "-c", code], 60, env)
    return ended == 0, text.strip().splitlines()[-1] if text.strip() else f"exit code {ended}"


def table(stages: list[Stage]) -> None:
    print(f"\n{'stage':10} {'passed':>7} {'failed':>7} {'skipped':>8} {'of':>6} {'seconds':>8}")
    for s in stages:
        print(
            f"{s.name:10} {s.passed:7} {s.failed:7} {s.skipped:8} {s.collected:6} {s.seconds:8.1f}  "
            f"{s.broken or ('' if s.ok else 'FAILED')}"
        )
        for left in s.left_out:
            print(f"{'':10} not run: {left}")


def token_table(tokens: dict[str, Any]) -> None:
    for point in tokens.get("frontiers", []):
        print(
            f"context {point['context']:6}: prefill {point['prefill']['median']:.1f}, decode "
            f"{point['decode']['median']:.1f} tokens/s, {point['graph_ratio']:.2f} x direct launches, "
            f"{point['decode']['share']:.2%} of a copy"
        )
        drafts = point.get("decode_drafts")
        if drafts is not None:
            print(
                f"{'':16} with drafts {drafts['median']:.1f} tokens/s, {point['drafts_ratio']:.2f} x plain, "
                f"{drafts['tokens_per_round']:.2f} tokens a round, {drafts['bytes']:,} bytes of weights a token, "
                f"{drafts['share']:.2%} of a copy"
            )
    if tokens:
        print(
            f"{tokens['launches']} launches and {tokens['weight_bytes']:,} weight bytes a token; copy "
            f"{tokens['copy_gb_s']:.0f} GB/s, share {tokens['bandwidth_share']:.2%}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="The stages of bench/gpu_check.sh.")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=340.0)
    parser.add_argument("--driver", choices=("nvidia", "simt"), default="nvidia")
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    lacks = [module for module in NEEDED if not has(module)]
    if lacks:
        print(
            f"gpu_check: missing here: {', '.join(lacks)}; run bench/carry.sh where there is a network and bring var/"
        )
        return 2
    out: Path = args.out or args.work / "out"
    out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "DS4_DRIVER": args.driver, "GPU_CHECK_EVERY": str(args.every), "PYTHONPATH": path}
    started = time.monotonic()
    opened, device = device_line(env)
    print(f"gpu_check on {device}" if opened else f"gpu_check: no device: {device}", flush=True)
    if not opened:
        return 1
    scale = args.seconds / 340.0
    deadline = started + args.seconds
    stages, saved = [], 0.0
    for name, (files, share) in TESTS.items():
        stages.append(Stage(name))
        seconds = min(share * scale + saved, deadline - time.monotonic())
        run_tests(stages[-1], files, seconds, env, out)
        saved = max(seconds - stages[-1].seconds, 0.0)
        table([stages[-1]])
        sys.stdout.flush()
    stages.append(Stage("launches"))
    launches = run_bench(stages[-1], "launches.py", [], LAUNCHES_SECONDS * scale, env, out)
    stages.append(Stage("tokens"))
    seconds = max(deadline - time.monotonic(), TOKENS_SECONDS * scale)
    tokens = run_bench(stages[-1], "tokens.py", tokens_args(args.driver, args.every > 1), seconds, env, out)
    table(stages)
    token_table(tokens)
    ok = all(stage.ok for stage in stages)
    result = {
        "bench": "gpu_check",
        "device": device,
        "driver": args.driver,
        "every": args.every,
        "ok": ok,
        "seconds": round(time.monotonic() - started, 1),
        "stages": [asdict(stage) | {"seconds": round(stage.seconds, 1)} for stage in stages],
        "launches": launches,
        "tokens": tokens,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
