"""The candidates of a night: solved, mounted and judged, step by step; each step's result is kept (steps.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ds4.engine import Engine
from ds4.errors import Ds4Error, FileFormatError, UsageError
from ds4.posttrain.log import Logged
from ds4.posttrain.points import Point, read_points, score_points, write_points
from ds4.server.request import Card
from ds4.sidecar.files import list_folder
from ds4.sidecar.fingerprint import check_base
from rulers.identity import file_mark, folder_mark
from rulers.journal import Journal
from rulers.scores import Meta, Scores
from solvers.nightly import gates, judge
from solvers.nightly.gates import Verdict
from solvers.nightly.inputs import Inputs
from solvers.nightly.method import BEST, Solved, Solver, Task
from solvers.nightly.night import Bar, Night, Progress, RulerText, Say
from solvers.nightly.room import Room
from solvers.nightly.steps import Steps

T = TypeVar("T")
Work = Callable[[Engine, Progress | None], T]
CANDIDATES, REHEARSALS = "candidates", "rehearsals"  # folders of a night's work
ALONE = "before"  # the base with its sidecar, no candidate on


@dataclass
class Seen:
    """What the engine does beside points, with a candidate on or without.

    Attributes:
        likeliest: see judge.likeliest.
        answers: see judge.free_answers.
        readings: domain -> file of the reading.
    """

    likeliest: list[list[int]]
    answers: dict[str, int]
    readings: dict[str, Path]


@dataclass
class Candidate:
    """One, with everything that was found out about it.

    Attributes:
        name: refit, margins or refit+margins.
        folder: the post-training folder; None: there is none, for what `missing` says.
        figures: each solve's own.
        trains: whether it was solved for the points.
        leads: of the points, by a real forward; None without points.
        held_out: see judge.carried.
    """

    name: str
    folder: Path | None
    figures: list[dict[str, Any]]
    missing: str = "no gains that help were found"
    trains: bool = False
    leads: list[float] | None = None
    answers: dict[str, int] = field(default_factory=dict)
    rulers: dict[str, dict[str, Any]] = field(default_factory=dict)
    held_out: dict[str, Any] | None = None
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def why_not(self) -> str:
        """Why it may not be mounted; empty: it passed."""
        if self.folder is None:
            return self.missing
        return "" if gates.passes(self.verdicts) else gates.reasons(self.verdicts)

    @property
    def rank(self) -> tuple[float, ...]:
        """Of those that pass, the highest is taken (job.py). What people corrected comes first: a candidate that was
        not solved for it is taken where none that was passes.
        """
        held = self.held_out["right_after"] if self.held_out else 0
        right = sum(x > 0 for x in self.leads or ())
        general = next(iter(self.rulers.values()), None)
        return (self.trains, held, right, general["sigma_min"]["mean"] if general else 0.0)


@dataclass
class Bench:
    """Runs the steps of one night that need the engine.

    Args:
        originals: the original's scores of the rulers' texts, by domain as the night names it.
        mounted: the post-training folder that is mounted now.

    Attributes:
        points, before: of the base with its sidecar alone.
        held_out: figures of the day's own points, by what was mounted or would have been.
        notes: what the report should say.
    """

    night: Night
    steps: Steps
    room: Room
    inputs: Inputs
    card: Card
    n_layers: int
    model: str
    solvers: dict[str, Solver]
    originals: dict[str, Scores]
    mounted: Path | None
    bar: Bar
    say: Say
    points: list[Point] = field(default_factory=list)
    before: Seen | None = None
    held_out: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _watched: list[judge.Transcript] = field(default_factory=list)
    _solved: dict[tuple[str, str], Solved] = field(default_factory=dict)

    def start(self) -> None:
        """What the base with its sidecar does today; how last night's folder does on the day's points."""
        if self.inputs.found:
            path = self.steps.folder / "points.jsonl"
            self._step("points", None, lambda e, p: self._score(e, path, p))
            self.points = read_points(path)[1]
        found, problems = judge.transcripts(self.inputs.requests, self.card)
        if problems:
            first = problems[0]
            self.notes.append(
                f"{len(problems)} requests could not be read as tokens and were not watched; line {first.line} "
                f"{first.reason}"
            )
        self._watched = judge.watched(found)
        self.before = self._see(None, ALONE)
        today = self._today
        if self.mounted is not None and today:
            name = self.mounted.name
            told = self.steps.do(f"the day's points, {name} on", lambda: self._with_mounted(self.mounted, today))
            if "error" in told:
                self.notes.append(f"{name}, which is mounted, could not be looked at: {told['error']}")
            else:
                self.held_out[f"mounted ({name})"] = told

    def _with_mounted(self, folder: Path | None, today: Sequence[Point]) -> dict[str, Any]:
        """What last night's folder makes of the day's points; why not, where it cannot be mounted on this sidecar."""
        try:
            rows = self._on(folder, "the day's points", lambda e, p: judge.margins(e, today, progress=p))
        except FileFormatError as e:
            return {"error": str(e)}
        return judge.carried(today, [p.margin for p in today], [r["lead"] for r in rows])

    @property
    def _today(self) -> list[Point]:
        return [p for p in self.points if self.inputs.is_today(p.request_id)]

    @property
    def _earlier(self) -> list[Point]:
        return [p for p in self.points if not self.inputs.is_today(p.request_id)]

    def candidate(self, name: str, chain: Sequence[str]) -> Candidate:
        """Solve it, and judge it by a real forward. Of several candidates one that a solve refuses is none, and says
        why.

        Raises:
            Ds4Error: a solve failed, or wrote what cannot be mounted.
        """
        try:
            return self._candidate(name, chain)
        except UsageError as e:  # as of too few requests for a refit
            if self.night.method != BEST:
                raise
            return Candidate(name, None, [], str(e))

    def _candidate(self, name: str, chain: Sequence[str]) -> Candidate:
        solved: list[Solved] = []
        under: Path | None = None
        for i, solver in enumerate(chain):
            key = "+".join(chain[: i + 1])
            solved.append(self._solve(CANDIDATES, key, solver, self.points, self.inputs.requests, under))
            if not solved[-1].wrote and i + 1 < len(chain):
                why = f"{key} found no gains that help: nothing to go on from"
                return Candidate(name, None, [dict(s.figures) for s in solved], why)
            under = self.steps.folder / CANDIDATES / key
        folder = under if solved[-1].wrote else None
        made = Candidate(name, folder, [dict(s.figures) for s in solved])
        if folder is None:
            return made
        own, apart = solved[-1], 0.0
        if self.points:
            against = None if own.real is None else [b for b, _ in own.real]
            rows = self._step(f"points, {name}", folder, lambda e, p: judge.margins(e, self.points, against, p))
            made.leads = [float(r["lead"]) for r in rows]
            if own.real is not None:
                apart = max(abs(r["against"] - m) for r, (_, m) in zip(rows, own.real, strict=True))
        seen = self._see(folder, name)
        made.answers = seen.answers
        assert self.before is not None
        for text, after in seen.readings.items():
            made.rulers[self.originals[text].meta.domain] = judge.difference(self.before.readings[text], after)
        made.trains = self.solvers[chain[-1]].needs_points
        made.held_out = self._held_out(name, chain, made.leads)
        made.verdicts = self._verdicts(made, seen, own, apart)
        return made

    # -- solving --

    def _solve(
        self, root: str, key: str, solver: str, points: Sequence[Point], requests: Sequence[Logged],
        under: Path | None,
    ) -> Solved:  # fmt: skip
        """One solve's folder, root/KEY; a chain's first part may be another candidate, and is not made twice."""
        if (root, key) in self._solved:
            return self._solved[root, key]
        out = self.steps.folder_of(root, key)
        task = Task(out, self.night.zchain, under, points, requests, self._saved)

        def work() -> dict[str, Any]:
            with self.bar(f"{solver}: what takes no engine") as progress:
                self.solvers[solver].prepare(replace(task, progress=progress))

            def solve(engine: Engine) -> Solved:
                with self.bar(solver) as progress:
                    return self.solvers[solver].solve(engine, replace(task, progress=progress))

            got = self.room.run(solve)
            if got.wrote:
                self._check(out)
            return {
                "wrote": got.wrote, "real": got.real, "correlation": got.correlation, "figures": dict(got.figures)
            }  # fmt: skip

        told = self.steps.do(f"{'solve' if root == CANDIDATES else 'solve without the day'}, {key}", work)
        real = None if told["real"] is None else tuple((int(b), float(m)) for b, m in told["real"])
        made = Solved(told["wrote"], real, told["correlation"], told["figures"])
        self._solved[root, key] = made
        return made

    def _check(self, out: Path) -> None:
        """A solve's folder can be mounted on this sidecar, and on no other."""
        n_layers = self.n_layers
        if not list_folder(out, n_layers).gains:
            raise Ds4Error(f"{out}: the solve says that it wrote gains, and there are none")
        warning = check_base(out, self.night.zchain, n_layers)
        if warning is not None:
            raise Ds4Error(f"{warning}; the solve must say so")

    def _saved(self, line: str) -> None:
        self.say(line)
        self.room.breathe()

    def _held_out(self, name: str, chain: Sequence[str], leads: list[float] | None) -> dict[str, Any] | None:
        """The day's points under a solve that knew only the earlier days; a refit never knows what was wanted."""
        today, earlier = self._today, self._earlier
        if not today or leads is None:
            return None
        if self.solvers[chain[-1]].needs_points:  # it knows what was wanted
            if not earlier:
                return None
            under = self.steps.folder / CANDIDATES / "+".join(chain[:-1]) if len(chain) > 1 else None
            known = self.inputs.requests[: len(self.inputs.requests) - len(self.inputs.today)]
            if not self._solve(REHEARSALS, name, chain[-1], earlier, known, under).wrote:
                return None
            folder = self.steps.folder / REHEARSALS / name
            rows = self._step(f"the day's points, {name}", folder, lambda e, p: judge.margins(e, today, progress=p))
            after = [float(r["lead"]) for r in rows]
        else:
            after = [x for x, p in zip(leads, self.points, strict=True) if self.inputs.is_today(p.request_id)]
        self.held_out[name] = judge.carried(today, [p.margin for p in today], after)
        return self.held_out[name]

    # -- judging --

    def _verdicts(self, made: Candidate, seen: Seen, own: Solved, apart: float) -> list[Verdict]:
        assert self.before is not None
        limits, out = self.night.thresholds, []
        if made.trains and made.leads is not None:
            was = [p.margin for p in self.points]
            if own.real is not None:
                out.append(gates.flipped(was, made.leads, limits.flipped))
            else:  # it pulls, and promises no margin
                out.append(gates.more_right(was, made.leads))
            out.append(gates.correlation(own.correlation, apart, limits.correlation))
        else:
            out += [Verdict.left_out(gate, "this method trains no points") for gate in ("flipped", "correlation")]
        same, n = judge.kept(self._watched, self.before.likeliest, seen.likeliest, self.points if made.trains else ())
        out.append(gates.kept(same, n, limits.kept))
        for text in self.night.texts:
            scores = self.originals.get(text.domain)
            if scores is None:
                out.append(Verdict.left_out(f"ruler {text.domain}", "no original is named (--teacher)"))
            else:
                out += gates.ruler(scores.meta.domain, made.rulers[scores.meta.domain], limits.ruler_errors)
        if self.night.no_domain is not None:
            out.append(Verdict.left_out("ruler of the mounted domain", self.night.no_domain))
        before = (self.before.answers["ended"], self.before.answers["answers"])
        out.append(gates.endings(before, (seen.answers["ended"], seen.answers["answers"]), limits.ending_errors))
        return out

    def _see(self, folder: Path | None, what: str) -> Seen:
        """Other positions, free answers and readings with a candidate on, or without one."""
        work = self.steps.folder
        likeliest = self._step(
            f"other positions, {what}", folder, lambda e, p: judge.likeliest(e, self._watched, p)
        )  # fmt: skip

        def answers(engine: Engine, progress: Progress | None) -> dict[str, int]:
            night = self.night
            job = f"{what} {night.answer_limit} {len(night.prompts)} {len(self.points)}"
            with Journal(work / f"answers-{what}.journal.jsonl", job) as journal:
                return judge.free_answers(
                    engine, night.prompts, self.points, night.answer_limit, journal, self._breathing(progress)
                )

        told = self._step(f"free answers, {what}", folder, answers)
        readings = {}
        for i, text in enumerate(self.night.texts):
            if text.domain in self.originals:
                name = self._step(
                    f"ruler {i + 1}, {what}", folder, self._reading(text, f"ruler-{i + 1}-{what}", folder)
                )
                readings[text.domain] = work / name
        return Seen(likeliest, told, readings)

    def _reading(self, text: RulerText, name: str, folder: Path | None) -> Work[str]:
        scores, options = self.originals[text.domain], self.night.options

        def read(engine: Engine, progress: Progress | None) -> str:
            parts = [f"{self.night.base.name} {file_mark(self.night.base)}"]
            for flag, mounted in (("zchain", self.night.zchain), ("posttrain", folder)):
                if mounted is not None:
                    parts.append(f"{flag} {mounted.resolve().name} {folder_mark(mounted)}")
            m, arithmetic = scores.meta, f"{options.activations} {options.kv}"
            ours = Meta(self.model, m.domain, m.split, m.length, arithmetic, "prefill", " + ".join(parts))
            return judge.read(engine, scores, ours, self.steps.folder, name, self._breathing(progress)).name

        return read

    def _score(self, engine: Engine, path: Path, progress: Progress | None) -> int:
        points = score_points(self.inputs.found, engine.session, None, progress)
        write_points(path, {"day": str(self.night.day), "sidecars": engine.sidecars, "teacher": None}, points)
        return len(points)

    def _step(self, name: str, folder: Path | None, work: Work[T]) -> Any:
        """A step on the engine with a folder mounted on the sidecar."""
        return self.steps.do(name, lambda: self._on(folder, name, work))

    def _on(self, folder: Path | None, name: str, work: Work[T]) -> T:
        def run(engine: Engine) -> T:
            engine.remount(self.night.zchain, folder)
            with self.bar(name) as progress:
                return work(engine, progress)

        return self.room.run(run)

    def _breathing(self, progress: Progress | None) -> Progress:
        """For work that keeps what it has done, unit by unit."""

        def tell(done: int, total: int) -> None:
            if progress is not None:
                progress(done, total)
            self.room.breathe()

        return tell
