"""Files under their final names: written beside and renamed, so that nobody finds half of one."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Names in `folder` to the disk: a rename lasts after that, and not before.

    Raises:
        OSError: the folder cannot be opened, or its disk fails.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_beside(path: Path, data: bytes, mode: int = 0o666) -> None:
    """A small file, written beside its name, forced to the disk and renamed. Nothing is left beside it if that fails.

    Args:
        mode: of the new file, less the process's mask.

    Raises:
        OSError: as it comes.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def cache_fault(root: Path) -> str | None:
    """Why the build cache cannot lie in the folder `root`; None: it can.

    Raises:
        OSError: it cannot be looked at.
    """
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"build cache {root} is not a directory; set DS4_CACHE to one of your own"
    if status.st_uid != os.getuid():
        return (
            f"build cache {root} belongs to user {status.st_uid}, not to you ({os.getuid()}): binaries of others "
            "are not loaded; set DS4_CACHE to a directory of your own"
        )
    if status.st_mode & 0o077:
        return (
            f"build cache {root} has mode {stat.S_IMODE(status.st_mode):04o}: others could put binaries there; "
            f"run: chmod 700 {root} (or set DS4_CACHE)"
        )
    return None
