"""The folder of kept texts: one server's, its owner's alone, and never fuller than it may be."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds4.engine.keep import Saved
from ds4.engine.keep_file import Header, KeepError, read, read_header, write
from ds4.errors import Ds4Error, UsageError

SUFFIX = ".ds4keep"
LEAST_FREE_BYTES = 1 << 30  # of the disk, that are left to others


class DiskFull(OSError):
    """There is no room for a file: the disk's last gigabyte is not for texts."""


@dataclass(frozen=True)
class Found:
    """A file of the folder; `header` is None where it cannot be used, `problem` says why.

    Attributes:
        used: when it was used last, in ns.
    """

    path: Path
    file_bytes: int
    used: int
    header: Header | None
    problem: KeepError | None


class PrefixFolder:
    """Files of kept texts. Its methods may be called from any thread.

    Args:
        path: made if it is not there; the folder above it must be.
        most_bytes: of all files together.

    Raises:
        UsageError: the folder cannot be used.
        Ds4Error: another server uses it.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path, self.most_bytes = path, most_bytes
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            info = path.stat()
            if not stat.S_ISDIR(info.st_mode):
                raise UsageError(f"--prefix-dir {path}: is no folder; name one")
            if info.st_uid != os.geteuid() or info.st_mode & 0o077:
                raise UsageError(
                    f"--prefix-dir {path}: must be yours alone (mode {stat.S_IMODE(info.st_mode):o}, user "
                    f"{info.st_uid}), as prompts lie in it: chmod 700 it, or name another"
                )
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise UsageError(f"--prefix-dir {path}: cannot be used ({e.strerror or e}); name another") from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            os.close(self._lock)
            raise Ds4Error(
                f"--prefix-dir {path}: another server keeps its texts there; name another folder for this one"
            ) from e
        except OSError as e:
            os.close(self._lock)
            raise UsageError(f"--prefix-dir {path}: cannot be locked ({e.strerror or e}); name another") from e

    def scan(self) -> Iterator[Found]:
        """Every file, headers only. What a writer that died left half written is removed."""
        try:
            names = sorted(os.listdir(self.path))
        except OSError as e:
            raise UsageError(f"--prefix-dir {self.path}: cannot be listed ({e.strerror or e})") from e
        for name in names:
            path = self.path / name
            if name.endswith(SUFFIX + ".part"):
                remove(path)
            elif name.endswith(SUFFIX):
                try:
                    info = path.lstat()
                except OSError:
                    continue
                try:
                    yield Found(path, info.st_size, info.st_mtime_ns, read_header(path), None)
                except KeepError as e:
                    yield Found(path, info.st_size, info.st_mtime_ns, None, e)

    def write(self, saved: Saved, identity: str, chain: bytes) -> tuple[Path, int]:
        """A new file and its bytes.

        Raises:
            DiskFull: it would take the disk's last gigabyte.
            OSError: the disk does not work, or became full meanwhile.
        """
        room = os.statvfs(self.path)
        if room.f_bavail * room.f_frsize - saved.nbytes < LEAST_FREE_BYTES:
            raise DiskFull(f"{saved.nbytes >> 20} MB would leave less than {LEAST_FREE_BYTES >> 20} MB free")
        path = self.path / (secrets.token_hex(12) + SUFFIX)
        return path, write(path, saved, identity, chain)

    def read(self, path: Path) -> tuple[Header, Saved]:
        """A file, checked; it counts as used now.

        Raises:
            KeepError: as keep_file.read.
        """
        found = read(path)
        with contextlib.suppress(OSError):  # it is older than it seems, nothing more
            os.utime(path)
        return found

    def close(self) -> None:
        """Another server may have it."""
        os.close(self._lock)


def remove(path: Path) -> None:
    """A file that is of no use; one that cannot be removed stays, and takes room."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
