"""`ds4 fetch OWNER/REPO`: a published base with its shards and sidecars, checked, and resumed wherever it stopped."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4.cli.model_flags import some_text
from ds4.cli.processes import file_error, locked
from ds4.errors import UsageError

if TYPE_CHECKING:
    from ds4.hub.client import Hub
    from ds4.hub.fetch import State
    from ds4.hub.plan import Ask

LOCK = ".ds4-fetch.lock"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "fetch",
        help="fetch a published base, its n-gram shards and sidecars",
        description="Fetch what a server needs from a hub's repository into a folder, and compare it with the "
        "published sums. Run again, it goes on where it stopped; when everything is here, it asks nobody.",
    )
    p.add_argument(
        "repository", metavar="OWNER/REPO[@REV]", nargs="?",
        help="the base's repository, and its branch, tag or commit (default main); without it: what the folder's "
        "last run fetched",
    )  # fmt: skip
    p.add_argument("--to", type=some_text, metavar="DIR", default=".", help="the folder (default: this one)")
    p.add_argument(
        "--shards", metavar="OWNER/REPO[@REV]", default="",
        help="the checkpoint whose n-gram shards the base needs, or none (default: what the base's repository names "
        "or holds, else the official one)",
    )  # fmt: skip
    p.add_argument(
        "--file", metavar="NAME", action="append", default=[],
        help="only files of this name or pattern; again for more",
    )  # fmt: skip
    p.add_argument("--manifest", metavar="FILE", help="a manifest of your own: which files, sizes and sums to accept")
    p.add_argument("--endpoint", metavar="URL", help="the hub (default: HF_ENDPOINT, else https://huggingface.co)")
    p.add_argument("--no-xet", action="store_true", help="plain HTTP, without the hub's chunk storage")
    p.add_argument("--update", action="store_true", help="look at the branch anew, and fetch what changed")
    p.add_argument("--verify", action="store_true", help="read what is here and compare its sums, not its sizes only")
    p.add_argument(
        "--dry-run", action="store_true", help="say what would be fetched and whether it fits; fetch nothing"
    )
    p.add_argument("--json", action="store_true", help="print one JSON object about the files")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ds4.hub.fetch import Fetch

    folder = Path(args.to)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--to {folder}: is a file; name a folder")
    ask = _ask(args)
    fetch = Fetch(folder, lambda: _hub(args), _say)
    if args.dry_run:
        state = fetch.look(ask, update=args.update, verify=args.verify)
        _print(args, folder, state)
        return 0
    with _folder(folder), _bar() as bar:
        state = fetch.run(ask, update=args.update, verify=args.verify, progress=bar)
    _print(args, folder, state)
    return 0


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """Make the folder and hold its lock. What fails leaves neither, as far as they are empty."""
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    busy = f"another fetch (process {{pid}}) is at work in {folder}; wait for it and run the same command again"
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise file_error(folder, e) from e
        with locked(folder / LOCK, busy):
            try:
                yield
            except BaseException:
                (folder / LOCK).unlink(missing_ok=True)
                raise
    except BaseException:
        with suppress(OSError):  # what came stays, to go on with
            for path in made:
                path.rmdir()
        raise


def _ask(args: argparse.Namespace) -> Ask | None:
    from ds4.hub.names import Repository
    from ds4.hub.plan import NONE, Ask, published

    manifest = ""
    if args.manifest is not None:
        try:
            manifest = Path(args.manifest).read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            raise UsageError(f"--manifest {args.manifest}: cannot be read ({e})") from e
    if args.shards not in ("", NONE):
        Repository.of(args.shards, "--shards")
    given = None if args.repository is None else Repository.of(args.repository, "fetch")
    if given is None and not manifest:
        from ds4.hub.names import RECORD

        asked = [f"--{flag}" for flag in ("shards", "file", "update") if getattr(args, flag)]
        if (Path(args.to) / RECORD).exists():
            if asked:
                raise UsageError(f"{asked[0]} needs the repository too: ds4 fetch OWNER/REPO {asked[0]} ...")
            return None
        manifest = published()[0]
        if not manifest:
            raise UsageError(
                "name a repository: ds4 fetch OWNER/REPO; no base is published for this release yet. One is made of "
                "the official checkpoint with ds4 quantize"
            )
    return Ask(given, args.shards, tuple(args.file), manifest)


def _hub(args: argparse.Namespace) -> Hub:
    from ds4.hub.client import Hub

    return Hub(args.endpoint, xet=not args.no_xet, say=_say)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(args: argparse.Namespace, folder: Path, state: State) -> None:
    from ds4.hub.fetch import room_problem, sidecars, tool_text_problem

    plan = state.plan
    complete = len(state.here) == len(plan.files)
    problem = tool_text_problem(folder, plan) if complete and plan.base else None
    if problem:
        _say(f"warning: {problem}")
    lacking = None if complete else room_problem(folder, state.missing)
    if args.json:
        base = None if plan.base is None else str(folder / plan.base)
        told: dict[str, Any] = {
            "folder": str(folder), "complete": complete, "base": base,
            "sidecars": {name: str(folder / path) for name, path in sidecars(plan).items()},
            "sources": list(plan.sources), "bytes": plan.size, "missing_bytes": state.missing, "no_room": lacking,
            "released_tool_text": problem is None if complete and plan.base else None,
            "files": [
                {"name": w.name, "bytes": w.size, "checked_by": w.checked_by, "here": w.name in state.here}
                for w in plan.files
            ],
        }  # fmt: skip
        print(json.dumps(told))
        return
    if args.dry_run:
        for w in plan.files:
            pieces = f", in {len(w.pieces)} pieces" if len(w.pieces) > 1 else ""
            print(f"{'here' if w.name in state.here else 'to fetch':9} {w.size:>16,} {w.name}{pieces}")
    where = ", ".join(plan.sources)
    if complete:
        print(f"{folder}: {len(plan.files)} files, {plan.size:,} bytes, all here and checked; from {where}")
    else:
        print(f"{folder}: {state.missing:,} of {plan.size:,} bytes are to be fetched; from {where}")
        print(f"no room: {lacking}" if lacking else "there is room for them")


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None] | None]:
    """A bar with rate and time left on a terminal's stderr, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("fetching"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("fetching", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
