"""The scheduler's bench ends with its JSON line; of its figures only those of simulated clocks are judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bench.test_benches import ROOT, run


def test_scheduler() -> None:
    code, out, text = run("scheduler.py", "--tokens", "1000", "--rounds", "200")
    assert code == 0 or out["overhead_us"] > 50, text  # a loaded machine may be slow, but must say so
    assert out["overhead_us"] > 0
    # a pass reads the more the more rows it has, and several tokens' worth of it once
    first, last = out["pass_ms"][0], out["pass_ms"][-1]
    assert out["pass_ms"] == sorted(out["pass_ms"]) and first < last < 3 * first
    assert out["draft_ms"] < first
    for row in out["simulated"]:
        best = max(row["plain"], *row["fixed"])
        assert 0.85 * best < row["scheduler"] < 1.5 * best, row
    gains = [row["over_plain"] for row in out["simulated"]]
    assert gains[0] > 0.97 and gains[-1] > 2
    assert all(row["over_plain"] > 0.97 for row in out["arithmetic_bound"])


def test_measured_acceptances(tmp_path: Path) -> None:
    """Two good drafts and a third that is never right; and a text whose drafts are worth nothing."""
    said = tmp_path / "drafts.txt"
    answers = [
        {"rule": "greedy", "policy": "k 1", "acceptance_by_position": [0.9]},
        {"rule": "greedy", "policy": "k 3", "acceptance_by_position": [0.9, 0.81, 0.0]},
        {"rule": "seed", "policy": "k 3", "acceptance_by_position": [0.05, 0.0, 0.0]},
    ]
    said.write_text("printed before\n" + json.dumps({"block": 3, "answers": answers}) + "\n")
    few = ("--tokens", "1000", "--rounds", "100")
    code, out, text = run("scheduler.py", *few, "--acceptance", str(said))
    assert code == 0 or out["overhead_us"] > 50, text
    good, bad = out["acceptances"]
    assert (good["text"], bad["text"]) == ("greedy", "seed")
    assert max(good["fixed"]) == good["fixed"][1] and 1.3 < good["over_plain"] < 2.2
    assert bad["fixed"] == sorted(bad["fixed"], reverse=True) and 0.95 < bad["over_plain"] <= 1
    assert 1.5 < good["k"] < 3 and good["tokens_per_round"] > 2.2

    (tmp_path / "else.txt").write_text("nothing of the kind\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "bench" / "scheduler.py"), *few, "--acceptance", str(tmp_path / "else.txt")]
    ran = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ran.returncode == 1 and "is not what bench/drafts.py prints" in ran.stderr
