"""Requests that must go: their rows, and what quotes them elsewhere.

Files are rewritten beside their names and renamed, days that go whole are unlinked, while nobody else writes the log.
Quotes go before rows: after a kill the rows are still there, and the same command finds everything again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from ds4.disk import sync_folder
from ds4.errors import CapacityError, Ds4Error, UsageError
from ds4.posttrain.log import BESIDE, LOCK, day_file, days, locked, read_file, replace_file
from ds4.posttrain.quotes import ID, Quotes, texts_of


@dataclass
class Forgotten:
    """What was done.

    Attributes:
        requests: ids whose rows were in the log.
        rows, removed, edited: files of the log with the number of rows that went, files that are gone, other files
            with the number of places.
        missing: ids that were nowhere, days without a file.
        left: what could not be done, a sentence a file.
    """

    requests: list[str] = field(default_factory=list)
    rows: dict[Path, int] = field(default_factory=dict)
    removed: list[Path] = field(default_factory=list)
    edited: dict[Path, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def report(self) -> str:
        """For people; no text of a request."""
        lines = [f"forgotten: {len(self.requests)} request{'' if len(self.requests) == 1 else 's'}"]
        lines += [f"  {path}: {n} row{'' if n == 1 else 's'}" for path, n in self.rows.items()]
        lines += [f"  {path}: {n} quote{'' if n == 1 else 's'}" for path, n in self.edited.items()]
        lines += [f"  {path}: removed" for path in self.removed]
        if self.requests:
            lines.append("gains that were solved on them are as they were: solve again, or mount an earlier folder")
        return "\n".join(lines) + "\n"

    def as_json(self) -> dict[str, object]:
        return {
            "requests": self.requests,
            "rows": {str(path): n for path, n in self.rows.items()},
            "quotes": {str(path): n for path, n in self.edited.items()},
            "removed": [str(path) for path in self.removed],
            "missing": self.missing,
            "left": self.left,
        }


def forget(
    folder: Path,
    *,
    ids: Sequence[str] = (),
    wanted_days: Sequence[date] = (),
    everything: bool = False,
    also: Sequence[Path] = (),
) -> Forgotten:
    """Remove requests from the log in `folder`, and their quotes from every other file in it and below `also`.

    Raises:
        UsageError: what cannot be an id; a folder that is not there.
        CapacityError: no room to rewrite a file; that file is as it was, and so is the log.
    """
    for given in ids:
        if not ID.fullmatch(given):
            raise UsageError(f"--request {given!r}: is no request id; it is the id of an answer, as chatcmpl-12ab...")
    for root in also:
        if not root.is_dir():
            raise UsageError(f"--also {root}: no such folder")
    done = Forgotten()
    with locked(folder):
        files = days(folder)
        going: dict[Path, set[int]] = {}  # line numbers, from 1
        texts: set[str] = set()
        named = Quotes(ids, ())
        for day, path in files.items():
            whole = everything or day in wanted_days
            found, problems = read_file(path)
            rows = [logged for logged in found if whole or logged.id in ids]
            going[path] = {logged.line for logged in rows}
            if problems and not whole:  # a torn row may be the one
                lines = path.read_bytes().split(b"\n")
                going[path] |= {p.line for p in problems if named.named_in(lines[p.line - 1])}
            done.requests += [logged.id for logged in rows]
            for logged in rows:
                texts.update(texts_of(logged.row))
        quotes = Quotes({*ids, *done.requests}, texts)
        _purge(folder, files.values(), also, quotes, done)
        for day, path in files.items():
            if everything or day in wanted_days:
                path.unlink()
                done.removed.append(path)
            elif going[path]:
                _drop_lines(path, going[path], done)
        _drop_left_overs(folder)
        sync_folder(folder)
    done.missing += [str(day) for day in wanted_days if day_file(folder, day) not in files.values()]
    done.missing += [given for given in ids if given not in done.requests and given not in quotes.seen]
    return done


def _purge(folder: Path, day_files: Collection[Path], also: Sequence[Path], quotes: Quotes, done: Forgotten) -> None:
    """Take quotes out of every file but the log's own."""
    own = {*day_files, folder / LOCK}
    seen: set[Path] = set()
    for root in (folder, *also):
        for path in _files(root, done):
            if path in own or path.resolve() in seen or (path.parent == folder and BESIDE.fullmatch(path.name)):
                continue
            seen.add(path.resolve())
            try:
                edited = quotes.without(path)
                if edited is None:
                    continue
                data, n = edited
                if data:
                    replace_file(path, data, stat.S_IMODE(path.stat().st_mode))
                    done.edited[path] = n
                else:
                    path.unlink()
                    sync_folder(path.parent)
                    done.removed.append(path)
            except FileNotFoundError:  # its owner removed it meanwhile
                continue
            except CapacityError:  # rows go after quotes: all of this can be run again
                raise
            except Ds4Error as e:
                done.left.append(str(e))


def _files(root: Path, done: Forgotten) -> Iterator[Path]:
    """Regular files below a folder, sorted; links are not followed."""

    def note(e: OSError) -> None:
        done.left.append(f"{e.filename}: cannot be looked into ({e.strerror}); look yourself")

    for here, folders, names in os.walk(root, onerror=note):
        folders.sort()
        for name in sorted(names):
            path = Path(here) / name
            if path.is_file() and not path.is_symlink():
                yield path


def _drop_lines(path: Path, numbers: set[int], done: Forgotten) -> None:
    lines = path.read_bytes().split(b"\n")
    kept = b"\n".join(line for n, line in enumerate(lines, start=1) if n not in numbers)
    if kept.strip():
        replace_file(path, kept)
        done.rows[path] = len(numbers)
    else:
        path.unlink()
        done.rows[path] = len(numbers)
        done.removed.append(path)


def _drop_left_overs(folder: Path) -> None:
    """What a killed rewrite left holds rows too."""
    for path in folder.iterdir():
        if BESIDE.fullmatch(path.name):
            with suppress(FileNotFoundError):
                path.unlink()
