"""Steps of a night: finished ones are not done again, another job begins anew, nothing half stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ds4.errors import CapacityError, FileFormatError
from solvers.nightly.steps import Steps

HEAD = {"day": "2026-11-30", "gates": {"kept": 0.995}, "files": [["a", "b"]]}


def steps(tmp_path: Path, head: dict[str, Any] | None = None) -> Steps:
    (tmp_path / "work").mkdir(exist_ok=True)
    return Steps(tmp_path / "work" / "2026-11-30", head or HEAD, lambda line: None)


def test_a_finished_step_is_not_done_again(tmp_path: Path) -> None:
    first = steps(tmp_path)
    result = first.do("points, refit+margins", lambda: {"leads": (0.1, 1e-17), "none": None})
    assert result == {"leads": [0.1, 1e-17], "none": None}, "as it reads back, in the run that made it too"
    again = steps(tmp_path)
    assert again.do("points, refit+margins", lambda: pytest.fail("done again")) == result
    assert (again.resumed, again.seconds) == (1, first.seconds)
    with pytest.raises(ZeroDivisionError):
        again.do("next", lambda: 1 // 0)
    assert steps(tmp_path).do("points, refit+margins", lambda: None) == result


def test_another_job_begins_anew(tmp_path: Path) -> None:
    first = steps(tmp_path)
    first.do("points", lambda: 1)
    (first.folder / "candidates").mkdir()
    other = steps(tmp_path, {**HEAD, "day": "2026-12-01"})
    assert other.do("points", lambda: 2) == 2 and not (other.folder / "candidates").exists()
    first.folder.joinpath("job.json").write_text("{")
    assert steps(tmp_path).do("points", lambda: 3) == 3, "a torn head is nobody's"


def test_steps_in_another_order_are_an_error(tmp_path: Path) -> None:
    steps(tmp_path).do("a b", lambda: 1)
    with pytest.raises(FileFormatError, match=r"is no step of this night .*remove"):
        steps(tmp_path).do("a-b", lambda: 1)


def test_a_full_disk_leaves_the_step_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = steps(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CapacityError, match="the disk is full"):
            made.do("points", lambda: 1)
    assert list((made.folder / "steps").iterdir()) == []
    assert steps(tmp_path).do("points", lambda: 2) == 2


def test_removed_is_removed(tmp_path: Path) -> None:
    made = steps(tmp_path)
    made.do("points", lambda: 1)
    made.remove()
    assert not made.folder.exists() and made.folder.parent.is_dir()
