"""The text of a day: the tokens that the server read and drew, each once, conversations whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4 import embedded
from ds4.checkpoint.reader import Checkpoint
from ds4.corpus import Domain
from ds4.errors import UsageError
from ds4.model.chat import render
from ds4.model.tokenizer import END_THINK, EOS, Tokenizer
from ds4.posttrain.corrections import Correction
from ds4.posttrain.log import Logged, append, make_folder, read_day
from ds4.server.request import Card
from rulers.text import Text
from solvers.day_text import SOURCE, beside, day_text, domain_text, domains_beside, wanted_answers

CONFIG = Checkpoint.open(embedded.checkpoint()).config
TOKENIZER = Tokenizer.from_file(embedded.checkpoint() / "tokenizer.json", CONFIG)
MODEL = Card("embedded", CONFIG, TOKENIZER, {})
END = TOKENIZER.special_id(EOS)
PATH = Path("requests-2026-11-30.jsonl")


def chat(name: str, text: str, answer: str, **more: Any) -> dict[str, Any]:
    messages = more.pop("messages", [{"role": "user", "content": text}])
    ids = [*TOKENIZER.encode(answer), END]
    row = {"id": name, "messages": messages, "thinking": False, "effort": 50, "answer": {"content": answer}}
    return {**row, "answer_ids": ids, **more}


def completion(name: str, prompt: Any, answer: str) -> dict[str, Any]:
    return {"id": name, "prompt": prompt, "answer": {"content": answer}, "answer_ids": TOKENIZER.encode(answer)}


def logged(rows: Sequence[dict[str, Any]]) -> list[Logged]:
    return [Logged(PATH, n, row) for n, row in enumerate(rows, start=1)]


def windows(text: Text) -> list[list[int]]:
    return [text.ids[part].tolist() for part in text.slices]


def test_prompts_are_the_servers_and_answers_as_drawn() -> None:
    thinking = chat("c", "Why?", "So.", thinking=True, effort=80)
    drawn = [TOKENIZER.encode("t")[0], TOKENIZER.special_id(END_THINK), END]  # in other tokens than its text says
    thinking["answer_ids"] = drawn
    ids = TOKENIZER.encode("from here")
    rows = [chat("a", "What?", "That."), thinking, completion("d", "from there", " on"), completion("e", ids, "!")]
    found = day_text(logged(rows), MODEL, length=256)
    ask = [{"role": "user", "content": "What?"}], [{"role": "user", "content": "Why?"}]
    segments = render(ask[0], thinking=False), render(ask[1], thinking=True, effort=80)
    assert windows(found.text) == [
        [*TOKENIZER.encode_segments(segments[0]), *TOKENIZER.encode("That."), END],
        [*TOKENIZER.encode_segments(segments[1]), *drawn],
        [CONFIG.bos_token_id, *TOKENIZER.encode("from there"), *TOKENIZER.encode(" on")],
        [*ids, *TOKENIZER.encode("!")],
    ]
    assert [(d.id, d.source) for d in found.documents] == [(i, SOURCE) for i in "acde"]
    assert (found.requests, found.repeated, found.passed_over, found.unread) == (4, 0, 0, ())


def test_a_long_one_keeps_its_answer() -> None:
    row = completion("a", "word " * 100, " the very end")
    (ids,) = windows(day_text(logged([row]), MODEL, length=20).text)
    whole = [CONFIG.bos_token_id, *TOKENIZER.encode("word " * 100), *row["answer_ids"]]
    assert len(whole) > 20 and ids == [CONFIG.bos_token_id, *whole[-19:]]


def test_text_counts_once_and_conversations_stand_together() -> None:
    first = [{"role": "user", "content": "What is a follicle?"}]
    later = [*first, {"role": "assistant", "content": "A small sac."}, {"role": "user", "content": "And an oak?"}]
    rows = [
        chat("a", "", "A small sac.", messages=first),
        chat("b", "Another thing", "Yes."),
        chat("c", "", "A tree.", messages=later),  # has a's text in it
        chat("d", "", "A sac, small.", messages=first),  # the same question, another answer
        chat("e", "Another thing", "Yes."),  # b again
        completion("f", "def add(a, b", "):"),
        chat("g", "Third", "No."),
        completion("h", "def add(a, b):\n    return", " a + b"),  # goes on from f's prompt
        completion("i", "def sub(a, b", "):"),
    ]
    found = day_text(logged(rows), MODEL, length=256)
    assert found.repeated == 2 and found.requests == 7
    assert [d.id for d in found.documents] == ["b", "c", "f", "g", "i"]
    counts = [len(np.unique(found.text.windows[found.text.documents == n])) for n in range(5)]
    assert counts == [1, 2, 2, 1, 1]
    assert (np.diff(found.text.documents) >= 0).all()


def test_as_much_as_there_is_room_for_evenly() -> None:
    rows = [completion(str(i), f"number {i} " * 8, " is it") for i in range(20)]
    whole = day_text(logged(rows), MODEL, length=256)
    assert whole.requests == 20
    some = day_text(logged(rows), MODEL, length=256, tokens=len(whole.text) // 4)
    assert some.requests + some.passed_over == 20 and len(some.text) <= len(whole.text) // 4
    chosen = [int(d.id) for d in some.documents]
    assert len(chosen) in (4, 5) and chosen[0] < 5 and chosen[-1] >= 15
    with pytest.raises(UsageError, match="none of 1 requests fits into 16 tokens"):
        day_text(logged([completion("a", "word " * 40, ".")]), MODEL, length=256, tokens=16)


def test_what_was_wanted_stands_in_its_place() -> None:
    rows = [chat("a", "What?", "This."), chat("b", "Why?", "So.")]
    corrections = [
        Correction(1, rows[0]["messages"], "This.", "That.", request_id="a", drawn=tuple(rows[0]["answer_ids"])),
        Correction(2, [], "x", "y"),
        Correction(3, rows[0]["messages"], "This.", "Those.", request_id="a"),
        Correction(4, [], "x", "y", request_id="c", reasoning="well", drawn=(5, TOKENIZER.special_id(END_THINK), 6)),
        Correction(5, [], "x", "y", request_id="d", reasoning="well", drawn=(5,)),
    ]
    wanted, problems = wanted_answers(corrections, TOKENIZER)
    y = TOKENIZER.encode("y")
    assert wanted == {
        "a": (*TOKENIZER.encode("That."), END), "c": (5, TOKENIZER.special_id(END_THINK), *y, END)
    }  # fmt: skip
    assert [(p.line, p.reason.split(":")[0]) for p in problems] == [
        (2, "names no request whose text it could stand in"), (3, "corrects what line 1 corrects"),
        (5, "is of an answer that ended inside its reasoning, or was not logged"),
    ]  # fmt: skip
    one, two = windows(day_text(logged(rows), MODEL, length=256, wanted=wanted).text)
    assert (
        one[-len(wanted["a"]) :] == list(wanted["a"])
        and two[-1] == END
        and two[-3:-1] == TOKENIZER.encode("So.")[-2:]
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": "x", "messages": [{"role": "user", "content": "a"}], "answer": {}}, "has no answer_ids"),
        ({**chat("x", "a", "b"), "answer_ids": "abc"}, "has no answer_ids"),
        ({**chat("x", "a", "b"), "answer_ids": []}, "has no answer_ids"),
        ({**chat("x", "a", "b"), "answer_ids": [TOKENIZER.vocab_size]}, "use the base that answered"),
        ({**chat("x", "a", "b"), "answer_ids": [True]}, "use the base that answered"),
        ({"id": "x", "answer_ids": [5]}, "neither messages nor a prompt"),
        (completion("x", [TOKENIZER.vocab_size], "b"), "outside the vocabulary"),
        (completion("x", {"a": 1}, "b"), "prompt must be a string or a list"),
        (chat("x", "", "b", messages=[]), "messages is missing or empty"),
        (chat("x", "", "b", messages=[{"role": "owl", "content": "a"}]), "owl"),
        (chat("x", "", "b", messages=[{"role": "user", "content": 3}]), "content"),
        (chat("x", "a\ud800", "b"), "lone surrogate"),
        (chat("x", "a", "b", thinking="yes"), "thinking must be"),
    ],
)
def test_rows_that_cannot_be_read_are_told(row: dict[str, Any], said: str) -> None:
    found = day_text(logged([chat("a", "What?", "That."), row]), MODEL, length=256)
    (unread,) = found.unread
    assert found.requests == 1 and unread.problem.line == 2 and said in str(unread)
    assert str(unread).startswith("requests-2026-11-30.jsonl, line 2: ")
    with pytest.raises(UsageError, match="1 requests, none of which gives text to refit on: requests-2026"):
        day_text(logged([row]), MODEL, length=256)


def test_bad_sizes_and_no_requests() -> None:
    rows = logged([chat("a", "What?", "That.")])
    with pytest.raises(UsageError, match="windows of 15 tokens are too short"):
        day_text(rows, MODEL, length=15)
    with pytest.raises(UsageError, match="15 tokens are too few"):
        day_text(rows, MODEL, length=256, tokens=15)
    with pytest.raises(UsageError, match="0 requests, none of which gives text"):
        day_text([], MODEL, length=256)


def test_from_a_log_with_lines_in_another_encoding(tmp_path: Path) -> None:
    make_folder(tmp_path / "log")
    rows = [json.dumps(chat(str(i), f"What is {i}?", "That.")).encode() + b"\n" for i in range(3)]
    day = date(2026, 11, 30)
    append(tmp_path / "log", day, [rows[0], '{"id": "é"}\n'.encode("latin-1"), *rows[1:]])
    found, problems = read_day(tmp_path / "log", day)
    assert [p.line for p in problems] == [2]
    assert [d.id for d in day_text(found, MODEL, length=64).documents] == ["0", "1", "2"]


def test_other_text_beside_it() -> None:
    day = day_text(logged([chat("a", "What?", "That."), chat("b", "Why?", "So.")]), MODEL, length=256)
    general = domain_text(Domain.open("general"), TOKENIZER, CONFIG.bos_token_id, length=64, tokens=200)
    text, documents = beside(day, [general, general])
    more = general[0]
    assert len(text) == len(day.text) + 2 * len(more)
    assert windows(text) == [*windows(day.text), *windows(more), *windows(more)]
    sources = [documents[d].source for d in text.documents]
    assert sources[: len(day.text)] == [SOURCE] * len(day.text) and SOURCE not in sources[len(day.text) :]
    assert [documents[d].id for d in text.documents[-len(more) :]] == [general[1][d].id for d in more.documents]


def test_which_text_stands_beside(tmp_path: Path) -> None:
    shipped = Path(__file__).parent.parent.parent / "sidecars"
    assert domains_beside(None) == ("general",) == domains_beside(shipped / "general")
    assert domains_beside(shipped / "law") == ("general", "law")
    for told in ("[]", "{", '{"domain": "of my own"}', '{"domain": ["law"]}'):
        (tmp_path / "manifest.json").write_text(told)
        assert domains_beside(tmp_path) == ("general",)
    assert domains_beside(tmp_path / "none") == ("general",)
