"""Environment and ds4.toml: every bad value is one error that names the variable or the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds4.errors import UsageError
from ds4.settings import config_dirs, device_settings, read_config

KNOWN = {"host": str, "port": int, "mem_budget_mb": int, "temp": (int, float), "thinking": bool}


def test_defaults() -> None:
    found = device_settings({})
    assert (found.driver, found.simt, found.order, found.workers, found.cxx) == ("auto", "fast", "greedy", 0, "g++")
    assert found.replay == "recorded"
    assert found.cache == Path("~/.cache/ds4").expanduser() and found.cuda_dir is None


def test_values() -> None:
    env = {"DS4_DRIVER": "simt", "DS4_SIMT": "check", "DS4_SIMT_ORDER": "falling", "DS4_SIMT_WORKERS": "3"}
    env["DS4_SIMT_REPLAY"] = "turns"
    found = device_settings(env | {"DS4_CACHE": "/c", "DS4_CUDA_DIR": "/k", "DS4_CXX": "clang++"})
    assert (found.driver, found.simt, found.order, found.workers, found.cxx) == (
        "simt",
        "check",
        "falling",
        3,
        "clang++",
    )
    assert (found.cache, found.cuda_dir, found.replay) == (Path("/c"), Path("/k"), "turns")


def test_an_empty_variable_is_an_unset_one() -> None:
    assert device_settings({"DS4_DRIVER": "", "DS4_SIMT_WORKERS": "", "DS4_CACHE": ""}) == device_settings({})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DS4_DRIVER", "cpu"),
        ("DS4_SIMT", "slow"),
        ("DS4_SIMT_ORDER", "up"),
        ("DS4_SIMT_REPLAY", "backwards"),
        ("DS4_SIMT_WORKERS", "-1"),
        ("DS4_SIMT_WORKERS", "many"),
        ("DS4_SIMT_WORKERS", "4096"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is '{value}'; expected"):
        device_settings({name: value})


def put(where: Path, text: str) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    (where / "ds4.toml").write_text(text)
    return where


def test_the_first_file_found_is_read_and_dashes_are_underscores(tmp_path: Path) -> None:
    a, b = put(tmp_path / "a", "port = 1\nmem-budget-mb = 7\n"), put(tmp_path / "b", "port = 2\n")
    assert read_config(KNOWN, [tmp_path / "none", a, b]) == {"port": 1, "mem_budget_mb": 7}
    assert read_config(KNOWN, [a], path=b / "ds4.toml") == {"port": 2}
    assert read_config(KNOWN, [tmp_path / "none"]) == {}


def test_the_given_directory_comes_before_the_users() -> None:
    assert config_dirs(Path("/d")) == [Path("/d"), Path("~/.config/ds4").expanduser()]
    assert config_dirs() == [Path("~/.config/ds4").expanduser()]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "unknown key 'prot'; known are host, mem-budget-mb, port"),
        (
            "[server]\nport = 1",
            "[server] is a table; flags stand outside tables, above the first one, as",
        ),
        ("port = 'x'", "port is 'x'; expected a whole number"),
        ("port = true", "port is True; expected a whole number"),
        ("thinking = 1", "thinking is 1; expected true or false"),
        ("temp = 'hot'", "temp is 'hot'; expected a number"),
        ("mem-budget-mb = 1\nmem_budget_mb = 2", "given twice"),
        ("port = ", "not valid TOML"),
    ],
)
def test_a_bad_file_is_one_error_that_names_it(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        read_config(KNOWN, [put(tmp_path, text)])
    assert str(tmp_path / "ds4.toml") in str(caught.value)


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ds4.toml").write_bytes(b"port = \xff")
    with pytest.raises(UsageError, match="not valid TOML"):
        read_config(KNOWN, [tmp_path])


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_config(KNOWN, [], path=tmp_path / "other.toml")
