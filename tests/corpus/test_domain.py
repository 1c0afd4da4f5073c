"""A domain's folder: what is refused, by name, and the embedded domains through the same door."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ds4 import embedded
from ds4.corpus import SLICES, Domain
from ds4.errors import FileFormatError, UsageError
from tests.corpus.test_likeness import words

Rows = list[dict[str, object]]


def make(folder: Path, fit: Rows, judge: Rows) -> Path:
    """A domain's folder with a true manifest."""
    folder.mkdir(exist_ok=True)
    lines = ['domain = "made"']
    for name, rows in (("fit", fit), ("judge", judge)):
        data = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode()
        (folder / f"{name}.jsonl").write_bytes(data)
        n_bytes = sum(len(str(r["text"]).encode()) for r in rows)
        lines += [f"[{name}]", f'file = "{name}.jsonl"', f'sha256 = "{hashlib.sha256(data).hexdigest()}"']
        lines += [f"documents = {len(rows)}", f"bytes = {n_bytes}"]
    lines += ["[[sources]]", 'id = "s"', 'licence = "CC0"']
    (folder / "manifest.toml").write_text("\n".join(lines) + "\n")
    return folder


def row(name: str, text: str) -> dict[str, object]:
    return {"id": name, "source": "s", "text": text}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "d", [row("a", words(1, 500)), row("b", "einé \u2028 line")], [row("c", words(2, 400))])


def test_documents_come_back(folder: Path) -> None:
    domain = Domain.open(folder)
    assert domain.name == "made" and domain.folder == folder
    assert [d.key for d in domain.documents("fit")] == [("s", "a"), ("s", "b")]
    assert domain.documents("fit")[1].text == "einé \u2028 line"
    assert domain.documents("judge")[0].text == words(2, 400)
    assert domain.sha256("judge") == hashlib.sha256((folder / "judge.jsonl").read_bytes()).hexdigest()
    with pytest.raises(UsageError, match="slice 'train' is unknown; there are fit, judge"):
        domain.documents("train")


@pytest.mark.parametrize("name", embedded.domains())
def test_embedded_domains_open_the_same_way(name: str) -> None:
    """Every hash and count of the manifests that ship holds, and no slice has a passage of the other's."""
    domain = Domain.open(name)
    assert domain.name == name
    for slice in SLICES:
        documents = domain.documents(slice)
        assert [d.text for d in documents] == embedded.slice(name, slice)
        assert len({d.key for d in documents}) == len(documents)
    assert {d.source for s in SLICES for d in domain.documents(s)} == {s["id"] for s in domain.manifest["sources"]}


def test_a_folder_may_have_an_embedded_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "code", [row("a", words(1, 500))], [row("c", words(2, 400))])
    monkeypatch.chdir(tmp_path)
    assert Domain.open("./code").name == "made" and Domain.open("code").name == "code"
    assert Domain.open(Path("code")).name == "made"
    with pytest.raises(UsageError, match="domain 'cod': neither a folder nor an embedded domain"):
        Domain.open("cod")


PASSAGE = words(3, 320)
OVERLAPS = {
    "the same id": ([row("a", words(1, 500))], [row("a", words(2, 500))], "document 'a' of source 's' is in both"),
    "the same text": (
        [row("a", "One  text.")],
        [row("b", "one text. ")],
        "fit's 'a' .* and judge's 'b' .* share 'one",
    ),
    "a passage": (
        [row("a", words(1, 50)), row("b", words(4, 700) + PASSAGE)],
        [row("c", words(2, 600)), row("d", PASSAGE.upper() + words(5, 30))],
        f"fit's 'b' .* and judge's 'd' .* share '{PASSAGE[:60]}",
    ),
    "a passage of three": (  # two of them in fit: the pair that crosses is found all the same
        [row("a", words(1, 50) + PASSAGE), row("b", words(4, 700) + PASSAGE)],
        [row("d", PASSAGE + words(5, 30))],
        "fit's 'b' .* and judge's 'd' .* share",
    ),
}


@pytest.mark.parametrize("what", OVERLAPS)
def test_overlapping_slices_are_refused(tmp_path: Path, what: str) -> None:
    fit, judge, says = OVERLAPS[what]
    with pytest.raises(FileFormatError, match=f"d: the slices overlap: {says}"):
        Domain.open(make(tmp_path / "d", fit, judge))


def test_a_changed_slice_is_refused_by_name(folder: Path) -> None:
    path = folder / "judge.jsonl"
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(
        FileFormatError, match=r"judge\.jsonl: its SHA-256 is [0-9a-f]{16}\.\.\., manifest\.toml lists"
    ):
        Domain.open(folder)
    path.unlink()
    with pytest.raises(FileFormatError, match=r"judge\.jsonl: cannot be read \(No such file"):
        Domain.open(folder)


@pytest.mark.parametrize(
    "old, new, says",
    [
        ('domain = "made"', "", "has no `domain`"),
        (
            "documents = 2",
            "documents = 3",
            r"fit\.jsonl: has 2 documents of 514 bytes, manifest\.toml lists 3 of 514",
        ),
        ('file = "fit.jsonl"', 'file = "../fit.jsonl"', "is no plain file name"),
        ('file = "fit.jsonl"', "", r"\[fit\] must say file, sha256, documents, bytes"),
        ("documents = 2", "documents = true", r"\[fit\] must say"),
        ('licence = "CC0"', "", "must say id and licence"),
        ("[fit]", "[fit", "not valid TOML"),
    ],
)
def test_a_manifest_that_lies_is_refused(folder: Path, old: str, new: str, says: str) -> None:
    path = folder / "manifest.toml"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(FileFormatError, match=says):
        Domain.open(folder)


@pytest.mark.parametrize(
    "bad, says",
    [
        ({"source": "s", "text": ""}, "line 1 must say text, source and id"),
        ({"source": "s", "text": "x", "id": 3}, "line 1 must say text, source and id"),
        ({"text": "x"}, "line 1 must say text, source and id"),
    ],
)
def test_a_row_that_is_no_document_is_refused(tmp_path: Path, bad: dict[str, object], says: str) -> None:
    with pytest.raises(FileFormatError, match=says):
        Domain.open(make(tmp_path / "d", [bad], [row("c", words(2, 400))]))


def test_twice_in_one_slice_or_nothing_in_it(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"fit\.jsonl: document 'a' of source 's' is there twice"):
        Domain.open(make(tmp_path / "d", [row("a", words(1, 50)), row("a", words(4, 50))], [row("c", words(2, 400))]))
    with pytest.raises(FileFormatError, match="slice judge has no documents"):
        Domain.open(make(tmp_path / "e", [row("a", words(1, 50))], []))
    with pytest.raises(FileFormatError, match=r"manifest\.toml: cannot be read"):
        (tmp_path / "empty").mkdir()
        Domain.open(tmp_path / "empty")
