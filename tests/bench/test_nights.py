"""bench/nights.py at a small size: every stage runs, and goes on where it was. Its figures mean nothing here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.bench.test_benches import ROOT, run

FEW = ("--quick", "--days", "2", "--methods", "none,margins-day,carry")


@pytest.fixture
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import night_requests

        yield night_requests
    finally:
        sys.path.pop(0)


def test_days_of_the_script(script: ModuleType) -> None:
    """Each seed has its own subjects; every day has all of them in words of its own, and others beside."""
    chosen = script.subjects(2)
    assert len({s.name for s in chosen}) == 12 and {s.name for s in script.subjects(1)} != {s.name for s in chosen}
    for subject in chosen:
        words = [script.wording(subject, 2, n) for n in range(2 * script.DAYS)]
        assert len(set(words)) == len(words)
    seen: set[str] = set()
    for number in range(1, script.DAYS + 1):
        asked = script.requests(2, number)
        mine = [a for a in asked if a.subject is not None]
        assert len(asked) == 40 and len(mine) == 16 and {a.subject.name for a in mine} == {s.name for s in chosen}
        words = {f"{a.subject.name}: {a.messages[-1]['content']}" for a in mine}
        assert len(words) == 16 and not words & seen
        seen |= words
        assert asked == script.requests(2, number)
        assert all("{" not in m["content"] or a.subject is None for a in asked for m in a.messages)


def test_what_is_wanted(script: ModuleType) -> None:
    ways = ("K21.", "The code is K21.")
    assert script.nearest("The code is S82, here.", ways) == "The code is K21."
    assert script.nearest("Hello!", ways) == "K21."
    assert script.nearest("the code is K21, he said", ways) == "the code is K21, he said"
    assert script.nearest("Yes.", ("In short: {given}",)) == "In short: Yes."


@pytest.mark.long
def test_nights(tmp_path: Path) -> None:
    code, out, text = run("nights.py", *FEW, "--work", str(tmp_path))
    assert code == 0, text
    rows = {(r["method"], r["day"]): r for r in out["nights"]}
    assert set(rows) == {(m, d) for m in ("none", "margins-day", "carry") for d in (1,)}
    for (method, _), r in rows.items():
        g = r["general"]["sigma_min"]
        if method == "none":
            assert r["change"]["mean"] == g["mean"] == 0 and r["kept"] == 1 and r["trained"] == r["trained_before"]
            continue
        assert r["most_moved"] > 0 and 0 < r["kept"] <= 1 and g["mean"] != 0
        assert r["apart"] <= 1  # by hand and mounted, a decision that is nearly even may differ
    assert rows["margins-day", 1]["today"] > rows["none", 1]["today"]
    assert rows["carry", 1]["general"]["sigma_min"] != rows["margins-day", 1]["general"]["sigma_min"]
    assert [m["nights"] for m in out["methods"]] == [1, 1, 1] and "nights up by 2 se" in text
    # the log is one as the server writes it, and a second run takes all of it as it is
    (work,) = tmp_path.iterdir()
    day = next((work / "log").glob("requests-*.jsonl"))
    assert day.stat().st_mode & 0o777 == 0o600
    before = {p: p.stat().st_mtime_ns for p in work.glob("*.npz")}
    again_code, again, _ = run("nights.py", *FEW, "--work", str(tmp_path))
    assert again_code == 0 and again["nights"] == out["nights"]
    assert {p: p.stat().st_mtime_ns for p in work.glob("*.npz")} == before
    assert json.loads((work / "carry-01.json").read_text()) == rows["carry", 1]


def test_bad_flags() -> None:
    for flags, said in ((("--days", "1"), "at least two"), (("--methods", "nonsense"), "no method nonsense")):
        with pytest.raises(AssertionError, match=said):  # of `run`: nothing but the usage was printed
            run("nights.py", *flags)
