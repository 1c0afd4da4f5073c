"""A night beside a real server, whose device it borrows: nobody's request is lost, and what passed is mounted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pytest

from ds4 import embedded
from ds4.cli.embedded_base import embedded_base
from ds4.posttrain.log import days, read_file
from solvers.nightly.home import Home
from tests.nightly.test_methods import LENIENT, ROOT, env

pytestmark = pytest.mark.long
LOADED_S, ANSWERED_S = 120.0, 300.0
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is a contract?"}], "max_tokens": 8, "temperature": 0,
}  # fmt: skip


def words(*more: str) -> list[str]:
    return ["-m", str(embedded_base()), "--engram-dir", str(embedded.checkpoint()), *more]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a ds4-server that logs, takes orders, and mounts a folder of nights, as yet empty."""
    Home.make(tmp_path / "nightly")
    flags = ["--port", "0", "--log-requests", str(tmp_path / "log"), "--admin-key", str(tmp_path / "key")]
    command = [sys.executable, "-m", "ds4.cli.serve", *words(*flags, "--posttrain", str(tmp_path / "nightly"))]
    with open(tmp_path / "server.log", "w") as log:
        process = subprocess.Popen(command, env=env(), stderr=log, stdout=log)
    try:
        until = time.monotonic() + LOADED_S
        url = ""
        while time.monotonic() < until:
            found = re.search(r"listening on (http://[0-9.:]+)", (tmp_path / "server.log").read_text())
            if found and httpx.get(f"{found[1]}/health").status_code == 200:
                url = found[1]
                break
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            time.sleep(0.2)
        assert url, (tmp_path / "server.log").read_text()
        yield url
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str, question: str) -> dict[str, Any]:
    body = {**BODY, "messages": [{"role": "user", "content": question}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=ANSWERED_S)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def mounted(url: str) -> str | None:
    told = httpx.get(f"{url}/health", timeout=60).json()
    found = told["sidecars"]["posttrain"]
    return None if found is None else str(found["name"])


def ds4(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ds4.cli.main", "nightly", *flags]
    return subprocess.run(command, env=env(), cwd=ROOT, capture_output=True, text=True, check=False)


def test_it_borrows_the_device_and_every_request_is_answered(server: str, tmp_path: Path) -> None:
    """Asked, corrected, solved on the server's own device while others ask, mounted, taken back."""
    log, home = tmp_path / "log", tmp_path / "nightly"
    for question in ("What is a contract?", "What is a bond?"):
        ask(server, question)
    for _ in range(100):  # a row is written a moment after its answer
        rows = [r for path in days(log).values() for r in read_file(path)[0]]
        if len(rows) == 2:
            break
        time.sleep(0.1)
    given = rows[0].row["answer"]["content"]
    correction = {"request_id": rows[0].id, "wanted": " ".join([*given.split(" ")[:2], "the", "opposite"])}
    (log / "corrections.jsonl").write_text(json.dumps(correction) + "\n")
    day = rows[0].path.name[len("requests-") : -len(".jsonl")]
    assert mounted(server) is None and date.fromisoformat(day)

    stop, answered, failed = threading.Event(), list[str](), list[str]()

    def others() -> None:
        while not stop.wait(1.0):
            try:
                answered.append(ask(server, "Name three fruits.")["choices"][0]["message"]["content"])
            except (AssertionError, httpx.HTTPError) as e:
                failed.append(repr(e))

    thread = threading.Thread(target=others)
    thread.start()
    to = ("--home", str(home), "--server", server, "--admin-key", str(tmp_path / "key"))
    try:
        done = ds4(
            "run", "--log", str(log), "--day", day, "--method", "margins", "--answer-limit", "4",
            "--mem-budget-mb", "1", "--wait", "2000", *words(), *to, *LENIENT,
        )  # fmt: skip
    finally:
        stop.set()
        thread.join()
    assert done.returncode == 0, done.stderr
    assert not failed and answered, failed
    told = json.loads((home / "nights" / day / "report.json").read_text())
    assert told["memory"]["borrowed"] and "borrowing the server's device" in done.stderr
    assert mounted(server) == day and Home.open(home).current == day
    back = ds4("rollback", *to)
    assert back.returncode == 0, back.stderr
    assert mounted(server) is None and Home.open(home).current is None
    assert ask(server, "Name three fruits.")["choices"][0]["message"]["content"] == answered[0], "as before the night"
    again = ds4("rollback", *to, "--to", day)
    assert again.returncode == 0 and mounted(server) == day
    assert os.listdir(home / "work") == []
