"""What is shipped: whole, small, of known origin, and said so."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ds4 import embedded
from ds4.base.experts import GAINS
from ds4.checkpoint.preflight import preflight
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import RELEASED_IDS, Special, Tokenizer

MOST_BYTES = 20_000_000
ENOUGH = 60_000  # bytes of judge text of a domain
MEASURED = ("code", "law", "medicine", "science", "general", "unseen")
DOMAINS = (*MEASURED, "chinese", "finance")
CORPORA = embedded.HOME / "corpora"


def files() -> list[Path]:
    return [p for p in embedded.HOME.rglob("*") if p.is_file() and "__pycache__" not in p.parts]


def rows(domain: str, split: str) -> list[dict[str, Any]]:
    text = (CORPORA / domain / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def test_every_file_is_the_one_that_was_shipped() -> None:
    embedded.verify()


def test_it_is_small() -> None:
    assert sum(p.stat().st_size for p in files()) <= MOST_BYTES


def test_plain_files() -> None:
    """No links, and no pointers of a large-file store."""
    for path in files():
        assert not path.is_symlink()
        assert not path.read_bytes()[:64].startswith(b"version https://git-lfs"), path


def test_the_checkpoint_is_whole() -> None:
    assert preflight(embedded.checkpoint()) == []
    found = embedded.recipe()
    assert found.gain in GAINS and 10 <= found.bits <= 13


def test_the_tokenizer_is_of_the_released_kind(config: ModelConfig, tokenizer: Tokenizer) -> None:
    assert set(tokenizer.added) == set(RELEASED_IDS)
    text = "def f(x):\n    return x + 12345  # café 中文 \u2603\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == Tokenizer.from_parts(tokenizer.tokens, tokenizer.merges, tokenizer.token_types, config).encode(text)
    assert tokenizer.encode_segments([Special("<think>"), "<think>"])[0] == tokenizer.special_id("<think>")
    assert tokenizer.special_id("<think>") not in tokenizer.encode("<think>")


def test_all_domains_are_there() -> None:
    assert set(embedded.domains()) == set(DOMAINS)


@pytest.mark.parametrize("domain", DOMAINS)
def test_text_of_a_domain(domain: str) -> None:
    """Enough of it, and no document in both splits."""
    judge, fit = (embedded.slice(domain, split) for split in embedded.SPLITS)
    if domain in MEASURED:
        assert sum(len(d.encode()) for d in judge) >= ENOUGH
    assert judge and fit and not set(judge) & set(fit)


def test_chinese_is_chinese() -> None:
    text = "".join(embedded.slice("chinese", "judge"))
    assert sum("一" <= c <= "鿿" for c in text) >= 2000


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_source_has_its_licence(domain: str) -> None:
    """Each document names a source, each source its package and licence, and LICENSES.md has both."""
    manifest = tomllib.loads((CORPORA / domain / "manifest.toml").read_text(encoding="utf-8"))
    sources = {s["id"]: s for s in manifest["sources"]}
    licences = (CORPORA / "LICENSES.md").read_text(encoding="utf-8")
    used = {row["source"] for split in embedded.SPLITS for row in rows(domain, split)}
    assert used and used <= set(sources)
    for name in used:
        source = sources[name]
        assert source["package"] and source["version"] and len(source["sha256"]) == 64
        assert source["licence"] in licences and source["package"] in licences, name


def test_the_model_has_its_own_statement() -> None:
    text = (embedded.HOME / "LICENSE.md").read_text(encoding="utf-8")
    assert len(text) > 300 and "corpora/LICENSES.md" in text


def test_the_training_log_is_there() -> None:
    logs = list((embedded.HOME / "training-log").glob("*.jsonl"))
    assert logs
    for path in logs:
        assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())
