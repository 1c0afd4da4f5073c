"""A folder that is made file by file and appears under its name when all of it is there (see sidecar.py)."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ds4.base.output import write_text
from ds4.disk import sync_folder
from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError

MANIFEST = "manifest.json"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_name(out: Path) -> None:
    """Refuse a folder's name that could not be made or taken up, before the hours of work.

    Raises:
        UsageError: no folder to make it in, or something is there that no solve has left.
    """
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder to make {out.name} in")
    if os.path.lexists(out) and not (out.is_dir() and ((out / MANIFEST).is_file() or not any(out.iterdir()))):
        raise UsageError(f"{out}: is there and is no sidecar that was solved; choose another name")


def finished(out: Path, head: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of a folder that this job has finished, its files checked; None where there is no folder yet.

    Raises:
        UsageError: the name is taken by something else.
        FileFormatError: a file is not what the manifest says.
    """
    check_name(out)
    if not out.exists() or not any(out.iterdir()):
        return None
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        theirs = {key: manifest[key] for key in head}
        files = {name: digest for record in manifest["layers"] for name, digest in record["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{out}: is there and is no sidecar that was solved; choose another name") from None
    if theirs != dict(head):
        differs = ", ".join(key for key in head if theirs[key] != head[key])
        raise UsageError(f"{out}: holds another sidecar ({differs} differ); remove it, or choose another name")
    for name, digest in files.items():
        if _digest(out / name) != digest:
            raise FileFormatError(f"{out / name}: is not what {MANIFEST} says; remove {out} and solve it again")
    _remove_beside(out)  # killed between the rename and this
    return dict(manifest)


class WorkFolder:
    """NAME.part, NAME.part.json and NAME.part.lock of the folder NAME.

    What an earlier run of the same job finished is kept, as far as its files are what its records say; what belongs
    to no record, or to another job, is removed. Leaving the context without `publish` keeps everything for a resume.

    Args:
        head: names the job.
        room: bytes that will be written at most.

    Raises:
        UsageError: another process is at work on the same name. CapacityError: the disk cannot hold it.
    """

    def __init__(self, out: Path, head: Mapping[str, Any], room: int) -> None:
        self.out, self.head, self._room = out, dict(head), room
        self.folder, self._state, self._lock_path = _beside(out)
        self.records: list[dict[str, Any]] = []
        self._lock = -1

    def __enter__(self) -> WorkFolder:
        with _errors(self.out):
            self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._resume()
        except BlockingIOError:
            self._close()
            raise UsageError(f"{self.folder} is being made by another process; wait for it") from None
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._close()

    def put(self, name: str, data: bytes, same: Callable[[Path], bool]) -> str:
        """Write a file beside its name, ask whether a reader finds in it what was meant, and name it; its SHA-256.

        Raises:
            CapacityError: the disk is full. Ds4Error: a reader finds something else.
        """
        path, beside = self.folder / name, self.folder / f".{name}.new"
        with _errors(path):
            try:
                with open(beside, "wb") as f:
                    f.write(data)
                    f.flush()
                    os.fsync(f.fileno())
                if not same(beside):
                    raise Ds4Error(f"{path}: a reader finds other values in it than were solved; it is not kept")
                os.replace(beside, path)
                sync_folder(self.folder)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
        return hashlib.sha256(data).hexdigest()

    def drop(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def add(self, record: dict[str, Any]) -> None:
        """A unit is finished: `record["files"]` are its files' names and hashes."""
        self.records.append(record)
        write_text(self._state, json.dumps({"head": self.head, "records": self.records}))

    def publish(self, texts: Mapping[str, str]) -> None:
        """Add texts, give the folder its name, remove what lies beside it."""
        for name, text in texts.items():
            write_text(self.folder / name, text)
        with _errors(self.out):
            os.rename(self.folder, self.out)  # an empty folder of that name is replaced
            sync_folder(self.out.parent)
        _remove_beside(self.out)

    def _resume(self) -> None:
        try:
            state = json.loads(self._state.read_text(encoding="utf-8"))
            records = list(state["records"]) if state["head"] == self.head else []
        except (OSError, ValueError, KeyError, TypeError):
            records = []
        for record in records:
            if any(_digest(self.folder / name) != digest for name, digest in record["files"].items()):
                break  # later ones were solved with this one on
            self.records.append(record)
        known = {name for record in self.records for name in record["files"]}
        with _errors(self.out):
            self.folder.mkdir(exist_ok=True)
            for path in self.folder.iterdir():
                if path.name not in known:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        free = shutil.disk_usage(self.folder).free
        if free < self._room:
            if not self.records:
                self.folder.rmdir()
            raise CapacityError(
                f"{self.out}: takes up to {self._room:,} bytes, {free:,} are free in {self.out.parent}; make room"
            )

    def _close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def _beside(out: Path) -> tuple[Path, Path, Path]:
    folder, state, lock = (out.with_name(out.name + end) for end in (".part", ".part.json", ".part.lock"))
    return folder, state, lock


def _remove_beside(out: Path) -> None:
    for path in _beside(out)[1:]:
        path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


class _errors:
    """What the operating system says, as ours."""

    def __init__(self, where: Path) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(e, OSError):
            if e.errno in _FULL:
                raise CapacityError(f"{self._where}: the disk is full; make room and run the same command") from e
            raise Ds4Error(f"{self._where}: cannot be written ({e.strerror or e})") from e
