"""Rows of corrections: what they may say, and every way of saying it wrong, by line."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from ds4.errors import FileFormatError
from ds4.posttrain.corrections import Correction, Corrections, read_corrections
from ds4.posttrain.log import append, row_bytes

MESSAGES = [{"role": "user", "content": "What time is it?"}]
ID = "chatcmpl-" + "a" * 24


def read(tmp_path: Path, *rows: object, log: Path | None = None) -> Corrections:
    """Rows: objects, or lines as bytes."""
    path = tmp_path / "corrections.jsonl"
    path.write_bytes(b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows))
    return read_corrections(path, log)


def whole(**more: object) -> dict[str, Any]:
    return {"messages": MESSAGES, "given": "It is 3 pm, or 3 am.", **more}


def one(found: Corrections) -> Correction:
    assert found.problems == ()
    (row,) = found.rows
    return row


def reason(found: Corrections) -> str:
    assert found.rows == ()
    (problem,) = found.problems
    return problem.reason


def test_whole_or_as_an_edit(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        whole(wanted="It is 4 pm."),
        b"\r\n",
        whole(edit={"replace": "3 am", "with": "4 am"}),
        whole(
            edit={"replace": "3", "with": "", "occurrence": 2}, thinking=True, effort="low", reasoning="Hm.", note="n"
        ),
    )  # fmt: skip
    assert [(c.line, c.wanted) for c in found.rows] == [
        (1, "It is 4 pm."), (3, "It is 3 pm, or 4 am."), (4, "It is 3 pm, or  am.")
    ]  # fmt: skip
    assert found.problems == () and len(found.sha256) == 64
    first, _, last = found.rows
    assert (first.thinking, first.effort, first.reasoning, first.drawn, first.cut) == (False, None, None, None, False)
    assert (last.thinking, last.effort, last.reasoning) == (True, "low", "Hm.")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (whole(), '"wanted", the whole answer, or "edit"'),
        (whole(wanted="x", edit={"replace": "3 am", "with": "y"}), '"wanted", the whole answer, or "edit"'),
        (whole(wanted="It is 3 pm, or 3 am."), "nothing is to be decided"),
        (whole(edit={"replace": "3 am", "with": "3 am"}), "nothing is to be decided"),
        (whole(edit={"replace": "3", "with": "4"}), "2 times; give more of the text"),
        (whole(edit={"replace": "5", "with": "4"}), "'5', which is not in the given answer"),
        (
            whole(edit={"replace": "3", "with": "4", "occurrence": 3}),
            "occurrence 3; '3' is in the given answer 2 times",
        ),
        (whole(edit={"replace": "3", "with": "4", "occurrence": 0}), "occurrence 0"),
        (whole(edit={"replace": "3", "with": "4", "occurrence": True}), "not a whole number"),
        (whole(edit={"replace": "", "with": "4"}), "the first is not empty"),
        (whole(edit={"replace": "3 am"}), '"replace" or "with"'),
        (whole(edit={"replace": "3 am", "by": "x"}), "'by'"),
        (whole(edit="3"), "'edit' that is not an object"),
        (whole(wanted=4), "'wanted' that is not a text"),
        ({"given": "a", "wanted": "b"}, "has no 'messages'"),
        ({"messages": MESSAGES, "wanted": "b"}, "has no 'given'"),
        ({"messages": "What?", "given": "a", "wanted": "b"}, "'messages' that is not a list"),
        (whole(wnated="x"), "'wnated'"),
        (whole(wanted="x", effort=True), "effort"),
        (whole(wanted="x", thinking="yes"), "'thinking' that is not true or false"),
        ({"request_id": ID, "wanted": "b"}, f"name the log that request {ID} is in"),
    ],
)
def test_what_a_row_may_not_say(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    assert says in reason(read(tmp_path, row))


def test_occurrences_may_overlap(tmp_path: Path) -> None:
    """ "aa" is in "aaa" twice: which one is meant has to be said."""
    row = {"messages": MESSAGES, "given": "aaa", "edit": {"replace": "aa", "with": "b"}}
    assert "2 times" in reason(read(tmp_path, row))
    row["edit"] = {"replace": "aa", "with": "b", "occurrence": 2}
    assert one(read(tmp_path, row)).wanted == "ab"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"given": "grün"}'.encode("latin-1"), "not UTF-8 text (byte 13 of the line is 0xfc)"),
        (b'{"given": "half", "wanted": "half \\ud83d"', "no JSON"),
        (json.dumps(whole(wanted="half \ud83d")).encode(), "lone surrogate"),
        (json.dumps(whole(wanted="x", note={"half \udc00": 1})).encode(), "lone surrogate"),
        (b'["a", "list"]', "no JSON object"),
        (b'{"given": NaN}', "NaN is not JSON"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested too deep"),
        (b'{"given": "a", "wanted": "b", "messages": ' + b"[" * 960 + b"]" * 960 + b"}", ""),
        (b'{"given": "a", "given', "no JSON"),
    ],
)
def test_lines_that_are_no_rows_are_told_and_the_others_read(tmp_path: Path, line: bytes, says: str) -> None:
    found = read(tmp_path, whole(wanted="It is 4 pm."), line + b"\n", whole(wanted="It is 5 pm."))
    assert [c.line for c in found.rows] == [1, 3]
    ((at, why),) = [(p.line, p.reason) for p in found.problems]
    assert at == 2 and says in why


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-8-sig"])
def test_a_file_in_another_encoding_is_refused_by_name(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "corrections.jsonl"
    path.write_bytes(json.dumps(whole(wanted="x")).encode(encoding))
    says = "byte order mark" if encoding == "utf-8-sig" else encoding[:6].upper()
    with pytest.raises(FileFormatError, match=rf"corrections\.jsonl.*{says}"):
        read_corrections(path)


def test_no_corrections_at_all(tmp_path: Path) -> None:
    for data in (b"", b"\n \r\n\n"):
        with pytest.raises(FileFormatError, match="no corrections"):
            read(tmp_path, data)
    with pytest.raises(FileFormatError, match="none"):
        read_corrections(tmp_path / "none.jsonl")
    with pytest.raises(FileFormatError):
        read_corrections(tmp_path)


# -- with a log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir(mode=0o700)
    row = {
        "id": ID, "messages": MESSAGES, "thinking": True, "effort": 50,
        "answer": {"content": "It is 3 pm.", "reasoning": "Hm."}, "answer_ids": [5, 6, 7], "finish_reason": "length",
    }  # fmt: skip
    completion = {"id": "cmpl-" + "b" * 24, "prompt": "x", "answer": {"content": "y"}}
    damaged = {"id": "chatcmpl-damaged", "messages": MESSAGES, "answer": {"content": 7}}
    append(folder, date(2026, 11, 30), [row_bytes(r) for r in (row, completion, damaged)])
    return folder


def test_a_request_of_the_log(tmp_path: Path, log: Path) -> None:
    c = one(read(tmp_path, {"request_id": ID, "edit": {"replace": "3", "with": "4"}}, log=log))
    assert (c.messages, c.given, c.wanted) == (MESSAGES, "It is 3 pm.", "It is 4 pm.")
    assert (c.thinking, c.effort, c.reasoning) == (True, 50, "Hm.")
    assert (c.request_id, c.drawn, c.cut) == (ID, (5, 6, 7), True)
    agreeing = {"request_id": ID, "messages": MESSAGES, "given": "It is 3 pm.", "wanted": "It is 4 pm."}
    assert one(read(tmp_path, agreeing, log=log)).drawn == (5, 6, 7)


def test_what_the_log_does_not_agree_with(tmp_path: Path, log: Path) -> None:
    other = {"request_id": ID, "given": "It is 5 pm.", "wanted": "It is 4 pm."}
    assert "other given than its request has in the log (line 1 of requests-2026-11-30" in reason(
        read(tmp_path, other, log=log)
    )
    unknown = {"request_id": "chatcmpl-unknown", "wanted": "b"}
    assert "request chatcmpl-unknown is not in the log" in reason(read(tmp_path, unknown, log=log))
    assert one(read(tmp_path, {**unknown, **whole(wanted="b")}, log=log)).drawn is None  # it says all itself
    completion = {"request_id": "cmpl-" + "b" * 24, "given": "y", "wanted": "z"}
    assert "corrections are of chats" in reason(read(tmp_path, completion, log=log))
    damaged = {"request_id": "chatcmpl-damaged", "wanted": "z"}
    assert "line 3 of requests-2026-11-30.jsonl, which is damaged" in reason(read(tmp_path, damaged, log=log))
