"""What is to be fetched, and by which published sum it is known. No sum here is ever made from what arrived."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Protocol

from ds4.errors import FileFormatError, UsageError

LENGTHS = {"sha256": 64, "git-sha1": 40}  # hex digits
RECORD = "ds4-fetch.json"  # in the folder: what was planned, and what is there
PART, NOTE = ".part", ".part.json"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[\w.][\w./-]{0,250}", re.ASCII)


class Hasher(Protocol):
    """What hashlib makes."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class Sum:
    """A published sum. `kind`: "sha256" of the bytes (what a hub lists of large files, and manifests), or "git-sha1"
    of Git's blob (what it lists of small ones: SHA-1 over "blob SIZE", a zero byte, the bytes)."""

    kind: str
    digits: str

    @staticmethod
    def of(kind: object, digits: object, where: str) -> Sum:
        """Checked.

        Raises:
            FileFormatError: an unknown kind, or digits that are none of it; names `where`.
        """
        n = LENGTHS.get(kind) if isinstance(kind, str) else None
        if n is None:
            raise FileFormatError(f"{where}: {kind!r} is no kind of sum; known are {', '.join(LENGTHS)}")
        if not isinstance(digits, str) or not re.fullmatch(f"[0-9a-f]{{{n}}}", digits.lower()):
            raise FileFormatError(f"{where}: {digits!r} is no {kind}; expected {n} hex digits")
        return Sum(str(kind), digits.lower())

    @staticmethod
    def read(text: object, where: str) -> Sum:
        """From `KIND:DIGITS`, as records have it."""
        kind, _, digits = str(text).partition(":")
        return Sum.of(kind, digits, where)

    def __str__(self) -> str:
        return f"{self.kind}:{self.digits}"

    def hasher(self, size: int) -> Hasher:
        """A hash of this kind for a file of `size` bytes."""
        if self.kind == "sha256":
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


@dataclass(frozen=True)
class Repository:
    """OWNER/REPO and a revision: a branch, a tag or a commit."""

    name: str
    revision: str = "main"

    @staticmethod
    def of(given: str, flag: str) -> Repository:
        """From `OWNER/REPO[@REVISION]`.

        Raises:
            UsageError: it is nothing of the kind.
        """
        name, at, revision = given.partition("@")
        if not _REPO.fullmatch(name) or ".." in name or "--" in name:
            raise UsageError(f"{flag} {given}: expected OWNER/REPO or OWNER/REPO@REVISION")
        if at and (not _REVISION.fullmatch(revision) or ".." in revision):
            raise UsageError(f"{flag} {given}: {revision!r} is no revision (a branch, a tag or a commit)")
        return Repository(name, revision if at else "main")

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}"


@dataclass(frozen=True)
class Piece:
    """A file of a repository at one commit.

    Attributes:
        size: bytes.
        xet: its hash in the hub's chunk storage; None: it is not there.
    """

    repo: str
    commit: str
    path: str
    size: int
    sum: Sum
    xet: str | None = None

    @property
    def where(self) -> str:
        return f"{self.repo}@{self.commit[:12]}: {self.path}"

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "repo": self.repo, "commit": self.commit, "path": self.path, "size": self.size, "sum": str(self.sum)
        }  # fmt: skip
        return row | ({"xet": self.xet} if self.xet else {})


@dataclass(frozen=True)
class Wanted:
    """A file that is to lie in the folder: the bytes of its pieces, one after the other.

    Attributes:
        name: relative to the folder, with `/`.
        sum: of the whole; None: none is published, and the sums of the pieces have to do.
    """

    name: str
    pieces: tuple[Piece, ...]
    sum: Sum | None = None

    @property
    def size(self) -> int:
        return sum(p.size for p in self.pieces)

    @property
    def checked_by(self) -> str:
        """In words, which sums its bytes had to fit."""
        whole = self.sum or (self.pieces[0].sum if len(self.pieces) == 1 else None)
        pieces = f"{len(self.pieces)} pieces by their sums" if len(self.pieces) > 1 else ""
        return ", ".join(filter(None, [pieces, str(whole or "")]))

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"name": self.name, "pieces": [p.to_json() for p in self.pieces]}
        return row | ({"sum": str(self.sum)} if self.sum else {})

    @staticmethod
    def from_json(row: Any, where: str) -> Wanted:
        """As `to_json` left it.

        Raises:
            FileFormatError: it is something else.
        """
        try:
            pieces = tuple(_piece(p, where) for p in row["pieces"])
            whole = Sum.read(row["sum"], where) if "sum" in row else None
            name = row["name"]
        except (KeyError, TypeError) as e:
            raise FileFormatError(f"{where}: is no record of a fetch ({e!r})") from e
        check_name(name, where)
        if not pieces:
            raise FileFormatError(f"{where}: {name} has no pieces")
        return Wanted(name, pieces, whole)


def _piece(row: Any, where: str) -> Piece:
    check_size(row["size"], where)
    repo, commit, path, xet = row["repo"], row["commit"], row["path"], row.get("xet")
    if not all(isinstance(t, str) for t in (repo, commit, path)) or not (xet is None or isinstance(xet, str)):
        raise FileFormatError(f"{where}: repo, commit, path and xet must be texts")
    return Piece(repo, commit, path, row["size"], Sum.read(row["sum"], where), xet)


def check_size(size: object, where: str) -> None:
    """Raises FileFormatError for what is no number of bytes."""
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 50:
        raise FileFormatError(f"{where}: size is {size!r}; expected a number of bytes")


def check_name(name: object, where: str) -> None:
    """A name that stays in its folder and is none of ours; somebody else chose it.

    Raises:
        FileFormatError: it does not.
    """
    good = isinstance(name, str) and 0 < len(name.encode("utf-8", "replace")) <= 1000 and name.isprintable()
    parts = str(name).split("/")
    if not good or any(p in ("", ".", "..") or "\\" in p or len(p.encode()) > 200 for p in parts):
        raise FileFormatError(f"{where}: {name!a} is no plain file name inside a folder")
    if parts[-1] == RECORD or parts[-1].endswith((PART, NOTE)) or parts[0].startswith("."):
        raise FileFormatError(f"{where}: {name!a} is a name that fetching keeps for itself")
