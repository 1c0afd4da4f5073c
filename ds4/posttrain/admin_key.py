"""The key of a server's admin routes: a file of its owner's alone, made by the server, read by both sides.

Whoever can read the file may change what the server has mounted and borrow its device; a key for requests may not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from ds4.errors import UsageError

LEAST_CHARS, MOST_BYTES = 16, 4096
KEY_BYTES = 32  # of a key that is made here; 43 characters


def read_key(path: Path, what: str = "admin key") -> str:
    """The key in the file; `what` it is, for errors.

    Raises:
        UsageError: no such file, not a regular file of this user's, readable by others, or no key in it. Quotes
            nothing of it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise UsageError(f"{path}: is a link; the {what} is a regular file, name that") from e
        raise UsageError(f"{path}: the {what} cannot be read ({e.strerror})") from e
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise UsageError(f"{path}: is not a regular file; the {what} is one, of mode 600")
        if info.st_uid != os.geteuid():
            raise UsageError(f"{path}: belongs to another user; the {what} is a file of your own")
        if info.st_mode & 0o077:
            mode = stat.S_IMODE(info.st_mode)
            raise UsageError(
                f"{path}: others may use this key (mode {mode:o}); remove it for a new one, or chmod 600"
            )
        data = os.read(fd, MOST_BYTES + 1)
    finally:
        os.close(fd)
    key = data.strip()
    if len(data) > MOST_BYTES or not all(0x21 <= b < 0x7F for b in key):
        raise UsageError(f"{path}: holds no key: one word of ASCII is expected; remove it for a new one")
    if len(key) < LEAST_CHARS:
        raise UsageError(
            f"{path}: the key has {len(key)} characters, at least {LEAST_CHARS} are needed; remove it for a new one"
        )
    return key.decode("ascii")


def make_key(path: Path) -> str:
    """The key in the file; a random one, the file being made (0600), if there is none.

    Raises:
        UsageError: as `read_key`, or it cannot be made.
    """
    if not os.path.lexists(path):
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(fd, 0o600)
                os.write(fd, secrets.token_urlsafe(KEY_BYTES).encode() + b"\n")
                os.fsync(fd)
            finally:
                os.close(fd)
            with contextlib.suppress(FileExistsError):  # unlike a rename a link takes nobody's place: of two
                os.link(beside, path)  # servers that begin at once, one makes the key
        except OSError as e:
            raise UsageError(f"{path}: the admin key cannot be made ({e.strerror}); name a place for it") from e
        finally:
            beside.unlink(missing_ok=True)
    return read_key(path)
