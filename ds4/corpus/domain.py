"""A domain: a folder with manifest.toml, fit.jsonl and judge.jsonl, checked when it is opened.

manifest.toml   domain, [fit] and [judge] (file, sha256, documents, bytes), [[sources]] (id, licence, ...)
*.jsonl         a document a line: {"id", "source", "text"}

Nothing is repaired: a hash that differs or a document that is in both slices refuses the domain.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4 import embedded
from ds4.corpus.likeness import PASSAGE, normalised, shared
from ds4.errors import FileFormatError, UsageError

SLICES = ("fit", "judge")
MANIFEST = "manifest.toml"


@dataclass(frozen=True)
class Document:
    """`source` and `id` together name the source document that `text` is, or is a part of."""

    id: str
    source: str
    text: str

    @property
    def key(self) -> tuple[str, str]:
        """No two documents of a domain have the same."""
        return self.source, self.id


@dataclass(frozen=True)
class Domain:
    """An opened domain. `manifest` is manifest.toml as it stands."""

    name: str
    folder: Path
    manifest: Mapping[str, Any]
    _slices: Mapping[str, tuple[Document, ...]]

    @staticmethod
    def open(what: str | Path) -> Domain:
        """The domain of a folder, or the embedded one of that name (./NAME is a folder whatever its name).

        Raises:
            UsageError: neither a folder nor an embedded domain.
            FileFormatError: the manifest lacks something or lies about a slice; the slices share a document.
        """
        folder = Path(what)
        if isinstance(what, str) and what in embedded.domains():
            folder = embedded.HOME / "corpora" / what
        elif not folder.is_dir():
            raise UsageError(
                f"domain {str(what)!r}: neither a folder nor an embedded domain ({', '.join(embedded.domains())})"
            )
        manifest = _read_manifest(folder / MANIFEST)
        slices = {name: _read_slice(folder, name, manifest[name]) for name in SLICES}
        problem = overlap(slices["fit"], slices["judge"])
        if problem is not None:
            raise FileFormatError(f"{folder}: the slices overlap: {problem}; build the domain again")
        return Domain(manifest["domain"], folder, manifest, slices)

    def documents(self, slice: str) -> tuple[Document, ...]:
        """Documents of "fit" or "judge" in file order.

        Raises:
            UsageError: no such slice.
        """
        return self._slices[self._checked(slice)]

    def sha256(self, slice: str) -> str:
        """Hash of the slice's file, as the manifest says and `open` checked."""
        digest: str = self.manifest[self._checked(slice)]["sha256"]
        return digest

    def _checked(self, slice: str) -> str:
        if slice not in SLICES:
            raise UsageError(f"slice {slice!r} is unknown; there are {', '.join(SLICES)}")
        return slice


def overlap(fit: Sequence[Document], judge: Sequence[Document]) -> str | None:
    """What the two slices share, in words; None if nothing."""
    both = [*fit, *judge]
    keys = {d.key for d in fit}
    for d in judge:
        if d.key in keys:
            return f"document {d.id!r} of source {d.source!r} is in both"
    texts = [normalised(d.text).encode() for d in both]
    for a, b, at in shared(texts):
        # pairs run along a chain of equal runs in file order, so one of them crosses from fit to judge
        if a < len(fit) <= b:
            words = texts[a][at : at + PASSAGE].decode(errors="replace")[:60]
            return (
                f"fit's {both[a].id!r} ({both[a].source}) and judge's {both[b].id!r} ({both[b].source}) "
                f"share {words + '...'!r}"
            )
    return None


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e}); a domain has a manifest") from e
    except ValueError as e:
        raise FileFormatError(f"{path}: not valid TOML ({e})") from e
    if not isinstance(raw.get("domain"), str) or not raw["domain"]:
        raise FileFormatError(f"{path}: has no `domain`, the domain's name")
    for name in SLICES:
        table = raw.get(name)
        wanted = {"file": str, "sha256": str, "documents": int, "bytes": int}
        if not isinstance(table, dict) or any(type(table.get(key)) is not kind for key, kind in wanted.items()):
            raise FileFormatError(f"{path}: [{name}] must say {', '.join(wanted)}")
        if Path(table["file"]).name != table["file"] or table["file"] in ("", ".", ".."):
            raise FileFormatError(f"{path}: [{name}] file {table['file']!r} is no plain file name")
    sources = raw.get("sources")
    if not isinstance(sources, list) or not all(
        isinstance(s, dict) and isinstance(s.get("id"), str) and isinstance(s.get("licence"), str) for s in sources
    ):
        raise FileFormatError(f"{path}: every one of [[sources]] must say id and licence")
    return raw


def _read_slice(folder: Path, name: str, table: Mapping[str, Any]) -> tuple[Document, ...]:
    path = folder / table["file"]
    try:
        data = path.read_bytes()
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e}); {MANIFEST} lists it") from e
    digest = hashlib.sha256(data).hexdigest()
    if digest != table["sha256"]:
        raise FileFormatError(
            f"{path}: its SHA-256 is {digest[:16]}..., {MANIFEST} lists {table['sha256'][:16]!r}...; "
            "one of the two was changed: build the domain again"
        )
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as e:
        raise FileFormatError(f"{path}: not UTF-8 at byte {e.start}") from e
    documents = tuple(_document(path, n, line, f"{name}:{n}") for n, line in enumerate(lines, start=1) if line)
    n_bytes = sum(len(d.text.encode()) for d in documents)
    if (len(documents), n_bytes) != (table["documents"], table["bytes"]):
        raise FileFormatError(
            f"{path}: has {len(documents)} documents of {n_bytes} bytes, {MANIFEST} lists {table['documents']} "
            f"of {table['bytes']}"
        )
    if not documents:
        raise FileFormatError(f"{path}: is empty; slice {name} has no documents")
    seen: set[tuple[str, str]] = set()
    for d in documents:
        if d.key in seen:
            raise FileFormatError(f"{path}: document {d.id!r} of source {d.source!r} is there twice")
        seen.add(d.key)
    return documents


def _document(path: Path, n: int, line: str, unnamed: str) -> Document:
    """`unnamed`: the id where the line has none, as in the embedded slices."""
    try:
        row = json.loads(line)
    except ValueError as e:
        raise FileFormatError(f"{path}: line {n} is no JSON ({e})") from e
    if not isinstance(row, dict):
        raise FileFormatError(f"{path}: line {n} is no JSON object")
    text, source, name = row.get("text"), row.get("source"), row.get("id", unnamed)
    if not isinstance(text, str) or not text or not isinstance(source, str) or not isinstance(name, str):
        raise FileFormatError(f"{path}: line {n} must say text, source and id, all texts")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise FileFormatError(f"{path}: line {n}: the text has half a character ({text[e.start]!r})") from e
    return Document(name, source, text)
