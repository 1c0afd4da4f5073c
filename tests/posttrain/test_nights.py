"""`--posttrain`: a folder is itself, a folder of nights is the night that is current, and no other place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds4.errors import FileFormatError
from ds4.posttrain.nights import is_nightly, resolve

HEAD = '{"kind": "ds4-nightly", "version": 1, "made": "2026-11-30"}'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "nightly"
    for name in ("2026-11-29", "2026-11-30", "2026-11-30.2"):
        (folder / "nights" / name).mkdir(parents=True)
    (folder / "rejected" / "2026-11-28").mkdir(parents=True)
    (folder / "nightly.json").write_text(HEAD)
    return folder


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert not is_nightly(tmp_path) and resolve(tmp_path) == tmp_path
    with pytest.raises(FileFormatError, match=r"none: no such folder; .*ds4 nightly init makes it"):
        resolve(tmp_path / "none")
    (tmp_path / "current").symlink_to(tmp_path)
    assert resolve(str(tmp_path)) == tmp_path


def test_the_current_night(home: Path, tmp_path: Path) -> None:
    """Its own path, so that a switch in the middle of a load mixes nothing; reached by another name too."""
    assert is_nightly(home) and resolve(home) is None
    (home / "current").symlink_to("nights/2026-11-29")
    first = resolve(home)
    beside = home / ".current.new"
    beside.symlink_to(home / "nights" / "2026-11-30.2")  # absolute
    os.replace(beside, home / "current")
    assert first == home / "nights" / "2026-11-29" and resolve(home) == home / "nights" / "2026-11-30.2"
    (tmp_path / "alias").symlink_to(home)
    assert resolve(tmp_path / "alias") == home / "nights" / "2026-11-30.2"


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("nights/2026-12-01", "not there"),
        ("rejected/2026-11-28", "not one of"),
        ("../elsewhere", "not one of"),
        ("nights", "not one of"),
        ("nights/2026-11-29/deeper", "not one of"),
        ("current", "not one of"),
    ],
)
def test_a_link_that_points_elsewhere(home: Path, tmp_path: Path, target: str, what: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (home / "nights" / "2026-11-29" / "deeper").mkdir()
    (home / "current").symlink_to(target)
    with pytest.raises(FileFormatError, match=what) as e:
        resolve(home)
    assert str(home / "current") in str(e.value) and f"ds4 nightly rollback --home {home}" in str(e.value)


def test_a_night_that_leads_out(home: Path, tmp_path: Path) -> None:
    """A link among the nights is followed too."""
    (tmp_path / "elsewhere").mkdir()
    (home / "nights" / "2026-12-02").symlink_to(tmp_path / "elsewhere")
    (home / "current").symlink_to("nights/2026-12-02")
    with pytest.raises(FileFormatError, match="not one of"):
        resolve(home)


def test_current_is_a_folder(home: Path) -> None:
    (home / "current").mkdir()
    with pytest.raises(FileFormatError, match="current: is not a link"):
        resolve(home)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "ds4-nightly", "version": 2}', "\udcff"])
def test_a_mark_that_says_something_else(home: Path, text: str) -> None:
    (home / "nightly.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FileFormatError, match=r"nightly\.json"):
        resolve(home)
