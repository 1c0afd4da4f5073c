"""--log-requests: what is kept and who can read it; a disk that is slow, full or shared; nothing unless asked for."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest

from ds4.cli.serve import parse, run
from ds4.errors import UsageError
from ds4.posttrain.log import append, day_file, days, locked, parse_day, prune, read_day, read_file
from ds4.server.request import Limits
from ds4.server.requests_log import RequestLog
from tests.server.standin import BOS, EOS, StandIn, events, ids_of, serve, until

NOON = datetime(2026, 11, 30, 12, tzinfo=timezone(timedelta(hours=2)))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in days(folder).values() for line in path.read_text("utf-8").splitlines()]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def old_umask() -> Iterator[None]:
    before = os.umask(0)  # the widest: modes are ours, not the shell's
    yield
    os.umask(before)


def test_a_request_and_its_answer_are_kept(folder: Path, old_umask: None) -> None:
    """Streamed or not, chat or not: the id that the client got, the words of both, how it was drawn, and when."""
    engine = StandIn(ids_of("All of it. ünd"))
    with serve(engine, requests=RequestLog(folder, 30)) as served:
        first = served.chat("What is kept?", temperature=0.5, seed=7, max_tokens=50, stop=["ünd"]).json()
        second = events(served.chat("Again, ü!", stream=True, thinking=True, reasoning_effort="low"))
        third = served.post("/v1/completions", {"prompt": [BOS, 30, 31], "max_tokens": 5}).json()
        until(lambda: served.get("/health").json()["request_log"]["written"] == 3)
        assert served.get("/health").json()["request_log"] == {"status": "ok", "written": 3, "lost": 0}
    (path,) = days(folder).values()
    assert (mode(folder), mode(path), mode(folder / ".lock")) == (0o700, 0o600, 0o600)
    whole, streamed, completed = rows(folder)
    assert [r["id"] for r in rows(folder)] == [first["id"], second[0]["id"], third["id"]]
    assert whole["messages"] == [{"role": "user", "content": "What is kept?"}] and whole["thinking"] is False
    assert whole["answer"] == {"content": "All of it. "} and whole["finish_reason"] == "stop"
    assert whole["answer_ids"] == ids_of("All of it. ünd")  # as it was drawn, the stop string too
    sampling = whole["sampling"]
    assert (sampling["temperature"], sampling["seed"], sampling["max_tokens"]) == (0.5, 7, 50)
    assert sampling["stop"] == ["ünd"] and sampling["seeded"] is True
    assert whole["usage"] == {
        "prompt_tokens": len(engine.prompts[0]),
        "completion_tokens": len(ids_of("All of it. ünd")),
    }
    assert (
        streamed["thinking"] is True
        and streamed["effort"] == 50
        and streamed["messages"][0]["content"] == "Again, ü!"
    )
    assert streamed["answer"] == {"content": "", "reasoning": "All of it. ünd"}
    assert streamed["answer_ids"] == [*ids_of("All of it. ünd"), EOS]  # how it ended is a decision too
    assert completed["prompt"] == [BOS, 30, 31] and completed["answer"] == {"content": "All o"}
    for row in rows(folder):
        assert row["model"] == "stand-in" and row["sidecars"] == {"zchain": None, "posttrain": None}
        assert datetime.fromisoformat(row["at"]).utcoffset() is not None
        assert set(row["timings"]) == {"queued_s", "prefill_s", "decode_s"}
        assert all(isinstance(t, float) and t >= 0 for t in row["timings"].values())


def test_nothing_is_kept_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serve(StandIn(ids_of("yes"))) as served:
        assert served.chat().status_code == 200
        assert "request_log" not in served.get("/health").json()
    assert list(tmp_path.iterdir()) == []


def test_only_finished_answers_are_kept(folder: Path) -> None:
    """Refused, failed and abandoned requests leave no row."""
    fail = {"on": True}

    def before_token(i: int) -> None:
        if i == 2 and fail["on"]:
            raise ValueError("broken")

    engine = StandIn(ids_of("x" * 50), before_token=before_token)
    with serve(engine, requests=RequestLog(folder, 30)) as served:
        assert served.chat("", max_tokens=3).status_code == 400
        assert served.chat("fails").status_code == 500
        fail["on"] = False
        assert served.chat("works").status_code == 200
    assert [r["messages"][0]["content"] for r in rows(folder)] == ["works"]


def test_a_stalled_disk_delays_no_answer(folder: Path) -> None:
    """The lock is held by somebody else for as long as he likes; answers come, and their rows later."""
    with serve(StandIn(ids_of("quick")), requests=RequestLog(folder, 30)) as served:
        served.chat("before")
        until(lambda: len(rows(folder)) == 1)
        with locked(folder):
            for i in range(5):
                begun = time.monotonic()
                assert served.chat(f"while it is held {i}").status_code == 200
                assert time.monotonic() - begun < 5
            assert len(rows(folder)) == 1
        until(lambda: len(rows(folder)) == 6)
    assert [r["messages"][0]["content"] for r in rows(folder)][1:] == [f"while it is held {i}" for i in range(5)]


def test_what_waits_for_the_disk_is_bounded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep = RequestLog(folder, 30, most_waiting_bytes=1000)
    with serve(StandIn(ids_of("ok")), requests=keep) as served:
        served.chat("first")
        until(lambda: len(rows(folder)) == 1)
        with locked(folder):
            for _ in range(8):
                assert served.chat("x" * 300).status_code == 200
            assert served.get("/health").json()["request_log"]["status"] == "failing"
        until(lambda: served.get("/health").json()["request_log"]["status"] == "ok")
        counts = served.get("/health").json()["request_log"]
        assert counts["lost"] >= 1 and counts["written"] + counts["lost"] == 9
    assert len(rows(folder)) == counts["written"] > 1
    assert caplog.text.count("cannot be written") == 1


def full_disk(monkeypatch: pytest.MonkeyPatch, room: int) -> Callable[[], None]:
    """A disk with room for so many bytes more in the log's files; returns what makes room."""
    write, left = os.write, [room]

    def limited(fd: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        n = write(fd, bytes(data)[: left[0]])
        left[0] -= n
        return n

    monkeypatch.setattr("ds4.posttrain.log.os.write", limited)
    return lambda: monkeypatch.setattr("ds4.posttrain.log.os.write", write)


def test_a_full_disk_breaks_no_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A row that fits in part is not there at all; the server's log says so once, and once that it is over."""
    caplog.set_level(logging.INFO)
    with serve(StandIn(ids_of("fine")), requests=RequestLog(folder, 30)) as served:
        served.chat("before")
        until(lambda: len(rows(folder)) == 1)
        before = next(iter(days(folder).values())).read_bytes()
        make_room = full_disk(monkeypatch, 40)
        for i in range(3):
            assert served.chat("on a full disk").json()["choices"][0]["message"]["content"] == "fine"
            until(lambda n=i: served.get("/health").json()["request_log"]["lost"] == n + 1)  # type: ignore[misc]
        health = served.get("/health")
        assert health.status_code == 200 and health.json()["status"] == "ok"
        assert health.json()["request_log"] == {"status": "failing", "written": 1, "lost": 3}
        assert next(iter(days(folder).values())).read_bytes() == before
        make_room()
        served.chat("after")
        until(lambda: len(rows(folder)) == 2)
        until(lambda: served.get("/health").json()["request_log"] == {"status": "ok", "written": 2, "lost": 3})
    assert caplog.text.count("cannot be written (No space left on device)") == 1
    assert caplog.text.count("is written again; 3 rows were lost") == 1


def test_servers_and_restarts_share_a_folder(folder: Path) -> None:
    """Two servers at once, then a third: no row is lost, none is cut, none stands in another's line."""

    def ask(url: str, who: str) -> None:
        for i in range(20):
            body = {"messages": [{"role": "user", "content": f"{who} {i} " + who * 200}]}
            assert httpx.post(url + "/v1/chat/completions", json=body, timeout=30).status_code == 200

    one, two = RequestLog(folder, 30), RequestLog(folder, 30)
    with serve(StandIn(ids_of("1")), requests=one) as a, serve(StandIn(ids_of("2")), requests=two) as b:
        threads = [threading.Thread(target=ask, args=(s.url, w)) for s, w in ((a, "a"), (b, "b"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with serve(StandIn(ids_of("3")), requests=RequestLog(folder, 30)) as c:
        c.chat("restarted")
    said = [r["messages"][0]["content"][:4].strip() for r in rows(folder)]
    assert sorted(said[:-1]) == sorted(f"{w} {i}"[:4].strip() for w in "ab" for i in range(20))
    assert said[-1] == "rest" and len({r["id"] for r in rows(folder)}) == 41


def test_what_waits_is_written_when_the_server_stops(folder: Path) -> None:
    with serve(StandIn(ids_of("bye")), requests=RequestLog(folder, 30)) as served:
        for _ in range(5):
            served.chat("last words")
    assert len(rows(folder)) == 5  # `serve` waits for the server's end, and nothing here for the disk


def test_a_row_that_a_dead_machine_cut_spoils_no_other(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    day = NOON.date()
    day_file(folder, day).write_bytes(b'{"id":"a"}\n{"id":"b","messages":[{"ro')
    append(folder, day, [b'{"id":"c"}\n'])
    found, problems = read_file(day_file(folder, day))
    assert [r.id for r in found] == ["a", "c"] and [r.line for r in found] == [1, 3]
    assert [p.line for p in problems] == [2] and "no JSON" in problems[0].reason
    assert mode(day_file(folder, day)) == 0o600  # it was not, before
    assert read_day(folder, day) == (found, problems)
    assert read_day(folder, day + timedelta(days=1)) == ([], [])


def test_days_end_at_midnight_and_old_ones_go(folder: Path) -> None:
    """A clock of the test's own: a file a day of local time, and of two days that are kept the third goes."""
    at = [NOON]
    folder.mkdir(mode=0o700)
    for name in ("requests-2026-11-28.jsonl", "requests-2026-11-29.jsonl", "requests-2026-13-40.jsonl", "notes.txt"):
        (folder / name).write_text("{}\n")
    (folder / ".requests-2026-11-01.jsonl.new").write_text("left by a rewrite that was killed")
    (folder / "requests-2026-11-01.jsonl").symlink_to(folder / "notes.txt")

    def clock() -> datetime:
        if threading.current_thread().name != "ds4-requests-log":
            ended.append(at[0].day)
        return at[0]

    keep = RequestLog(folder, 2, clock=clock)
    ended: list[int] = []  # the days on which answers ended, as the log asked for them
    with serve(StandIn(ids_of("ok")), requests=keep) as served:
        served.chat("on the 30th")
        until(lambda: day_file(folder, date(2026, 11, 30)).exists())
        assert sorted(p.name for p in folder.glob("*.jsonl")) == [
            "requests-2026-11-01.jsonl", "requests-2026-11-29.jsonl", "requests-2026-11-30.jsonl",
            "requests-2026-13-40.jsonl",
        ]  # fmt: skip
        assert not (folder / ".requests-2026-11-01.jsonl.new").exists() and (folder / "notes.txt").exists()
        at[0] = NOON + timedelta(hours=11, minutes=59)  # 22:59 in Greenwich, 23:59 here
        with locked(folder):  # written after midnight: the day is the one that it was answered on
            served.chat("still on the 30th")
            until(lambda: ended == [30, 30])
            at[0] = NOON + timedelta(hours=12)
        served.chat("on the 1st")
        until(lambda: day_file(folder, date(2026, 12, 1)).exists())
        until(lambda: not day_file(folder, date(2026, 11, 29)).exists())
    assert len(day_file(folder, date(2026, 11, 30)).read_text().splitlines()) == 2


def test_retention_counts_today(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    today = date(2026, 11, 30)
    for back in range(4):
        append(folder, today - timedelta(days=back), [b"{}\n"])
    append(folder, today + timedelta(days=1), [b"{}\n"])  # a clock that was wrong: not ours to remove
    assert [p.name for p in prune(folder, today, 1)] == [f"requests-2026-11-{d}.jsonl" for d in (27, 28, 29)]
    assert list(days(folder)) == [today, today + timedelta(days=1)]


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """Whoever may write in the folder cannot make the server write elsewhere."""
    folder.mkdir(mode=0o700)
    (tmp_path / "precious").write_text("as it was")
    day_file(folder, NOON.date()).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        append(folder, NOON.date(), [b"{}\n"])
    assert (tmp_path / "precious").read_text() == "as it was"


def test_a_folder_that_cannot_be_one_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    for wide in (0o755, 0o710, 0o701):
        folder.chmod(wide)
        with pytest.raises(UsageError, match=f"mode {wide:o}.*chmod 700"):
            RequestLog(folder, 30)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        RequestLog(tmp_path / "file", 30)
    with pytest.raises(UsageError, match="none"):
        RequestLog(tmp_path / "none" / "below", 30)
    with pytest.raises(UsageError, match="chmod 700"):  # the server does not begin
        run(["-m", str(tmp_path / "x.gguf"), "--port", "0", "--log-requests", str(folder)])
    assert not (tmp_path / "none").exists()


def test_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse(["-m", "x"]).log_requests is None
    (tmp_path / "ds4.toml").write_text('model = "x"\nlog_requests = "there"\nlog-days = 3\n')
    args = parse(["--dir", str(tmp_path)])
    assert (args.log_requests, args.log_days) == ("there", 3)
    with pytest.raises(UsageError, match="--log-requests"):
        parse(["-m", "x", "--log-days", "3"])
    for wrong in ("0", "-1", "40000"):
        with pytest.raises(UsageError, match=f"--log-days {wrong}"):
            parse(["-m", "x", "--log-requests", "d", "--log-days", wrong])


def test_days_are_read_as_written() -> None:
    assert parse_day("2026-11-30") == date(2026, 11, 30)
    for wrong in ("2026-11-31", "30.11.2026", "20261130", "2026-W49-1", ""):
        with pytest.raises(UsageError, match="2026-11-30"):
            parse_day(wrong)


def test_the_lock_is_a_lock(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with locked(folder), open(folder / ".lock") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_limits_are_untouched_by_a_log(folder: Path) -> None:
    """A body over the limit is refused before anything is kept of it."""
    with serve(StandIn(ids_of("ok")), limits=Limits(body_bytes=200), requests=RequestLog(folder, 30)) as served:
        assert served.chat("x" * 500).status_code == 413
    assert rows(folder) == []
