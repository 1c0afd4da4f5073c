"""What a night has to go by: the log's requests of its days, and what people's corrections say of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from ds4.errors import UsageError
from ds4.model.tokenizer import Tokenizer
from ds4.posttrain.corrections import Correction, read_corrections
from ds4.posttrain.decisions import Decision, decisions
from ds4.posttrain.log import Logged, Problem, days, read_file, read_log, row_bytes

CORRECTIONS = "corrections*.jsonl"


@dataclass(frozen=True)
class Inputs:
    """Requests and decisions.

    Attributes:
        day: the last of the days.
        requests: of all the days, oldest first; `today` those of `day`.
        damaged: lines of the log that are no requests: {"file", "line", "reason"}.
        found: decisions of corrections, those of other days left out.
        reported: corrections without one; lines are counted through the files in their order.
        files: {"file", "sha256", "first_line"} of the corrections.
        read, other_days: corrections in all, and of requests that are in the log on other days.
        days_of: day of each request that is named by a correction, if it is in the log.
    """

    day: date
    requests: tuple[Logged, ...]
    today: tuple[Logged, ...]
    damaged: tuple[dict[str, Any], ...]
    found: tuple[Decision, ...]
    reported: tuple[Problem, ...]
    files: tuple[dict[str, Any], ...]
    read: int
    other_days: int
    days_of: dict[str, date]

    @property
    def sha256(self) -> str:
        """Of the requests' rows: a log that was added to or forgotten from gives another."""
        h = hashlib.sha256()
        for logged in self.requests:
            h.update(row_bytes(logged.row))
        return h.hexdigest()

    def is_today(self, request_id: str | None) -> bool:
        return request_id is not None and self.days_of.get(request_id) == self.day

    def span(self, n_days: int) -> list[str]:
        """First and last of the days."""
        return [str(self.day - timedelta(days=n_days - 1)), str(self.day)]

    def to_json(self) -> dict[str, Any]:
        """For the report; quotes nothing."""
        return {
            "requests": {"day": len(self.today), "days": len(self.requests), "damaged": list(self.damaged)},
            "corrections": {
                "files": list(self.files), "read": self.read, "of_other_days": self.other_days,
                "decisions": len(self.found),
                "reported": [{"line": p.line, "reason": p.reason} for p in self.reported],
            },
        }  # fmt: skip

    def why_no_points(self) -> str:
        """In a line."""
        if not self.read:
            return "no corrections"
        if self.other_days == self.read:
            return f"all {self.read} corrections are of requests of other days"
        contradict = sum("contradicts" in p.reason for p in self.reported)
        first = self.reported[0] if self.reported else None
        why = f"; line {first.line} {first.reason}" if first else ""
        if contradict:
            why = f"; {contradict} contradict each other{why}"
        return f"none of {self.read} corrections gives a decision point{why}"


def gather(
    log: Path, day: date, n_days: int, files: Sequence[Path] | None, tokenizer: Tokenizer, context: int
) -> Inputs:
    """The last `n_days` days of a log up to `day`, and its corrections.

    Args:
        files: of corrections; None: corrections*.jsonl in the log's folder.
        context: tokens that the model takes.

    Raises:
        UsageError: no day at all.
        FileFormatError: a file of corrections is not there, or in another encoding; a day's file cannot be read.
    """
    if n_days < 1:
        raise UsageError(f"--days {n_days}: must be at least 1")
    by_path = {path: d for d, path in days(log).items()}
    requests: list[Logged] = []
    today: list[Logged] = []
    damaged: list[dict[str, Any]] = []
    for path, d in by_path.items():
        if day - timedelta(days=n_days) < d <= day:
            rows, problems = read_file(path)
            requests += rows
            today += rows if d == day else []
            damaged += [{"file": path.name, "line": p.line, "reason": p.reason} for p in problems]
    rows_c, reported, told, read = _corrections(log, files)
    named = {c.request_id for c in rows_c if c.request_id is not None}
    days_of = {i: by_path[logged.path] for i, logged in read_log(log, named).items()} if named else {}
    ours = [c for c in rows_c if _within(days_of.get(c.request_id or ""), day, n_days)]
    found, refused = decisions(ours, tokenizer, context)
    return Inputs(
        day, tuple(requests), tuple(today), tuple(damaged), tuple(found),
        tuple(sorted([*reported, *refused], key=lambda p: p.line)), tuple(told), read, len(rows_c) - len(ours),
        days_of,
    )  # fmt: skip


def _within(of: date | None, day: date, n_days: int) -> bool:
    """Whether a correction counts: its request is of these days, or nobody knows of when it is."""
    return of is None or day - timedelta(days=n_days) < of <= day


def _corrections(
    log: Path, files: Sequence[Path] | None
) -> tuple[list[Correction], list[Problem], list[dict[str, Any]], int]:
    """All of them, numbered as if the files were one; problems; the files; how many lines that is."""
    rows: list[Correction] = []
    problems: list[Problem] = []
    told: list[dict[str, Any]] = []
    lines = read = 0
    for path in sorted(log.glob(CORRECTIONS)) if files is None else files:
        if files is None and not path.read_bytes().strip():
            continue
        found = read_corrections(path, log)
        rows += [replace(c, line=lines + c.line) for c in found.rows]
        problems += [Problem(lines + p.line, p.reason) for p in found.problems]
        told.append({"file": path.name, "sha256": found.sha256, "first_line": lines + 1})
        read += len(found.rows) + len(found.problems)
        lines += path.read_bytes().count(b"\n") + 1
    return rows, problems, told, read
