"""The real solves in a night: what they are given; whole nights of them; nights that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ds4 import embedded
from ds4.cli.embedded_base import embedded_base
from ds4.engine import Engine
from ds4.errors import UsageError
from ds4.posttrain.log import Logged, read_log
from ds4.posttrain.points import Point
from ds4.server.request import Card
from solvers.margin_capture import Turn
from solvers.nightly.carry_method import CarryOver
from solvers.nightly.home import Home
from solvers.nightly.method import CHAINS, Task, chains
from solvers.nightly.methods import Margins, Refit, turns_of

ROOT = Path(__file__).parent.parent.parent


def task(tmp_path: Path, points: list[Point], requests: list[Logged]) -> Task:
    return Task(tmp_path / "out", None, None, points, requests, lambda line: None)


def test_a_wrong_answer_is_not_kept_behind_its_decision(
    night_engine: Engine, night_log: Path, tmp_path: Path
) -> None:
    """A corrected request gives its point, and no row that would hold the model to what was wrong; others stay."""
    card = Card.of(night_engine)
    requests = list(read_log(night_log).values())
    everything = turns_of(task(tmp_path, [], requests), card)
    assert len(everything) == len(requests) == 4
    chosen = everything[1]
    point = Point(1, "x", chosen.prompt, chosen.answer[:2], 9, 7, 0.0, 1.0, 7)
    turns = turns_of(task(tmp_path, [point], requests), card)
    assert turns[0] == Turn(chosen.prompt, chosen.answer[:2], 9)
    assert turns[1:] == [t for t in everything if t != chosen] and len(turns) == 4
    answers = [tuple(r.row["answer_ids"]) for r in requests]
    assert [t.answer for t in everything] == [a[:-1] for a in answers], "every token of an answer was decided"


def test_too_few_requests_for_a_refit(night_log: Path, tmp_path: Path) -> None:
    requests = list(read_log(night_log).values())[:3]
    with pytest.raises(UsageError, match="a refit needs at least 4"):
        Refit(embedded_base(), embedded.checkpoint()).prepare(task(tmp_path, [], requests))


def test_which_candidates_there_are() -> None:
    solvers: Mapping[str, Any] = {"margins": Margins(), "refit": Refit(Path("b"), Path("c"))}
    assert list(chains("best", solvers, points=True, teacher=True)) == ["refit+margins", "margins", "refit"]
    assert list(chains("best", {"margins": Margins()}, points=True, teacher=False)) == ["margins"]
    more = {**solvers, "carry": CarryOver(Path("c"), Path("d"))}
    assert list(chains("best", more, points=True, teacher=True)) == ["refit+margins", "carry", "margins", "refit"]
    assert list(chains("best", more, points=False, teacher=True)) == ["refit"]
    assert list(chains("best", more, points=True, teacher=False)) == ["margins"]
    assert list(chains("best", solvers, points=False, teacher=True)) == ["refit"]
    assert chains("best", {"margins": Margins()}, points=False, teacher=False) == {}
    assert chains("margins", solvers, points=False, teacher=True) == {}
    assert chains("refit+margins", solvers, points=True, teacher=True) == {"refit+margins": CHAINS["refit+margins"]}
    for method in ("refit", "refit+margins", "carry"):
        with pytest.raises(UsageError, match="name its checkpoint"):
            chains(method, {"margins": Margins()}, points=True, teacher=False)


# -- whole nights, by the command --

FLAGS = ("--day", "2026-11-29", "--answer-limit", "4", "--ruler-tokens", "512", "--ruler-length", "256")
LENIENT = ("--gate-kept", "0", "--gate-flipped", "0", "--gate-correlation=-1", "--gate-ruler-errors", "1000",
           "--gate-ending-errors", "1000")  # fmt: skip


def command(log: Path, home: Path, *flags: str) -> list[str]:
    words = [sys.executable, "-m", "ds4.cli.main", "nightly", "run", "--log", str(log), "--home", str(home)]
    return [*words, *FLAGS, *LENIENT, *flags]


def env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.long
def test_a_night_of_all_methods(night_log: Path, tmp_path: Path) -> None:
    """With gates that everything passes: three candidates side by side, one of them mounted, the others kept."""
    home = tmp_path / "nightly"
    done = subprocess.run(command(night_log, home), env=env(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    opened = Home.open(home)
    name = opened.current
    assert name == "2026-11-29"
    told = json.loads((opened.night(name) / "report.json").read_text())
    assert [c["name"] for c in told["candidates"]] == ["refit+margins", "carry", "margins", "refit"]
    assert [c["why"] for c in told["candidates"]].count("") == 1
    by_name = {c["name"]: c for c in told["candidates"]}
    assert by_name["margins"]["trained"]["right"] == len(told["points"]), "the solve moved what it was asked to"
    for c in told["candidates"]:
        if c["why"] != "no gains that help were found" and not c["why"].startswith("refit found"):
            gates = {v["gate"]: v["measured"] for v in c["verdicts"]}
            assert {"kept", "endings", "ruler general Sigma-min", "ruler general KL"} <= set(gates)
            assert (gates["correlation"] is None) == (c["name"] in ("carry", "refit"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "number", "code"),
    [
        ("points", signal.SIGKILL, -signal.SIGKILL),
        ("solve, margins", signal.SIGKILL, -signal.SIGKILL),
        ("free answers, margins", signal.SIGTERM, 130),
    ],
)
def test_a_killed_night_goes_on_and_gives_the_same_folder(
    night_log: Path, tmp_path: Path, at: str, number: signal.Signals, code: int
) -> None:
    """Killed or stopped in the middle of a step, by the command; the next run ends as an undisturbed one."""
    whole, home = tmp_path / "whole", tmp_path / "killed"
    flags = ("--method", "margins")
    subprocess.run(command(night_log, whole, *flags), env=env(), capture_output=True, check=True)
    process = subprocess.Popen(
        command(night_log, home, *flags), env=env(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line == f"{at} ...\n":
            process.send_signal(number)
            break
    assert process.wait() == code
    assert Home.open(home).under_way() == ["2026-11-29"] and Home.open(home).current is None
    done = subprocess.run(command(night_log, home, *flags), env=env(), capture_output=True, text=True, check=True)
    assert f"{at} ..." in done.stderr and "mounted before ..." not in done.stderr, "it went on, it did not begin anew"
    folders = [h / "nights" / "2026-11-29" for h in (home, whole)]
    names = {p.name for p in folders[1].iterdir()}
    assert {p.name for p in folders[0].iterdir()} == names
    for name in names - {"report.json", "report.md", "report.html"}:  # which have the time that it took
        assert len({(f / name).read_bytes() for f in folders}) == 1, name
