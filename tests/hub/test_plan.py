"""Which files are chosen of what a repository lists, and what is refused before a byte of it comes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from ds4.errors import Ds4Error, FileFormatError, UsageError
from ds4.hub.names import Piece, Repository, Sum, Wanted
from ds4.hub.plan import INDEX, MANIFEST, SUMS, Ask, Plan, make_plan, published
from tests.hub.server import HubServer

OFFICIAL = published()[1].name
BASE = Repository("someone/base")


def sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Listed:
    """Repositories in memory."""

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        self.repos = repos
        self.asked: list[str] = []

    def listing(self, repository: Repository) -> tuple[str, dict[str, Piece]]:
        self.asked.append(str(repository))
        name = repository.name
        commit = hashlib.sha1(str(repository).encode()).hexdigest()
        rows = HubServer.listing(self_less(), self.repos[name])
        return commit, {
            r["path"]: Piece(name, commit, r["path"], r["size"], Sum("sha256", r["lfs"]["oid"])) for r in rows
        }

    def read(self, piece: Piece, most: int) -> bytes:
        assert piece.size <= most
        return self.repos[piece.repo][piece.path]


def self_less() -> HubServer:
    made = HubServer.__new__(HubServer)
    made.wrong, made.small, made.xet = {}, set(), {}
    return made


TABLES = {
    "layers.1.engram.embed.weight": "m-2.safetensors", "layers.1.engram.embed.scale": "m-2.safetensors",
    "layers.14.engram.embed.weight": "m-3.safetensors", "layers.0.attn.wq.weight": "m-1.safetensors",
}  # fmt: skip
CHECKPOINT = {
    INDEX: json.dumps({"weight_map": TABLES}).encode(), "m-1.safetensors": b"1", "m-2.safetensors": b"22",
    "m-3.safetensors": b"333", "encoding/encoding.py": b"#", "config.json": b"{}", "tokenizer.json": b"{}",
}  # fmt: skip
REPO = {
    "flash.gguf": b"base", "README.md": b"", ".gitattributes": b"", "sidecars/code/gr_L03.bin": b"g",
    "sidecars/code/rb_L03.bin": b"r", "sidecars/code/manifest.json": b"{}", "sidecars/code/notes.txt": b"",
    "sidecars/README.md": b"", "night/gr_L03.bin": b"n", "night/base.fnv": b"f", "pictures/a.png": b"",
}  # fmt: skip


def names(plan: Plan) -> list[str]:
    return [w.name for w in plan.files]


def plan(repos: dict[str, dict[str, bytes]], **ask: Any) -> Plan:
    return make_plan(Listed(repos), Ask(BASE, **ask))


def test_what_a_server_needs_of_two_repositories() -> None:
    made = plan({BASE.name: REPO, OFFICIAL: CHECKPOINT})
    assert made.base == "flash.gguf"
    assert names(made) == [
        "flash.gguf", "night/base.fnv", "night/gr_L03.bin", "sidecars/code/gr_L03.bin", "sidecars/code/manifest.json",
        "sidecars/code/rb_L03.bin", "m-2.safetensors", "m-3.safetensors", "encoding/encoding.py",
    ]  # fmt: skip
    assert [s.partition("@")[0] for s in made.sources] == [BASE.name, OFFICIAL]
    assert made.size == sum(w.size for w in made.files) and made.files[-2].pieces[0].repo == OFFICIAL
    again = [Wanted.from_json(json.loads(json.dumps(w.to_json())), "record") for w in made.files]
    assert tuple(again) == made.files


def test_shards_where_they_are_said_to_be() -> None:
    both = {BASE.name: REPO | CHECKPOINT, "x/other": CHECKPOINT | {"m-2.safetensors": b"mine"}}
    inside = plan(both)
    assert len(inside.sources) == 1 and names(inside)[-2:] == ["m-2.safetensors", "m-3.safetensors"]
    other = plan(both, shards="x/other@v1")
    assert next(w for w in other.files if w.name == "m-2.safetensors").pieces[0].repo == "x/other"
    assert "m-2.safetensors" not in names(plan(both, shards="none"))
    single = plan({BASE.name: {"toy.gguf": b"t", "model.safetensors": b"m"}})
    assert names(single) == ["toy.gguf", "model.safetensors"]


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        ({"config.json": b"{}"}, "has neither model.safetensors.index.json nor model.safetensors"),
        ({INDEX: b"{"}, "is no index of a checkpoint"),
        ({INDEX: b'{"weight_map": {"layers.0.x": "a"}}'}, "names no n-gram tables"),
        ({INDEX: b'{"weight_map": {"layers.1.engram.embed.weight": "../a"}}'}, r"lie in '../a', which is not there"),
        ({INDEX: b'{"weight_map": {"layers.1.engram.embed.weight": "gone"}}'}, "lie in 'gone'"),
        ({INDEX: b'{"weight_map": []}'}, "is no index"),
    ],
)
def test_a_checkpoint_without_its_tables(checkpoint: dict[str, bytes], said: str) -> None:
    with pytest.raises(Ds4Error, match=said):
        plan({BASE.name: REPO, OFFICIAL: checkpoint})


@pytest.mark.parametrize("spelt", ["{name}.part{i}of{n}", "{name}.part-{i:05d}-of-{n:05d}", "{name}.part-{i}of{n}"])
def test_a_base_in_pieces(spelt: str) -> None:
    """Eleven, whose names do not sort as their numbers do; the whole's sum from SHA256SUMS."""
    parts = {spelt.format(name="flash.gguf", i=i, n=11): b"p%d" % i for i in range(1, 12)}
    whole = b"".join(b"p%d" % i for i in range(1, 12))
    line = f"{hashlib.sha256(whole).hexdigest()}  flash.gguf\n# a remark\n"
    made = plan({BASE.name: parts | {SUMS: line.encode()}}, shards="none")
    base = next(w for w in made.files if w.name == "flash.gguf")
    assert names(made) == [SUMS, "flash.gguf"] and [p.size for p in base.pieces] == [2] * 9 + [3] * 2
    assert str(base.sum) == sha(whole)
    for missing in (spelt.format(name="flash.gguf", i=i, n=11) for i in (1, 5, 11)):
        with pytest.raises(FileFormatError, match="that is not all of one file"):
            plan({BASE.name: {k: v for k, v in parts.items() if k != missing}}, shards="none")
    with pytest.raises(FileFormatError, match="not all of one file"):
        plan({BASE.name: parts | {"flash.gguf": b"whole too"}}, shards="none")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.gguf": b"", "b.gguf": b""}, r"has the bases a.gguf, b.gguf; choose one with --file"),
        ({"README.md": b""}, r"has no base \(\*.gguf\)$"),
        ({"model.safetensors": b""}, r"it is a checkpoint: fetch it with --file '\*', then ds4 quantize"),
        ({"a-00001-of-00002.gguf": b"", "a-00002-of-00002.gguf": b""}, "split .* in a way that only other programs"),
    ],
)
def test_a_repository_without_one_base(files: dict[str, bytes], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan({BASE.name: files})


def test_files_by_name() -> None:
    repos = {BASE.name: REPO | {"other.gguf": b"o"}, OFFICIAL: CHECKPOINT}
    assert names(plan(repos, files=("other.gguf",))) == ["other.gguf"]
    assert plan(repos, files=("other.gguf",)).base == "other.gguf"
    assert names(plan(repos, files=("sidecars/code/*", "README.md", "*.md"))) == [
        "sidecars/code/gr_L03.bin", "sidecars/code/manifest.json", "sidecars/code/notes.txt",
        "sidecars/code/rb_L03.bin", "README.md", "sidecars/README.md",
    ]  # fmt: skip
    with_shards = plan(repos, files=("other.gguf",), shards=OFFICIAL)
    assert names(with_shards) == ["other.gguf", "m-2.safetensors", "m-3.safetensors", "encoding/encoding.py"]
    with pytest.raises(UsageError, match=r"no file is called x\*; there are .gitattributes, README.md"):
        plan(repos, files=("x*",))


def manifest(**more: Any) -> dict[str, Any]:
    return {
        "format": 1, "base": "flash.gguf", "files": [
            {"name": "flash.gguf", "size": 6, "sum": sha(b"abcdef"), "parts": [
                {"path": "p/1", "size": 4, "sum": sha(b"abcd")}, {"path": "p/2", "size": 2, "sum": sha(b"ef")}]},
            {"name": "sidecars/law/gr_L03.bin", "path": "gr.bin", "size": 1, "sum": sha(b"g")},
        ],
    } | more  # fmt: skip


PARTS = {"p/1": b"abcd", "p/2": b"ef", "gr.bin": b"g", "left/out.bin": b"x"}


@pytest.mark.parametrize("ours", [False, True])
def test_a_manifest_says_what_joins_to_what(ours: bool) -> None:
    """In the repository, or a file of the user's own; it may name where the shards are."""
    text = json.dumps(manifest(shards={"repo": "x/tables", "revision": "v1"}, repo="someone/base"))
    hub = Listed({BASE.name: PARTS | ({} if ours else {MANIFEST: text.encode()}), "x/tables": CHECKPOINT})
    made = make_plan(hub, Ask(None if ours else BASE, manifest=text if ours else ""))
    assert names(made) == [
        "flash.gguf", "sidecars/law/gr_L03.bin", "m-2.safetensors", "m-3.safetensors", "encoding/encoding.py"
    ]  # fmt: skip
    assert str(made.files[0].sum) == sha(b"abcdef") and [p.path for p in made.files[0].pieces] == ["p/1", "p/2"]
    assert hub.asked == ["someone/base@main", "x/tables@v1"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "is of format 2; this version knows 1"),
        ({"files": []}, "lists no file"),
        ({"base": "b.gguf"}, "the base 'b.gguf' is none of its files"),
        ({"files": [{"name": "a", "size": 1, "sum": "sha256:12"}]}, "'12' is no sha256; expected 64 hex digits"),
        ({"files": [{"name": "a", "size": 1, "sum": "md5:" + "0" * 32}]}, "'md5' is no kind of sum"),
        ({"files": [{"name": "../a", "size": 1, "sum": sha(b"")}]}, r"'../a' is no plain file name"),
        ({"files": [{"name": "/a", "size": 1, "sum": sha(b"")}]}, "is no plain file name"),
        ({"files": [{"name": ".ds4-fetch.lock", "size": 1, "sum": sha(b"")}]}, "keeps for itself"),
        ({"files": [{"name": "a.part", "size": 1, "sum": sha(b"")}]}, "keeps for itself"),
        ({"files": [{"name": "a", "size": -1, "sum": sha(b"")}]}, "expected a number of bytes"),
        ({"files": [{"name": "a", "size": True, "sum": sha(b"")}]}, "expected a number of bytes"),
        ({"files": [{"name": "a"}]}, "is no manifest"),
        ({"files": "a"}, "is no manifest"),
        ({"shards": {"repo": "no"}}, "expected OWNER/REPO"),
    ],
)
def test_manifests_that_cannot_be(change: dict[str, Any], said: str) -> None:
    made = manifest(**change)
    if "files" in change:
        made.pop("base")
    with pytest.raises(Ds4Error, match=said):
        plan({BASE.name: PARTS}, shards="none", manifest=json.dumps(made))


def test_a_manifest_and_a_hub_that_differ() -> None:
    """The pinned sum decides; another file of that name is refused before it comes."""
    for files, said in (
        (PARTS | {"p/1": b"ABCD"}, r"says p/1 has 4 bytes and sha256.*it is another file than the manifest means"),
        ({"p/1": b"abcd"}, "p/2 is not in someone/base"),
    ):
        with pytest.raises(FileFormatError, match=said):
            plan({BASE.name: files}, shards="none", manifest=json.dumps(manifest()))
    wrong = manifest()
    wrong["files"][0]["size"] = 7
    with pytest.raises(FileFormatError, match="its parts have 6 bytes, the file 7"):
        plan({BASE.name: PARTS}, shards="none", manifest=json.dumps(wrong))


@pytest.mark.parametrize(
    "given", ["base", "a/b/c", "a/../b", "/b", "a/b@", "a/b@x y", "a/b@../c", "a--b/c", "a/b c", ""]
)
def test_names_of_repositories(given: str) -> None:
    with pytest.raises(UsageError, match="--hub"):
        Repository.of(given, "--hub")


def test_what_is_published_is_said_honestly() -> None:
    """No base yet; the official checkpoint has a name."""
    assert published() == ("", Repository("deepseek-ai/DeepSeek-V4.1-Flash"))
    assert str(Repository.of("a/b@refs/pr/1", "--hub")) == "a/b@refs/pr/1"
