"""What an interrupted run had finished: one JSON line a finished unit, behind a line that names the job.

For results that are small beside the work that they take. A line is on disk before the next unit begins; one that a
kill tore is dropped. One process at a time: the file is locked.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from ds4.errors import CapacityError, Ds4Error, UsageError


class Journal:
    """Units of one job by name, kept at `path` until `discard`.

    Raises:
        UsageError: another process is at the same job.
        CapacityError: the disk is full. Ds4Error: the file cannot be written.
    """

    def __init__(self, path: Path, job: str) -> None:
        self.path, self.job = path, job
        self.done: dict[str, Any] = {}
        self._fd = -1

    def __enter__(self) -> Journal:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise Ds4Error(f"{self.path}: cannot be written ({e.strerror or e})") from e
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(self._fd)
            self._fd = -1
            raise UsageError(f"{self.path}: another process is at the same work; wait for it") from e
        self._load()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._fd)
        self._fd = -1

    def add(self, unit: str, record: Any) -> None:
        """A unit is finished; `record` (JSON; floats come back bit for bit) is on disk when this returns."""
        self._write({"unit": unit, "record": record})
        self.done[unit] = record

    def discard(self) -> None:
        """The job is done: nothing is left of it."""
        self.path.unlink(missing_ok=True)

    def _load(self) -> None:
        with open(os.dup(self._fd), "rb") as f:
            f.seek(0)
            lines = f.read().split(b"\n")[:-1]
        good = 0
        try:
            if lines and json.loads(lines[0]) == {"job": self.job}:
                good = len(lines[0]) + 1
                for line in lines[1:]:
                    entry = json.loads(line)
                    self.done[entry["unit"]] = entry["record"]
                    good += len(line) + 1
        except (ValueError, KeyError, TypeError):
            pass  # written over from there
        os.ftruncate(self._fd, good)
        os.lseek(self._fd, good, os.SEEK_SET)
        if good == 0:
            self._write({"job": self.job})

    def _write(self, entry: dict[str, Any]) -> None:
        data = (json.dumps(entry) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError as e:
            kind = CapacityError if e.errno == 28 else Ds4Error
            raise kind(f"{self.path}: cannot be written ({e.strerror or e})") from e
