"""Finish what the tree carries: the runs' logs, and SHA256SUMS over everything in ds4/embedded.

    python -m train.ship [--log FOLDER ...]

Run it last, after `train.export -o ds4/embedded/model --force` and `train.slices`, and again whenever a file there
changes. A run's FOLDER gives its log.jsonl and those of the folders in it; without --log the logs that are there
stay. Refuses what is not whole, or more than 20 MB.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ds4 import embedded
from ds4.checkpoint.preflight import preflight
from ds4.checkpoint.writer import replace_file
from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError

MOST_BYTES = 20_000_000


def ship(home: Path, logs: Sequence[tuple[str, Path]]) -> int:
    """Replace the logs if there are any, check, write SHA256SUMS; bytes of all files.

    Args:
        logs: (name, log.jsonl), see `logs_of`.

    Raises:
        FileFormatError: a log or the checkpoint is broken; nothing was changed if it is a log.
        CapacityError: too large.
    """
    texts = {name: _checked(path) for name, path in logs}
    folder = home / "training-log"
    if texts:
        folder.mkdir(exist_ok=True)
        for old in folder.glob("*.jsonl"):
            if old.stem not in texts:
                old.unlink()
        for name, data in texts.items():
            replace_file(folder / f"{name}.jsonl", data)
    if problems := preflight(embedded.checkpoint()):
        raise FileFormatError(f"the checkpoint is not whole: {problems[0]}")
    replace_file(home / embedded.SUMS, embedded.sums().encode())
    n_bytes = sum(p.stat().st_size for p in home.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    if n_bytes > MOST_BYTES:
        raise CapacityError(
            f"{home}: {n_bytes:,} bytes, the tree has room for {MOST_BYTES:,}; ship less text or logs"
        )
    return n_bytes


def logs_of(run: Path) -> list[tuple[str, Path]]:
    """A run's logs: the log of `embedded` and, named after both, that of `embedded/draft`.

    Raises:
        UsageError: the folder has no log.
    """
    found = [run / "log.jsonl", *sorted(run.glob("*/log.jsonl"))]
    if not found[0].is_file():
        raise UsageError(f"{run}: has no log.jsonl; name the folder of a run")
    return [("-".join((run.resolve().name, *p.parent.relative_to(run).parts)), p) for p in found]


def _checked(path: Path) -> bytes:
    """The bytes of a log, every line of which is an object."""
    try:
        data = path.read_bytes()
        for n, line in enumerate(data.splitlines(), 1):
            if not isinstance(json.loads(line), dict):
                raise FileFormatError(f"{path}: line {n} is not an object")
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e})") from e
    except ValueError as e:
        raise FileFormatError(f"{path}: line {n} is not JSON ({e})") from e
    return data


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="train.ship", description="Finish what the tree carries.")
    parser.add_argument(
        "--log", nargs="+", type=Path, default=[], metavar="FOLDER", help="runs whose logs are shipped"
    )
    args = parser.parse_args(argv)
    try:
        n_bytes = ship(embedded.HOME, [log for folder in args.log for log in logs_of(folder)])
    except Ds4Error as e:
        print(f"train.ship: {e}", file=sys.stderr)
        return 2 if isinstance(e, UsageError) else 1
    except OSError as e:
        print(f"train.ship: {e.filename}: {e.strerror or e}", file=sys.stderr)
        return 1
    print(f"{embedded.HOME}: {n_bytes:,} bytes of {MOST_BYTES:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
