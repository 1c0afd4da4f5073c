"""`ds4 posttrain refit`: from a log to a folder that mounts, and what it refuses before any work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from ds4.cli import posttrain_refit
from ds4.cli.main import run
from ds4.engine import Engine
from ds4.errors import Ds4Error
from ds4.posttrain.log import append, make_folder
from tests.cli.commands import ok, refused
from tests.conftest import opened
from tests.engine.conftest import bases  # noqa: F401 - a fixture
from tests.reference_sidecar import write_sidecar
from tests.solvers.solving import DATA, NAME

CHECKPOINT = DATA / NAME
LAST = date(2026, 11, 30)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two days: six requests and a line that is none; three requests."""
    folder = tmp_path_factory.mktemp("log") / "log"
    make_folder(folder)
    rng = np.random.default_rng(8)
    for day, n in ((date(2026, 11, 29), 3), (LAST, 6)):
        rows = [
            {
                "id": f"cmpl-{day.day}-{i}", "prompt": rng.integers(3, 320, 24).tolist(), "answer": {"content": "x"},
                "answer_ids": rng.integers(3, 320, 16).tolist(),
            }
            for i in range(n)
        ]  # fmt: skip
        append(folder, day, [json.dumps(r).encode() + b"\n" for r in rows] + [b"{nonsense\n"] * (day == LAST))
    return folder


@pytest.fixture(scope="module")
def base(bases: Callable[[str], Path]) -> Path:  # noqa: F811
    return bases(NAME)


def argv(log: Path, base: Path, out: Path, *more: object) -> list[object]:
    model = ["-m", base, "--engram-dir", CHECKPOINT, "--teacher", CHECKPOINT]
    rest = ["--beside", "none", "--layers", "last", "--workers", 1]
    return ["posttrain", "refit", "--log", log, "-o", out, *model, *rest, *more]


def test_from_a_log_to_a_folder_that_mounts(
    log: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the original's part: until the end the requests' tokens lie in a folder of their owner's alone."""
    out, zchain, left = tmp_path / "third", tmp_path / "second", tmp_path / "third.requests"
    engine = Engine.open(base, engram_dir=CHECKPOINT, device=opened("fast", "greedy"))
    write_sidecar(zchain, engine.config, 5)
    command = argv(log, base, out, "--zchain", zchain, "--json")
    with monkeypatch.context() as m:
        m.setattr(posttrain_refit, "_solve", _stop)
        assert "stopped" in said_with(capsys, 1, *command)
    assert os.stat(left).st_mode & 0o777 == 0o700 and [p.suffix for p in left.iterdir()] == [".fixture"]
    (left / "0123.fixture").write_bytes(b"of requests that were forgotten")
    manifest = json.loads(ok(capsys, *command))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["second", "third"]
    assert (manifest["requests"], manifest["tokens"], manifest["split"]) == (6, 6 * 40, "2026-11-30")
    assert manifest["beside"] == [] and manifest["zchain"] == "second"
    engine.remount(zchain, out)
    assert not any("base.fnv" in w for w in engine.warnings)
    assert not any(str(i) in (out / "manifest.json").read_text() for i in ("cmpl-30-0", "cmpl-30-5"))


def _stop(*_: object) -> None:
    raise Ds4Error("stopped")


def test_several_days_and_what_cannot_be_read(
    log: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posttrain_refit, "_solve", _stop)
    said = said_with(capsys, 1, *argv(log, base, tmp_path / "third", "--days", 2))
    assert "9 requests, 9 conversations, 360 tokens; 0 repeat others, 0 had no room, 1 cannot be read" in said
    assert "requests-2026-11-30.jsonl, line 7: is no JSON" in said


def said_with(capsys: pytest.CaptureFixture[str], code: int, *command: object) -> str:
    """What a command says that tells of the requests first."""
    assert run([str(a) for a in command]) == code
    return capsys.readouterr().err


def test_refused_before_any_work(log: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "third"
    empty = tmp_path / "empty"
    empty.mkdir()
    for more, said in (
        (("--day", "2026-11-28"), "has no requests of 2026-11-28; its days go from 2026-11-29 to 2026-11-30"),
        (("--day", "yesterday"), "write one as 2026-11-30"),
        (("--days", 0), "--days 0: must be at least 1"),
        (("--log", empty), "has no requests; ds4-server --log-requests"),
        (("--log", tmp_path / "none"), "no such folder"),
        (("--workers", 0), "expected at least 1"),
        (("--beside", "nonsense"), "neither a folder nor an embedded domain"),
        (("--tokens", 3), "3 tokens are too few"),
    ):
        assert said in refused(capsys, 2, *argv(log, base, out, *more)), more
    said = said_with(capsys, 2, *argv(log, base, out, "--day", "2026-11-29"))
    assert "3 requests" in said and "has text of 3 different requests; a refit needs at least 4" in said
    command = argv(log, base, out)
    del command[command.index("--teacher") : command.index("--teacher") + 2]  # the embedded one
    assert "refit a base against the checkpoint that it was made from" in refused(capsys, 2, *command)
    out.mkdir()
    (out / "mine").write_text("mine")
    assert "choose another name" in refused(capsys, 2, *argv(log, base, out))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "third"]
