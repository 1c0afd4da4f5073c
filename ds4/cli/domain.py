"""`install.sh --domain`: which sidecar a server mounts. Standard library only, as the installer that asks.

A name is one of the checkout's `sidecars/`, made for the embedded model; it is copied into D/sidecars/KEY/NAME, since
the server goes on when the checkout is gone. A folder of the user's own is mounted where it lies. What was chosen
stands in D/ds4.toml as `zchain`, so it outlives every restart.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4.cli.home import Home, key_of
from ds4.cli.processes import file_error
from ds4.errors import FileFormatError, UsageError

NONE = "none"
SHIPPED = Path(__file__).resolve().parent.parent.parent / "sidecars"  # of the checkout
MANIFEST = "manifest.json"
REMEDY = "get the whole tree again"


def shipped(folder: Path = SHIPPED) -> tuple[str, ...]:
    """Names of the domains whose sidecars are there, sorted."""
    return tuple(sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}")))


def listed(folder: Path) -> dict[str, str]:
    """Layer file -> SHA-256, as the folder's manifest says.

    Raises:
        FileFormatError: it cannot be read, or says nothing of the kind.
    """
    path = folder / MANIFEST
    try:
        layers = json.loads(path.read_bytes())["layers"]
        return {str(name): str(digest) for layer in layers for name, digest in layer["files"].items()}
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e}); {REMEDY}") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise FileFormatError(f"{path}: is no manifest of a sidecar ({e}); {REMEDY}") from e


def read_shipped(folder: Path) -> dict[str, bytes]:
    """A shipped sidecar's files by name, the layer files as its manifest lists them.

    Raises:
        FileFormatError: one is missing, changed, or not listed.
    """
    want, found = listed(folder), {}
    try:
        for path in sorted(folder.iterdir()):
            found[path.name] = path.read_bytes()
    except OSError as e:
        raise FileFormatError(f"{e.filename}: cannot be read ({e.strerror}); {REMEDY}") from e
    for name, digest in want.items():
        if name not in found:
            raise FileFormatError(f"{folder / name}: the file is missing; {REMEDY}")
        if hashlib.sha256(found[name]).hexdigest() != digest:
            raise FileFormatError(f"{folder / name}: is not the file that {MANIFEST} lists; {REMEDY}")
    for name in found:
        if name.endswith(".bin") and name not in want:
            raise FileFormatError(f"{folder / name}: {MANIFEST} does not list it; remove it, or {REMEDY}")
    return found


@dataclass(frozen=True)
class Choice:
    """What --domain names: a shipped sidecar by its folder in the checkout, one of the user's own, or neither."""

    name: str
    folder: Path | None
    own: bool

    @staticmethod
    def of(given: str, folder: Path = SHIPPED) -> Choice:
        """A name in `folder`, `none`, or a path; a name comes before a folder of that name, which `./` makes a path.

        Raises:
            UsageError: nothing of the kind is there; says what is.
            FileFormatError: the shipped sidecar is damaged.
        """
        if given == NONE:
            return Choice(NONE, None, own=False)
        names = shipped(folder)
        if given in names:
            read_shipped(folder / given)
            return Choice(given, folder / given, own=False)
        path = Path(os.path.abspath(Path(given).expanduser()))
        if path.is_dir():
            return Choice(path.name, path, own=True)
        if "/" in given:
            raise UsageError(f"--domain {given}: no such folder")
        there = f"there are {', '.join(names)}" if names else f"{folder} has no sidecars"
        raise UsageError(f"--domain {given}: is unknown; {there}, {NONE}, or the path of a folder of your own")

    def install(self, home: Home) -> Path | None:
        """The folder to mount, a copy in D if it is shipped; None for none.

        Raises:
            FileFormatError: the shipped sidecar is damaged.
            Ds4Error: it cannot be copied.
        """
        if self.folder is None or self.own:
            return self.folder
        files = read_shipped(self.folder)
        parts: list[str | bytes] = [part for name, data in files.items() for part in (name, data)]
        top = home.sidecars / key_of(parts)
        if top.is_dir():
            return top / self.name
        beside = top.with_name(f"{top.name}.part-{secrets.token_hex(4)}")
        try:
            (beside / self.name).mkdir(parents=True)
            for name, data in files.items():
                with open(beside / self.name / name, "xb") as out:
                    out.write(data)
                    out.flush()
                    os.fsync(out.fileno())
            os.rename(beside, top)
        except OSError as e:
            raise file_error(top, e) from e
        finally:
            shutil.rmtree(beside, ignore_errors=True)  # gone already when all went well
        return top / self.name


def as_before(home: Home, settings: Mapping[str, Any], folder: Path = SHIPPED) -> Choice:
    """What the settings mount; a shipped one as the checkout has it now, in case that is newer than the copy.

    Raises:
        UsageError: `zchain` is no text.
        FileFormatError: the shipped sidecar is damaged.
    """
    value = settings.get("zchain")
    if value is None:
        return Choice(NONE, None, own=False)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{home.toml}: zchain is {value!r}; it must name a folder")
    path = Path(value)
    if path.parent.parent == home.sidecars and path.name in shipped(folder):
        return Choice.of(path.name, folder)
    return Choice(path.name, path, own=True)


def mounted(settings: Mapping[str, Any]) -> str:
    """Name of the domain that these settings mount, as /health tells it; `none` without one."""
    value = settings.get("zchain")
    return Path(str(value)).name if value else NONE
