"""ds4.embedded on made-up folders: what it hands out, and what it says of what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ds4 import embedded
from ds4.errors import Ds4Error, FileFormatError, UsageError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two domains, a folder that has a config, and the sums of it all."""
    folder = tmp_path / "embedded"
    for domain in ("code", "law"):
        (folder / "corpora" / domain).mkdir(parents=True)
        for split in embedded.SPLITS:
            documents = [f"{domain} {split} {i}\u2028 é" for i in range(2)]
            lines = [json.dumps({"source": "s", "text": d}, ensure_ascii=False) + "\n" for d in documents]
            (folder / "corpora" / domain / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "corpora" / "LICENSES.md").write_text("all of them")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "base.toml").write_text('bits = 11\ngain = "norm"\n')
    (folder / "__init__.py").write_text("")
    monkeypatch.setattr(embedded, "HOME", folder)
    (folder / embedded.SUMS).write_text(embedded.sums())
    return folder


def test_what_it_hands_out(home: Path) -> None:
    embedded.verify()
    assert embedded.checkpoint() == home / "model"
    assert embedded.domains() == ("code", "law")
    assert embedded.slice("law", "fit") == ["law fit 0\u2028 é", "law fit 1\u2028 é"]
    assert embedded.recipe() == embedded.Recipe(11, "norm")


def test_keys_change_with_model_and_recipe(home: Path) -> None:
    keys = [embedded.key_parts()]
    (home / "base.toml").write_text('bits = 10\ngain = "norm"\n')
    keys.append(embedded.key_parts())
    (home / "model" / "config.json").write_text("{ }")
    (home / embedded.SUMS).write_text(embedded.sums())
    keys.append(embedded.key_parts())
    (home / "corpora" / "LICENSES.md").write_text("some of them")
    (home / embedded.SUMS).write_text(embedded.sums())
    keys.append(embedded.key_parts())
    assert keys[0] != keys[1] != keys[2] == keys[3]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda h: (h / "model" / "config.json").write_text("{} "), r"config\.json: is not the file that SHA256SUMS"),
        (lambda h: (h / "corpora" / "law" / "fit.jsonl").unlink(), r"law/fit\.jsonl: the file is missing"),
        (lambda h: (h / "model" / "more").write_text(""), "more: SHA256SUMS does not list it"),
        (lambda h: (h / "SHA256SUMS").unlink(), "SHA256SUMS: cannot be read"),
        (lambda h: (h / "SHA256SUMS").write_text("abc\n"), "line 1 is no line of sha256sum"),
    ],
)
def test_damage_is_found_by_name(home: Path, harm: Callable[[Path], object], said: str) -> None:
    harm(home)
    with pytest.raises(FileFormatError, match=said):
        embedded.verify()


@pytest.mark.parametrize(
    ("harm", "ask", "error", "said"),
    [
        (lambda h: shutil.rmtree(h / "model"), embedded.checkpoint, FileFormatError, "embedded model is not there"),
        (lambda h: shutil.rmtree(h / "corpora"), embedded.domains, FileFormatError, "text is not there"),
        (lambda h: None, lambda: embedded.slice("poems", "fit"), UsageError, "there are code, law"),
        (lambda h: None, lambda: embedded.slice("law", "train"), UsageError, "there are judge, fit"),
        (
            lambda h: (h / "corpora" / "law" / "fit.jsonl").write_text('{"text": "a"}\nno\n'),
            lambda: embedded.slice("law", "fit"), FileFormatError, r"fit\.jsonl: line 2 is no JSON",
        ),
        (
            lambda h: (h / "corpora" / "law" / "fit.jsonl").write_text('{"source": "a"}\n'),
            lambda: embedded.slice("law", "fit"), FileFormatError, r"fit\.jsonl: line 1 has no text",
        ),
        (
            lambda h: (h / "corpora" / "law" / "fit.jsonl").unlink(),
            lambda: embedded.slice("law", "fit"), FileFormatError, r"fit\.jsonl: cannot be read",
        ),
        (lambda h: (h / "base.toml").unlink(), embedded.recipe, FileFormatError, r"base\.toml: cannot be read"),
        (lambda h: (h / "base.toml").write_text("bits ="), embedded.recipe, FileFormatError, r"base\.toml"),
        (lambda h: (h / "base.toml").write_text("bits = true\ngain = ''"), embedded.recipe, FileFormatError, "whole"),
        (lambda h: (h / "base.toml").write_text("bits = 10"), embedded.recipe, FileFormatError, "expected `bits`"),
        (lambda h: (h / "base.toml").unlink(), embedded.key_parts, FileFormatError, r"base\.toml: cannot be read"),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong(
    home: Path, harm: Callable[[Path], object], ask: Callable[[], object], error: type[Ds4Error], said: str
) -> None:
    harm(home)
    with pytest.raises(error, match=said):
        ask()
