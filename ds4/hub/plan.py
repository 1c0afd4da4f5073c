"""Which files of which repositories make what a server needs: base, sidecars, n-gram shards, words around tools.

A repository may carry a manifest (`ds4-files.json`) that says what joins to what, and pins sizes and sums; so may a
file of the user's own. Without one the names decide: the one `*.gguf`, or pieces `NAME.gguf.part1of3` of it.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ds4.checkpoint.scan import INDEX, SINGLE, plain_file_name
from ds4.errors import FileFormatError, UsageError
from ds4.hub.names import Piece, Repository, Sum, Wanted, check_name, check_size

MANIFEST = "ds4-files.json"
SUMS = "SHA256SUMS"
FORMAT = 1
NONE = "none"
MOST_TEXT = 256 << 20  # bytes of a manifest or index; the released index has 6 MB
TOOL_FILES = (
    "encoding/encoding.py",
    "encoding.py",
    "chat_template.jinja",
)  # as model.tools.load_tool_text reads them
_PIECE = re.compile(r"(?P<name>.+)\.part-?(?P<n>\d{1,5})-?of-?(?P<of>\d{1,5})")
_SPLIT = re.compile(r".+-\d{5}-of-\d{5}\.gguf")  # of a base that another tool split: each a file of its own
_LAYER_FILE = re.compile(r"(?P<folder>.+)/(gr|rb)_L\d+\.bin")
_TABLE = re.compile(r"(.*\.)?layers\.\d+\.engram\.embed\.(weight|scale)")
_FOLDER_FILES = ("manifest.json", "manifest.txt", "base.fnv")
_PUBLISHED = Path(__file__).with_name("published.json")


class Lister(Protocol):
    """What a plan asks: `client.Hub`."""

    def listing(self, repository: Repository) -> tuple[str, dict[str, Piece]]: ...

    def read(self, piece: Piece, most: int) -> bytes: ...


@dataclass(frozen=True)
class Ask:
    """What somebody wants fetched.

    Attributes:
        repository: of the base; None: the manifest's.
        shards: where the n-gram shards are: OWNER/REPO[@REV], "none", or "" for wherever they are known to be.
        files: patterns of names; nothing but these. Empty: what a server needs.
        manifest: text of a manifest of the user's own; "" without one.
    """

    repository: Repository | None
    shards: str = ""
    files: tuple[str, ...] = ()
    manifest: str = ""

    def to_json(self) -> dict[str, Any]:
        """What a record keeps, to know whether it answers the same question."""
        return {
            "repository": str(self.repository or ""), "shards": self.shards, "files": list(self.files),
            "manifest": self.manifest,
        }  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Files for one folder.

    Attributes:
        base: the base's name in the folder; None: there is none among them.
        sources: repository and commit, for each that files come from.
    """

    base: str | None
    files: tuple[Wanted, ...]
    sources: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(w.size for w in self.files)


def published(path: Path = _PUBLISHED) -> tuple[str, Repository]:
    """The manifest of the base that is published for this release, "" while none is; and the official checkpoint."""
    told = json.loads(path.read_text(encoding="utf-8"))
    shards = told["shards"]
    return ("" if told["base"] is None else json.dumps(told["base"])), Repository(shards["repo"], shards["revision"])


def make_plan(hub: Lister, ask: Ask) -> Plan:
    """Look at the repositories and choose.

    Raises:
        UsageError: nothing there is what was asked for, or more than one thing is.
        FileFormatError: a manifest, index or listing that cannot be, or contradicts another.
    """
    told = _Manifest.read(ask.manifest, "--manifest") if ask.manifest else None
    repository = ask.repository or (told.repository if told else None)
    if repository is None:
        raise UsageError("a manifest without `repo` needs the repository too: ds4 fetch OWNER/REPO --manifest FILE")
    commit, listing = hub.listing(repository)
    sources = [f"{repository.name}@{commit}"]
    where = sources[0]
    if told is None and MANIFEST in listing:
        told = _Manifest.read(
            hub.read(listing[MANIFEST], MOST_TEXT).decode("utf-8", "replace"), f"{where}: {MANIFEST}"
        )
    joined = told.wanted(listing, where) if told else _joined(listing, _sums(hub, listing), where)
    if ask.files:
        files = _matching(joined, ask.files, where)
        base = next((w.name for w in files if w.name.endswith(".gguf")), None)
    else:
        base = told.base if told and told.base else _only_base(joined, where)
        files = list(joined.values()) if told else _server_files(joined, base)
    if ask.shards or not ask.files:
        files += _shards(hub, ask, told, listing, where, files, sources)
    names = [w.name for w in files]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise FileFormatError(f"{twice}: would come from two places: {', '.join(sources)}")
    return Plan(base, tuple(files), tuple(sources))


# -- one repository


def _joined(listing: Mapping[str, Piece], sums: Mapping[str, Sum], where: str) -> dict[str, Wanted]:
    """Every file by its name; pieces of one file, `NAME.part1of3`, as that file."""
    out: dict[str, Wanted] = {}
    pieces: dict[str, dict[int, tuple[int, Piece]]] = {}
    for path, piece in listing.items():
        if match := _PIECE.fullmatch(path):
            pieces.setdefault(match["name"], {})[int(match["n"])] = int(match["of"]), piece
        else:
            out[path] = Wanted(path, (piece,), sums.get(path))
    for name, found in pieces.items():
        counts = {of for of, _ in found.values()}
        first = 0 if 0 in found else 1  # counted from either
        if len(counts) != 1 or sorted(found) != list(range(first, first + counts.pop())) or name in out:
            raise FileFormatError(
                f"{where}: the pieces of {name} are {', '.join(sorted(p.path for _, p in found.values()))}; "
                "that is not all of one file"
            )
        out[name] = Wanted(name, tuple(found[i][1] for i in sorted(found)), sums.get(name))
    return out


def _sums(hub: Lister, listing: Mapping[str, Piece]) -> dict[str, Sum]:
    """What a published SHA256SUMS says: the only word about a file that is published in pieces."""
    if SUMS not in listing:
        return {}
    found = {}
    for line in hub.read(listing[SUMS], MOST_TEXT).decode("utf-8", "replace").splitlines():
        digits, _, name = line.partition(" ")
        name = name.lstrip(" *").removeprefix("./")
        if name and not line.startswith("#"):
            found[name] = Sum.of("sha256", digits, f"{listing[SUMS].where}: {name}")
    return found


def _only_base(joined: Mapping[str, Wanted], where: str) -> str:
    bases = sorted(name for name in joined if name.endswith(".gguf"))
    whole = [name for name in bases if not _SPLIT.fullmatch(name)]
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise UsageError(f"{where}: has the bases {', '.join(whole)}; choose one with --file")
    if bases:
        raise UsageError(f"{where}: its base is split ({bases[0]}, ...) in a way that only other programs read")
    weights = [name for name in joined if name.endswith(".safetensors")]
    is_one = "; it is a checkpoint: fetch it with --file '*', then ds4 quantize" if weights else ""
    raise UsageError(f"{where}: has no base (*.gguf){is_one}")


def _server_files(joined: Mapping[str, Wanted], base: str) -> list[Wanted]:
    """The base, the folders with layer files (sidecars, post-training), and the words around tools."""
    folders = {m["folder"] for m in map(_LAYER_FILE.fullmatch, joined) if m}
    names = [
        name
        for name in sorted(joined)
        if name in (base, SUMS)
        or name in TOOL_FILES
        or ("/" in name and name.rpartition("/")[0] in folders and _of_a_folder(name))
    ]
    return [joined[name] for name in names]


def _of_a_folder(name: str) -> bool:
    return bool(_LAYER_FILE.fullmatch(name)) or name.rpartition("/")[2] in _FOLDER_FILES


def _matching(joined: Mapping[str, Wanted], patterns: Sequence[str], where: str) -> list[Wanted]:
    out: dict[str, Wanted] = {}
    for pattern in patterns:
        hits = [name for name in sorted(joined) if fnmatch.fnmatchcase(name, pattern)]
        if not hits:
            some = ", ".join(sorted(joined)[:8]) + (", ..." if len(joined) > 8 else "")
            raise UsageError(f"{where}: no file is called {pattern}; there are {some}")
        out |= {name: joined[name] for name in hits}
    return list(out.values())


# -- the n-gram shards


def _shards(
    hub: Lister, ask: Ask, told: _Manifest | None, listing: Mapping[str, Piece], where: str, files: Sequence[Wanted],
    sources: list[str],
) -> list[Wanted]:  # fmt: skip
    """Shards that hold n-gram tables, and the words around tools where the base's repository has none."""
    if ask.shards == NONE:
        return []
    given = Repository.of(ask.shards, "--shards") if ask.shards else told.shards if told else None
    if given is None and (INDEX in listing or SINGLE in listing):
        there, found = where, listing
    else:
        if given is None and told is not None and _has_shards(told, files):
            return []
        repository = given or published()[1]
        commit, found = hub.listing(repository)
        there = f"{repository.name}@{commit}"
        if there not in sources:
            sources.append(there)
    have = {w.name for w in files}
    tables = sorted(_tables(hub, found, there))
    words = [] if have & set(TOOL_FILES) else [name for name in TOOL_FILES if name in found]
    return [Wanted(name, (found[name],)) for name in (*tables, *words) if name not in have]


def _has_shards(told: _Manifest, files: Sequence[Wanted]) -> bool:
    return any(w.name.endswith(".safetensors") for w in files)


def _tables(hub: Lister, listing: Mapping[str, Piece], where: str) -> set[str]:
    """Names of the shards that hold n-gram tables, as the checkpoint's index says."""
    if INDEX not in listing:
        if SINGLE not in listing:
            raise UsageError(f"{where}: has neither {INDEX} nor {SINGLE}; name the checkpoint with --shards, or none")
        return {SINGLE}
    at = listing[INDEX].where
    try:
        placed = json.loads(hub.read(listing[INDEX], MOST_TEXT))["weight_map"]
        shards = {str(shard) for name, shard in placed.items() if _TABLE.fullmatch(name)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise FileFormatError(f"{at}: is no index of a checkpoint ({e!r})") from e
    if not shards:
        raise UsageError(f"{at}: names no n-gram tables; name another checkpoint with --shards, or none")
    for name in shards:
        if not plain_file_name(name) or name not in listing:
            raise FileFormatError(f"{at}: its n-gram tables lie in {name!a}, which is not there")
    return shards


# -- manifests


@dataclass(frozen=True)
class _Manifest:
    """`ds4-files.json`: format 1; `base`, `files` [{`name`, `size`, `sum`, `path` or `parts` [{`path`, `size`,
    `sum`}]}], and if they lie elsewhere `repo`, `revision`, `shards` {`repo`, `revision`}. A sum is `sha256:DIGITS`.
    """

    repository: Repository | None
    base: str | None
    shards: Repository | None
    files: tuple[Wanted, ...]  # pieces without repository and commit
    where: str

    @staticmethod
    def read(text: str, where: str) -> _Manifest:
        """Raises FileFormatError: it is no manifest, or one of a format that this version does not know."""
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise FileFormatError(f"{where}: is of format {raw['format']!r}; this version knows {FORMAT}")
            files = tuple(_Manifest._file(row, where) for row in raw["files"])
            base, shards = raw.get("base"), raw.get("shards")
            repository = _repository(raw, where) if "repo" in raw else None
            official = None if shards is None else _repository(shards, where)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise FileFormatError(f"{where}: is no manifest of files ({e!r})") from e
        names = [w.name for w in files]
        if len(set(names)) != len(names) or not names:
            raise FileFormatError(f"{where}: lists no file, or one twice")
        if base is not None and base not in names:
            raise FileFormatError(f"{where}: the base {base!r} is none of its files")
        return _Manifest(repository, base, official, files, where)

    @staticmethod
    def _file(row: Mapping[str, Any], where: str) -> Wanted:
        name = row["name"]
        check_name(name, where)
        whole = Sum.read(row["sum"], f"{where}: {name}")
        check_size(row["size"], f"{where}: {name}")
        parts = row.get("parts") or [{"path": row.get("path", name), "size": row["size"], "sum": row["sum"]}]
        pieces = []
        for part in parts:
            check_name(part["path"], where)
            check_size(part["size"], f"{where}: {part['path']}")
            pieces.append(
                Piece("", "", part["path"], part["size"], Sum.read(part["sum"], f"{where}: {part['path']}"))
            )
        wanted = Wanted(name, tuple(pieces), whole)
        if wanted.size != row["size"]:
            raise FileFormatError(f"{where}: {name}: its parts have {wanted.size} bytes, the file {row['size']}")
        return wanted

    def wanted(self, listing: Mapping[str, Piece], where: str) -> dict[str, Wanted]:
        """Its files with the pieces that the hub lists.

        Raises:
            FileFormatError: one is not there, or not the one that the manifest means.
        """
        return {w.name: replace(w, pieces=tuple(self._found(w.pieces, listing, where))) for w in self.files}

    def _found(self, pieces: Sequence[Piece], listing: Mapping[str, Piece], where: str) -> Iterator[Piece]:
        for piece in pieces:
            there = listing.get(piece.path)
            if there is None:
                raise FileFormatError(f"{self.where}: {piece.path} is not in {where}")
            differs = there.sum != piece.sum and there.sum.kind == piece.sum.kind
            if differs or there.size != piece.size:
                raise FileFormatError(
                    f"{self.where}: says {piece.path} has {piece.size} bytes and {piece.sum}; {where} lists "
                    f"{there.size} and {there.sum}: it is another file than the manifest means"
                )
            yield replace(there, sum=piece.sum)


def _repository(row: Mapping[str, Any], where: str) -> Repository:
    given = f"{row['repo']}@{row['revision']}" if "revision" in row else str(row["repo"])
    return Repository.of(given, f"{where}:")
