"""Decision points on the engine: the logits that a request has there; the file; from the server's log to a point."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from ds4 import embedded
from ds4.cli.embedded_base import embedded_base
from ds4.engine import Engine, Sampling
from ds4.engine.sampling import Penalties
from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError
from ds4.model.chat import render
from ds4.posttrain.corrections import Correction
from ds4.posttrain.decisions import Decision, decisions
from ds4.posttrain.forget import forget
from ds4.posttrain.log import read_log
from ds4.posttrain.points import Point, check_target, read_points, score_points, write_points
from ds4.server.request import ServedEngine
from ds4.server.requests_log import RequestLog
from tests.cli.commands import ok, refused
from tests.conftest import opened
from tests.server.standin import Served, StandIn, serve, until

MESSAGES = [{"role": "user", "content": "Write a sentence about the old house by the river and its owner."}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine.open(
        embedded_base(), engram_dir=embedded.checkpoint(), prefill="replay", device=opened("fast", "greedy")
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def found(engine: Engine) -> list[Decision]:
    rows = [
        Correction(1, MESSAGES, "The old house was sold by its owner.", "The old house was built by its owner."),
        Correction(2, MESSAGES, "It is here.", "She is here."),
    ]
    got, problems = decisions(rows, engine.tokenizer, engine.config.max_position_embeddings)
    assert not problems and [len(d.answer) > 0 for d in got] == [True, False]
    return got


def test_logits_are_those_of_a_request(engine: Engine, found: Sequence[Decision]) -> None:
    """Prompt by prefill, answer by decode: bit for bit what a session has that goes on token by token."""
    for d, p in zip(found, score_points(found, engine.session), strict=True):
        session = engine.session()
        session.sync(list(d.prompt))
        rows = [session.step([token])[0] for token in d.answer]
        logits_V = rows[-1] if rows else session.logits()
        assert p.logit_a == logits_V[d.a] and p.logit_b == logits_V[p.b]
        others = np.delete(logits_V, d.a)
        assert p.b != d.a and p.logit_b == others.max()
        again = engine.session()  # and as greedy decode draws, its answer put into its mouth
        again.sync(list(d.prompt))
        for token in d.answer:
            bias = Penalties(logit_bias=((token, 100.0),))
            assert again.next(Sampling(temperature=0.0, penalties=bias)) == token
        assert again.next(Sampling(temperature=0.0)) == (p.b if p.margin < 0 else p.a)
        assert (p.position, p.given, p.prompt, p.answer) == (d.position, d.given, d.prompt, d.answer)


def test_b_is_the_strongest_and_not_what_was_written(engine: Engine, found: Sequence[Decision]) -> None:
    """The wrong answer wrote a word that greedy decode would not have."""
    points = score_points(found, engine.session)
    assert any(p.b != p.given for p in points)


class Watched:
    """A session that notes which tokens went which way, over logits of the test's own."""

    def __init__(self, logits_V: Sequence[float] = (0.0, 3.0, 1.0, 2.0)) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self._logits_V = np.array(logits_V, np.float32)

    def sync(self, tokens: Sequence[int]) -> None:
        self.calls.append(("prefill", list(tokens)))

    def step(self, tokens: Sequence[int], *, logits: bool) -> None:
        self.calls.append(("decode", list(tokens)))

    def logits(self) -> NDArray[np.float32]:
        return self._logits_V


DECISION = Decision(1, None, (10, 11, 12), (13, 14), 2, 1, ())


@pytest.mark.parametrize(
    ("split", "calls"),
    [
        (None, [("prefill", [10, 11, 12]), ("decode", [13, 14])]),
        (1, [("prefill", [10]), ("decode", [11, 12, 13, 14])]),
        (4, [("prefill", [10, 11, 12, 13]), ("decode", [14])]),
        (5, [("prefill", [10, 11, 12, 13, 14])]),
        (900, [("prefill", [10, 11, 12, 13, 14])]),
    ],
)
def test_where_prefill_ends_and_decode_begins(split: int | None, calls: list[tuple[str, list[int]]]) -> None:
    session = Watched()
    (point,) = score_points([DECISION], lambda: session, split)
    assert session.calls == calls
    assert (point.a, point.b, point.margin, point.position) == (2, 1, -2.0, 5)


def test_the_split_reaches_the_engine(engine: Engine, found: Sequence[Decision]) -> None:
    """All through prefill is not the path of a request, and gives other logits."""
    (apart, _), (together, _) = (score_points(found, engine.session, split) for split in (None, 10**6))
    assert (apart.a, apart.answer) == (together.a, together.answer)
    assert apart.logit_a != together.logit_a and abs(apart.margin - together.margin) < 2


def test_each_point_has_a_timeline_of_its_own() -> None:
    made: list[Watched] = []

    def new() -> Watched:
        made.append(Watched())
        return made[-1]

    score_points([DECISION, DECISION], new)
    assert len(made) == 2 and all(len(s.calls) == 2 for s in made)


def test_what_the_model_says_must_be_a_number() -> None:
    with pytest.raises(Ds4Error, match=r"line 1.*not finite"):
        score_points([DECISION], lambda: Watched([0.0, float("nan"), 1.0]))


# -- the file


POINT = Point(3, "chatcmpl-aaaaaaaa", (1, 2), (), 7, 8, 0.1, 2.5, None, ("f" * 64,))


def test_the_file_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    other = Point(4, None, (1,), (2, 3), 7, 8, float(np.float32(0.1)), -1e30, 9)
    write_points(path, {"teacher": None, "base": {"file": "x"}}, [POINT, other])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    head, points = read_points(path)
    assert points == [POINT, other] and head["base"] == {"file": "x"} and head["teacher"] is None
    assert (points[0].position, points[1].position) == (2, 3)


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        ({"a": 8}, 2),  # a is b
        ({"a": -1}, 2),
        ({"a": True}, 2),
        ({"position": 3}, 2),
        ({"prompt_ids": []}, 2),
        ({"prompt_ids": "12"}, 2),
        ({"logit_a": "0.1"}, None),
        ({"logit_b": None}, 2),
        ({"logit_b": 1e999}, 2),
        ({"texts_sha256": None}, 2),
    ],
)
def test_a_broken_point_is_refused_by_line(tmp_path: Path, edit: dict[str, Any], line: int | None) -> None:
    path = tmp_path / "points.jsonl"
    write_points(path, {}, [POINT])
    head, row = path.read_text().splitlines()
    path.write_text(f"{head}\n{json.dumps({**json.loads(row), **edit})}\n")
    if line is None:  # a number as a text is a number
        assert read_points(path)[1] == [POINT]
        return
    with pytest.raises(FileFormatError, match=rf"points\.jsonl: line {line} "):
        read_points(path)


def test_files_that_are_no_points(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for text in ("", "\n", '{"kind": "other"}\n', '{"kind": "ds4-points", "version": 2}\n', "no JSON\n"):
        path.write_text(text)
        with pytest.raises(FileFormatError, match=r"x\.jsonl.*ds4 posttrain points"):
            read_points(path)
    with pytest.raises(FileFormatError, match="none"):
        read_points(tmp_path / "none.jsonl")


def test_a_full_disk_leaves_the_file_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "points.jsonl"
    write_points(path, {}, [POINT])
    before, write = path.read_bytes(), os.write
    room = [30]

    def limited(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = write(fd, bytes(data)[: room[0]])
        room[0] -= n
        return n

    monkeypatch.setattr("ds4.posttrain.log.os.write", limited)
    with pytest.raises(CapacityError, match=r"points\.jsonl: the disk is full"):
        write_points(path, {}, [POINT, POINT])
    monkeypatch.undo()
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["points.jsonl"]


# -- from a request to a point


@pytest.fixture(scope="module")
def logged(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A request that the server answered and logged: the log, and its row."""
    folder = tmp_path_factory.mktemp("served") / "log"

    def load(progress: object) -> ServedEngine:
        return engine

    with serve(StandIn(), open_engine=load, requests=RequestLog(folder, 30)) as served:
        assert isinstance(served, Served)
        body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}
        answer = httpx.post(served.url + "/v1/chat/completions", json=body, timeout=300).json()
        until(lambda: read_log(folder) if any(folder.glob("requests-*")) else False)
    (row,) = read_log(folder).values()
    assert row.id == answer["id"] and row.row["answer"]["content"] == answer["choices"][0]["message"]["content"]
    return folder, dict(row.row)


def test_from_a_logged_request_to_its_point(
    engine: Engine, logged: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A greedy answer, one of its words corrected: the strongest other token is the one that it wrote, by a margin
    below 0; forgetting the request takes correction and point along.
    """
    folder, row = logged
    text, ids = row["answer"]["content"], row["answer_ids"]
    prompt = engine.tokenizer.encode_segments(render(MESSAGES, thinking=False))
    assert row["usage"]["prompt_tokens"] == len(prompt) and len(ids) == 12
    place = next(i for i in range(4, 12) if engine.tokenizer.decode([ids[i]]).strip().isalpha())
    before = engine.tokenizer.decode(ids[:place])
    wanted = before + engine.tokenizer.decode([ids[place]])[:1] + "zz"
    corrections, out = folder / "corrections.jsonl", folder / "points.jsonl"
    corrections.write_text(
        json.dumps({"request_id": row["id"], "wanted": wanted}) + "\n"
        + json.dumps({"messages": MESSAGES, "given": text, "wanted": f"{text} <think>x</think>"}) + "\n"
        + '{"given": \n'
    )  # fmt: skip
    report = json.loads(ok(capsys, "posttrain", "points", corrections, "--log", folder, "-o", out, "--json"))
    assert report["corrections_read"] == 3 and [r["line"] for r in report["reported"]] == [2, 3]
    head, (point,) = read_points(out)
    assert point.prompt == tuple(prompt) and point.answer == tuple(ids[: len(point.answer)])
    assert point.b == ids[len(point.answer)] == point.given and point.margin < 0
    assert head["sidecars"] == {"zchain": None, "posttrain": None} and head["teacher"] is None
    assert head["score_split"] == "answer" and head["engine"]["prefill"] == "replay"
    assert head["base"]["file"] == "embedded.gguf" and len(head["base"]["model"]) == 16
    assert report["points"][0]["margin"] == point.margin and report["base"] == head["base"]

    said = ok(capsys, "posttrain", "points", corrections, "--log", folder, "-o", out, "--score-split", "9999")
    assert "1 points of 3 corrections" in said and "reported: is no JSON" in said and "inside markup" in said
    head, (prefilled,) = read_points(out)
    assert head["score_split"] == 9999 and prefilled.logit_a != point.logit_a and prefilled.a == point.a

    forget(folder, ids=[row["id"]])
    assert read_points(out)[1] == [] and row["id"] not in corrections.read_text()
    assert read_log(folder) == {}


def test_bad_input_ends_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds4.cli.posttrain.open_engine", lambda args: pytest.fail("the engine was opened"))
    rows, out = tmp_path / "c.jsonl", tmp_path / "p.jsonl"
    rows.write_text(json.dumps({"messages": MESSAGES, "given": "a b", "wanted": "a"}) + "\n")
    none = refused(capsys, 1, "posttrain", "points", rows, "-o", out)
    assert "none of 1 corrections gives a decision point" in none and not out.exists()
    rows.write_text("")
    assert "c.jsonl: has no corrections" in refused(capsys, 1, "posttrain", "points", rows, "-o", out)
    rows.write_bytes("{}".encode("utf-16"))
    assert "c.jsonl: is UTF-16" in refused(capsys, 1, "posttrain", "points", rows, "-o", out)
    for argv, named in (
        ([rows, "-o", tmp_path / "no" / "p.jsonl"], "no"),
        ([rows, "-o", rows], "is no file of points"),
        ([rows, "-o", out, "--score-split", "0"], "--score-split 0"),
        ([rows, "-o", out, "--log", tmp_path / "nolog"], "nolog"),
    ):
        assert named in refused(capsys, 2, "posttrain", "points", *argv)


def test_points_are_written_over_points_only(tmp_path: Path) -> None:
    log, key, fresh, points = (tmp_path / name for name in ("requests-2026-11-30.jsonl", "key", "new", "points"))
    log.write_text('{"id": "chatcmpl-1"}\n')
    key.write_bytes(b"\xff\x00 no JSON")
    points.write_text('{"kind": "ds4-points", "version": 1}\n')
    for path in (log, key):
        with pytest.raises(UsageError, match="is there and is no file of points"):
            check_target(path)
    for path in (fresh, points):
        check_target(path)
