"""The benches run and end with their JSON line. No time is judged here; bench/ and docs/performance.md do that."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.base.toys import toy_base, toy_dir

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *args: str) -> tuple[int, dict, str]:
    """Exit code, the last line as JSON, everything printed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DS4_SIMT_WORKERS": "1"}
    ran = subprocess.run(
        [sys.executable, str(ROOT / "bench" / script), *args], capture_output=True, text=True, env=env, timeout=600
    )
    assert ran.stdout.strip(), ran.stderr
    return ran.returncode, json.loads(ran.stdout.strip().splitlines()[-1]), ran.stdout + ran.stderr


@pytest.fixture
def base() -> list[str]:
    return ["-m", str(toy_base("oracle-a")), "--engram-dir", str(toy_dir("oracle-a"))]


@pytest.mark.long
def test_tokens(base: list[str]) -> None:
    code, out, text = run(
        "tokens.py", *base, "--frontiers", "5,9", "--tokens", "2", "--runs", "1", "--profile", "--least-graph", "1e9"
    )
    assert code == 1, text  # the only reach that was asked for, and no graph is as fast
    assert [p["context"] for p in out["frontiers"]] == [5, 9]
    for point in out["frontiers"]:
        for what in ("prefill", "decode", "decode_direct", "decode_drafts"):
            assert 0 < point[what]["least"] <= point[what]["median"] <= point[what]["most"]
        assert point["decode"]["bytes"] == point["decode_direct"]["bytes"] == out["weight_bytes"]
        assert point["decode_drafts"]["bytes"] > 0 and 1 <= point["decode_drafts"]["tokens_per_round"] <= 5
        assert re.search(rf"\| {point['context']} \| plain \| [\d.]+ \| {out['weight_bytes']:,} ", text)
        assert re.search(rf"\| {point['context']} \| drafts, [\d.]+ tokens a round \| [\d.]+ \| ", text)
    assert text.count("| not measured |") == 4  # whatever the GPU would do
    assert out["launches"] == sum(line["launches"] for line in out["profile"]) or len(out["profile"]) == 12
    # a token reads all of its weights, and what kernels read twice comes on top
    assert 0 < out["weight_bytes"] < out["counted_bytes"]


def test_tokens_of_plain_decode_alone(base: list[str]) -> None:
    few = ("--frontiers", "5", "--tokens", "2", "--runs", "1", "--no-dspark", "--no-graph", "--no-count")
    code, out, text = run("tokens.py", *base, *few, "--reach", "0.001")
    assert code == 0, text
    assert run("tokens.py", *base, *few, "--reach", "1e9")[0] == 1
    assert "decode_drafts" not in out["frontiers"][0] and "decode" not in out["frontiers"][0]
    assert "| 5 | drafts | not measured |" in text


def test_tokens_says_what_is_wrong(base: list[str]) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "bench" / "tokens.py"), *base, "--frontiers", "5", "--tokens", "99999999"]
    ran = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ran.returncode == 1 and "do not fit a context" in ran.stderr


@pytest.mark.long
def test_drafts(base: list[str]) -> None:
    """oracle-a's draft head is right by chance only: what is the same is the tokens."""
    code, out, text = run("drafts.py", *base, "--prompt", "to be", "--tokens", "6", "--runs", "1", "--count", "6")
    assert code == 0 and out["different"] == 0, text
    fixed, rest = ["k 1", "k 2", "k 3", "k 4"], ["plain", "k 4", "scheduler"]
    assert [a["policy"] for a in out["answers"]] == ["plain", *fixed, "scheduler", "by bytes", *rest, *rest]
    by_policy = {a["policy"]: a for a in out["answers"] if a["rule"] == "greedy"}
    assert by_policy["plain"]["bytes_over_plain"] == 1 and by_policy["plain"]["tokens_per_round"] == 1
    assert all(by_policy[k]["bytes_over_plain"] > 1 for k in fixed)
    assert out["wall_speed"] > 0 and out["cpu_speed"] > 0
    assert [c["k"] for c in out["counted"]] == [0, 1, 2, 3, 4] and out["counted"][0]["over_plain"] == 1
    for c in out["counted"]:
        assert c["weights"] < c["memory"] < c["asked"]
        # the session's own figure leaves out an embedding row, and counts what an f32 vector takes once a pass
        told = by_policy[f"k {c['k']}" if c["k"] else "plain"]["weight_bytes_per_token"]
        assert 0.99 < told / c["weights"] < 1.01, (c, told)


def test_distance(base: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("to be, or not to be")
    code, out, printed = run("distance.py", *base, "--text", str(text), "--tokens", "8")
    assert code == 0, printed
    exact = out["pairs"][-1]
    assert (exact["activations"], exact["kv"], exact["arith"]) == ("f32", "f32", "none")
    assert exact["relative_l2"] <= 1e-4 < out["pairs"][0]["relative_l2"]


@pytest.mark.skipif(os.environ.get("DS4_DRIVER") == "nvidia", reason="only the CPU driver counts")
def test_traffic_reaches_hold() -> None:
    """Streams and formulas at the released shapes, on slices; bench/traffic.py without --quick takes larger ones."""
    code, out, text = run("traffic.py", "--quick")
    assert code == 0 and out["missed"] == 0, text
    assert out["exact"] >= 40 and out["least_useful"] >= 0.95


def test_launches() -> None:
    """The reach on empty kernels has a wide margin, whatever else the machine does."""
    code, out, text = run("launches.py", "--runs", "5")
    assert code == 0 and out["ratio"] >= 1.5 and out["launches"] == 217, text
    assert run("launches.py", "--launches", "3", "--runs", "1", "--least", "1e9")[0] == 1
