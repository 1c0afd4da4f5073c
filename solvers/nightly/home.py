"""The folder of the nights: what was accepted, what was rejected, which one is mounted, and who is at work.

    nightly.json          marks it: {"kind": "ds4-nightly", "version": 1, "made"}
    lock                  held by the one job that changes anything; says who, for people
    current               link to nights/NAME, switched by one rename; not there: nothing is mounted
    nights/NAME/          accepted: a post-training folder, night.json, a report; NAME is the day, or DAY.2 and so on
    rejected/NAME/        candidates that were not taken; kept, never mounted
    work/DAY/             a night under way (steps.py)
    history.jsonl         a line an event (history.py)

Everything is its owner's alone (0700). Nothing here is ever removed but finished work folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ds4.disk import sync_folder
from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError
from ds4.posttrain.log import FULL, replace_file
from ds4.posttrain.nights import CURRENT, KIND, MARK, NIGHTS, VERSION, is_nightly
from solvers.nightly.history import History

JOB = "job.json"  # of a night under way, see steps.py
LOCK, REJECTED, WORK = "lock", "rejected", "work"
NAME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:\.[0-9]+)?")
NONE = "none"
PATIENCE_S = 1.0  # `status` looks at the lock by taking it for a moment; whoever wants it does not give up over that


@dataclass(frozen=True)
class Holder:
    """Who holds the lock, as it says itself."""

    pid: int
    since: str
    what: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.what}) since {self.since}"


@dataclass(frozen=True)
class Home:
    """An opened folder. Whatever changes it wants the lock to be held."""

    path: Path

    @staticmethod
    def open(path: str | Path) -> Home:
        """A folder that is there.

        Raises:
            UsageError: no such folder, or another kind of one. FileFormatError: its mark is broken.
        """
        home = Home(Path(path))
        if not home.path.is_dir():
            raise UsageError(f"{path}: no such folder; ds4 nightly run makes it")
        if not is_nightly(home.path):
            raise UsageError(
                f"{path}: is no folder of nights (no {MARK} in it); name the one that ds4 nightly run made"
            )
        return home

    @staticmethod
    def make(path: str | Path) -> Home:
        """The folder, made if there is none or an empty one.

        Raises:
            UsageError: something else is there, others can look into it, or it is another user's.
            CapacityError: the disk is full.
        """
        home = Home(Path(path))
        with errors(home.path):
            if not home.path.exists():
                if not home.path.parent.is_dir():
                    raise UsageError(f"{home.path.parent}: no such folder to make {home.path.name} in")
                home.path.mkdir(mode=0o700, exist_ok=True)
            if not home.path.is_dir():
                raise UsageError(f"{path}: is no folder; nights need one of their own")
            info = home.path.stat()
            if info.st_uid != os.geteuid():
                raise UsageError(f"{path}: belongs to another user; nights need a folder of your own")
            if info.st_mode & 0o077:
                mode = f"{stat.S_IMODE(info.st_mode):o}"
                raise UsageError(f"{path}: others may look into it (mode {mode}); chmod 700 it, or name another")
            if not (home.path / MARK).exists():
                if set(os.listdir(home.path)) - {f".{MARK}.new"}:
                    raise UsageError(f"{path}: has other things in it and no {MARK}; name an empty or a new folder")
                mark = {"kind": KIND, "version": VERSION, "made": now()}
                replace_file(home.path / MARK, (json.dumps(mark) + "\n").encode())
        opened = Home.open(path)
        with errors(home.path):
            for name in (NIGHTS, REJECTED, WORK):
                (home.path / name).mkdir(mode=0o700, exist_ok=True)
        return opened

    @property
    def history(self) -> History:
        return History(self.path / "history.jsonl")

    def under_way(self) -> list[str]:
        """Days whose night was begun and not finished."""
        return sorted(path.parent.name for path in (self.path / WORK).glob(f"*/{JOB}"))

    def work(self, day: str) -> Path:
        return self.path / WORK / day

    def night(self, name: str) -> Path:
        return self.path / NIGHTS / name

    # -- one at a time --

    @contextlib.contextmanager
    def locked(self, what: str) -> Iterator[None]:
        """Alone with the folder.

        Raises:
            UsageError: somebody else is; says who.
        """
        with errors(self.path / LOCK):
            fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            until = time.monotonic() + PATIENCE_S
            while not _try_lock(fd):
                if time.monotonic() > until:
                    holder = self.holder() or "another process"
                    raise UsageError(f"{self.path}: {holder} is at work here; wait for it")
                time.sleep(0.05)
            told = {"pid": os.getpid(), "since": now(), "what": what}
            with contextlib.suppress(OSError):  # for people only: a full disk keeps nobody from a rollback
                os.ftruncate(fd, 0)
                os.pwrite(fd, (json.dumps(told) + "\n").encode(), 0)
            yield
        finally:
            os.close(fd)

    def holder(self) -> Holder | None:
        """Who is at work; None: nobody. Looks, and waits for nobody."""
        try:
            fd = os.open(self.path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            if _try_lock(fd):
                return None
            told = json.loads(os.pread(fd, 4096, 0))
            return Holder(int(told["pid"]), str(told["since"]), str(told["what"]))
        except (OSError, ValueError, KeyError, TypeError):
            return Holder(0, "?", "?")
        finally:
            os.close(fd)

    # -- what is mounted --

    @property
    def current(self) -> str | None:
        """Name of the night that `current` leads to; None: nothing is mounted.

        Raises:
            FileFormatError: it leads nowhere, or elsewhere.
        """
        name = self.linked()
        if name is None:
            return None
        if not NAME.fullmatch(name) or not self.night(name).is_dir():
            raise FileFormatError(
                f"{self.path / CURRENT}: leads to {name!r}, which is no night here; choose one, or none: "
                f"ds4 nightly rollback --home {self.path} --to NAME"
            )
        return name

    def linked(self) -> str | None:
        """What follows nights/ in the link, whether that is there or not; other targets whole."""
        path = self.path / CURRENT
        try:
            target = os.readlink(path)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise FileFormatError(
                f"{path}: is no link ({e.strerror}); move it away, then ds4 nightly rollback --to NAME or none"
            ) from e
        return target.removeprefix(f"{NIGHTS}/")

    def names(self, below: str = NIGHTS) -> list[str]:
        """Nights in the order of their days and numbers."""
        found = [n for n in os.listdir(self.path / below) if NAME.fullmatch(n) and (self.path / below / n).is_dir()]
        return sorted(found, key=_order)

    def new_name(self, day: str, besides: Collection[str] = ()) -> str:
        """DAY, or DAY.2 and so on where nights, rejected ones or `besides` have that."""
        taken = {*self.names(), *self.names(REJECTED), *besides}
        number = 1
        while (day if number == 1 else f"{day}.{number}") in taken:
            number += 1
        return day if number == 1 else f"{day}.{number}"

    def place(self, candidate: Path, name: str, below: str = NIGHTS) -> Path:
        """A candidate's folder becomes nights/NAME or rejected/NAME by one rename; done already is done."""
        there = self.path / below / name
        with errors(there):
            if not there.exists():
                for path in candidate.iterdir():
                    _sync(path)
                sync_folder(candidate)
                os.chmod(candidate, 0o700)
                os.rename(candidate, there)
                sync_folder(candidate.parent)
            sync_folder(there.parent)
        return there

    def switch(self, name: str | None) -> None:
        """`current` leads to nights/NAME, or is gone; whoever opens it finds the one before or this one."""
        path, beside = self.path / CURRENT, self.path / f".{CURRENT}.new"
        with errors(path):
            beside.unlink(missing_ok=True)
            if name is None:
                path.unlink(missing_ok=True)
            else:
                os.symlink(f"{NIGHTS}/{name}", beside)
                os.replace(beside, path)
            sync_folder(self.path)

    def rollback(self, to: str | None) -> tuple[str | None, str | None]:
        """Take the mounted night back.

        Args:
            to: a night's name, "none", or None: what was mounted before the present one was accepted.

        Returns:
            What was mounted, and what is now.

        Raises:
            UsageError: no such night; nothing is mounted; or nobody knows what was before.
        """
        was = self.linked()
        if to is None:
            goal = self._before(was)
        elif to == NONE:
            goal = None
        elif to in self.names():
            goal = to
        else:
            raise UsageError(f"--to {to!r}: is no night; there are {', '.join([*self.names(), NONE])}")
        self.switch(goal)
        self.history.append({"event": "rolled back", "night": goal, "before": was})
        return was, goal

    def _before(self, was: str | None) -> str | None:
        """What was mounted when `was` was accepted."""
        if was is None:
            raise UsageError(
                f"{self.path}: nothing is mounted, so there is nothing to take back; name a night by --to, "
                "or none, as where a server still has one (--to none --server URL --admin-key FILE)"
            )
        for line in reversed(self.history.read()[0]):
            if line.get("event") == "accepted" and line.get("night") == was:
                before = line.get("before")
                if before is None or before in self.names():
                    return None if before is None else str(before)
                raise UsageError(f"{self.path}: before {was} there was {before}, which is gone; name a night by --to")
        raise UsageError(f"{self.path}: history does not say what was before {was}; name a night, or none, by --to")

    def about(self, name: str, below: str = NIGHTS) -> dict[str, Any]:
        """night.json of an accepted or rejected one.

        Raises:
            FileFormatError: it cannot be read.
        """
        path = self.path / below / name / "night.json"
        try:
            found = json.loads(path.read_bytes())
            if not isinstance(found, dict):
                raise ValueError("no object")
        except (OSError, ValueError) as e:
            raise FileFormatError(f"{path}: cannot be read ({e})") from e
        return found


def now() -> str:
    """This machine's own time, with its offset, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _order(name: str) -> tuple[str, int]:
    day, _, number = name.partition(".")
    return day, int(number or 1)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(path: Path) -> None:
    if path.is_file():
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def errors(where: Path) -> Iterator[None]:
    """What the operating system says, as ours."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL:
            raise CapacityError(f"{where}: the disk is full; make room and run the same command") from e
        raise Ds4Error(f"{where}: cannot be written ({e.strerror or e})") from e
