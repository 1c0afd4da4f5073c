"""What a night goes by: days, corrections of several files, foreign encodings, contradictions."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from ds4 import embedded
from ds4.checkpoint.reader import Checkpoint
from ds4.errors import FileFormatError, UsageError
from ds4.model.chat import render
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer
from ds4.posttrain.log import Logged, append, make_folder, row_bytes
from ds4.posttrain.points import Point
from ds4.server.request import Card
from solvers.nightly import judge
from solvers.nightly.inputs import Inputs, gather
from solvers.nightly.judge import Transcript

D28, D29, D30 = date(2026, 11, 28), date(2026, 11, 29), date(2026, 11, 30)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return Checkpoint.open(embedded.checkpoint()).config


@pytest.fixture(scope="module")
def tokenizer(config: ModelConfig) -> Tokenizer:
    return Tokenizer.from_file(embedded.checkpoint() / "tokenizer.json", config)


def row(tokenizer: Tokenizer, name: str, given: str = "The old house.", asked: str = "What?") -> dict[str, Any]:
    return {
        "id": name, "messages": [{"role": "user", "content": asked}], "thinking": False, "effort": None,
        "answer": {"content": given}, "answer_ids": tokenizer.encode(given), "finish_reason": "stop",
    }  # fmt: skip


@pytest.fixture
def log(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    folder = tmp_path / "log"
    make_folder(folder)
    for day in (D28, D29, D30):
        append(folder, day, [row_bytes(row(tokenizer, f"chatcmpl-{day}", asked=f"What is {day}?"))])
    return folder


def correct(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def take(log: Path, tokenizer: Tokenizer, day: date = D29, n: int = 14, files: list[Path] | None = None) -> Inputs:
    return gather(log, day, n, files, tokenizer, 4096)


WANTED = {"wanted": "The new house."}


def test_days_are_the_last_ones_up_to_the_day(log: Path, tokenizer: Tokenizer) -> None:
    """Not what came after it: a night that is solved again knows no more than it did."""
    named = [{"request_id": f"chatcmpl-{day}", **WANTED} for day in (D28, D29, D30)]
    correct(log / "corrections.jsonl", *named)
    found = take(log, tokenizer)
    assert [r.id for r in found.requests] == ["chatcmpl-2026-11-28", "chatcmpl-2026-11-29"]
    assert [r.id for r in found.today] == ["chatcmpl-2026-11-29"]
    assert [d.request_id for d in found.found] == ["chatcmpl-2026-11-28", "chatcmpl-2026-11-29"]
    assert (found.read, found.other_days) == (3, 1)
    assert [found.is_today(d.request_id) for d in found.found] == [False, True]
    one = take(log, tokenizer, n=1)
    assert [d.request_id for d in one.found] == ["chatcmpl-2026-11-29"] and one.other_days == 2
    none = take(log, tokenizer, day=date(2026, 12, 24), n=1)
    assert not none.today and not none.found
    assert none.why_no_points() == "all 3 corrections are of requests of other days"
    with pytest.raises(UsageError, match="--days 0: must be at least 1"):
        take(log, tokenizer, n=0)


def test_a_correction_of_no_known_request_counts_always(log: Path, tokenizer: Tokenizer) -> None:
    said = {"messages": [{"role": "user", "content": "Who?"}], "given": "The old house.", **WANTED}
    correct(log / "corrections.jsonl", said)
    found = take(log, tokenizer)
    assert len(found.found) == 1 and not found.is_today(None) and found.days_of == {}


def test_lines_go_on_from_file_to_file(log: Path, tokenizer: Tokenizer) -> None:
    """Contradictions between files are found, and every line is told apart."""
    correct(log / "corrections-a.jsonl", {"request_id": "chatcmpl-2026-11-29", **WANTED})
    other = {"request_id": "chatcmpl-2026-11-29", "wanted": "The red house."}
    correct(log / "corrections-b.jsonl", {"wanted": 3}, other)
    (log / "corrections-c.jsonl").write_text("\n")
    found = take(log, tokenizer)
    assert not found.found
    assert [(p.line, p.reason.split(":")[0]) for p in found.reported] == [
        (1, "contradicts line 4"), (3, "has no 'messages'"), (4, "contradicts line 1"),
    ]  # fmt: skip
    assert [(f["file"], f["first_line"]) for f in found.files] == [
        ("corrections-a.jsonl", 1), ("corrections-b.jsonl", 3),
    ]  # fmt: skip
    assert found.why_no_points() == (
        "none of 3 corrections gives a decision point; 2 contradict each other; line 1 contradicts line 4: another "
        "word in the same place"
    )
    named = take(log, tokenizer, files=[log / "corrections-a.jsonl"])
    assert len(named.found) == 1, "files that are named are all that count"


def test_no_corrections_at_all(log: Path, tokenizer: Tokenizer) -> None:
    assert take(log, tokenizer).why_no_points() == "no corrections"
    with pytest.raises(FileFormatError, match=r"no\.jsonl"):
        take(log, tokenizer, files=[log / "no.jsonl"])


def test_foreign_encodings(log: Path, tokenizer: Tokenizer) -> None:
    """A line that is not UTF-8 is reported and the others count; a file in UTF-16 is refused whole."""
    path = log / f"requests-{D29}.jsonl"
    with open(path, "ab") as f:
        f.write(b'{"id": "chatcmpl-latin1", "messages": "caf\xe9"}\n\xff\xfe{"torn\n')
    found = take(log, tokenizer)
    assert [r.id for r in found.today] == ["chatcmpl-2026-11-29"]
    assert [(d["file"], d["line"]) for d in found.damaged] == [(path.name, 2), (path.name, 3)]
    assert "is not UTF-8 text" in found.damaged[0]["reason"]
    text = json.dumps({"request_id": "chatcmpl-2026-11-29", **WANTED})
    (log / "corrections.jsonl").write_bytes(text.encode("utf-16"))
    with pytest.raises(FileFormatError, match="is UTF-16; corrections are JSON lines in UTF-8"):
        take(log, tokenizer)


def test_a_log_that_changed_is_another_night(log: Path, tokenizer: Tokenizer) -> None:
    before = take(log, tokenizer).sha256
    assert take(log, tokenizer).sha256 == before
    append(log, D30, [row_bytes(row(tokenizer, "chatcmpl-later"))])
    assert take(log, tokenizer).sha256 == before, "the next day's are not this night's"
    append(log, D29, [row_bytes(row(tokenizer, "chatcmpl-more"))])
    assert take(log, tokenizer).sha256 != before


# -- requests as tokens --


def test_transcripts_are_what_the_engine_had(tokenizer: Tokenizer, config: ModelConfig, tmp_path: Path) -> None:
    card = Card("m", config, tokenizer, {})
    chat, completion = row(tokenizer, "chatcmpl-1"), {"id": "cmpl-2", "prompt": "The old", "answer_ids": [5, 6]}
    odd = [
        {"id": "a-no-answer", "prompt": "x"}, {"id": "b-other-model", "prompt": "x", "answer_ids": [10**6]},
        {"id": "c-no-prompt", "answer_ids": [5]}, {"id": "d-images", "messages": [{"role": "user", "content": 3}],
        "answer_ids": [5]},
    ]  # fmt: skip
    logged = [Logged(tmp_path / "x", n, r) for n, r in enumerate([chat, completion, *odd], start=1)]
    found, problems = judge.transcripts(logged, card)
    wanted = tokenizer.encode_segments(render(chat["messages"], thinking=False), spell_missing=True)
    assert found[0] == Transcript("chatcmpl-1", tuple(wanted), tuple(tokenizer.encode("The old house.")))
    assert found[1].prompt == (config.bos_token_id, *tokenizer.encode("The old")) and found[1].answer == (5, 6)
    assert [p.line for p in problems] == [3, 4, 5, 6]


def test_the_newest_requests_are_watched() -> None:
    some = [Transcript(str(i), (1,), (2,) * 10) for i in range(5)]
    assert [t.id for t in judge.watched(some, 25)] == ["2", "3", "4"]
    assert judge.watched(some, 1000) == some


def test_what_counts_as_another_position() -> None:
    """Up to the decision that a correction speaks of; behind it the answer is no longer what is written."""
    t, other = Transcript("a", (1, 2), (5, 6, 7, 8)), Transcript("b", (1, 3), (5, 6))
    point = Point(1, "a", (1, 2), (5, 6), 9, 7, 0.0, 1.0, 7)
    before, after = [[5, 6, 7, 8], [5, 6]], [[5, 0, 0, 0], [5, 6]]
    assert judge.kept([t, other], before, after, [point]) == (3, 4)
    assert judge.kept([t, other], before, after, []) == (3, 6)
