"""The solve that is to carry over (carry.py), as a night runs it: all days' points against text that pays nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ds4.base.codebook import Workers
from ds4.checkpoint.reader import Checkpoint
from ds4.corpus.domain import Domain
from ds4.engine import Engine
from ds4.model.tokenizer import Tokenizer
from ds4.server.request import Card
from ds4.teacher.source import CheckpointSource
from rulers.scores import Scores
from rulers.teacher_scores import teacher_scores
from rulers.text import Text
from solvers.carry import CarryRule
from solvers.carry_night import solve_carry
from solvers.nightly.method import CARRY, Solved, Task
from solvers.nightly.methods import turns_of

SLICE, LENGTH, TOKENS = "fit", 256, 12288


@dataclass
class CarryOver:
    """Points of all days by carry.py, on about `tokens` tokens of each domain's fit slice against the original.

    cache: where the original's logits of that text are kept from night to night.
    """

    checkpoint: Path
    cache: Path
    domains: tuple[str, ...] = ("general",)
    workers: int = 1
    tokens: int = TOKENS
    length: int = LENGTH
    rule: CarryRule = field(default_factory=CarryRule)
    name: str = CARRY
    needs_points: bool = True
    needs_teacher: bool = True
    _scores: list[Scores] = field(default_factory=list)

    def about(self) -> Mapping[str, Any]:
        domains = [[name, Domain.open(name).sha256(SLICE)] for name in self.domains]
        return {"rule": asdict(self.rule), "domains": domains, "tokens": self.tokens, "length": self.length}

    def prepare(self, task: Task) -> None:
        """The original's logits of the text, from the cache or computed."""
        if self._scores:
            return
        source = CheckpointSource(Checkpoint.open(self.checkpoint))
        tokenizer = Tokenizer.from_file(self.checkpoint / "tokenizer.json", source.config)
        for name in self.domains:
            domain = Domain.open(name)
            documents = [d.text for d in domain.documents(SLICE)]
            text = Text.cut(
                documents, tokenizer.encode, source.config.bos_token_id, length=self.length, tokens=self.tokens
            )
            scores = teacher_scores(
                self.checkpoint, text, domain=domain.name, split=SLICE, length=self.length,
                folder=self.cache / "teacher", say=task.say, progress=task.progress,
            )  # fmt: skip
            self._scores.append(scores)

    def solve(self, engine: Engine, task: Task) -> Solved:
        """`task.under` is not gone on from: the first table, towards the original, is what a refit is for."""
        with Workers(self.workers) as workers:
            manifest = solve_carry(
                engine, self._scores, turns_of(task, Card.of(engine)), task.out, self.about(), zchain=task.zchain,
                rule=self.rule, workers=workers, progress=task.progress,
            )  # fmt: skip
        return Solved(manifest["figures"]["taken"] is not None, None, None, manifest["figures"])
