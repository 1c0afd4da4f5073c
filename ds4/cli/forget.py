"""`ds4 forget`: logged requests that must go, and what quotes them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ds4.errors import Ds4Error, UsageError
from ds4.posttrain.forget import forget
from ds4.posttrain.log import own_log, parse_day


class NotForgotten(Ds4Error):
    """Something that was to go was not there, or could not go; `problems` has a line each."""

    def __init__(self, message: str, problems: tuple[str, ...]) -> None:
        super().__init__(message)
        self.problems = problems


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "forget",
        help="remove logged requests",
        description="Remove requests from the log of ds4-server --log-requests, and what quotes them in the other "
        "files of that folder and of the folders named with --also: corrections, decision points, reports.",
        epilog="What can be quoted and found: docs/posttraining.md. Prints what was removed, and no text of it.",
    )
    p.add_argument("--log", required=True, metavar="DIR", help="the folder of the log")
    p.add_argument("--request", action="append", default=[], metavar="ID", help="this request; may be repeated")
    p.add_argument(
        "--day", action="append", default=[], metavar="D", help="all of a day, 2026-11-30; may be repeated"
    )
    p.add_argument("--all", action="store_true", help="every request")
    p.add_argument(
        "--also", action="append", default=[], metavar="DIR", help="take quotes out of this folder; may be repeated"
    )
    p.add_argument("--json", action="store_true", help="print what was removed as JSON")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not (args.request or args.day or args.all):
        raise UsageError("forget what? give --request ID, --day D or --all")
    if args.all and (args.request or args.day):
        raise UsageError("--all is every request: leave --request and --day out")
    done = forget(
        own_log(args.log),
        ids=args.request,
        wanted_days=[parse_day(d) for d in args.day],
        everything=args.all,
        also=[Path(d) for d in args.also],
    )
    print(json.dumps(done.as_json()) if args.json else done.report(), end="\n" if args.json else "")
    if done.missing or done.left:
        absent = tuple(f"{name}: in no file of {', '.join([args.log, *args.also])}" for name in done.missing)
        raise NotForgotten(
            "not all of it could be forgotten; a request's row is written a moment after its answer",
            (*absent, *done.left),
        )
    return 0
