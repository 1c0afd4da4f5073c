"""`ds4 forget`: what is gone is gone, whatever quoted it; what nobody asked for stays, to the byte."""

from __future__ import annotations

import errno
import html
import json
import os
import stat
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import CapacityError
from ds4.posttrain.forget import forget
from ds4.posttrain.log import append, day_file, days, read_log, row_bytes
from ds4.posttrain.quotes import digests, text_digest
from solvers.nightly import report
from solvers.nightly.report import Part, Row
from tests.cli.commands import ok, refused

SECRET = "My brother's <name> is Ottokar & he lives in Lübeck."
ANSWER = "Then Ottokar lives\nby the sea, in a town of seven towers and of much marzipan.\n"
SYSTEM = "You are the assistant of a small bakery in town."
ONE, TWO, THREE = (f"chatcmpl-{'0' * 23}{i}" for i in (1, 2, 3))
DAY, NEXT = date(2026, 11, 29), date(2026, 11, 30)


def request(id: str, said: str, answer: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}]
    return {"id": id, "at": "2026-11-29T10:00:00.000+01:00", "messages": messages, "answer": {"content": answer}}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir(mode=0o700)
    append(
        folder, DAY, [row_bytes(request(ONE, SECRET, ANSWER)), row_bytes(request(TWO, "yes", "A long answer it is."))]
    )
    append(folder, NEXT, [row_bytes(request(THREE, "And what of today, then?", "Nothing of note."))])
    return folder


def everything(folder: Path) -> bytes:
    return b"".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())


def test_a_request_by_its_id(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = day_file(log, DAY).read_bytes().split(b"\n")[1]
    said = ok(capsys, "forget", "--log", log, "--request", ONE)
    assert day_file(log, DAY).read_bytes() == other + b"\n"
    assert stat.S_IMODE(day_file(log, DAY).stat().st_mode) == 0o600
    assert set(read_log(log)) == {TWO, THREE} and b"Ottokar" not in everything(log)
    assert "1 request\n" in said and "requests-2026-11-29.jsonl: 1 row\n" in said and "Ottokar" not in said
    assert [p.name for p in log.iterdir() if p.name.endswith(".new")] == []
    again = refused(capsys, 1, "forget", "--log", log, "--request", ONE)
    assert f"{ONE}: in no file of" in again


def test_a_day_and_everything(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = json.loads(ok(capsys, "forget", "--log", log, "--day", "2026-11-29", "--json"))
    assert got["requests"] == [ONE, TWO] and got["removed"] == [str(day_file(log, DAY))]
    assert list(days(log)) == [NEXT]
    assert "2026-11-29" in refused(capsys, 1, "forget", "--log", log, "--day", "2026-11-29")
    append(log, DAY, [b"no JSON at all\n"])
    ok(capsys, "forget", "--log", log, "--all")
    assert sorted(p.name for p in log.iterdir()) == [".lock"]
    assert "forgotten: 0 requests" in ok(capsys, "forget", "--log", log, "--all")  # nothing is what was asked for


def test_quotes_elsewhere_go_too(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Corrections, points, reports as JSON, text and HTML, by id, by text, by a text's digest; all else stays."""
    home = tmp_path / "nightly"
    for name in ("rejected/2026-11-29", "snapshots"):
        (home / name).mkdir(parents=True)
    keep = {"given": "An answer of somebody else.", "wanted": "Another one of his."}
    quoting: list[dict[str, Any]] = [
        {"request_id": ONE, "edit": {"replace": "a", "with": "b"}},
        {"given": ANSWER, "wanted": "No."},
    ]
    (log / "corrections.jsonl").write_bytes(b"".join(row_bytes(r) for r in [keep, *quoting]))
    points: list[dict[str, Any]] = [
        {"kind": "points"},
        {"prompt_ids": [1, 2], "texts_sha256": digests([SECRET])},
        {"prompt_ids": [3]},
    ]
    (home / "snapshots" / "points.jsonl").write_bytes(b"".join(row_bytes(p) for p in points))
    (home / "snapshots" / "only.jsonl").write_bytes(row_bytes({"request_id": ONE}))
    report = {
        "day": "2026-11-29", "gates": {"flipped": 0.9}, ONE: {"margin": -1},
        "points": [{"request": ONE, "margin": 2}, {"request": TWO, "margin": 3}], "worst": f"it said: {ANSWER} and",
    }  # fmt: skip
    (home / "rejected/2026-11-29" / "report.json").write_text(json.dumps(report))  # escapes of its own
    text = f"night of the 29th\n{ONE} -1.5 0.5\n{TWO} 2.5 3.5\n  {ANSWER.splitlines()[1]}\nend"
    (home / "rejected/2026-11-29" / "report.txt").write_text(text)
    page = f"<p>kept</p>\n<td>{html.escape(SECRET)}</td>\n<p>{SYSTEM}</p>\n"
    (home / "rejected/2026-11-29" / "report.html").write_text(page)
    (home / "rejected/2026-11-29" / "gr_L05.bin").write_bytes(bytes(range(256)) * 9)
    (home / "rejected/2026-11-29" / "report.html").chmod(0o640)
    gains = (home / "rejected/2026-11-29" / "gr_L05.bin").read_bytes()
    said = ok(capsys, "forget", "--log", log, "--request", ONE, "--also", home)
    assert (log / "corrections.jsonl").read_bytes() == row_bytes(keep)
    rows = [json.loads(line) for line in (home / "snapshots" / "points.jsonl").read_text().splitlines()]
    assert rows == [points[0], points[2]] and not (home / "snapshots" / "only.jsonl").exists()
    assert json.loads((home / "rejected/2026-11-29" / "report.json").read_text()) == {
        "day": "2026-11-29", "gates": {"flipped": 0.9}, "points": [{"request": TWO, "margin": 3}],
        "worst": "[forgotten]",
    }  # fmt: skip
    assert (home / "rejected/2026-11-29" / "report.txt").read_text() == (
        f"night of the 29th\n[forgotten]\n{TWO} 2.5 3.5\n  [forgotten]\nend"
    )
    page = f"<p>kept</p>\n<td>[forgotten]</td>\n<p>{SYSTEM}</p>\n"
    assert (home / "rejected/2026-11-29" / "report.html").read_text() == page
    assert stat.S_IMODE((home / "rejected/2026-11-29" / "report.html").stat().st_mode) == 0o640
    assert (home / "rejected/2026-11-29" / "gr_L05.bin").read_bytes() == gains
    for trace in (b"Ottokar", b"marzipan", ONE.encode(), text_digest(SECRET).encode()):
        assert trace not in everything(log) + everything(home)
    assert f"{log}/corrections.jsonl: 2 quotes" in said and "report.txt: 2 quotes" in said


def test_a_table_goes_on_behind_a_row_that_was_forgotten(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a night's report: a line without its bars would end the table, and show the rows after it as text."""
    parts = [Part("Points", head=("request", "place"), rows=(Row((ONE, "7")), Row((TWO, "8"))))]
    (tmp_path / "report.md").write_text(report.markdown(parts))
    (tmp_path / "report.html").write_text(report.html(parts))
    ok(capsys, "forget", "--log", log, "--request", ONE, "--also", tmp_path)
    rows = [line for line in (tmp_path / "report.md").read_text().splitlines() if line]
    assert rows[1:] == ["| request | place |", "|---|---|", "| [forgotten] |", f"| {TWO} | 8 |"]
    page = (tmp_path / "report.html").read_text()
    table = page[page.index("<table>") : page.index("</table>")].splitlines()
    assert table[2:] == ["<tr><td>[forgotten]</td></tr>", f"<tr><td>{TWO}</td><td>8</td></tr>"]


def test_short_and_common_texts_take_nothing_along(log: Path) -> None:
    """A "yes" and a system message are in everybody's requests."""
    row = row_bytes({"messages": [{"role": "system", "content": SYSTEM}], "given": "yes", "wanted": "no"})
    (log / "corrections.jsonl").write_bytes(row)
    done = forget(log, ids=[TWO])
    assert done.requests == [TWO] and (log / "corrections.jsonl").read_bytes() == row


def test_an_id_is_a_word_and_not_a_beginning(log: Path) -> None:
    longer = ONE + "9"
    append(log, DAY, [row_bytes(request(longer, "Another question, quite", "Another answer, quite"))])
    (log / "notes.txt").write_text(f"see {longer}.\n")
    forget(log, ids=[ONE])
    assert longer in read_log(log) and (log / "notes.txt").read_text() == f"see {longer}.\n"


def test_a_quote_is_found_when_the_row_is_gone_already(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (log / "corrections.jsonl").write_bytes(row_bytes({"request_id": ONE}) + b"\n")
    day_file(log, DAY).unlink()
    ok(capsys, "forget", "--log", log, "--request", ONE)
    assert ONE.encode() not in everything(log)


def test_a_completion_is_quoted_by_its_prompt(log: Path) -> None:
    id = "cmpl-" + "d" * 24
    append(log, NEXT, [row_bytes({"id": id, "prompt": SECRET, "answer": {"content": "Yes."}})])
    append(log, NEXT, [row_bytes({"id": id + "e", "prompt": [1, 2, 3], "answer": {"content": "Yes."}})])
    (log / "notes.txt").write_text(f"He said: {SECRET}\n")
    forget(log, ids=[id, id + "e"])
    assert (log / "notes.txt").read_text() == "He said: [forgotten]\n"


def test_a_torn_row_with_the_id_goes(log: Path) -> None:
    with open(day_file(log, DAY), "ab") as f:
        f.write(b'{"id":"' + ONE.encode() + b'","messages":[{"content":"My brot')
    forget(log, ids=[ONE])
    assert b"My bro" not in everything(log) and set(read_log(log)) == {TWO, THREE}


def test_what_cannot_be_edited_is_named(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (log / "dump.npy").write_bytes(b"\x93NUMPY\0" + ONE.encode() + b"\xff")
    said = refused(capsys, 1, "forget", "--log", log, "--request", ONE, "--also", log)
    assert said.count("dump.npy: quotes a request") == 1 and ONE not in read_log(log)


def test_links_are_not_followed(log: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text(ONE)
    (log / "there").symlink_to(tmp_path / "elsewhere")
    (log / "b.txt").symlink_to(tmp_path / "elsewhere" / "a.txt")
    forget(log, ids=[ONE])
    assert (tmp_path / "elsewhere" / "a.txt").read_text() == ONE and (log / "b.txt").is_symlink()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def write(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as m:
        m.setattr("ds4.posttrain.log.os.write", write)
        yield


def test_a_full_disk_leaves_files_as_they_were(log: Path, full: None) -> None:
    (log / "corrections.jsonl").write_bytes(row_bytes({"given": "not quoted"}) + row_bytes({"request_id": ONE}))
    before = everything(log)
    with pytest.raises(CapacityError, match=r"corrections\.jsonl: the disk is full.*make room"):
        forget(log, ids=[ONE])
    assert everything(log) == before and not list(log.glob(".*.new"))
    (log / "corrections.jsonl").unlink()
    with pytest.raises(CapacityError, match="2026-11-29"):
        forget(log, ids=[ONE])
    assert ONE in read_log(log)
    forget(log, everything=True)  # needs no room
    assert read_log(log) == {}


def test_bad_arguments(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(log)
    for argv, named in (
        ([], "--request ID, --day D or --all"),
        (["--all", "--day", "2026-11-29"], "--all"),
        (["--day", "yesterday"], "yesterday"),
        (["--request", "a b"], "'a b'"),
        (["--request", "e"], "'e'"),
        (["--all", "--also", tmp_path / "none"], "none"),
    ):
        assert named in refused(capsys, 2, "forget", "--log", log, *argv)
    assert "nowhere" in refused(capsys, 2, "forget", "--log", tmp_path / "nowhere", "--all")
    assert everything(log) == before


@settings(deadline=None, max_examples=60)
@given(secret=st.text(min_size=1).map(lambda t: f"[{t}]" + "secret words of mine"), ascii=st.booleans())
def test_whatever_was_said_is_found_in_json(
    tmp_path_factory: pytest.TempPathFactory, secret: str, ascii: bool
) -> None:
    """Odd characters, escaped or not."""
    folder = tmp_path_factory.mktemp("log")
    row = request(ONE, secret, "an answer to it, in full")
    append(folder, DAY, [row_bytes(row)])
    (folder / "a.json").write_text(
        json.dumps({"list": [row, {"x": [secret]}], "y": secret}, ensure_ascii=ascii), errors="surrogatepass"
    )
    forget(folder, ids=[ONE])
    assert json.loads((folder / "a.json").read_text(errors="surrogatepass")) == {
        "list": [{"x": []}], "y": "[forgotten]"
    }  # fmt: skip
    assert not days(folder)


def test_only_the_folder_of_a_log_is_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not one that others can look into, nor one in which no server has written; nothing is made there."""
    open_to_all, empty = tmp_path / "open", tmp_path / "empty"
    open_to_all.mkdir(mode=0o755)
    empty.mkdir(mode=0o700)
    day_file(open_to_all, DAY).write_bytes(b"{}\n")
    assert "others may look into it" in refused(capsys, 2, "forget", "--log", open_to_all, "--all")
    assert "has no requests-DAY.jsonl" in refused(capsys, 2, "forget", "--log", empty, "--all")
    assert [p.name for p in open_to_all.iterdir()] == [day_file(open_to_all, DAY).name] and not list(empty.iterdir())
