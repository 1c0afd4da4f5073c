"""A large file written beside its final name, unit by unit, that a killed process can go on with.

`NAME.part` has its whole size from the start (so a full disk shows at once) and holds finished units at their
places; `NAME.part.journal` has one JSON line a finished unit, after the job's key. Data reach the disk before
the line that speaks of them. The final name appears by one rename, when everything is there. One process at a
time: the part file is locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ds4.disk import sync_folder
from ds4.errors import CapacityError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMMIT_BYTES = 64 << 20


class Output:
    """The part file and its journal. Leaving the context without `publish` or `discard` keeps both for a resume.

    Args:
        out: the final name.
        size: its bytes.
        key: names the job; a part file of another job is discarded.
        commit_bytes: data between two forced writes.

    Raises:
        CapacityError: the disk cannot hold the file; nothing is left behind.
        UsageError: the folder does not exist, or another process is writing the same file.
    """

    def __init__(self, out: Path, size: int, key: str, commit_bytes: int = COMMIT_BYTES) -> None:
        self.out, self.size, self.key = out, size, key
        self.part = out.with_name(out.name + ".part")
        self.journal = out.with_name(out.name + ".part.journal")
        self.done: dict[str, dict[str, Any]] = {}
        self.resumed = 0
        self._commit_bytes = commit_bytes
        self._pending: list[str] = []
        self._unsaved = 0
        self._fd = self._journal_fd = -1

    def __enter__(self) -> Output:
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._close()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes at their place; threads may write at once."""
        view = memoryview(data).cast("B")
        with _disk_errors(self.out):
            while view:
                n = os.pwrite(self._fd, view, offset)
                view, offset = view[n:], offset + n
                self._unsaved += n

    def read(self, offset: int, n: int) -> bytes:
        data = os.pread(self._fd, n, offset)
        assert len(data) == n
        return data

    def finish(self, unit: str, record: dict[str, Any]) -> None:
        """A unit is complete; `record` comes back in `done` after a resume."""
        self.done[unit] = record
        self._pending.append(json.dumps({"unit": unit, "record": record}) + "\n")
        if self._unsaved >= self._commit_bytes:
            self.commit()

    def commit(self) -> None:
        """Force data, then the journal's lines about them, to the disk."""
        with _disk_errors(self.out):
            os.fsync(self._fd)
            _write_all(self._journal_fd, "".join(self._pending).encode())
            os.fsync(self._journal_fd)
        self._pending.clear()
        self._unsaved = 0

    def publish(self) -> None:
        """Give the finished file its name and remove the journal."""
        self.commit()
        with _disk_errors(self.out):
            os.replace(self.part, self.out)
            sync_folder(self.out.parent)
            self.journal.unlink()

    def discard(self) -> None:
        """Remove part file and journal."""
        for path in (self.journal, self.part):
            path.unlink(missing_ok=True)

    def _open(self) -> None:
        try:
            self._fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise UsageError(f"{self.part}: cannot be written ({e.strerror}); is {self.out.parent} a folder?") from e
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise UsageError(f"{self.part} is being written by another process; wait for it") from e
        if not self._load_journal():
            self.done.clear()
            try:
                self._allocate()
                self._start_journal()
            except BaseException:
                self.discard()
                raise
        self.resumed = len(self.done)

    def _load_journal(self) -> bool:
        """Units of an earlier run of the same job; False if there is none."""
        if os.fstat(self._fd).st_size != self.size:
            return False
        try:
            raw = self.journal.read_bytes()
        except OSError:
            return False
        lines = raw.split(b"\n")[:-1]  # a torn last line has no newline and does not count
        try:
            if not lines or json.loads(lines[0]) != {"key": self.key}:
                return False
            for line in lines[1:]:
                entry = json.loads(line)
                self.done[entry["unit"]] = entry["record"]
        except (ValueError, KeyError, TypeError):
            return False
        self._journal_fd = os.open(self.journal, os.O_WRONLY | os.O_CLOEXEC)
        whole = sum(len(line) + 1 for line in lines)
        os.ftruncate(self._journal_fd, whole)
        os.lseek(self._journal_fd, whole, os.SEEK_SET)
        return True

    def _allocate(self) -> None:
        os.ftruncate(self._fd, 0)
        free = shutil.disk_usage(self.out.parent).free
        if free < self.size:
            raise CapacityError(
                f"{self.out}: needs {self.size} bytes, {free} are free in {self.out.parent}; make room"
            )
        with _disk_errors(self.out):
            os.posix_fallocate(self._fd, 0, self.size)

    def _start_journal(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with _disk_errors(self.out):
            self._journal_fd = os.open(self.journal, flags, 0o644)
            _write_all(self._journal_fd, (json.dumps({"key": self.key}) + "\n").encode())
            os.fsync(self._journal_fd)
            sync_folder(self.out.parent)

    def _close(self) -> None:
        for fd in (self._fd, self._journal_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._journal_fd = -1


def write_text(path: Path, text: str) -> None:
    """Write a small file beside its name, force it to disk, rename."""
    part = path.with_name(path.name + ".part")
    try:
        with _disk_errors(path):
            with open(part, "w", encoding="utf-8") as f:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
            os.replace(part, path)
            sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


@contextlib.contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in _FULL:
            raise CapacityError(f"{out}: the disk is full ({e.strerror}); make room and run the same command") from e
        raise
