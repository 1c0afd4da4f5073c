"""The model that ds4 carries with it, and text to judge it by. Standard library only: the installer reads it first.

model/                           a checkpoint in the released layout, trained by `train/`
base.toml                        how its base is made: `bits`, `gain`
corpora/<domain>/judge.jsonl     documents that no training saw, one {"source", "text"} a line
corpora/<domain>/fit.jsonl       others that no training saw, for solvers
corpora/<domain>/manifest.toml   where they come from, under which licence
training-log/                    what the training said
SHA256SUMS                       of every file here but code, base.toml and itself, as `sha256sum` writes it
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds4.errors import FileFormatError, UsageError

HOME = Path(__file__).resolve().parent
SPLITS = ("judge", "fit")
SUMS = "SHA256SUMS"
REMEDY = "get the whole tree again (a checkout without its data files, or an edited one?)"
_UNLISTED = (SUMS, "base.toml")


@dataclass(frozen=True)
class Recipe:
    """How the embedded model's base is made: index bits of all experts, rule of the row gains."""

    bits: int
    gain: str


def checkpoint() -> Path:
    """Folder of the checkpoint.

    Raises:
        FileFormatError: it is not there.
    """
    folder = HOME / "model"
    if not (folder / "config.json").is_file():
        raise FileFormatError(f"{folder}: the embedded model is not there; {REMEDY}")
    return folder


def recipe() -> Recipe:
    """What base.toml says; what the values may be is the quantizer's to judge.

    Raises:
        FileFormatError: it is not there, or says something else than `bits` and `gain`.
    """
    path = HOME / "base.toml"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise FileFormatError(f"{path}: cannot be read ({e}); {REMEDY}") from e
    if set(raw) != {"bits", "gain"} or type(raw["bits"]) is not int or not isinstance(raw["gain"], str):
        raise FileFormatError(f"{path}: says {raw}; expected `bits`, a whole number, and `gain`, a word")
    return Recipe(raw["bits"], raw["gain"])


def domains() -> tuple[str, ...]:
    """Names of the domains that text is there of, sorted.

    Raises:
        FileFormatError: there is none.
    """
    found = tuple(sorted(p.name for p in (HOME / "corpora").glob("*") if p.is_dir()))
    if not found:
        raise FileFormatError(f"{HOME / 'corpora'}: the embedded model's text is not there; {REMEDY}")
    return found


def slice(domain: str, split: str) -> list[str]:
    """Documents of a domain that no training saw: "judge" to measure on, "fit" to solve on.

    Raises:
        UsageError: no such domain or split.
        FileFormatError: the file is missing or broken, by line.
    """
    if domain not in domains():
        raise UsageError(f"domain {domain!r} is unknown; there are {', '.join(domains())}")
    if split not in SPLITS:
        raise UsageError(f"split {split!r} is unknown; there are {', '.join(SPLITS)}")
    path = HOME / "corpora" / domain / f"{split}.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as e:
        raise FileFormatError(f"{path}: cannot be read ({e}); {REMEDY}") from e
    return [_text(path, n, line) for n, line in enumerate(lines, start=1) if line]


def verify() -> None:
    """Compare every file with SHA256SUMS.

    Raises:
        FileFormatError: one is missing, changed or not listed; names it.
    """
    listed = _listed()
    there = dict(_files())
    for name, digest in listed.items():
        if name not in there:
            raise FileFormatError(f"{HOME / name}: the file is missing; {REMEDY}")
        if _digest(there[name]) != digest:
            raise FileFormatError(f"{there[name]}: is not the file that {SUMS} lists; {REMEDY}")
    for name, path in there.items():
        if name not in listed:
            raise FileFormatError(f"{path}: {SUMS} does not list it; remove it, or get the whole tree again")


def sums() -> str:
    """What SHA256SUMS should say of the files that are there."""
    return "".join(f"{_digest(path)}  {name}\n" for name, path in _files())


def key_parts() -> list[str]:
    """Texts that change when the checkpoint does (SHA256SUMS tells), or the recipe of its base.

    Raises:
        FileFormatError: one of the two files cannot be read.
    """
    return [repr(recipe()), *(f"{digest} {name}" for name, digest in _listed().items() if name.startswith("model/"))]


def _files() -> Iterator[tuple[str, Path]]:
    """(name as in SHA256SUMS, path) of every file that it lists, sorted."""
    for path in sorted(HOME.rglob("*")):
        name = path.relative_to(HOME)
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in name.parts and str(name) not in _UNLISTED:
            yield name.as_posix(), path


def _listed() -> dict[str, str]:
    path = HOME / SUMS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as e:
        raise FileFormatError(f"{path}: cannot be read ({e}); {REMEDY}") from e
    out = {}
    for n, line in enumerate(lines, start=1):
        digest, sep, name = line.partition("  ")
        if not sep or len(digest) != 64 or not name:
            raise FileFormatError(f"{path}: line {n} is no line of sha256sum")
        out[name] = digest
    return out


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror})") from e


def _text(path: Path, n: int, line: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise FileFormatError(f"{path}: line {n} is no JSON ({e}); {REMEDY}") from e
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text:
        raise FileFormatError(f"{path}: line {n} has no text; {REMEDY}")
    return text
