"""history.jsonl: what happened to the nights, a line an event, oldest first.

    {"at", "event", "day", "night", "before", "method", "reason", ...}

event is one of: accepted, rejected, failed, nothing to do, rolled back, reloaded, given up. No line quotes a request.
A machine may die in a line: a torn one is passed over, and the next begins on a line of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ds4.disk import sync_folder
from ds4.errors import CapacityError, Ds4Error, FileFormatError
from ds4.posttrain.log import FULL, row_bytes


@dataclass(frozen=True)
class History:
    """The file at `path`, which may not be there yet."""

    path: Path

    def append(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """A line with the time of now; it is on the disk when this returns.

        Raises:
            CapacityError: the disk is full. Ds4Error: it cannot be written. The file is as it was.
        """
        row = {"at": datetime.now().astimezone().isoformat(timespec="seconds"), **line}
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                size = os.fstat(fd).st_size
                torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
                data = (b"\n" if torn else b"") + row_bytes(row)
                try:
                    while data:
                        data = data[os.write(fd, data) :]
                    os.fsync(fd)
                except OSError:
                    os.ftruncate(fd, size)
                    raise
            finally:
                os.close(fd)
            if size == 0:
                sync_folder(self.path.parent)
        except OSError as e:
            if e.errno in FULL:
                raise CapacityError(f"{self.path}: the disk is full, the event is not noted; make room") from e
            raise Ds4Error(f"{self.path}: cannot be written ({e.strerror or e})") from e
        return row

    def read(self) -> tuple[list[dict[str, Any]], int]:
        """The lines, and how many are none.

        Raises:
            FileFormatError: it cannot be read.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return [], 0
        except OSError as e:
            raise FileFormatError(f"{self.path}: cannot be read ({e.strerror or e})") from e
        rows, torn = [], 0
        for line in data.split(b"\n"):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("event"), str):
                    raise ValueError
            except (ValueError, RecursionError):
                torn += 1
                continue
            rows.append(row)
        return rows, torn
