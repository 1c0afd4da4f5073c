"""What the tree carries is listed, its logs are objects, and it is small."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4 import embedded
from train import ship


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "embedded"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    monkeypatch.setattr(embedded, "HOME", folder)
    monkeypatch.setattr(ship, "preflight", lambda path: [])
    return folder


def run(tmp_path: Path, name: str, log: str) -> str:
    (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / name / "log.jsonl").write_text(log)
    return str(tmp_path / "runs" / name)


def test_logs_and_sums(home: Path, tmp_path: Path) -> None:
    trunk, other = run(tmp_path, "trunk", '{"step": 1}\n'), run(tmp_path, "other", '{"step": 2}\n')
    run(tmp_path, "trunk/draft", '{"step": 3}\n')
    assert ship.main(["--log", trunk]) == 0
    assert sorted(p.name for p in (home / "training-log").iterdir()) == ["trunk-draft.jsonl", "trunk.jsonl"]
    assert (home / "training-log" / "trunk-draft.jsonl").read_text() == '{"step": 3}\n'
    embedded.verify()
    (home / "training-log" / "evaluation.json").write_text("{}")
    assert ship.main(["--log", other]) == 0
    assert sorted(p.name for p in (home / "training-log").iterdir()) == ["evaluation.json", "other.jsonl"]
    assert ship.main([]) == 0  # nothing new: the logs stay
    assert (home / "training-log" / "other.jsonl").read_text() == '{"step": 2}\n'
    embedded.verify()


@pytest.mark.parametrize(("log", "said"), [("{}\nhalf", "line 2 is not JSON"), ("[1]\n", "line 1 is not an object")])
def test_a_broken_log_changes_nothing(
    home: Path, tmp_path: Path, log: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ship.main(["--log", run(tmp_path, "trunk", log)]) == 1
    assert said in capsys.readouterr().err and not (home / "training-log").exists()
    assert ship.main(["--log", str(tmp_path)]) == 2


def test_too_large_and_not_whole(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ship, "MOST_BYTES", 1)
    assert ship.main([]) == 1 and "has room for" in capsys.readouterr().err
    monkeypatch.setattr(ship, "preflight", lambda path: ["layers.0: is missing"])
    assert ship.main([]) == 1 and "not whole: layers.0" in capsys.readouterr().err
