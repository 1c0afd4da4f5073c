"""The two solves as a night runs them: margins (posttrain.py) and refit (refit.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ds4.base.codebook import Workers
from ds4.corpus.domain import Domain
from ds4.engine import Engine
from ds4.model.tokenizer import Tokenizer
from ds4.server.request import Card, ServedModel
from ds4.teacher.run import Teacher
from ds4.teacher.source import open_source
from rulers.identity import file_mark
from rulers.teacher_scores import weights_mark
from solvers.day_text import SLICE, SOURCE, beside, day_text, domain_text
from solvers.fixture import Fixture, make_fixture, plan_fixture
from solvers.margin_capture import Turn
from solvers.nightly.judge import corrected, transcripts, watched
from solvers.nightly.method import MARGINS, REFIT, Solved, Task
from solvers.posttrain import NightRule, solve_night
from solvers.refit import Layers, refit, require_requests


@dataclass
class Margins:
    """Decision points by the margin solve; the day's other decisions are to stay as they are."""

    workers: int = 1
    rule: NightRule = field(default_factory=NightRule)
    name: str = MARGINS
    needs_points: bool = True
    needs_teacher: bool = False

    def about(self) -> Mapping[str, Any]:
        return asdict(self.rule)

    def prepare(self, task: Task) -> None:
        """Everything is done on the engine."""

    def solve(self, engine: Engine, task: Task) -> Solved:
        turns = turns_of(task, Card.of(engine))
        with Workers(self.workers) as workers:
            manifest = solve_night(
                engine, turns, task.out, {}, zchain=task.zchain, under=task.under, rule=self.rule, workers=workers,
                say=None, progress=task.progress,
            )  # fmt: skip
        figures = dict(manifest["figures"])
        real = tuple((int(p["b"]), float(p["real"])) for p in figures.pop("points"))
        return Solved(True, real, figures["correlation"], figures)


def turns_of(task: Task, model: ServedModel) -> list[Turn]:
    """Points, then what is to stay: the answers of the newest requests, but not where a point's own answer goes on
    after the decision that was wrong.
    """
    points = [Turn(p.prompt, p.answer, p.a) for p in task.points]
    others = watched(transcripts(task.requests, model)[0])
    return [
        *points,
        *(Turn(t.prompt, t.answer[:-1]) for t in others if not any(corrected(t, p) for p in task.points)),
    ]


@dataclass
class Refit:
    """Gains of all layers, or of the last one, refitted on the days' text against the original.

    beside: domains whose text is not to suffer, about `beside_tokens` of each.
    """

    base: Path
    checkpoint: Path
    workers: int = 1
    layers: Layers = "all"
    tokens: int = 8192
    length: int = 512
    beside: tuple[str, ...] = ("general",)
    beside_tokens: int = 4096
    arith: str = "none"
    name: str = REFIT
    needs_points: bool = False
    needs_teacher: bool = True
    _made: dict[Path, tuple[Teacher, Fixture]] = field(default_factory=dict)

    def about(self) -> Mapping[str, Any]:
        domains = [[name, Domain.open(name).sha256(SLICE)] for name in self.beside]
        return {
            "layers": self.layers, "tokens": self.tokens, "length": self.length, "beside": domains,
            "beside_tokens": self.beside_tokens, "arith": self.arith,
        }  # fmt: skip

    def prepare(self, task: Task) -> None:
        """What the original does on the days' text, beside the folder that is to be; goes on after a kill.

        Raises:
            UsageError: too few requests to hold one out.
        """
        teacher = Teacher(open_source(self.checkpoint), self.arith)
        tokenizer = Tokenizer.from_file(self.checkpoint / "tokenizer.json", teacher.config)
        card = Card(self.base.stem, teacher.config, tokenizer, {})
        day = day_text(task.requests, card, length=self.length, tokens=self.tokens)
        require_requests(len(day.documents), "the log's days")
        bos = teacher.config.bos_token_id
        others = [
            domain_text(Domain.open(name), tokenizer, bos, length=self.length, tokens=self.beside_tokens)
            for name in self.beside
        ]
        text, documents = beside(day, others)
        path = task.out.with_name(f"{task.out.name}.fixture")
        plan = plan_fixture(path, teacher, text, documents, domain=SOURCE, split="days")
        self._made[task.out] = teacher, make_fixture(plan, teacher, progress=task.progress)

    def solve(self, engine: Engine, task: Task) -> Solved:
        teacher, fixture = self._made[task.out]
        about = {
            "base": f"{self.base.name} {file_mark(self.base)}",
            "teacher": f"{self.checkpoint.resolve().name} {weights_mark(self.checkpoint)}",
            "zchain": None if task.zchain is None else task.zchain.resolve().name, **self.about(),
        }  # fmt: skip
        with Workers(self.workers) as workers:
            manifest = refit(
                engine, teacher, fixture, task.zchain, task.out, json.loads(json.dumps(about)), layers=self.layers,
                workers=workers, say=task.say, progress=task.progress,
            )  # fmt: skip
        written = [r for r in manifest["layers"] if r["files"]]
        told = {k: manifest[k] for k in ("requests", "held_out_requests", "held_out_rows", "fingerprint")}
        return Solved(bool(written), None, None, {**told, "layers_with_gains": len(written)})
