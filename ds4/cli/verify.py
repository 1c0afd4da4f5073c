"""`ds4 verify PATH`: read all of a base and say everything that is wrong with it."""

from __future__ import annotations

import argparse
import json
import sys

from ds4.base.verify import fingerprint, verify
from ds4.cli.model_flags import progress_bar, some_text


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "verify",
        help="read a whole base and check every value",
        description="A load checks headers, tables, gains and codebooks; this reads everything: NaN, infinities, "
        "ranges, padding.",
    )
    p.add_argument("path", metavar="BASE", help="a base file")
    p.add_argument(
        "--engram-dir", type=some_text, metavar="D", help="where the two n-gram shards lie (default: beside the base)"
    )
    p.add_argument("--json", action="store_true", help="print the findings as JSON")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with progress_bar("verifying") as bar:
        step = (lambda _name, done, total: bar(done, total)) if bar else None
        problems = verify(args.path, args.engram_dir, step)
    sha256 = fingerprint(args.path)
    if args.json:
        print(json.dumps({"path": args.path, "sound": not problems, "problems": problems, "sha256": sha256}))
    elif problems:
        for line in problems:
            print(line)
        print(f"{args.path}: {len(problems)} problem{'s' * (len(problems) != 1)}", file=sys.stderr)
    else:
        print(f"{args.path}: sound, sha256 {sha256}")
    return 1 if problems else 0
