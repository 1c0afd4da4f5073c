"""Files of logged requests: a folder of one JSONL file a day, which servers append to and `ds4 forget` rewrites.

    requests-2026-11-30.jsonl   a finished request a line; the day is this machine's own
    .lock                       held by whoever changes a file of the folder

The folder is its owner's alone (0700), and so are the files (0600). A row is whole or not there: what a failed write
left is cut off again, and where a machine died in a row, the next one begins on a line of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ds4.disk import sync_folder
from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError

LOCK = ".lock"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DAY = re.compile(r"requests-([0-9]{4}-[0-9]{2}-[0-9]{2})\.jsonl")
BESIDE = re.compile(r"\.requests-.*\.new")  # a file that is being rewritten, or that a killed rewrite left


@dataclass(frozen=True)
class Logged:
    """A request of the log: the file and line that it stands in, and its row."""

    path: Path
    line: int
    row: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.row["id"])


@dataclass(frozen=True)
class Problem:
    """A line that cannot be used, and why."""

    line: int
    reason: str


def make_folder(folder: Path) -> None:
    """The folder of a log: made if it is not there, refused if others can look into it.

    Raises:
        UsageError: names it, and what to do.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        info = folder.stat()
    except OSError as e:
        raise UsageError(f"{folder}: cannot be the folder of a request log ({e.strerror}); name another") from e
    if not stat.S_ISDIR(info.st_mode):
        raise UsageError(f"{folder}: is no folder; a request log needs one")
    if info.st_uid != os.geteuid():
        raise UsageError(f"{folder}: belongs to another user; a request log needs a folder of your own")
    if info.st_mode & 0o077:
        raise UsageError(
            f"{folder}: others may look into it (mode {stat.S_IMODE(info.st_mode):o}); chmod 700 it, or name another"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{folder}: nothing can be written there; chmod 700 it, or name another")


def existing_folder(folder: str | Path) -> Path:
    """`folder`, which must be there.

    Raises:
        UsageError: it is not.
    """
    path = Path(folder)
    if not path.is_dir():
        raise UsageError(f"--log {folder}: no such folder; name the one that ds4-server --log-requests has")
    return path


def own_log(folder: str | Path) -> Path:
    """`existing_folder`, and nobody else's, in which a server has written: what files may be taken out of.

    Raises:
        UsageError: it is no such folder; nothing in it was touched.
    """
    path = existing_folder(folder)
    make_folder(path)  # it is there: only looked at
    if not days(path) and not (path / LOCK).is_file():
        raise UsageError(
            f"--log {folder}: has no requests-DAY.jsonl; name the one that ds4-server --log-requests has"
        )
    return path


def day_file(folder: Path, day: date) -> Path:
    return folder / f"requests-{day.isoformat()}.jsonl"


def parse_day(text: str) -> date:
    """2026-11-30 as a date.

    Raises:
        UsageError: it is none.
    """
    try:
        if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
            raise ValueError
        return date.fromisoformat(text)
    except ValueError:
        raise UsageError(f"day {text!r}: is no day; write one as 2026-11-30") from None


def days(folder: Path) -> dict[date, Path]:
    """The files of a log by their day, oldest first; whatever else lies there is not looked at."""
    found = {}
    for path in folder.iterdir():
        match = _DAY.fullmatch(path.name)
        if match and path.is_file() and not path.is_symlink():
            with contextlib.suppress(ValueError):  # requests-2026-99-99.jsonl is not ours
                found[date.fromisoformat(match[1])] = path
    return dict(sorted(found.items()))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone with the files of the folder; waits for whoever is."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def append(folder: Path, day: date, rows: Sequence[bytes]) -> None:
    """Rows, each with its newline, to the end of a day's file, and to the disk: all of them or none.

    Raises:
        OSError: the disk is full, or whatever else the system says; the file is as it was.
    """
    path = day_file(folder, day)
    with locked(folder):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise OSError(errno.EINVAL, "is not a regular file", str(path))
            if stat.S_IMODE(info.st_mode) != 0o600:
                os.fchmod(fd, 0o600)
            torn = info.st_size > 0 and os.pread(fd, 1, info.st_size - 1) != b"\n"
            data = b"".join([b"\n" if torn else b"", *rows])
            try:
                while data:
                    data = data[os.write(fd, data) :]
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, info.st_size)
                raise
        finally:
            os.close(fd)
        if info.st_size == 0:
            sync_folder(folder)


def prune(folder: Path, today: date, keep_days: int) -> list[Path]:
    """Remove the files of days before the last `keep_days`, today being one of those, and what killed rewrites left.

    Returns:
        The files of days that are gone.
    """
    with locked(folder):
        gone = [path for day, path in days(folder).items() if (today - day).days >= keep_days]
        left = [path for path in folder.iterdir() if BESIDE.fullmatch(path.name)]
        for path in (*gone, *left):
            path.unlink(missing_ok=True)
        if gone or left:
            sync_folder(folder)
    return gone


def lines_of(path: Path) -> Iterator[Logged | Problem]:
    """The requests of a day's file, and the lines of it that are none; a line in memory at a time.

    Raises:
        FileFormatError: it cannot be read.
    """
    try:
        with open(path, "rb") as f:
            for n, line in enumerate(f, start=1):
                if line.strip():
                    yield _logged(path, n, line.removesuffix(b"\n"))
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e})") from e


def _logged(path: Path, n: int, line: bytes) -> Logged | Problem:
    try:
        row = parse_row(line)
    except ValueError as e:
        return Problem(n, str(e))
    if not isinstance(row.get("id"), str) or not row["id"]:
        return Problem(n, "has no id")
    return Logged(path, n, row)


def read_file(path: Path) -> tuple[list[Logged], list[Problem]]:
    """`lines_of` in one go, requests and problems apart."""
    found = list(lines_of(path))
    return [x for x in found if isinstance(x, Logged)], [x for x in found if isinstance(x, Problem)]


def read_day(folder: Path, day: date) -> tuple[list[Logged], list[Problem]]:
    """A day's requests, none where there is no file; see `read_file`."""
    path = day_file(folder, day)
    return read_file(path) if path.exists() else ([], [])


def read_log(folder: Path, ids: Collection[str] | None = None) -> dict[str, Logged]:
    """Requests of a log by their id: those of `ids`, or all."""
    rows = (x for path in days(folder).values() for x in lines_of(path) if isinstance(x, Logged))
    return {x.id: x for x in rows if ids is None or x.id in ids}


def parse_row(line: bytes) -> dict[str, Any]:
    """A line of JSONL as an object.

    Raises:
        ValueError: what it is instead, without the line's number.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"is not UTF-8 text (byte {e.start} of the line is 0x{line[e.start]:02x})") from None
    try:
        row = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except ValueError as e:
        raise ValueError(f"is no JSON ({e})") from None
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    return row


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def row_bytes(row: Mapping[str, Any]) -> bytes:
    """A row as its line. A lone surrogate stays the escape that JSON has for it."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """`data` under the name `path`: written beside it, forced to the disk, renamed.

    Raises:
        CapacityError: the disk is full. Ds4Error: it cannot be written. The file is as it was.
    """
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.unlink(missing_ok=True)  # of a run that was killed; its mode may be another
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            os.fchmod(fd, mode)
            left = data
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(beside, path)
        sync_folder(path.parent)
    except OSError as e:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        if e.errno in FULL:
            raise CapacityError(f"{path}: the disk is full, so it is as it was; make room and run this again") from e
        raise Ds4Error(f"{path}: cannot be written ({e.strerror or e})") from e
