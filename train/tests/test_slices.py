"""The shipped slices: only what may ship, whole paragraphs, in like shares, with licences, the same bytes again."""

from __future__ import annotations

import json
import tomllib
import zipfile
from pathlib import Path

import pytest

from ds4.errors import FileFormatError
from train import slices
from train.config import DOMAINS, UNSEEN
from train.slices import choose, head, quotas, write_slices
from train.tests.test_corpora import prose

SPLITS = ("train", "fit", "judge")


def make_work(work: Path, ship: bool = True) -> Path:
    """A working folder whose domains all hold the sources wordnet (may ship) and hpo (may not)."""
    (work / "corpora").mkdir(parents=True)
    (work / "packages").mkdir()
    rows = []
    for n, domain in enumerate((*DOMAINS, UNSEEN)):
        for m, split in enumerate(SPLITS):
            lines = [
                json.dumps({"source": source, "text": prose(1000 * n + 100 * m + k + offset)}) + "\n"
                for source, offset in (("wordnet", 0), ("hpo", 50))
                for k in range(3)
            ]
            (work / "corpora" / f"{domain}.{split}.jsonl").write_text("".join(lines))
    for source, may in (("wordnet", ship), ("hpo", False)):
        rows.append(
            {"id": source, "domain": "x", "package": f"{source}-base", "kind": "apt", "version": "1:3.0", "ship": may}
            | {"file": f"{source}.deb", "sha256": "ab" * 32, "licence": "WordNet-3.0", "licence_text_from": "y"}
        )
    (work / "corpora" / "manifest.json").write_text(json.dumps({"sources": rows, "missing": []}))
    with zipfile.ZipFile(work / "packages" / "l.whl", "w") as archive:
        archive.writestr("licensedcode/data/licenses/wordnet.LICENSE", "---\nkey: wordnet\n---\nThe words of it.\n")
    index = {"pip:licensedcode-data": {"file": "l.whl"}}
    (work / "packages" / "fetched.json").write_text(json.dumps(index))
    return work


def test_only_what_may_ship_is_written_with_its_licence(tmp_path: Path) -> None:
    work = make_work(tmp_path / "w")
    size = write_slices(work, tmp_path / "one")
    assert size == sum(path.stat().st_size for path in (tmp_path / "one").rglob("*") if path.is_file())
    write_slices(work, tmp_path / "two")
    for domain in (*DOMAINS, UNSEEN):
        manifest = tomllib.loads((tmp_path / "one" / domain / "manifest.toml").read_text())
        assert [source["id"] for source in manifest["sources"]] == ["wordnet"]
        assert manifest["sources"][0]["version"] == "1:3.0"
        for split in ("judge", "fit"):
            data = (tmp_path / "one" / domain / f"{split}.jsonl").read_bytes()
            assert data == (tmp_path / "two" / domain / f"{split}.jsonl").read_bytes()
            rows = [json.loads(line) for line in data.decode().splitlines()]
            assert {row["source"] for row in rows} == {"wordnet"} and set(rows[0]) == {"source", "text"}
            assert manifest[split]["documents"] == len(rows) == 3
            assert manifest["sources"][0]["documents"][split] == 3
            assert manifest[split]["bytes"] == sum(len(row["text"].encode()) for row in rows)
            assert ("in_train" in manifest[split]) == (domain != UNSEEN)
    licences = (tmp_path / "one" / "LICENSES.md").read_text()
    assert "wordnet-base 1:3.0" in licences and "The words of it." in licences and "hpo" not in licences
    assert "Princeton University" in licences and "key: wordnet" not in licences


def test_nothing_to_ship_and_no_corpora_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileFormatError, match=r"code\.judge\.jsonl: has no text that may ship"):
        write_slices(make_work(tmp_path / "w", ship=False), tmp_path / "to")
    assert not (tmp_path / "to").exists()
    assert slices.main(["--work", str(tmp_path / "none"), "--to", str(tmp_path / "to")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "run `python -m train.corpora` first" in error


def test_a_source_without_attribution_may_not_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(slices.ATTRIBUTIONS, "wordnet")
    with pytest.raises(FileFormatError, match="says nothing of wordnet"):
        write_slices(make_work(tmp_path / "w"), tmp_path / "to")


def test_a_missing_licence_text_is_named(tmp_path: Path) -> None:
    work = make_work(tmp_path / "w")
    (work / "packages" / "l.whl").unlink()
    with pytest.raises(FileFormatError, match="pip:licensedcode-data is not there"):
        write_slices(work, tmp_path / "to")


def test_documents_are_cut_at_paragraphs() -> None:
    text = "one é\n\ntwo\n\nthree"
    assert head(text, 100) == text
    assert head(text, len("one é\n\ntwo".encode())) == "one é\n\ntwo"
    assert head(text, 10) == "one é" and head(text, 5) == ""


def test_quotas_give_the_small_their_all_and_the_others_like_shares() -> None:
    assert quotas({"a": 10, "b": 1000, "c": 1000}, 100) == {"a": 10, "b": 45, "c": 45}
    assert quotas({"a": 10, "b": 20}, 100) == {"a": 10, "b": 20}
    assert quotas({}, 100) == {}


def test_choosing_stays_within_the_size_and_keeps_the_order() -> None:
    rows = [{"source": "ab"[n % 2], "text": prose(n)} for n in range(20)]
    chosen = choose(rows, 10_000)
    assert 8_000 <= sum(len(row["text"]) for row in chosen) <= 10_000
    assert {row["source"] for row in chosen} == {"a", "b"}
    assert next(row["text"] for row in chosen if row["source"] == "a") == prose(0)
    assert choose([{"source": "a", "text": prose(1)[:190]}], 5000) == []
