"""`ds4 nightly`: flags, ds4.toml, status, history, rollback with a server, install."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import date, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ds4 import embedded
from ds4.cli import main, nightly, serve
from ds4.posttrain.log import day_file
from solvers.nightly.gates import Thresholds
from solvers.nightly.home import Home
from solvers.nightly.night import Outcome

KEY = "0123456789abcdef0123"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home.make(tmp_path / "nightly")
    before = None
    for name in ("2026-11-28", "2026-11-29"):
        made.night(name).mkdir()
        made.switch(name)
        made.history.append({"event": "accepted", "day": name, "night": name, "method": "margins", "before": before})
        before = name
    return made


def ds4(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> str:
    capsys.readouterr()
    assert main.run(["nightly", *map(str, words)]) == code, capsys.readouterr()
    out = capsys.readouterr()
    return out.out if code == 0 else out.err


@pytest.fixture
def server() -> Iterator[dict[str, Any]]:
    """Something that answers /admin/reload as a ds4-server does, and notes what it was asked."""
    told: dict[str, Any] = {"asked": [], "answer": (200, {"status": "ok", "sidecars": {"posttrain": {"name": "x"}}})}

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told["asked"].append((self.path, self.headers["Authorization"]))
            status, body = told["answer"]
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    told["url"] = f"http://127.0.0.1:{http.server_address[1]}"
    yield told
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "admin.key"
    path.touch(0o600)
    path.write_text(KEY)
    return path


def test_status_and_history(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.history.append({"event": "failed", "day": "2026-11-30", "reason": "the disk is full"})
    home.history.append({"event": "reloaded", "day": "2026-11-29", "night": "2026-11-29"})
    home.work("2026-11-30").mkdir()
    (home.work("2026-11-30") / "job.json").write_text("{}")
    with open(home.history.path, "a") as f:
        f.write('{"event": "torn')
    told = json.loads(ds4(capsys, "status", "--home", home.path, "--json"))
    assert told["mounted"] == "2026-11-29" and told["nights"] == ["2026-11-28", "2026-11-29"]
    assert told["last"]["reason"] == "the disk is full" and told["at_work"] is None
    assert told["under_way"] == ["2026-11-30"] and told["history_lines_torn"] == 1
    text = ds4(capsys, "status", "--home", home.path)
    for words in ("mounted: 2026-11-29", "failed  day 2026-11-30", "at work: nobody", "not finished: 2026-11-30"):
        assert words in text
    with home.locked("a night"):
        assert f"at work: process {os.getpid()} (a night) since" in ds4(capsys, "status", "--home", home.path)
    events = json.loads(ds4(capsys, "history", "--home", home.path, "--json"))
    assert [e["event"] for e in events] == ["accepted", "accepted", "failed", "reloaded"]
    assert len(ds4(capsys, "history", "--home", home.path, "--last", "2").splitlines()) == 2
    assert "--last is 0" in ds4(capsys, "history", "--home", home.path, "--last", "0", code=2)
    assert "no such folder" in ds4(capsys, "status", "--home", home.path / "none", code=2)


def test_status_of_a_broken_link_names_the_remedy(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    os.rename(home.night("2026-11-29"), home.path / "gone")
    assert "ds4 nightly rollback" in ds4(capsys, "status", "--home", home.path, code=1)
    assert "mounted: none, before: 2026-11-29" in ds4(capsys, "rollback", "--home", home.path, "--to", "none")


def test_rollback_tells_the_server(
    home: Home, server: dict[str, Any], key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ds4(capsys, "rollback", "--home", home.path, "--server", server["url"], "--admin-key", key, "--json")
    assert json.loads(told) == {"was": "2026-11-29", "now": "2026-11-28", "server": "x"}
    assert server["asked"] == [("/admin/reload", f"Bearer {KEY}")]
    assert home.current == "2026-11-28"
    error = {"error": {"message": "base.fnv: solved on another sidecar", "code": "reload_failed"}}
    server["answer"] = (500, error)
    to = ("--to", "2026-11-29", "--server", server["url"], "--admin-key", key)
    said = ds4(capsys, "rollback", "--home", home.path, *to, code=1)
    assert "2026-11-29 is current now, but the server still has 2026-11-28: " in said and "another sidecar" in said
    server["answer"] = (401, {"error": {"message": "wrong key", "code": "unauthorized"}})
    assert "wrong key" in ds4(capsys, "rollback", "--home", home.path, *to, code=1)


def test_rollback_that_cannot_be(home: Home, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ds4(capsys, "rollback", "--home", home.path, "--server", "http://127.0.0.1:1", code=2)
    assert "--server and --admin-key belong together" in said
    said = ds4(capsys, "rollback", "--home", home.path, "--to", "x", code=2)
    assert "--to 'x': is no night; there are 2026-11-28, 2026-11-29, none" in said
    with home.locked("a night"):
        assert "is at work here" in ds4(capsys, "rollback", "--home", home.path, code=2)
    assert home.current == "2026-11-29"


# -- flags of run --


def settled(*words: str) -> argparse.Namespace:
    parser = main.build_parser("nightly")
    args = parser.parse_args(["nightly", "run", *words])
    nightly.settle(args)
    return args


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "ds4.toml").write_text(
        'port = 1234\n[nightly]\nlog = "L"\nhome = "H"\ngate-kept = 0.9\nkv = "f32"\nactivations = "f32"\nwait = 5\n'
        "no-graph = true\n"
    )
    args = settled("--dir", str(tmp_path), "--home", "other", "--activations", "bf16", "--day", "2026-11-30")
    assert (args.log, args.home, args.gate_kept, args.gate_flipped) == ("L", "other", 0.9, None)
    assert (args.kv, args.activations, args.wait, args.no_graph, args.chunk) == ("f32", "bf16", 5, True, 512)
    night, solvers = nightly.night_of(args)
    assert night.thresholds == Thresholds(kept=0.9) and (night.options.kv, night.options.graphs) == ("f32", False)
    assert (night.day, night.n_days, night.method) == (date(2026, 11, 30), 14, "best")
    assert night.teacher == embedded.checkpoint() and set(solvers) == {"margins", "refit", "carry"}


def test_the_server_does_not_mind_the_table(tmp_path: Path) -> None:
    (tmp_path / "ds4.toml").write_text('port = 1234\nmodel = "M"\n[nightly]\nlog = "L"\n')
    assert serve.parse(["--dir", str(tmp_path)]).port == 1234


@pytest.mark.parametrize(
    ("toml", "words", "said"),
    [
        ("[nightly]\nkeep = 3\n", (), "unknown key 'keep'"),
        ("[nightly]\nwait = 'x'\n", (), "wait is 'x'"),
        ("nightly = 3\n", (), "nightly is 3; expected a table"),
        ("", ("--home", "H"), "--log is missing"),
        ("", ("--log", "L"), "--home is missing"),
        ("", ("--log", "L", "--home", "H", "--wait", "-1"), "--wait is -1"),
        ("", ("--log", "L", "--home", "H", "--days", "0"), "--days is 0"),
        ("", ("--log", "L", "--home", "H", "--day", "yesterday"), "write one as 2026-11-30"),
        ("", ("--log", "L", "--home", "H", "--gate-kept", "2"), "--gate-kept is 2"),
        ("", ("--log", "L", "--home", "H", "--server", "http://127.0.0.1:1"), "belong together"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, toml: str, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds4.toml").write_text(toml)
    assert said in ds4(capsys, "run", "--dir", tmp_path, *words, code=2)


def test_the_day_is_yesterday_and_the_domain_the_sidecars(tmp_path: Path) -> None:
    (tmp_path / "ds4.toml").write_text("")
    sidecar = tmp_path / "mine"
    sidecar.mkdir()
    words = ("--dir", str(tmp_path), "--log", "L", "--home", "H", "--zchain", str(sidecar))
    night, _ = nightly.night_of(settled(*words))
    assert night.day == date.today() - timedelta(days=1)
    assert [t.domain for t in night.texts] == ["general"] and "nothing in mine says its domain" in str(
        night.no_domain
    )
    (sidecar / "manifest.json").write_text('{"domain": "law"}')
    night, _ = nightly.night_of(settled(*words))
    assert [t.domain for t in night.texts] == ["general", "law"] and night.no_domain is None
    (sidecar / "manifest.json").write_text('{"domain": "somewhere/else"}')
    night, _ = nightly.night_of(settled(*words))
    assert len(night.texts) == 1 and "whose text nobody knows here" in str(night.no_domain)
    night, _ = nightly.night_of(settled(*words, "--domain", "code"))
    assert [t.domain for t in night.texts] == ["general", "code"]
    with pytest.raises(SystemExit):
        settled(*words, "--mem-budget-mb", "0")


def test_a_night_without_requests_says_that_today_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, today = tmp_path / "log", date.today()
    log.mkdir(mode=0o700)
    monkeypatch.setattr(nightly, "run_night", lambda *_: Outcome("nothing to do", reason="none"))
    words = ("run", "--dir", str(tmp_path), "--log", str(log), "--home", str(tmp_path / "H"), "-m", "a.gguf")
    hint = f"{today} has requests already: ds4 nightly run --day {today} takes these\n"
    for day, given, said in (
        (None, (), ""), (today, (), hint), (today, ("--day", str(today)), ""),
        (today - timedelta(days=1), (), ""),  # that of yesterday are there, and nothing came of them
    ):  # fmt: skip
        if day is not None:
            day_file(log, day).write_text("{}\n")
        assert main.run(["nightly", *words, *given]) == 0
        told = capsys.readouterr()
        assert (told.out, told.err) == ("nothing to do: none\n", said)


# -- install --


def test_install_prints_a_cron_line_that_runs_where_there_is_no_systemd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is run by sh, from another folder: the night that it asks for is this one."""
    log, elsewhere = tmp_path / "a log", tmp_path / "else where"
    log.mkdir(mode=0o700)
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "ds4.toml").write_text("")
    flags = ("--dir", ".", "--log", "a log", "--home", "50% of nights", "--method", "margins", "--gate-kept", "0.9")
    line = ds4(capsys, "install", "--at", "4:05", *flags).strip()
    assert line.startswith("5 4 * * * ")
    command = line.split(" ", 5)[5].replace("\\%", "%")
    words = shlex.split(command)
    assert words[words.index("--log") + 1] == str(log) and words[words.index("--gate-kept") + 1] == "0.9"
    monkeypatch.undo()
    env = {**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2])}
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=elsewhere, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    yesterday = date.today() - timedelta(days=1)
    assert done.stdout == f"nothing to do: {yesterday}: no requests\n"
    assert Home.open(tmp_path / "50% of nights").history.read()[0][0]["event"] == "nothing to do"


def test_install_print_and_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "ds4.toml").write_text("")
    flags = ("--dir", tmp_path, "--log", tmp_path / "l", "--home", tmp_path / "h")
    assert "no such folder" in ds4(capsys, "install", "--print", *flags, code=2)
    (tmp_path / "l").mkdir()
    for wrong in (("--gate-kept", "7"), ("--day", "2999-01-01"), ("--ruler-tokens", "3")):
        assert wrong[0] in ds4(capsys, "install", "--print", *flags, *wrong, code=2)
    said = ds4(capsys, "install", "--print", *flags)
    folder = tmp_path / "config" / "systemd" / "user"
    for words in (f"# {folder / 'ds4-nightly.service'}", "OnCalendar=*-*-* 03:30:00", "# crontab", sys.executable):
        assert words in said
    assert not folder.exists(), "--print only prints"
    assert ds4(capsys, "install", "--remove").strip() == "there is no timer"
    folder.mkdir(parents=True)
    (folder / "ds4-nightly.timer").write_text("")
    assert "ds4-nightly.timer: removed" in ds4(capsys, "install", "--remove")
    assert "--log is missing" in ds4(capsys, "install", "--dir", tmp_path, code=2)
    assert "write it as 03:30" in ds4(capsys, "install", "--at", "half past three", *flags, code=2)
