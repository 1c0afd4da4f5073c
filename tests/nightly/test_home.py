"""The folder of the nights: one at a time, switched in one rename, taken back, nothing lost on the way."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError
from ds4.posttrain.nights import resolve
from solvers.nightly import home as home_module
from solvers.nightly.history import History
from solvers.nightly.home import REJECTED, Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.make(tmp_path / "nightly")


def candidate(home: Home, text: str = "x") -> Path:
    made = home.work("2026-11-30") / "candidates" / "margins"
    made.mkdir(parents=True)
    (made / "manifest.json").write_text(text)
    return made


def accept(home: Home, name: str) -> None:
    home.place(candidate(home, name), name)
    before = home.current
    home.switch(name)
    home.history.append({"event": "accepted", "night": name, "before": before})


def test_it_is_made_for_its_owner_alone(home: Home) -> None:
    assert home.path.stat().st_mode & 0o777 == 0o700
    assert json.loads((home.path / "nightly.json").read_text())["kind"] == "ds4-nightly"
    assert Home.make(home.path) == Home.open(home.path) == home
    assert home.current is None and resolve(home.path) is None and home.names() == []


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder; ds4 nightly run makes it"):
        Home.open(tmp_path / "none")
    with pytest.raises(UsageError, match="no such folder to make"):
        Home.make(tmp_path / "none" / "nightly")
    (tmp_path / "full").mkdir(mode=0o700)
    (tmp_path / "full" / "thing").write_text("")
    with pytest.raises(UsageError, match="has other things in it"):
        Home.make(tmp_path / "full")
    with pytest.raises(UsageError, match="is no folder of nights"):
        Home.open(tmp_path / "full")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UsageError, match=r"others may look into it \(mode 755\)"):
        Home.make(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is no folder"):
        Home.make(tmp_path / "file")
    Home.make(tmp_path / "nightly")
    (tmp_path / "nightly" / "nightly.json").write_text('{"kind": "ds4-nightly", "version": 2}')
    with pytest.raises(FileFormatError, match="version 2"):
        Home.open(tmp_path / "nightly")


def test_one_job_at_a_time_and_who_it_is(home: Home) -> None:
    code = f"""
        import sys, time
        from solvers.nightly.home import Home
        with Home.open({str(home.path)!r}).locked("a long night"):
            print("held", flush=True)
            time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        holder = home.holder()
        assert holder is not None and (holder.pid, holder.what) == (process.pid, "a long night")
        with (
            pytest.raises(UsageError, match=rf"process {process.pid} \(a long night\) since .* is at work here"),
            home.locked("another"),
        ):
            pass
    finally:
        process.kill()
        process.wait()
    assert home.holder() is None, "a killed job holds nothing"
    with home.locked("another"):
        pass


def test_names_are_days_and_never_twice(home: Home) -> None:
    assert home.new_name("2026-11-30") == "2026-11-30"
    accept(home, "2026-11-30")
    assert home.new_name("2026-11-30") == "2026-11-30.2"
    home.place(candidate(home), "2026-11-30.2", REJECTED)
    assert home.new_name("2026-11-30") == "2026-11-30.3"
    assert home.new_name("2026-11-30", {"2026-11-30.3"}) == "2026-11-30.4"
    for n in range(3, 12):
        home.place(candidate(home), f"2026-11-30.{n}")
    assert home.names()[-2:] == ["2026-11-30.10", "2026-11-30.11"]


def failing_at(real: Callable[..., Any], at: int) -> Callable[..., Any]:
    """`real`, whose call number `at` fails."""
    calls = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise OSError(errno.EIO, "killed here")
        return real(*args, **kwargs)

    return call


def test_a_switch_is_whole_at_every_moment(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever call fails, what is mounted is the night before or this one, and it can be done again."""
    accept(home, "2026-11-29")
    home.place(candidate(home), "2026-11-30")
    seen = set()
    for name in ("symlink", "replace", "unlink", "open", "fsync"):
        for at in range(1, 4):
            home.switch("2026-11-29")
            with monkeypatch.context() as patch:
                patch.setattr(os, name, failing_at(getattr(os, name), at))
                try:
                    home.switch("2026-11-30")
                except Ds4Error as e:
                    assert "killed here" in str(e)
            seen.add(home.current)
            assert resolve(home.path) == home.night(str(home.current)).resolve()
            home.switch("2026-11-30")
            assert home.current == "2026-11-30" and not (home.path / ".current.new").is_symlink()
    assert seen == {"2026-11-29", "2026-11-30"}, "a failure before the rename and one after it: else nothing is shown"


def test_a_candidate_moves_whole_and_moving_it_again_is_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    made = candidate(home, "gains")
    real = os.rename
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(CapacityError, match="the disk is full; make room and run the same command"):
        home.place(made, "2026-11-30")
    assert made.is_dir() and not home.night("2026-11-30").exists()
    monkeypatch.setattr(os, "rename", real)
    there = home.place(made, "2026-11-30")
    assert there == home.place(made, "2026-11-30") and (there / "manifest.json").read_text() == "gains"
    assert not made.exists() and there.stat().st_mode & 0o777 == 0o700


def test_back_and_back_again(home: Home) -> None:
    for name in ("2026-11-28", "2026-11-29", "2026-11-30"):
        accept(home, name)
    assert home.rollback(None) == ("2026-11-30", "2026-11-29")
    assert home.rollback(None) == ("2026-11-29", "2026-11-28"), "not back to what was just taken away"
    assert home.rollback(None) == ("2026-11-28", None) and home.current is None
    with pytest.raises(UsageError, match="nothing is mounted, so there is nothing to take back"):
        home.rollback(None)
    assert home.rollback("2026-11-30") == (None, "2026-11-30")
    assert home.rollback("none") == ("2026-11-30", None)
    with pytest.raises(UsageError, match="--to '2026-12-01': is no night; there are 2026-11-28, 2026-11-29, 2026-11"):
        home.rollback("2026-12-01")
    assert home.names() == ["2026-11-28", "2026-11-29", "2026-11-30"], "nothing is removed"
    events = [(e["event"], e["night"], e["before"]) for e in home.history.read()[0]][3:]
    assert events[0] == ("rolled back", "2026-11-29", "2026-11-30") and len(events) == 5


def test_a_link_that_leads_nowhere_can_be_mended(home: Home) -> None:
    accept(home, "2026-11-29")
    os.rename(home.night("2026-11-29"), home.path / "gone")
    with pytest.raises(FileFormatError, match="current: leads to '2026-11-29', which is no night here"):
        _ = home.current
    with pytest.raises(FileFormatError, match="ds4 nightly rollback"):
        resolve(home.path)
    assert home.rollback("none") == ("2026-11-29", None) and resolve(home.path) is None
    os.symlink("/etc", home.path / "current")
    with pytest.raises(FileFormatError, match="leads to '/etc'"):
        _ = home.current
    with pytest.raises(UsageError, match="history does not say what was before /etc"):
        home.rollback(None)
    assert home.rollback("none") == ("/etc", None) and Path("/etc").is_dir()
    (home.path / "current").mkdir()
    with pytest.raises(FileFormatError, match="is no link"):
        home.rollback("none")


def test_rollback_where_history_has_lost_its_lines(home: Home) -> None:
    accept(home, "2026-11-29")
    accept(home, "2026-11-30")
    home.history.path.unlink()
    with pytest.raises(UsageError, match="history does not say what was before 2026-11-30; name a night, or none"):
        home.rollback(None)
    assert home.current == "2026-11-30" and home.rollback("2026-11-29") == ("2026-11-30", "2026-11-29")


def test_history_survives_a_torn_line(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    assert history.read() == ([], 0)
    history.append({"event": "failed", "reason": "half a character \ud800"})
    with open(history.path, "ab") as f:
        f.write(b'{"event": "accep')
    assert [e["event"] for e in history.read()[0]] == ["failed"] and history.read()[1] == 1
    history.append({"event": "accepted", "night": "2026-11-30"})
    events, torn = history.read()
    assert [e["event"] for e in events] == ["failed", "accepted"] and torn == 1
    assert history.path.stat().st_mode & 0o777 == 0o600


def test_history_on_a_full_disk_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(tmp_path / "history.jsonl")
    history.append({"event": "accepted"})
    before, real = history.path.read_bytes(), os.write
    calls = [0]

    def half(fd: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] == 1:
            return real(fd, data[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(CapacityError, match="the disk is full, the event is not noted"):
        history.append({"event": "rejected"})
    monkeypatch.undo()
    assert history.path.read_bytes() == before


def test_the_lock_is_taken_on_a_full_disk(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(home_module.os, "pwrite", full)
    with home.locked("a rollback"):
        home.switch(None)
