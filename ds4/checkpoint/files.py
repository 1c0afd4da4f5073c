"""Rules about files that hold weights: regular ones only, and where a link may lead."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ds4.errors import FileFormatError

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


def require_regular(path: Path) -> None:
    """Look before opening: opening a pipe that nobody writes to waits for ever.

    Raises:
        FileFormatError: `path` leads to no file, or to something that is not a regular one.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e})") from e
    if not stat.S_ISREG(mode):
        raise FileFormatError(f"{path}: is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file")


def link_that_leads_out(path: Path, folder: Path) -> str | None:
    """What is wrong with an existing `path` in `folder` if it lies elsewhere once all links are followed.

    Returns:
        The predicate of a message whose subject is `path`; None if it stays inside.
    """
    if path.resolve().is_relative_to(folder.resolve()):
        return None
    return f"is a link that leads out of {folder}; copy or hard-link that shard into the folder in its place"
