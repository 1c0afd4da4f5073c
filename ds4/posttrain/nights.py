"""Which post-training folder is meant by a path: the folder itself, or the current night of the folder of all nights.

    NIGHTLY/nightly.json        {"kind": "ds4-nightly", "version": 1, ...}: marks it
    NIGHTLY/current             link to nights/NAME, switched by one rename; absent: nothing is mounted
    NIGHTLY/nights/NAME/        post-training folders that passed their gates

The link is followed once and the night's own path handed out, so that a switch in the middle of a load mixes nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ds4.errors import FileFormatError

MARK, CURRENT, NIGHTS = "nightly.json", "current", "nights"
KIND, VERSION = "ds4-nightly", 1


def is_nightly(folder: str | Path) -> bool:
    """Whether `folder` is one of nights.

    Raises:
        FileFormatError: it has a `nightly.json` that says something else, or cannot be read.
    """
    mark = Path(folder) / MARK
    try:
        told = json.loads(mark.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as e:
        raise FileFormatError(f"{mark}: cannot be read ({getattr(e, 'strerror', None) or e})") from e
    kind, version = (told.get("kind"), told.get("version")) if isinstance(told, dict) else (None, None)
    if kind != KIND or version != VERSION:
        raise FileFormatError(
            f"{mark}: kind {kind!r}, version {version!r}; this ds4 reads kind {KIND!r}, version {VERSION}"
        )
    return True


def resolve(folder: str | Path) -> Path | None:
    """The post-training folder to mount: `folder`, or where the `current` of a folder of nights points now.

    Returns:
        The night's real path; None for a folder of nights that mounts none.

    Raises:
        FileFormatError: nothing is there; `current` is no link, points to what is not there, or out of `nights`.
    """
    folder = Path(folder)
    if not os.path.lexists(folder):
        raise FileFormatError(
            f"{folder}: no such folder; name a post-training folder, or one of nights (ds4 nightly init makes it)"
        )
    if not is_nightly(folder):
        return folder
    link = folder / CURRENT
    remedy = f"choose an accepted night, or none: ds4 nightly rollback --home {folder} --to NAME|none"
    try:
        target = os.readlink(link)
    except FileNotFoundError:
        return None
    except OSError as e:  # EINVAL: something else has the name
        raise FileFormatError(f"{link}: is not a link to a night; move it away, then {remedy}") from e
    night = Path(os.path.realpath(link))
    if night.parent != Path(os.path.realpath(folder / NIGHTS)):
        raise FileFormatError(f"{link}: points to {target!r}, which is not one of {folder / NIGHTS}; {remedy}")
    if not night.is_dir():
        raise FileFormatError(f"{link}: points to {target!r}, which is not there; {remedy}")
    return night
