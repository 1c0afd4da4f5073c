"""Plain text and JSONL in: a document a file, or a document a row.

A folder is read to its depth, hidden files left out: *.jsonl as rows, every other file as one document. A row has
`text`, and may have `id` and `source`; rows of one source and id are parts of one document and are joined by an empty
line, so that a document that was cut into pieces cannot end up on both sides. Nothing depends on where the files lie,
only on their names below the argument.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds4.checkpoint.files import require_regular
from ds4.corpus.domain import Document
from ds4.errors import FileFormatError, UsageError


@dataclass(frozen=True)
class Input:
    """One --text: its documents, in order of their ids, and what the manifest says of it.

    Attributes:
        name: its base name; the source of documents that name none.
        sha256: of the file; of a folder, of the list of its files' names and hashes.
        empty: files or rows without any text, left out.
    """

    name: str
    sha256: str
    documents: tuple[Document, ...]
    empty: int


def read_inputs(paths: Sequence[str | Path]) -> list[Input]:
    """Everything that was named, sorted by name.

    Raises:
        UsageError: a path that is not there, or two of one base name.
        FileFormatError: a file that is not text, a row that is no document; names file and line.
    """
    named: dict[str, Path] = {}
    for given in paths:
        path = Path(os.path.abspath(Path(given).expanduser()))
        if not path.exists():
            raise UsageError(f"--text {given}: no such file or folder")
        if not path.name.isprintable() or not path.name:
            raise UsageError(f"--text {str(given)!r}: has no name that can stand in a manifest; rename it")
        if path.name in named:
            raise UsageError(f"--text {given}: another one is called {path.name!r} too; rename one of the two")
        named[path.name] = path
    inputs = [_read_input(name, named[name]) for name in sorted(named)]
    where: dict[tuple[str, str], str] = {}
    for read in inputs:
        for d in read.documents:
            if d.key in where:
                raise FileFormatError(
                    f"document {d.id!r} of source {d.source!r} is in {where[d.key]} and in {read.name}; "
                    "give one of them another source, or put its parts into one file"
                )
            where[d.key] = read.name
    return inputs


def _read_input(name: str, path: Path) -> Input:
    files = list(_files(path)) if path.is_dir() else [path]
    parts: dict[tuple[str, str], list[str]] = {}
    listed, empty = [], 0
    for file in files:
        below = file.relative_to(path).as_posix() if path.is_dir() else name
        if not below.isprintable():  # a name in another encoding cannot stand in the manifest
            raise FileFormatError(f"{below!r}: a file name that is not text; rename it")
        data = _bytes(file)
        listed.append(f"{hashlib.sha256(data).hexdigest()}  {below}\n")
        text = _text(file, data)
        rows = _rows(file, text, name, below) if file.suffix == ".jsonl" else [Document(below, name, text)]
        for row in rows:
            if row.text.strip():
                parts.setdefault(row.key, []).append(row.text)
            else:
                empty += 1
    documents = tuple(Document(key[1], key[0], "\n\n".join(texts)) for key, texts in sorted(parts.items()))
    digest = hashlib.sha256("".join(listed).encode()).hexdigest() if path.is_dir() else listed[0][:64]
    return Input(name, digest, documents, empty)


def _files(folder: Path) -> Iterator[Path]:
    """Files below a folder, sorted by name, without hidden ones."""
    found: list[Path] = []

    def give_up(e: OSError) -> None:
        raise FileFormatError(f"{e.filename}: cannot be read ({e.strerror})")

    for here, folders, names in os.walk(folder, onerror=give_up):
        folders[:] = [f for f in folders if not f.startswith(".")]
        found += [Path(here) / n for n in names if not n.startswith(".")]
    return iter(sorted(found, key=lambda p: p.relative_to(folder).as_posix()))


def _bytes(file: Path) -> bytes:
    require_regular(file)
    try:
        return file.read_bytes()
    except OSError as e:
        raise FileFormatError(f"{file}: cannot be read ({e.strerror or e})") from e


def _text(file: Path, data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise FileFormatError(
            f"{file}: not UTF-8 text (byte {e.start}); convert it, or leave it out of what --text names"
        ) from e
    if "\0" in text:
        raise FileFormatError(f"{file}: has a zero byte, so it is no text; leave it out of what --text names")
    return text.replace("\r\n", "\n")


def _rows(file: Path, text: str, source: str, below: str) -> Iterable[Document]:
    for n, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise FileFormatError(f"{file}: line {n} is no JSON ({e})") from e
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise FileFormatError(f'{file}: line {n} has no "text"')
        value, name, origin = row["text"], row.get("id", f"{below}:{n}"), row.get("source", source)
        if type(name) is int:
            name = str(name)
        if not isinstance(name, str) or not isinstance(origin, str) or not name or not origin:
            raise FileFormatError(f'{file}: line {n}: "id" and "source" must be texts, they are {name!r}, {origin!r}')
        try:
            f"{value}{name}{origin}".encode()
        except UnicodeEncodeError as e:
            raise FileFormatError(f"{file}: line {n} has half a character ({e.object[e.start]!r})") from e
        yield Document(name, origin, value.replace("\r\n", "\n"))
