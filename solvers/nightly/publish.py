"""From judged candidates to folders under their names: the last steps of a night, each of which may be repeated.

What goes where is decided first and kept; then come texts, renames, the link, history. A run that was killed in
between does the rest, and what is done already is done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds4.posttrain.log import replace_file
from ds4.posttrain.nights import NIGHTS
from ds4.posttrain.points import Point
from solvers.nightly import report
from solvers.nightly.candidates import Bench, Candidate
from solvers.nightly.home import REJECTED, Home
from solvers.nightly.night import Outcome

NIGHT = "night.json"


def publish(home: Home, bench: Bench, candidates: Sequence[Candidate], head: Mapping[str, Any]) -> Outcome:
    """Accept the best of those that passed, reject the others, and say so in history.

    Raises:
        CapacityError: the disk is full; the same run goes on.
    """
    made = [c for c in candidates if c.folder is not None]
    plan = bench.steps.do("choose", lambda: _plan(home, made, str(bench.night.day)))
    told = _told(bench, candidates, plan, head)
    for c in made:
        assert c.folder is not None
        below, name = plan["places"][c.name]
        if c.folder.exists():
            about = {
                "kind": "ds4-night", "version": 1, "name": name, "day": str(bench.night.day), "method": c.name,
                "accepted": below == NIGHTS, "why": told["why"][c.name], "solved_on": head["solved_on"], "head": head,
            }  # fmt: skip
            _text(c.folder / NIGHT, about)
            report.write(c.folder, {**told, "name": name})
        home.place(c.folder, name, below)
    chosen = plan["chosen"]
    noted = {(r.get("event"), r.get("night")) for r in home.history.read()[0]}
    day = str(bench.night.day)
    for c, (below, name) in plan["places"].items():
        if below == REJECTED and ("rejected", name) not in noted:
            line = {"event": "rejected", "day": day, "night": name, "method": c, "reason": told["why"][c]}
            home.history.append(line)
    if chosen is not None:
        below, name = plan["places"][chosen]
        home.switch(name)
        if ("accepted", name) not in noted:
            line = {"event": "accepted", "day": day, "night": name, "method": chosen, "before": plan["before"]}
            home.history.append(line)
        return Outcome("accepted", name, "", home.path / below / name / report.FILES[0])
    first = made[0].name
    below, name = plan["places"][first]
    why = "; ".join(f"{c.name}: {c.why_not}" for c in made)
    return Outcome("rejected", name, why, home.path / below / name / report.FILES[0])


def _plan(home: Home, made: Sequence[Candidate], day: str) -> dict[str, Any]:
    """{"chosen", "before", "places": candidate -> [folder, name]}; the accepted one has the first name."""
    passed = [c for c in made if not c.why_not]
    chosen = max(passed, key=lambda c: c.rank) if passed else None  # the first of equals: CHAINS has the order
    places: dict[str, tuple[str, str]] = {}
    taken: set[str] = set()
    for c in sorted(made, key=lambda c: c is not chosen):
        name = home.new_name(day, taken)
        taken.add(name)
        places[c.name] = (NIGHTS if c is chosen else REJECTED, name)
    return {"chosen": None if chosen is None else chosen.name, "before": home.linked(), "places": places}


def _told(
    bench: Bench, candidates: Sequence[Candidate], plan: Mapping[str, Any], head: Mapping[str, Any]
) -> dict[str, Any]:
    """The report's value (report.py)."""
    chosen = plan["chosen"]
    why = {c.name: c.why_not or ("" if c.name == chosen else f"passed, but {chosen} is better") for c in candidates}
    before = bench.before
    assert before is not None
    return {
        "kind": "ds4-night-report", "version": 1, "day": head["day"], "days": bench.inputs.span(head["days"]),
        "event": "accepted" if chosen else "rejected", "chosen": chosen, "before": plan["before"],
        "method": head["method"], "base": head["base"], "sidecar": head["zchain"] or "none",
        "teacher": head["teacher"], "why": why, "notes": bench.notes, **bench.inputs.to_json(),
        "points": [_point(i, p, bench, candidates) for i, p in enumerate(bench.points)], "said": before.answers,
        "held_out": bench.held_out,
        "candidates": [
            {
                "name": c.name, "placed": "/".join(plan["places"][c.name]) if c.folder else "no folder",
                "chosen": c.name == chosen, "why": why[c.name], "figures": c.figures, "trained": _trained(c),
                "answers": c.answers, "rulers": c.rulers, "held_out": c.held_out,
                "verdicts": [v.to_json() for v in c.verdicts],
            }
            for c in candidates
        ],
        "memory": {
            "borrowed": bench.room.ever_borrowed, "pauses": bench.room.pauses, "waited_s": bench.room.waited_s
        },
        "seconds": bench.steps.seconds,
    }  # fmt: skip


def _trained(c: Candidate) -> dict[str, int] | None:
    return None if c.leads is None else {"points": len(c.leads), "right": sum(x > 0 for x in c.leads)}


def _point(i: int, p: Point, bench: Bench, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """All that is said of a point, in one object: `ds4 forget` takes it out whole, by its id or any digest."""
    tokenizer = bench.card.tokenizer
    return {
        "request_id": p.request_id, "line": p.line, "position": p.position, "a": p.a, "b": p.b,
        "token_a": repr(tokenizer.decode([p.a])), "token_b": repr(tokenizer.decode([p.b])), "before": p.margin,
        "leads": {c.name: c.leads[i] for c in candidates if c.leads is not None},
        "texts_sha256": " ".join(p.texts_sha256),
    }  # fmt: skip


def _text(path: Path, value: Mapping[str, Any]) -> None:
    replace_file(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
