"""Built binaries on disk: private, verified before use, published by one rename, safe under two processes.

An entry is a directory `<root>/<kind>/<key>` that holds its files and `entry.json`, which lists the SHA-256 of
each. The key is the hash of everything that can change the files (see build.py), so an entry never goes stale;
it can only be damaged, and then it is built again. Builders of one key wait for each other at a file lock; a
reader takes none, because an entry appears complete or not at all and a good one is never replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ds4.disk import cache_fault
from ds4.errors import DeviceError

MANIFEST = "entry.json"


class Cache:
    """The build cache under `root` (created with mode 0700)."""

    def __init__(self, root: Path) -> None:
        """Open or create the cache.

        Raises:
            DeviceError: it cannot be made or written, belongs to somebody else, or is open to others.
        """
        self.root = root
        try:
            root.mkdir(parents=True, mode=0o700, exist_ok=True)
            fault = cache_fault(root)
        except OSError as e:
            raise _unwritable(root, e) from e
        if fault is not None:
            raise DeviceError(fault)

    def get(self, kind: str, key: str, build: Callable[[Path], None]) -> Path:
        """The directory of entry `key`, built now if it is absent or damaged.

        Args:
            kind: sub-directory ("host", "gpu", "driver").
            key: hex digest of all inputs.
            build: writes the entry's files into the empty directory it is given; its exceptions pass through and
                leave nothing behind.

        Raises:
            DeviceError: the cache cannot be written.
        """
        final = self.root / kind / key
        if _intact(final):
            return final
        try:
            final.parent.mkdir(mode=0o700, exist_ok=True)
            with self._locked(key):
                if _intact(final):  # another process was quicker
                    return final
                if final.exists():
                    shutil.rmtree(self._move_away(final))
                with self._scratch() as beside:
                    build(beside)
                    _seal(beside)
                    os.rename(beside, final)
        except OSError as e:
            raise _unwritable(self.root, e) from e
        return final

    def _move_away(self, path: Path) -> Path:
        away = self.root / f"tmp-{os.getpid()}-{secrets.token_hex(6)}"
        os.rename(path, away)
        return away

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        beside = self.root / f"tmp-{os.getpid()}-{secrets.token_hex(6)}"
        beside.mkdir(mode=0o700)
        try:
            yield beside
        finally:
            shutil.rmtree(beside, ignore_errors=True)  # gone already when it was published

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        locks = self.root / "locks"
        locks.mkdir(mode=0o700, exist_ok=True)
        with open(locks / key[:2], "w") as handle:  # 256 locks, shared by key prefix: no litter
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def _unwritable(root: Path, e: OSError) -> DeviceError:
    return DeviceError(
        f"build cache {root}: {e.strerror or e} ({e.filename or root}); set DS4_CACHE to a writable directory"
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _seal(entry: Path) -> None:
    hashes = {}
    for path in sorted(entry.iterdir()):
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
        hashes[path.name] = _digest(path)
    with open(entry / MANIFEST, "w") as handle:
        json.dump(hashes, handle)
        handle.flush()
        os.fsync(handle.fileno())


def _intact(entry: Path) -> bool:
    """Whether every file that the entry lists is there with the content it was published with."""
    try:
        hashes = json.loads((entry / MANIFEST).read_text())
        return (
            isinstance(hashes, dict)
            and bool(hashes)
            and all(_digest(entry / name) == value for name, value in hashes.items())
        )
    except (OSError, ValueError):
        return False
