"""Processes, locks and small files of the installer and the watchdog: standard library only, Linux only.

A process is named by its id, the tick it started at and the boot it lives in, so that a number used again by
another process is never taken for ours. Files appear whole under their names or not at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ds4.disk import write_beside
from ds4.errors import CapacityError, Ds4Error

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Process:
    """One process for all time: `ticks` is its start since boot (field 22 of /proc/PID/stat)."""

    pid: int
    ticks: int
    boot: str

    @staticmethod
    def of(pid: int) -> Process | None:
        """The process that has this id now; None if there is none, or only its unreaped remains."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold blanks and brackets
        return None if fields[0] in "ZX" else Process(pid, int(fields[19]), boot_id())

    @property
    def alive(self) -> bool:
        return Process.of(self.pid) == self

    def send(self, number: int) -> bool:
        """Signal this very process; False if it is gone."""
        with self._handle() as handle:
            if handle is None:
                return False
            try:
                signal.pidfd_send_signal(handle, number)
            except ProcessLookupError:
                return False
            return True

    def wait(self, seconds: float) -> bool:
        """Whether it is gone within so many seconds; it need not be our child."""
        with self._handle() as handle:
            if handle is None:
                return True
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            return bool(poll.poll(max(seconds, 0) * 1000))

    def end(self, grace_s: float) -> bool:
        """Ask it to end, then make it; whether it had to be made to."""
        self.send(signal.SIGTERM)
        if self.wait(grace_s):
            return False
        self.send(signal.SIGKILL)
        if not self.wait(10):
            raise Ds4Error(f"process {self.pid} does not end, not even when killed; is its disk or device stuck?")
        return True

    @contextlib.contextmanager
    def _handle(self) -> Iterator[int | None]:
        """A pidfd: once it is open and the start time matches, the number cannot pass to another process."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            yield None
            return
        try:
            yield handle if self.alive else None
        finally:
            os.close(handle)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def own_child(last_signal: int) -> Callable[[], None]:
    """For Popen's preexec_fn: no signal blocked, and `last_signal` arrives when the parent dies, however it dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        libc.prctl(PR_SET_PDEATHSIG, last_signal, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)

    return prepare


@contextlib.contextmanager
def locked(path: Path, busy: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the file lock `path`, which says who holds it.

    Args:
        busy: message when another process holds it; `{pid}` is replaced.
        wait_s: how long to try.

    Raises:
        Ds4Error: `busy`.
    """
    deadline = time.monotonic() + wait_s
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(handle, 32, 0).decode(errors="replace").strip()
                    raise Ds4Error(busy.replace("{pid}", holder or "unknown")) from None
                time.sleep(0.05)
                continue
            if _names(path, handle):
                break
            os.close(handle)  # who held it removed it: another file may have the name by now
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def _names(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def write_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Write beside, flush, rename.

    Raises:
        CapacityError: the disk is full. Nothing is left behind.
        Ds4Error: the folder cannot be written.
    """
    try:
        write_beside(path, text.encode(), mode)
    except OSError as e:
        raise file_error(path, e) from e


def file_error(path: Path, e: OSError) -> Ds4Error:
    """An operating system's refusal as a message with its remedy."""
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(f"{path}: the disk is full; free some space and run the same command again")
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Ds4Error(f"{path}: cannot be written ({e.strerror}); choose a folder of your own with --dir")
    return Ds4Error(f"{path}: {e.strerror or e}")
