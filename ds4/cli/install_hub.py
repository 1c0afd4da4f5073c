"""`install.sh --hub`: the model comes from a hub's repository, by `ds4 fetch` in the installation's environment, into
D/models/hub-OWNER--REPO. Standard library only, as the installer that asks.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ds4.cli.domain import NONE, Choice
from ds4.cli.home import Home
from ds4.cli.processes import own_child
from ds4.errors import CapacityError, Ds4Error, UsageError
from ds4.hub.names import Repository

FOLDER = "hub-"  # how the names of what was fetched begin
FLAGS = ("shards", "endpoint", "no_xet")


def add_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--hub", metavar="OWNER/REPO[@REV]",
        help="fetch the base, its n-gram shards and sidecars from this repository and serve them (docs/hub.md)",
    )  # fmt: skip
    p.add_argument(
        "--shards", metavar="OWNER/REPO[@REV]",
        help="with --hub: the checkpoint whose n-gram shards the base needs, or none (default: what the base's "
        "repository names or holds, else the official one; with --engram-dir none)",
    )  # fmt: skip
    p.add_argument("--endpoint", metavar="URL", help="with --hub: the hub (default HF_ENDPOINT, else the public one)")
    p.add_argument("--no-xet", action="store_true", help="with --hub: plain HTTP, without the hub's chunk storage")


def check_flags(args: argparse.Namespace) -> None:
    """Raises UsageError: flags that say nothing without --hub, or contradict it; names that are none."""
    if args.hub is None:
        for name in FLAGS:
            if getattr(args, name):
                raise UsageError(f"--{name.replace('_', '-')} belongs to --hub OWNER/REPO")
        return
    Repository.of(args.hub, "--hub")
    if args.model is not None:
        raise UsageError("--hub and --model both say which model to serve; give one of them")
    if args.shards is not None and args.shards != NONE:
        Repository.of(args.shards, "--shards")
        if args.engram_dir is not None:
            raise UsageError("--shards and --engram-dir both say where the n-gram shards are; give one of them")


@dataclass(frozen=True)
class Planned:
    """What `ds4 fetch --dry-run` said: the base's path and size."""

    base: Path
    nbytes: int
    complete: bool


class HubModel:
    """The model of --hub."""

    def __init__(self, home: Home, args: argparse.Namespace) -> None:
        name = Repository.of(args.hub, "--hub").name.replace("/", "--").replace(".part-", ".part_")  # which is swept
        self.folder = home.models / f"{FOLDER}{name}"
        shards = args.shards if args.shards is not None else NONE if args.engram_dir is not None else ""
        self._words = [str(home.python), "-I", "-m", "ds4.cli.main", "fetch", args.hub, "--to", str(self.folder)]
        self._words += ["--shards", shards] if shards else []
        self._words += ["--endpoint", args.endpoint] if args.endpoint else []
        self._words += ["--no-xet"] if args.no_xet else []

    def plan(self) -> Planned:
        """Look at the repository, or at what is here.

        Raises:
            Ds4Error: it cannot be looked at, or has no base.
            CapacityError: there is no room for what is missing.
        """
        done = self._run(["--dry-run", "--json"], capture=True)
        told = json.loads(done)
        if told["base"] is None:
            raise Ds4Error(f"--hub: there is no base in {self.folder}")
        if told["no_room"]:
            raise CapacityError(told["no_room"])
        base = Path(told["base"])
        name = base.relative_to(self.folder).as_posix()
        return Planned(base, next(f["bytes"] for f in told["files"] if f["name"] == name), told["complete"])

    def fetch(self) -> None:
        """Raises Ds4Error: it failed, and said why; what is here stays."""
        self._run([], capture=False)

    def _run(self, more: list[str], capture: bool) -> str:
        words = [*self._words, *more]
        out = subprocess.PIPE if capture else None
        try:
            done = subprocess.run(words, stdout=out, text=True, preexec_fn=own_child(signal.SIGINT))
        except OSError as e:
            raise Ds4Error(f"{words[0]}: cannot be started: {e.strerror}") from e
        if done.returncode != 0:
            failed = "the repository cannot be used" if capture else "fetching stopped; run the same command to go on"
            raise Ds4Error(f"{failed}; the lines above say why (exit code {done.returncode})")
        return done.stdout or ""


def choose_domain(home: Home, model: str, given: str, of: Callable[[str], Choice] = Choice.of) -> Choice:
    """What --domain names: a sidecar that came with the model from a hub, else what it names anywhere.

    Raises:
        UsageError, FileFormatError: as `Choice.of`.
    """
    folder = Path(model).parent
    if folder.parent == home.models and folder.name.startswith(FOLDER) and "/" not in given and given != NONE:
        for path in (folder / "sidecars" / given, folder / given):
            if next(path.glob("gr_L*.bin"), None) is not None:
                return Choice(given, path, own=True)
    return of(given)
