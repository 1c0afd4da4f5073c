"""`ds4 corpus build`: the split by document, what is kept together, what is refused, the same bytes again."""

from __future__ import annotations

import json
import os
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds4.cli.main import run
from ds4.corpus import SLICES, Document, Domain
from ds4.corpus import build as builder
from ds4.corpus.build import LEAST_BYTES, LEAST_GROUPS, build, split
from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError
from tests.corpus.test_likeness import words

PASSAGE = words(77, 400)


def text(seed: int, n: int = 6000) -> str:
    return words(1000 + seed, n)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of thirty documents of 6 kB: files at two depths, and a .jsonl with two more sources."""
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "not.txt").write_text("never read")
    for i in range(10):
        (folder / f"{i}.txt").write_text(text(i))
    for i in range(10, 18):
        (folder / "deep" / f"{i}.md").write_text(text(i))
    rows: list[dict[str, object]] = [{"text": text(i), "id": f"n{i}", "source": "news"} for i in range(18, 25)]
    rows += [{"text": text(i)} for i in range(25, 29)]
    rows += [{"text": part, "id": 9, "source": "book"} for part in (text(29, 3000), text(30, 3000))]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def everything(domain: Domain) -> dict[tuple[str, str], tuple[str, str]]:
    return {d.key: (s, d.text) for s in SLICES for d in domain.documents(s)}


def test_a_folder_becomes_a_domain(corpus: Path, tmp_path: Path) -> None:
    report = build("mine", [corpus], tmp_path / "mine", licence='CC "0"')
    domain = Domain.open(tmp_path / "mine")
    found = everything(domain)
    assert len(found) == 30 and domain.name == "mine"
    assert found["text", "3.txt"][1] == text(3) and found["text", "deep/12.md"][1] == text(12)
    assert found["news", "n20"][1] == text(20) and found["text", "rows.jsonl:9"][1] == text(26)
    assert found["book", "9"][1] == text(29, 3000) + "\n\n" + text(30, 3000)  # parts of one document
    n_bytes = {s: report[s]["bytes"] for s in SLICES}
    assert 0.28 < n_bytes["judge"] / sum(n_bytes.values()) < 0.39
    news = [d.source for d in domain.documents("judge")].count("news")
    assert 2 <= news <= 3  # a third of each source, not only of the whole
    sources = {s["id"]: s for s in domain.manifest["sources"]}
    assert sorted(sources) == ["book", "news", "text"] and sources["news"]["licence"] == 'CC "0"'
    assert sources["news"]["documents"] == {"fit": 7 - news, "judge": news}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "text"]


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_the_same_text_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    """Wherever it lies, whatever the order of the arguments, whatever the file system's order."""
    (tmp_path / "more.txt").write_text(text(50))
    build("mine", [corpus, tmp_path / "more.txt"], tmp_path / "a")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in sorted(corpus.rglob("*"), reverse=True):
        if path.is_file() and ".hidden" not in path.parts:
            copy = elsewhere / "text" / path.relative_to(corpus)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    (elsewhere / "more.txt").write_text(text(50))
    build("mine", [elsewhere / "more.txt", elsewhere / "text"], tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_names_do_not_decide_the_side(corpus: Path, tmp_path: Path) -> None:
    """A document goes where its text's hash says: files renamed, the sides stay."""
    build("mine", [corpus], tmp_path / "a")
    for i in range(10):
        (corpus / f"{i}.txt").rename(corpus / f"renamed-{(i * 7) % 10}.txt")
    build("mine", [corpus], tmp_path / "b")
    sides = [{text: s for s, text in everything(Domain.open(tmp_path / x)).values()} for x in "ab"]
    assert sides[0] == sides[1]


def test_like_documents_stay_on_one_side_and_repeats_are_left_out(corpus: Path, tmp_path: Path) -> None:
    """A chain of passages, an id in parts, and a copy with other white space."""
    second = words(78, 400)
    (corpus / "p.txt").write_text(text(40) + PASSAGE)
    (corpus / "q.txt").write_text(PASSAGE.upper().replace("A", "a") + text(41) + second)
    (corpus / "r.txt").write_text(text(42, 200) + second + text(43))
    (corpus / "0-copy.txt").write_text("  " + text(0).upper() + "\r\n")
    report = build("mine", [corpus], tmp_path / "mine")
    found = everything(Domain.open(tmp_path / "mine"))
    assert report["repeated"] == 1 and len(found) == 33
    assert sum(report[s]["groups"] for s in SLICES) == 31
    assert len({found["text", name][0] for name in ("p.txt", "q.txt", "r.txt")}) == 1
    assert ("text", "0.txt") not in found or ("text", "0-copy.txt") not in found
    raw = tomllib.loads((tmp_path / "mine" / "manifest.toml").read_text())
    assert {s["id"]: s["repeated"] for s in raw["sources"]} == {"book": 0, "news": 0, "text": 1}


def test_every_source_is_in_both_slices_in_its_share() -> None:
    """Six sources of nine like documents: three of each are judged by, whatever their hashes."""
    documents = [Document(str(i), f"s{i % 6}", words(2000 + i, 400)) for i in range(54)]
    found = split(documents)
    for slice, n in (("fit", 6), ("judge", 3)):
        assert Counter(d.source for d in found.slices[slice]) == {f"s{i}": n for i in range(6)}


def test_one_large_document_does_not_empty_a_slice(corpus: Path, tmp_path: Path) -> None:
    (corpus / "book.txt").write_text(text(60, 400_000))
    report = build("mine", [corpus], tmp_path / "mine")
    assert report["judge"]["groups"] >= LEAST_GROUPS and report["fit"]["groups"] >= LEAST_GROUPS


def test_too_little_is_refused_with_numbers(corpus: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for i in range(3):
        (few / f"{i}.txt").write_text(text(i))
    with pytest.raises(UsageError) as e:
        build("mine", [few], tmp_path / "mine")
    says = str(e.value)
    assert "too little text: 3 documents, 18,000 bytes" in says
    assert f"it needs {LEAST_GROUPS} and {LEAST_BYTES['fit']:,}" in says and "fit would have 2 documents" in says
    assert "judge would have 1 documents" in says and says.endswith("nothing was written")
    assert not (tmp_path / "mine").exists()
    for path in corpus.rglob("*.txt"):  # plenty of text, one boilerplate
        path.write_text(PASSAGE + path.read_text())
    for path in [*corpus.rglob("*.md"), *corpus.rglob("*.jsonl")]:
        path.unlink()
    with pytest.raises(UsageError, match=f"10 documents are one group because they share '{PASSAGE[:60]}"):
        build("mine", [corpus], tmp_path / "mine")


def test_bytes_alone_are_not_enough(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(text(1, 500_000))
    with pytest.raises(UsageError, match=r"fit would have 1 documents .* judge would have 0 documents"):
        build("mine", [tmp_path / "one.txt"], tmp_path / "mine")


BAD: dict[str, tuple[Callable[[Path], object], type[Ds4Error], str]] = {
    "not text": (lambda p: (p / "x.png").write_bytes(b"\x89PNG\xff"), FileFormatError, r"x\.png: not UTF-8 text"),
    "zero byte": (lambda p: (p / "x.bin").write_bytes(b"a\0b"), FileFormatError, r"x\.bin: has a zero byte"),
    "no JSON": (lambda p: (p / "x.jsonl").write_text('{"text": "a"}\n{"text"'), FileFormatError, "line 2 is no JSON"),
    "no text": (lambda p: (p / "x.jsonl").write_text('{"txt": "a"}'), FileFormatError, 'line 1 has no "text"'),
    "id": (lambda p: (p / "x.jsonl").write_text('{"text": "a", "id": 1.5}'), FileFormatError, "must be texts"),
    "surrogate": (lambda p: (p / "x.jsonl").write_text(r'{"text": "\ud800"}'), FileFormatError, "half a character"),
    "pipe": (lambda p: os.mkfifo(p / "pipe"), FileFormatError, "pipe: is a pipe, not a regular file"),
    "dangling": (lambda p: (p / "link").symlink_to("nowhere"), FileFormatError, "link: cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_text_is_refused_by_name(corpus: Path, tmp_path: Path, what: str) -> None:
    spoil, kind, says = BAD[what]
    spoil(corpus)
    with pytest.raises(kind, match=says):
        build("mine", [corpus], tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_arguments_that_cannot_be(corpus: Path, tmp_path: Path) -> None:
    for name, says in (("code", "an embedded domain is called so"), ("../x", "letters, digits"), ("", "letters")):
        with pytest.raises(UsageError, match=says):
            build(name, [corpus], tmp_path / "mine")
    with pytest.raises(UsageError, match="no such file or folder"):
        build("mine", [tmp_path / "none"], tmp_path / "mine")
    with pytest.raises(UsageError, match="another one is called 'text' too"):
        build("mine", [corpus, str(corpus) + "/"], tmp_path / "mine")
    with pytest.raises(UsageError, match="no such folder to put mine in"):
        build("mine", [corpus], tmp_path / "none" / "mine")
    (tmp_path / "again.jsonl").write_text(json.dumps({"text": text(5), "id": "n20", "source": "news"}))
    with pytest.raises(FileFormatError, match=r"'n20' of source 'news' is in again\.jsonl and in text"):
        build("mine", [corpus, tmp_path / "again.jsonl"], tmp_path / "mine")


def test_what_is_there_is_kept(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    assert build("mine", [corpus], out)["written"] is True
    before = files(out)
    assert build("mine", [corpus], out)["written"] is False
    (corpus / "new.txt").write_text(text(90))
    with pytest.raises(UsageError, match="another domain is there; replace it with --force"):
        build("mine", [corpus], out)
    assert files(out) == before
    assert build("mine", [corpus], out, overwrite=True)["written"] is True
    assert len(everything(Domain.open(out))) == 31
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is no domain that this command wrote"):
        build("mine", [corpus], out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    for other in (tmp_path / "file", tmp_path / "folder" / "x"):
        other.parent.mkdir(exist_ok=True)
        other.write_text("")
        with pytest.raises(UsageError, match="is no domain"):
            build("mine", [corpus], other if other.name == "file" else other.parent, overwrite=True)


def test_a_full_disk_leaves_nothing(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "mine"
    with monkeypatch.context() as m:
        m.setattr(builder.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(CapacityError, match=r"mine: needs \d+ bytes, 1000 are free"):
            build("mine", [corpus], out)
    build("mine", [corpus], out)
    before = files(out)
    (corpus / "new.txt").write_text(text(90))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(builder.os, "fsync", full)
    with pytest.raises(CapacityError, match=r"mine: cannot be written \(No space left"):
        build("mine", [corpus], out, overwrite=True)
    assert files(out) == before and sorted(p.name for p in tmp_path.iterdir()) == ["mine", "text"]


def test_the_command(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine"
    argv = ["corpus", "build", "--name", "mine", "--text", str(corpus), "-o", str(out)]
    assert run([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["domain"] == "mine" and report["fit"]["documents"] + report["judge"]["documents"] == 30
    assert run(argv) == 0
    assert "was there already, unchanged" in capsys.readouterr().out
    assert run(["corpus", "show", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {s: shown[s]["sha256"] for s in SLICES} == report["sha256"] and shown["sources"]["news"] == "not stated"
    assert run(["corpus", "show", "medicine"]) == 0
    assert "judge    29 documents" in capsys.readouterr().out
    for code, wrong in (
        (2, ["corpus", "show", "nothing"]),
        (2, ["corpus", "build", "--name", "x", "--text", str(tmp_path / "none"), "-o", str(tmp_path / "x")]),
    ):
        assert run(wrong) == code
        assert capsys.readouterr().err.startswith("error: ")
