"""When nights run by themselves: a systemd user timer with its service, or a line for cron.

ds4-nightly.service   Type=oneshot, the very command; low priority for CPU and disk
ds4-nightly.timer     OnCalendar at that time of day; Persistent: a night that the machine slept through is made up
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds4.errors import Ds4Error, UsageError
from ds4.posttrain.log import replace_file
from solvers.nightly.home import errors

SERVICE, TIMER = "ds4-nightly.service", "ds4-nightly.timer"
_TIME = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])")
SYSTEMCTL_S = 30.0


@dataclass(frozen=True)
class Job:
    """What is to run, and when: "HH:MM" in this machine's own time."""

    command: tuple[str, ...]
    at: str

    def __post_init__(self) -> None:
        """Raises UsageError: no time of day, or a word that no unit file can hold."""
        if not _TIME.fullmatch(self.at):
            raise UsageError(f"--at {self.at!r}: write it as 03:30")
        for word in self.command:
            if not word.isprintable():
                raise UsageError(
                    f"{word!r}: has a character that neither a unit file nor a crontab can hold; rename it"
                )

    def units(self) -> dict[str, str]:
        """Unit files by name."""
        hour, minute = self.at.split(":")
        service = (
            "[Unit]\nDescription=Post-training of ds4, one night\n\n"
            "[Service]\nType=oneshot\nNice=10\nIOSchedulingClass=idle\nUMask=0077\n"
            f"ExecStart={' '.join(map(_systemd, self.command))}\n"
        )
        timer = (
            "[Unit]\nDescription=Post-training of ds4, every night\n\n"
            f"[Timer]\nOnCalendar=*-*-* {int(hour):02d}:{minute}:00\nPersistent=true\n\n"
            "[Install]\nWantedBy=timers.target\n"
        )
        return {SERVICE: service, TIMER: timer}

    def cron(self) -> str:
        """A line for `crontab -e`."""
        hour, minute = self.at.split(":")
        return f"{int(minute)} {int(hour)} * * * {shlex.join(self.command)}".replace("%", "\\%")


def _systemd(word: str) -> str:
    """A word of ExecStart: specifiers and variables are not expanded, quotes and backslashes stay themselves."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{word}"' if re.search(r"[^A-Za-z0-9_@%+=:,./\\-]", word) or not word else word


def install(job: Job, folder: Path) -> list[Path]:
    """Write the unit files.

    Raises:
        CapacityError: the disk is full. Ds4Error: they cannot be written.
    """
    with errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in job.units().items():
        replace_file(folder / name, text.encode(), 0o644)
        written.append(folder / name)
    return written


def remove(folder: Path) -> list[Path]:
    """Stop the timer, where there is one, and remove the files; those that were there."""
    there = [folder / name for name in (TIMER, SERVICE) if (folder / name).exists()]
    if there and works():
        systemctl("disable", "--now", TIMER)
    with errors(folder):
        for path in there:
            path.unlink()
    if there and works():
        systemctl("daemon-reload")
    return there


def works() -> bool:
    """Whether this user's systemd answers."""
    if shutil.which("systemctl") is None:
        return False
    return _systemctl(["show-environment"]).returncode == 0


def enable() -> None:
    """Have systemd read the files, and start the timer.

    Raises:
        Ds4Error: it would not.
    """
    systemctl("daemon-reload")
    systemctl("enable", "--now", TIMER)


def next_run() -> str | None:
    """When the timer runs next, as systemd says it; None: there is none, or no systemd."""
    if not works():
        return None
    told = _systemctl(["show", TIMER, "-p", "NextElapseUSecRealtime", "--value"])
    return told.stdout.strip() or None if told.returncode == 0 else None


def systemctl(*words: str) -> None:
    """Raises Ds4Error: it failed, in its own words."""
    done = _systemctl(words)
    if done.returncode:
        why = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise Ds4Error(f"systemctl --user {' '.join(words)}: {why}")


def _systemctl(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = ["systemctl", "--user", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SYSTEMCTL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return subprocess.CompletedProcess(command, 1, "", str(e))
