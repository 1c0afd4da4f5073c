"""What makes a change of a folder last."""

from __future__ import annotations

import os
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
