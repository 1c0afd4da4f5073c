"""What the fourteen days' tables are solved on and judged by, read from the engine once and kept in files.

The log, its corrections, their decision points; the last layer of every decision of a day, on the path that requests
take (prompt by prefill, answer by decode); and the same of English text with the original's logits: `fit` to solve
on, `judge` to judge by. With these any table of the last layer is judged by hand (solvers/last_layer.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from night_requests import Asked, Recurring, answer, correction, day_of, requests, write_log
from numpy.typing import NDArray

from ds4 import embedded
from ds4.engine import Engine
from ds4.model.chat import render
from ds4.model.tokenizer import BOS
from ds4.posttrain.corrections import read_corrections
from ds4.posttrain.decisions import Decision, decisions
from ds4.posttrain.log import day_file, read_day, replace_file, row_bytes
from ds4.teacher.files import save_results
from rulers.teacher_scores import teacher_scores
from rulers.text import Text
from solvers.carry import TextPlaces
from solvers.carry_night import read_text
from solvers.last_layer import Head, Places, read_places
from solvers.margin_capture import Turn

FIELDS = ("y_PKD", "picks_PK", "h_PD", "reach_P")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Day:
    """A day's decisions: points with the wanted tokens and the subjects that they are of, and the others."""

    points: TextPlaces
    a_P: NDArray[np.int64]
    subjects: tuple[str, ...]
    decisions: tuple[Decision, ...]
    others: TextPlaces


class Bed:
    """The test bed in a folder; what is there already is used.

    Args:
        days, requests: how many days; of each day's requests how many at most.
        text: tokens to solve on and to judge by, about, and of a window.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        seed: int,
        days: int,
        a_day: int | None,
        text: tuple[int, int, int],
        say: Say,
        recurring: Recurring | None = None,
    ) -> None:
        self.engine, self.folder, self.seed, self.days = engine, folder, seed, days
        self._a_day, self._text, self._say, self._recurring = a_day, text, say, recurring
        self.log = folder / "log"
        folder.mkdir(parents=True, exist_ok=True)
        self.problems: list[str] = []

    @cached_property
    def head(self) -> Head:
        return Head.of(self.engine)

    def _asked(self, number: int) -> list[Asked]:
        return requests(self.seed, number, self._recurring)[: self._a_day]

    def make_log(self) -> None:
        """Answer and log what is not in the log yet; the corrections of all days."""
        rows = []
        for number in range(1, self.days + 1):
            asked = {a.id: a for a in self._asked(number)}
            if not day_file(self.log, day_of(number)).exists():
                write_log(self.log, number, [answer(self.engine, a) for a in asked.values()])
                self._say(f"day {number}: {len(asked)} requests answered")
            logged, _ = read_day(self.log, day_of(number))
            rows += [c for entry in logged if (c := correction(asked[entry.id], dict(entry.row)))]
        replace_file(self.log / "corrections.jsonl", b"".join(map(row_bytes, rows)))

    @cached_property
    def decided(self) -> dict[str, Decision]:
        """Request id -> its decision; what gives none is in `problems`."""
        given = read_corrections(self.log / "corrections.jsonl", self.log)
        found, problems = decisions(given.rows, self.engine.tokenizer, self.engine.config.max_position_embeddings)
        self.problems = [f"line {p.line} {p.reason}" for p in (*given.problems, *problems)]
        return {d.request_id: d for d in found if d.request_id is not None}

    def day(self, number: int) -> Day:
        """Every decision of a day's answers. After a decision that was corrected the given answer counts no more."""
        path = self.folder / f"day-{number:02d}.npz"
        asked = {a.id: a for a in self._asked(number)}
        logged, _ = read_day(self.log, day_of(number))
        mine = [self.decided[entry.id] for entry in logged if entry.id in self.decided]
        if not path.exists():
            kept: list[tuple[Places, NDArray[np.float32], NDArray[np.bool_]]] = []
            for entry in logged:
                d = self.decided.get(entry.id)
                turn = self._turn(entry.row) if d is None else Turn(d.prompt, d.answer, d.a)
                places, logits_PV = read_places(self.engine, self.engine.weights, turn)
                point_P = np.zeros(len(places), bool)
                point_P[-1] = d is not None
                kept.append((places, logits_PV, point_P))
            _save(
                path, Places.join([k[0] for k in kept]), np.concatenate([k[1] for k in kept]),
                point_P=np.concatenate([k[2] for k in kept]),
            )  # fmt: skip
            self._say(f"day {number}: {sum(len(k[0]) for k in kept)} decisions read, {len(mine)} of them points")
        places, logits_PV, more = _load(path)
        point_P = more["point_P"].astype(bool)
        names = tuple(s.name for d in mine if (s := asked[str(d.request_id)].subject) is not None)
        all_text = TextPlaces(places, logits_PV, None, np.arange(len(places)))
        a_P = np.array([d.a for d in mine], np.int64)
        return Day(all_text.take(point_P), a_P, names, tuple(mine), all_text.take(~point_P))

    def _turn(self, row: Any) -> Turn:
        prompt = self.engine.tokenizer.encode_segments(render(row["messages"], thinking=False), spell_missing=True)
        return Turn(tuple(prompt), tuple(row["answer_ids"][:-1]))

    def text(self, split: str) -> TextPlaces:
        """English text as the engine reads it by prefill, and the original's logits."""
        tokens, length = self._text[0 if split == "fit" else 1], self._text[2]
        tokenizer, path = self.engine.tokenizer, self.folder / f"{split}-{tokens}.npz"
        text = Text.cut(
            embedded.slice("general", split),
            tokenizer.encode,
            tokenizer.special_id(BOS),
            length=length,
            tokens=tokens,
        )
        scores = teacher_scores(
            embedded.checkpoint(), text, domain="general", split=split, length=length, folder=self.folder / "original"
        )
        if not path.exists():
            found = read_text(self.engine, self.engine.weights, scores)
            _save(path, found.places, found.logits_PV)
            self._say(f"{split}: {len(text)} tokens of text read")
        places, logits_PV, _ = _load(path)
        return TextPlaces(places, logits_PV, scores.rows(slice(None)), text.documents)


def _save(path: Path, places: Places, logits_PV: NDArray[np.float32], **more: NDArray[Any]) -> None:
    save_results(path, {**{name: getattr(places, name) for name in FIELDS}, "logits_PV": logits_PV, **more})


def _load(path: Path) -> tuple[Places, NDArray[np.float32], dict[str, NDArray[Any]]]:
    with np.load(path) as data:
        arrays = {name: data[name] for name in data.files}
    places = Places(*(arrays.pop(name) for name in FIELDS))
    return places, arrays.pop("logits_PV"), arrays


def note(path: Path, found: dict[str, Any]) -> None:
    """A night's figures, whole or not at all."""
    replace_file(path, (json.dumps(found) + "\n").encode())
