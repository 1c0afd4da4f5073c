"""Unit files and cron lines: words come out of them as they went in; what systemd says is passed on."""

from __future__ import annotations

import json
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ds4.errors import Ds4Error, UsageError
from ds4.settings import user_units
from solvers.nightly import timer
from solvers.nightly.timer import SERVICE, TIMER, Job

ODD = ("/a b/%n/python", "--log", "quo\"te's", "back\\slash", "$HOME ${X}", "50%", "~", "", "ж", "a;b", "#c")


def words_of(exec_start: str) -> list[str]:
    """ExecStart as systemd reads it (systemd.service(5), systemd.syntax(7)): quotes, C escapes, %% and $$."""
    out, word, quote, begun, i = [], "", "", False, 0
    while i < len(exec_start):
        c = exec_start[i]
        if c == "\\":
            i += 1
            word, begun = word + exec_start[i], True
        elif quote and c == quote:
            quote = ""
        elif not quote and not word and c in "\"'":
            quote, begun = c, True
        elif not quote and c == " ":
            out += [word] if begun else []
            word, begun = "", False
        else:
            word, begun = word + c, True
        i += 1
    assert not quote
    out += [word] if begun else []
    for w in out:
        assert "%" not in w.replace("%%", "") and "$" not in w.replace("$$", ""), "would be expanded"
    return [w.replace("%%", "%").replace("$$", "$") for w in out]


def test_the_service_runs_the_very_words() -> None:
    text = Job(ODD, "03:30").units()[SERVICE]
    (line,) = [x for x in text.splitlines() if x.startswith("ExecStart=")]
    assert words_of(line.removeprefix("ExecStart=")) == list(ODD)
    assert "Type=oneshot" in text


def test_the_timer_and_the_time() -> None:
    assert "OnCalendar=*-*-* 03:30:00" in Job(("x",), "3:30").units()[TIMER]
    for wrong in ("24:00", "3", "03:60", "03:30:00", "", "-1:30"):
        with pytest.raises(UsageError, match="write it as 03:30"):
            Job(("x",), wrong)
    with pytest.raises(UsageError, match="neither a unit file nor a crontab can hold"):
        Job(("a\nb",), "03:30")


def test_cron_runs_the_very_words(tmp_path: Path) -> None:
    """cron turns % into a newline unless it is escaped, and gives the rest to sh."""
    told = tmp_path / "told.json"
    script = f"import json, sys; json.dump(sys.argv[1:], open({str(told)!r}, 'w'))"
    line = Job((sys.executable, "-c", script, *ODD), "04:05").cron()
    minute, hour, *rest = line.split(" ", 5)
    assert (minute, hour, rest[:3]) == ("5", "4", ["*"] * 3)
    assert "%" not in rest[3].replace("\\%", "")
    subprocess.run(["/bin/sh", "-c", rest[3].replace("\\%", "%")], check=True)
    assert json.loads(told.read_text()) == list(ODD)


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A systemctl that notes how it was called and does what the test says."""

    def make(body: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        calls = tmp_path / "calls"
        script = folder / "systemctl"
        script.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(calls))}\n{body}\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return calls

    return make


def test_written_and_started_and_removed(tmp_path: Path, systemctl: Callable[[str], Path]) -> None:
    calls = systemctl('case "$*" in *show*Next*) echo "Tue 2026-12-01 03:30:00 UTC";; esac')
    folder = tmp_path / "a b" / "systemd" / "user"
    assert timer.works()
    assert timer.install(Job(("x",), "03:30"), folder) == [folder / SERVICE, folder / TIMER]
    timer.enable()
    assert timer.next_run() == "Tue 2026-12-01 03:30:00 UTC"
    assert timer.remove(folder) == [folder / TIMER, folder / SERVICE] and list(folder.iterdir()) == []
    assert timer.remove(folder) == []
    said = calls.read_text().splitlines()
    assert "--user daemon-reload" in said and f"--user enable --now {TIMER}" in said
    assert f"--user disable --now {TIMER}" in said and said[-1] == "--user daemon-reload"


def test_a_systemd_that_fails_is_quoted(systemctl: Callable[[str], Path]) -> None:
    systemctl('echo "Failed to connect to bus" >&2; exit 1')
    assert not timer.works() and timer.next_run() is None
    with pytest.raises(Ds4Error, match="systemctl --user daemon-reload: Failed to connect to bus"):
        timer.enable()


def test_no_systemd_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("systemctl") is None and not timer.works() and timer.next_run() is None


def test_where_units_lie(tmp_path: Path) -> None:
    assert user_units({"XDG_CONFIG_HOME": str(tmp_path)}) == tmp_path / "systemd" / "user"
    assert user_units({}) == Path("~/.config/systemd/user").expanduser()
