"""Reports for the page at `/reports`: what `ds4 ruler report` wrote into a folder, and the nights of `ds4 nightly`.

What is listed can be read and nothing else can: a path is looked up in a listing that is made anew, so it never
becomes a path of the disk. Links are not followed. Of a folder of nights only the reports are listed: a night under
way has prompts in it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ds4.errors import FileFormatError, UsageError
from ds4.posttrain.nights import CURRENT, MARK, NIGHTS, is_nightly
from ds4.server.errors import HttpError

TYPES = {".html": "text/html", ".svg": "image/svg+xml", ".md": "text/markdown", ".json": "application/json"}
REJECTED, HISTORY = "rejected", "history.jsonl"
STEM = "report"  # of what the rulers and a night write
MOST_BYTES = 32 << 20  # of a file; a report of eight domains takes 100 kB
MOST_DEEP, MOST_SEEN = 8, 20_000  # folders below each other, and names looked at in one listing
MOST_HISTORY, HISTORY_BYTES = 100, 1 << 20
TOLD = ("at", "event", "day", "night", "before", "method", "reason")


def check_reports(folder: str | None) -> Path | None:
    """`--reports DIR`.

    Raises:
        UsageError: it is no folder.
    """
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise UsageError(f"--reports {folder}: is not a folder; name the one that reports are written into")
    return Path(folder)


@dataclass
class Report:
    """Files of one name in one folder: a report in several formats.

    Attributes:
        title: its folder below the root, and its name unless that is `STEM`.
        kind: "report", "night" or "rejected".
        current: a night that is mounted.
        files: suffix without its dot -> path on the page.
    """

    title: str
    kind: str
    current: bool
    modified: float
    files: dict[str, str] = field(default_factory=dict)

    def told(self) -> dict[str, object]:
        return {
            "title": self.title, "kind": self.kind, "current": self.current, "modified": int(self.modified),
            "files": self.files,
        }  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A file that may be shown."""

    path: Path
    kind: str = "report"
    current: bool = False


class _Walk:
    """Everything below one root that may be shown, by its name on the page."""

    def __init__(self, label: str, root: Path) -> None:
        self._root, self._label = root, label
        self.seen = 0
        self.whole = True
        self.history: list[dict[str, object]] = []
        self.files = dict(self._below(root, 0))

    def _below(self, folder: Path, depth: int) -> Iterator[tuple[str, Found]]:
        if _holds_nights(folder):
            self.history += _history(folder / HISTORY)
            current = _link(folder / CURRENT)
            for kind, below in (("night", NIGHTS), ("rejected", REJECTED)):
                for night in self._entries(folder / below) if not (folder / below).is_symlink() else ():
                    for path in self._entries(Path(night.path)) if _is_folder(night) else ():
                        if path.name.partition(".")[0] == STEM and (name := self._shown(path)):
                            yield name, Found(Path(path.path), kind, kind == "night" and night.name == current)
            return
        for entry in self._entries(folder):
            if _is_folder(entry):
                if depth < MOST_DEEP:
                    yield from self._below(Path(entry.path), depth + 1)
                else:
                    self.whole = False
            elif name := self._shown(entry):
                yield name, Found(Path(entry.path))

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        """Names in `folder` that are not hidden, in order; none where it cannot be looked at."""
        out = []
        try:
            with os.scandir(folder) as found:
                for entry in found:
                    if self.seen >= MOST_SEEN:
                        self.whole = False
                        break
                    self.seen += 1
                    if not entry.name.startswith("."):
                        out.append(entry)
        except OSError:  # removed meanwhile, or another user's
            return []
        return sorted(out, key=lambda e: e.name)

    def _shown(self, entry: os.DirEntry[str]) -> str | None:
        """The name of a file on the page; None: it is not shown."""
        try:
            fits = entry.is_file(follow_symlinks=False) and Path(entry.name).suffix in TYPES
            entry.path.encode()  # a name that is no UTF-8 has no address
        except (OSError, UnicodeEncodeError):
            return None
        return f"{self._label}/{Path(entry.path).relative_to(self._root).as_posix()}" if fits else None


class Reports:
    """The folders whose reports are shown.

    Args:
        reports: of `--reports`; None: there is none.
        nights: of `--posttrain`; shown where it is a folder of nights.
    """

    def __init__(self, reports: Path | None = None, nights: Path | None = None) -> None:
        self._roots = [] if reports is None else [("reports", reports)]
        if nights is not None and (reports is None or not _inside(nights, reports)):
            self._roots.append(("nights", nights))

    def _walks(self) -> list[_Walk]:
        return [_Walk(label, root) for label, root in self._roots if label == "reports" or _holds_nights(root)]

    def listing(self) -> dict[str, object]:
        """What there is: `reports`, newest first, `history` of nights, newest first, and whether that is all."""
        walks = self._walks()
        found: dict[str, Report] = {}  # by the name without its suffix
        for walk in walks:
            for name, file in walk.files.items():
                try:
                    modified = file.path.lstat().st_mtime
                except OSError:  # removed meanwhile
                    continue
                whole = name.rpartition(".")[0]
                report = found.setdefault(whole, Report(_title(whole, file), file.kind, file.current, modified))
                report.modified = max(report.modified, modified)
                report.files[file.path.suffix[1:]] = name
        ordered = sorted(found.values(), key=lambda r: (-r.modified, r.title))
        history = [line for walk in walks for line in walk.history]
        return {
            "shown": [label for label, _ in self._roots],
            "reports": [r.told() for r in ordered],
            "history": sorted(history, key=lambda line: str(line.get("at", "")), reverse=True)[:MOST_HISTORY],
            "whole": all(walk.whole for walk in walks),
        }

    def read(self, name: str) -> tuple[bytes, str]:
        """A file that is listed, and its type.

        Raises:
            HttpError: 404: it is not listed, not any more, or too large.
        """
        for walk in self._walks():
            if (file := walk.files.get(name)) is not None:
                return _bytes(file.path, name), TYPES[file.path.suffix]
        raise HttpError(404, f"there is no report {name!r:.200}; /report-files lists those there are", "not_found")


def _title(name: str, file: Found) -> str:
    """A night's name; else a report's folder below its root, and its file's name unless every report's is that."""
    if file.kind != "report":
        return file.path.parent.name
    below = name.partition("/")[2]
    return below.removesuffix(f"/{STEM}") if file.path.stem == STEM else below


def _regular(path: Path) -> BinaryIO:
    """A regular file, opened: no link, and nothing that a read could wait for.

    Raises:
        OSError: it is none, or cannot be read.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def _bytes(path: Path, name: str) -> bytes:
    try:
        with _regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                raise HttpError(404, f"{name} has {size} bytes; reports of up to {MOST_BYTES} are shown", "too_large")
            return file.read(MOST_BYTES)
    except OSError as e:
        raise HttpError(404, f"{name} cannot be read ({e.strerror or e})", "not_found") from e


def _holds_nights(folder: Path) -> bool:
    """Whether it is a folder of nights; also one of another version, which is as private."""
    try:
        return is_nightly(folder)
    except FileFormatError:
        return (folder / MARK).exists()


def _inside(folder: Path, root: Path) -> bool:
    """Whether `root` shows `folder` already."""
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(root))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _link(path: Path) -> str | None:
    try:
        return Path(os.readlink(path)).name
    except OSError:
        return None


def _history(path: Path) -> list[dict[str, object]]:
    """The last lines; those that are torn are passed over."""
    try:
        with _regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - HISTORY_BYTES))
            lines = file.read(HISTORY_BYTES).split(b"\n")[-MOST_HISTORY - 1 :]
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append({key: row[key] for key in TOLD if isinstance(row.get(key, 0), str | None)})
    return rows
