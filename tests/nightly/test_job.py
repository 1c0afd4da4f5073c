"""Whole nights on the embedded model, with a solve of the tests' own: accepted, rejected, resumed, bad days."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4 import embedded
from ds4.cli.embedded_base import embedded_base
from ds4.engine import Engine
from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError
from ds4.posttrain.nights import resolve
from ds4.sidecar.files import encode_gains, gain_path
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from solvers.nightly import judge
from solvers.nightly.gates import Thresholds
from solvers.nightly.home import Home
from solvers.nightly.job import run_night
from solvers.nightly.method import Solved, Task
from solvers.nightly.night import Night, Outcome
from tests.conftest import opened
from tests.nightly.conftest import DAYS
from tests.nightly.test_room import Lease

ROOT = Path(__file__).parent.parent.parent
CODE = ROOT / "sidecars" / "code"


@dataclass
class Nudge:
    """Gains of the last layer that are all `factor`: a solve that takes no time, read again by a real forward."""

    factor: float = 1.0
    name: str = "margins"
    needs_points: bool = True
    needs_teacher: bool = False
    solved: int = 0
    error: Exception | None = None
    other_sidecar: bool = False

    def about(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def prepare(self, task: Task) -> None:
        assert not task.out.exists()

    def solve(self, engine: Engine, task: Task) -> Solved:
        self.solved += 1
        if self.error is not None:
            raise self.error
        c, part = engine.config, task.out.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        s_ED = np.full((c.n_routed_experts, c.hidden_size), self.factor, np.float32)
        gain_path(part, c.num_hidden_layers - 1).write_bytes(encode_gains(s_ED))
        mark = sidecar_fingerprint(task.zchain, c.num_hidden_layers)
        (part / "base.fnv").write_text(format_fingerprint(*((1, 2) if self.other_sidecar else mark)))
        part.rename(task.out)
        task.say("saved")
        if self.other_sidecar:
            return Solved(True, None, None, {})
        engine.remount(task.zchain, task.out)
        rows = judge.margins(engine, task.points)
        return Solved(True, tuple((p.b, r["against"]) for p, r in zip(task.points, rows, strict=True)), 1.0, {})


@contextmanager
def bar(what: str) -> Iterator[None]:
    yield None


@dataclass(frozen=True)
class InTests(Night):
    """On the tests' own device; nothing but that is other than in a real night."""

    def open_engine(self, progress: Any = None) -> Engine:
        return Engine.open(
            self.base, engram_dir=self.engram_dir, zchain=self.zchain, prefill="replay",
            device=opened("fast", "greedy"),
        )  # fmt: skip


@pytest.fixture
def night(night_log: Path, tmp_path: Path) -> Night:
    """The second of the two days; gates that a solve which trains nothing can pass."""
    log = tmp_path / "log"
    shutil.copytree(night_log, log)
    log.chmod(0o700)
    return InTests(
        tmp_path / "nightly", log, DAYS[1], embedded_base(), tmp_path / "cache", engram_dir=embedded.checkpoint(),
        method="margins", thresholds=Thresholds(flipped=0.0), answer_limit=2, prompts=("Hello!",),
    )  # fmt: skip


def run(night: Night, solve: Nudge | None = None, server: Any = None, said: list[str] | None = None) -> Outcome:
    found = [] if said is None else said
    return run_night(night, {"margins": solve or Nudge()}, server, found.append, bar)


def events(night: Night) -> list[tuple[str, str]]:
    return [(e["event"], str(e.get("reason") or e.get("night"))) for e in Home.open(night.home).history.read()[0]]


class Server:
    """Lends a device, always has somebody waiting, and mounts what is current."""

    def __init__(self, home: Path) -> None:
        self.home, self.borrowed, self.mounted = home, 0, [""]

    @contextmanager
    def borrow(self) -> Iterator[Lease]:
        self.borrowed += 1
        yield Lease(waiting=1)

    def busy(self) -> bool:
        return False

    def reload(self) -> str:
        found = resolve(self.home)
        self.mounted.append("none" if found is None else found.name)
        return self.mounted[-1]


class Refuses(Server):
    """Does not take what it is told to mount, the first time."""

    def reload(self) -> str:
        if len(self.mounted) == 1:
            self.mounted.append("refused")
            raise Ds4Error("the server has another sidecar")
        return super().reload()


def test_a_night_is_accepted_and_mounted_and_not_solved_twice(night: Night, night_engine: Engine) -> None:
    """With a server that does not take it at first: an error, and the next run asks again, and does nothing else."""
    server, solve = Refuses(night.home), Nudge()
    with pytest.raises(Ds4Error, match="another sidecar"):
        run(night, solve, server)
    home = Home.open(night.home)
    assert home.current == "2026-11-29", "it passed, and is current"
    out = run(night, solve, server)
    assert (out.event, out.name, out.code) == ("accepted", "2026-11-29", 0)
    assert server.mounted == ["", "refused", "2026-11-29"] and solve.solved == 2, "once with, once without the day"
    made = resolve(night.home)
    assert made is not None and {p.name for p in made.iterdir()} == {
        "gr_L05.bin", "base.fnv", "night.json", "report.md", "report.json", "report.html",
    }  # fmt: skip
    assert not home.work("2026-11-29").exists() and home.holder() is None and home.under_way() == []
    told = json.loads((made / "report.json").read_text())
    assert {v["gate"]: v["passed"] for v in told["candidates"][0]["verdicts"]} == {
        "flipped": True, "correlation": True, "kept": True, "ruler general": None, "endings": True,
    }  # fmt: skip
    assert [p["leads"]["margins"] for p in told["points"]] == [p["before"] for p in told["points"]]
    assert told["held_out"]["margins"]["points"] == 1, "the day's own point, solved without it"
    night_engine.remount(None, made)  # what was accepted can be mounted by anybody
    night_engine.remount(None, None)
    again = run(night, solve, server)
    assert (again.event, again.reason) == ("nothing to do", "2026-11-29: solved already, as 2026-11-29")
    assert solve.solved == 2 and [e for e, _ in events(night)] == ["accepted", "failed", "reloaded", "nothing to do"]


@pytest.mark.long
def test_a_borrowed_device_that_is_wanted_back_after_every_step(
    night: Night, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same night as on an engine of its own."""
    whole = replace(night, home=tmp_path / "undisturbed", zchain=CODE)
    run(whole)
    night = replace(night, budget=1, wait_s=1e9, zchain=CODE)
    server, said = Server(night.home), list[str]()
    monkeypatch.setattr("solvers.nightly.room.LOOK_EVERY_S", 0.001)
    assert run(night, server=server, said=said).event == "accepted"
    assert server.borrowed > 5 and any("borrowing the server's device" in line for line in said)
    told = json.loads((night.home / "nights" / "2026-11-29" / "report.json").read_text())
    assert told["memory"]["borrowed"] and told["memory"]["pauses"] == server.borrowed - 1
    same_folder(night, whole, without=("seconds", "memory"))


def same_folder(night: Night, whole: Night, without: tuple[str, ...] = ("seconds",)) -> None:
    folders = [h / "nights" / "2026-11-29" for h in (night.home, whole.home)]
    for name in ("gr_L05.bin", "base.fnv", "night.json"):
        assert len({(f / name).read_bytes() for f in folders}) == 1, name
    mine, theirs = (json.loads((f / "report.json").read_text()) for f in folders)
    assert {k: v for k, v in mine.items() if k not in without} == {
        k: v for k, v in theirs.items() if k not in without
    }


def test_a_candidate_that_breaks_answers_is_rejected(night: Night) -> None:
    """Gains of 3 in the last layer: other positions say other things. The candidate is kept, and not mounted."""
    home = Home.make(night.home)
    home.night("2026-11-28").mkdir()
    home.switch("2026-11-28")
    out = run(night, Nudge(3.0))
    assert (out.event, out.code) == ("rejected", 1) and "kept: " in out.reason
    assert home.current == "2026-11-28" and home.names("rejected") == ["2026-11-29"]
    assert (home.path / "rejected" / "2026-11-29" / "gr_L05.bin").is_file()
    told = json.loads((home.path / "rejected" / "2026-11-29" / "report.json").read_text())
    assert told["before"] == "2026-11-28" and "2026-11-28, which is mounted, could not" not in str(told["notes"])
    assert events(night) == [("rejected", out.reason.removeprefix("margins: "))]


def test_an_interrupted_night_goes_on_and_gives_the_same_folder(night: Night, tmp_path: Path) -> None:
    """Ctrl-C as each of several steps begins, then once more before publishing."""
    whole = replace(night, home=tmp_path / "undisturbed")
    run(whole)
    steps = list(json.loads((whole.home / "nights" / "2026-11-29" / "report.json").read_text())["seconds"])

    class Interrupts(list[str]):
        def __init__(self, at: str) -> None:
            self.at = at

        def append(self, line: str) -> None:
            if line == f"{self.at} ...":
                raise KeyboardInterrupt

    for at in ("solve, margins", "choose"):
        assert at in steps, steps
        with pytest.raises(KeyboardInterrupt):
            run(night, said=Interrupts(at))
        home = Home.open(night.home)
        assert home.current is None and home.under_way() == ["2026-11-29"] and home.holder() is None
    solve, said = Nudge(), list[str]()
    assert run(night, solve, said=said).event == "accepted"
    assert solve.solved == 0 and said == ["choose ..."], "all else was done"
    same_folder(night, whole)


# -- bad days: what was mounted stays, and history says why --


@pytest.fixture
def mounted(night: Night) -> Home:
    home = Home.make(night.home)
    home.night("2026-11-01").mkdir()
    home.switch("2026-11-01")
    return home


def stays(home: Home, event: str, words: str) -> None:
    """Nothing was mounted, and the last line of history is this."""
    assert home.current == "2026-11-01" and home.names() == ["2026-11-01"] and home.names("rejected") == []
    last = home.history.read()[0][-1]
    assert last["event"] == event and words in last["reason"], last
    assert home.holder() is None


def test_days_with_nothing_to_go_by(night: Night, mounted: Home) -> None:
    out = run(replace(night, day=date(2026, 12, 24)))
    assert (out.event, out.code) == ("nothing to do", 0)
    stays(mounted, "nothing to do", "2026-12-24: no requests")
    first = json.loads((night.log / "corrections.jsonl").read_text().splitlines()[1])
    other = {**first, "wanted": first["wanted"].rsplit(" ", 3)[0] + " zebra"}
    (night.log / "corrections.jsonl").write_text("".join(json.dumps(c) + "\n" for c in (first, other)))
    assert run(night).code == 0
    stays(mounted, "nothing to do", "none of 2 corrections gives a decision point; 2 contradict each other")
    (night.log / "corrections.jsonl").unlink()
    assert run(night).code == 0
    stays(mounted, "nothing to do", "2026-11-29: no corrections, and no original for a refit")


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("no base", FileFormatError, "none.gguf"),
        ("no log", UsageError, "nowhere"),
        ("no original", UsageError, "--method refit solves against the original"),
        ("original not there", Ds4Error, "no-checkpoint"),
        ("UTF-16", FileFormatError, "is UTF-16"),
        ("no sidecar", FileFormatError, "no-sidecar"),
    ],
)
def test_what_cannot_be_is_said_before_any_work(
    night: Night, mounted: Home, kind: str, error: type[Exception], words: str
) -> None:
    nowhere = night.home.parent
    changed: dict[str, Night] = {
        "no base": replace(night, base=nowhere / "none.gguf"),
        "no log": replace(night, log=nowhere / "nowhere"),
        "no original": replace(night, method="refit"),
        "original not there": replace(night, teacher=nowhere / "no-checkpoint"),
        "no sidecar": replace(night, zchain=nowhere / "no-sidecar"),
        "UTF-16": night,
    }
    if kind == "UTF-16":
        path = night.log / "corrections.jsonl"
        path.write_bytes(path.read_text().encode("utf-16"))
    solvers: dict[str, Any] = {"margins": Nudge(), "refit": replace(Nudge(name="refit"), needs_teacher=True)}
    with pytest.raises(error, match=words):
        run_night(changed[kind], solvers, None, lambda line: None, bar)
    stays(mounted, "failed", words)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "MemoryError"),
        pytest.param(Ds4Error("the solve broke"), "the solve broke", marks=pytest.mark.long),
        (None, "solved on sidecar"),
    ],
)
def test_a_solve_that_fails(night: Night, mounted: Home, error: Exception | None, words: str) -> None:
    """By an error, without memory, or with a folder that is of another sidecar; the next run begins there again."""
    solve = Nudge(error=error, other_sidecar=error is None)
    with pytest.raises(FileFormatError if error is None else type(error)):
        run(night, solve)
    stays(mounted, "failed", words)
    assert mounted.under_way() == ["2026-11-29"]


def test_a_full_disk(night: Night, mounted: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the points are written: history has no room either, the error is what is said, and the lock is free."""
    said: list[str] = []
    real = os.write

    def full(fd: int, data: bytes) -> int:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if ".points.jsonl" in name or "history" in name:
            real(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CapacityError, match=r"points\.jsonl: the disk is full"):
        run(night, said=said)
    assert "history has no line of this" in said[-1]
    assert mounted.current == "2026-11-01" and mounted.history.read() == ([], 0) and mounted.holder() is None
    assert not list(mounted.work("2026-11-29").glob(".points*"))


def test_a_second_job_is_told_who_is_at_work(night: Night, mounted: Home) -> None:
    with (
        mounted.locked("another night"),
        pytest.raises(UsageError, match=rf"process {os.getpid()} \(another night\)"),
    ):
        run(night)
    assert mounted.history.read() == ([], 0), "that is the other one's folder"


def test_an_older_night_that_was_never_finished_is_given_up(night: Night) -> None:
    home = Home.make(night.home)
    home.work("2026-11-27").mkdir()
    (home.work("2026-11-27") / "job.json").write_text("{}")
    run(replace(night, day=date(2026, 12, 24)))
    assert home.under_way() == [] and events(night)[0] == ("given up", "2026-12-24 begins")
