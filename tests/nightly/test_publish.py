"""The last steps of a night: which candidate is taken, where folders go, what a kill there leaves, the page."""

from __future__ import annotations

import errno
import json
import os
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ds4.errors import CapacityError, Ds4Error
from ds4.posttrain.forget import forget
from ds4.posttrain.log import append, make_folder, row_bytes
from ds4.posttrain.nights import resolve
from ds4.posttrain.points import Point
from ds4.posttrain.quotes import digests
from solvers.nightly import report
from solvers.nightly.candidates import Bench, Candidate
from solvers.nightly.gates import Verdict
from solvers.nightly.home import Home
from solvers.nightly.night import Outcome
from solvers.nightly.publish import publish
from solvers.nightly.steps import Steps
from tests.nightly.test_home import failing_at

DAY = "2026-11-30"
SAID = "Where is my mother's ring kept, please?"
HEAD = {
    "day": DAY, "days": 14, "method": "best", "base": "base.gguf 00", "zchain": "law", "teacher": None,
    "solved_on": "0123456789abcdef 3",
}  # fmt: skip
GOOD, BAD = Verdict("kept", True, 1.0, 0.995), Verdict("kept", False, 0.5, 0.995, "half of it <changed>")
ANSWERS = {"ended": 3, "answers": 4, "points": 2, "said": 1}


def point(name: str, before: float, said: str = SAID) -> Point:
    return Point(1, name, (1, 2), (3,), 4, 5, before, 0.0, 5, tuple(digests([said])))


POINTS = [point("chatcmpl-aaaaaaaa", -1.0), point("chatcmpl-bbbbbbbb", 2.0, "What | is <the> other question?")]


def candidate(steps: Steps, name: str, verdict: Verdict = GOOD, held: int = 0, leads: Any = (1.0, 2.0)) -> Candidate:
    """A judged one; its folder is there unless an earlier run has moved it."""
    folder = steps.folder / "candidates" / name
    if not (steps.folder / "moved").exists():
        folder.mkdir(parents=True)
        (folder / "gr_L05.bin").write_bytes(name.encode())
    gain = {"points": 4, "right_before": 0, "right_after": held, "margin_gain": {"mean": 0.5, "se": None}}
    trains = name != "refit"
    return Candidate(
        name, folder, [{}], trains=trains, leads=list(leads), answers=ANSWERS, held_out=gain, verdicts=[verdict]
    )


def bench(steps: Steps) -> Bench:
    """What `publish` reads of one."""
    told = {
        "requests": {"day": 2, "days": 3, "damaged": [{"file": "requests.jsonl", "line": 7, "reason": "is torn"}]},
        "corrections": {"files": [], "read": 3, "of_other_days": 1, "decisions": 2, "reported": []},
    }  # fmt: skip
    inputs = SimpleNamespace(span=lambda n: ["2026-11-17", DAY], to_json=lambda: told)
    tokenizer = SimpleNamespace(decode=lambda ids: f" |t{ids[0]}>")
    return cast(
        Bench,
        SimpleNamespace(
            steps=steps, night=SimpleNamespace(day=date.fromisoformat(DAY)), inputs=inputs, notes=["a note"],
            card=SimpleNamespace(tokenizer=tokenizer), points=POINTS, before=SimpleNamespace(answers=ANSWERS),
            held_out={"margins": {"points": 4, "right_before": 0, "right_after": 2,
                                  "margin_gain": {"mean": 0.5, "se": 0.1}}},
            room=SimpleNamespace(ever_borrowed=False, pauses=0, waited_s=0.0),
        ),
    )  # fmt: skip


def begin(home: Home) -> Steps:
    return Steps(home.work(DAY), HEAD, lambda line: None)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home.make(tmp_path / "nightly")
    (made.night("2026-11-29")).mkdir()
    made.switch("2026-11-29")
    made.history.append({"event": "accepted", "night": "2026-11-29", "before": None})
    return made


def run(home: Home, *of: tuple[str, Verdict, int]) -> Outcome:
    steps = begin(home)
    return publish(home, bench(steps), [candidate(steps, name, v, held) for name, v, held in of], HEAD)


def test_the_best_of_those_that_passed_is_mounted(home: Home) -> None:
    """Most held-out points right; the others are kept aside, the one that failed too, each with the whole page."""
    out = run(home, ("refit+margins", BAD, 4), ("margins", GOOD, 3), ("refit", GOOD, 2))
    assert (out.event, out.name, out.code) == ("accepted", DAY, 0)
    assert home.current == DAY and (home.night(DAY) / "gr_L05.bin").read_bytes() == b"margins"
    assert home.names("rejected") == [f"{DAY}.2", f"{DAY}.3"]
    told = [home.about(name, "rejected") for name in home.names("rejected")]
    assert [(t["method"], t["accepted"], t["why"]) for t in told] == [
        ("refit+margins", False, "kept: half of it <changed>"), ("refit", False, "passed, but margins is better"),
    ]  # fmt: skip
    events = [(e["event"], e["night"], e.get("before"), e.get("reason")) for e in home.history.read()[0]][1:]
    assert events == [
        ("rejected", f"{DAY}.2", None, "kept: half of it <changed>"),
        ("rejected", f"{DAY}.3", None, "passed, but margins is better"), ("accepted", DAY, "2026-11-29", None),
    ]  # fmt: skip
    assert home.rollback(None) == (DAY, "2026-11-29")


def rank(name: str, held: int = 0, leads: tuple[float, ...] = (1.0, 2.0), sigma: float = 0.0) -> tuple[float, ...]:
    return Candidate(
        name, Path("x"), [], trains=name != "refit", leads=list(leads), held_out={"right_after": held},
        rulers={"general": {"sigma_min": {"mean": sigma}}, "law": {"sigma_min": {"mean": 9.0}}},
    ).rank  # fmt: skip


def test_the_order_of_candidates(home: Home) -> None:
    """People's corrections first, then what carries over, then trained points, then general text, then CHAINS."""
    assert rank("margins") > rank("refit", held=5), "corrections that were solved for are not given up for a chance"
    assert rank("margins", held=2, leads=(-1.0, -1.0)) > rank("refit+margins", held=1)
    assert rank("margins", leads=(1.0, 1.0), sigma=-1.0) > rank("refit+margins", leads=(-1.0, 1.0))
    assert rank("margins", sigma=0.1) > rank("refit+margins", sigma=0.0)
    assert run(home, ("refit+margins", GOOD, 2), ("margins", GOOD, 2)).event == "accepted"
    assert home.about(DAY)["method"] == "refit+margins"


def test_a_refit_is_taken_where_nothing_else_passes(home: Home) -> None:
    assert run(home, ("margins", BAD, 2), ("refit", GOOD, 0)).event == "accepted"
    assert home.about(str(home.current))["method"] == "refit"


def test_where_none_passes_the_night_before_stays(home: Home) -> None:
    out = run(home, ("margins", BAD, 4))
    assert (out.event, out.code, out.reason) == ("rejected", 1, "margins: kept: half of it <changed>")
    assert home.current == "2026-11-29" and home.names("rejected") == [DAY] and home.names() == ["2026-11-29"]
    assert out.report is not None and "what is mounted stays: 2026-11-29" in out.report.read_text()


LONG = pytest.param("fsync", marks=pytest.mark.long)


@pytest.mark.parametrize("name", ["rename", "replace", "symlink", "unlink", "open", "write", "chmod", LONG])
def test_a_kill_anywhere_leaves_a_whole_night_mounted_and_the_rest_is_done_later(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of the system that `publish` makes fails once: what is mounted is one of the two nights, whole, and
    the next run ends as an undisturbed one does.
    """
    seen, at = set(), 0
    if name != "fsync":
        monkeypatch.setattr(
            os, "fsync", lambda fd: None
        )  # no machine loses power here, and it takes most of the time
    while True:
        at += 1
        home = Home.make(tmp_path / f"{name}{at}")
        home.night("2026-11-29").mkdir()
        home.switch("2026-11-29")
        steps = begin(home)
        found = [candidate(steps, "margins"), candidate(steps, "refit", BAD)]
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing_at(getattr(os, name), at))
            try:
                publish(home, bench(steps), found, HEAD)
                failed = False
            except Ds4Error:
                failed = True
        mounted = resolve(home.path)
        assert mounted is not None and mounted.name in ("2026-11-29", DAY)
        if mounted.name == DAY:
            assert {*report.FILES, "gr_L05.bin", "night.json"} == set(os.listdir(mounted))
        seen.add(mounted.name)
        (steps.folder / "moved").touch()
        steps = begin(home)
        again = publish(home, bench(steps), [candidate(steps, "margins"), candidate(steps, "refit", BAD)], HEAD)
        assert (again.event, again.name, home.current) == ("accepted", DAY, DAY)
        assert home.names("rejected") == [f"{DAY}.2"] and home.names() == ["2026-11-29", DAY]
        events = [(e["event"], e["night"]) for e in home.history.read()[0]]
        assert sorted(events) == [("accepted", DAY), ("rejected", f"{DAY}.2")], "each said once"
        if not failed:
            break
    assert at > 1, f"{name} was never called: nothing was shown"
    assert "2026-11-29" in seen or name in ("chmod",)


def test_a_full_disk_in_the_report(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.write, [0]

    def full(fd: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] == 3:
            real(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    steps = begin(home)
    found = [candidate(steps, "margins")]
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CapacityError, match="the disk is full"):
            publish(home, bench(steps), found, HEAD)
    assert home.current == "2026-11-29" and home.names() == ["2026-11-29"]
    assert not [p for p in found[0].folder.iterdir() if p.name.startswith(".")] if found[0].folder else False


# -- the page --


def page(home: Home) -> tuple[str, dict[str, Any], str]:
    folder = home.night(DAY)
    return (
        (folder / "report.md").read_text(),
        json.loads((folder / "report.json").read_text()),
        (folder / "report.html").read_text(),
    )


def test_what_the_page_says_in_its_three_forms(home: Home) -> None:
    run(home, ("margins", GOOD, 3), ("refit", BAD, 2))
    md, told, html = page(home)
    for text in (md, html):
        for words in (
            f"Night of {DAY}: accepted", "before it: 2026-11-29", "1 of 2 points are right without a candidate",
            "none: what needs it was left out", "a note", "is torn", "failed", "passed",
        ):  # fmt: skip
            assert words in text, words
    assert "half of it &lt;changed&gt;" in html and "half of it &lt;changed>" in md, "reasons are text, not markup"
    assert "' \\|t4>' before ' \\|t5>'" in md
    assert told["name"] == DAY and [c["name"] for c in told["candidates"]] == ["margins", "refit"]
    for forbidden in ("<script", "http://", "https://", "src=", "@import"):
        assert forbidden not in html, "a page that fetches something tells somebody"
    rows = [line for line in md.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").split("<!--")[0].count("|") for line in rows[2:4]}) == 1


@pytest.mark.parametrize("what", ["id", "text"])
def test_forget_finds_every_line_of_a_request(home: Home, tmp_path: Path, what: str) -> None:
    """By the request's id, or by what was said in it, where a point has no id."""
    run(home, ("margins", GOOD, 3), ("refit", BAD, 2))
    log = tmp_path / "log"
    make_folder(log)
    name = "chatcmpl-aaaaaaaa" if what == "id" else "chatcmpl-ffffffff"
    row = {"id": name, "messages": [{"role": "user", "content": SAID}], "answer": {"content": "no"}}
    append(log, date.fromisoformat(DAY), [row_bytes(row)])
    done = forget(log, ids=[name], also=[home.path])
    assert len(done.edited) == 6, "three forms of two pages"
    for folder in (home.night(DAY), home.path / "rejected" / f"{DAY}.2"):
        for form in report.FILES:
            text = (folder / form).read_text()
            assert "chatcmpl-aaaaaaaa" not in text and "chatcmpl-bbbbbbbb" in text, form
            assert text.count("t4>") == 1 or text.count("t4&gt;") == 1, "the words of the other request stay"
    assert len(json.loads((home.night(DAY) / "report.json").read_text())["points"]) == 1
