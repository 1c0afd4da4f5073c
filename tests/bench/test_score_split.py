"""bench/score_split.py runs and says what it judged. Which solve is better is for the bench, at its own size."""

import subprocess
import sys

import pytest

from tests.bench.test_benches import ROOT, run


def test_it_starts() -> None:
    """What it imports is there; its work is in the long run."""
    command = [sys.executable, str(ROOT / "bench" / "score_split.py"), "--help"]
    assert "--points" in subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout


@pytest.mark.long
def test_score_split() -> None:
    code, out, text = run("score_split.py", "--points", "2", "--answers", "12", "--domains", "code")
    assert code == 0, text
    assert set(out["found"]) == {"deployed", "prefilled"} and 18 <= out["others"] <= 26
    served, prefilled = out["found"]["deployed"], out["found"]["prefilled"]
    assert served["flipped"] == served["says"]["flipped"] and served["kept"] == served["says"]["kept"]
    assert served["largest_difference"] == 0 < prefilled["largest_difference"]
    assert "2 points" in text and "others kept" in text
