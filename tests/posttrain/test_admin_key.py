"""The admin key's file: made once, nobody else's to read, nothing that is no key."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ds4.errors import UsageError
from ds4.posttrain.admin_key import make_key, read_key

KEY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def wide_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_made_once_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    key = make_key(path)
    assert len(key) >= 40 and make_key(path) == read_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [p.name for p in tmp_path.iterdir()] == ["admin.key"]
    assert make_key(tmp_path / "other.key") != key
    assert read_key(written(tmp_path / "own.key", f"{KEY}\n", 0o400)) == KEY


def test_of_many_that_begin_at_once_one_makes_it(tmp_path: Path) -> None:
    for i in range(20):
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(make_key, [tmp_path / f"key{i}"] * 8))) == 1


def link(path: Path) -> None:
    path.symlink_to(written(path.with_name("there"), KEY))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: written(path, KEY, 0o640), "others may use this key .mode 640"),
        (lambda path: written(path, KEY, 0o604), "others may use"),
        (lambda path: written(path, KEY[1:]), "15 characters, at least 16"),
        (lambda path: written(path, ""), "0 characters"),
        (lambda path: written(path, f"{KEY} {KEY}"), "one word"),
        (lambda path: written(path, KEY + "\u00e9"), "one word"),
        (lambda path: written(path, KEY * 500), "one word"),
        (link, "is a link"),
        (os.mkdir, "not a regular file"),
        (lambda path: os.mkfifo(path, 0o600), "not a regular file"),
        (lambda path: path.symlink_to("nothing"), "is a link"),
    ],
)
def test_what_is_no_key(tmp_path: Path, make: Callable[[Path], object], what: str) -> None:
    """Neither read nor replaced, and not quoted."""
    path = tmp_path / "admin.key"
    make(path)
    for function in (read_key, make_key):
        with pytest.raises(UsageError, match=what) as e:
            function(path)
        assert str(path) in str(e.value) and KEY[1:] not in str(e.value)


def test_nowhere_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"admin\.key: the admin key cannot be made"):
        make_key(tmp_path / "none" / "admin.key")
    with pytest.raises(UsageError, match="cannot be read"):
        read_key(tmp_path / "none")
