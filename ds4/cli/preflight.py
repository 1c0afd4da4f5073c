"""`ds4 preflight DIR`: is the whole checkpoint here, before an hour of work."""

from __future__ import annotations

import argparse
import json
import sys

from ds4.checkpoint.preflight import preflight


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "preflight",
        help="check that a checkpoint is whole",
        description="List every missing, extra or misshapen tensor of a checkpoint at once; reads headers only.",
    )
    p.add_argument("path", metavar="DIR", help="a checkpoint folder in the released layout")
    p.add_argument("--json", action="store_true", help="print the findings as JSON")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    problems = preflight(args.path)
    if args.json:
        print(json.dumps({"path": args.path, "complete": not problems, "problems": problems}))
    elif problems:
        for line in problems:
            print(line)
        print(f"{args.path}: {len(problems)} problem{'s' * (len(problems) != 1)}", file=sys.stderr)
    else:
        print(f"{args.path}: complete")
    return 1 if problems else 0
