"""`ds4 ruler archive`: the original's scores in a small form, with what that costs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ds4.errors import UsageError
from ds4.teacher.files import check_output
from rulers.compact import compact
from rulers.scores import Scores

TOP = 64


def add_archive(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = below.add_parser(
        "archive",
        help="a small form of the original's scores",
        description="Keep the likeliest tokens of each position and the mass of all others, and print the bound on "
        "the error that this leaves. Rulers read full scores only.",
    )
    p.add_argument("scores", metavar="SCORES.npz", help="full scores, as `ds4 ruler run` says where it keeps them")
    p.add_argument("-o", "--out", required=True, metavar="SMALL.npz", help="the file to write")
    p.add_argument("--top", type=int, default=TOP, metavar="K", help=f"tokens a position (default {TOP})")
    p.add_argument("--json", action="store_true", help="print sizes and the bound as JSON")
    p.set_defaults(run=_archive)


def _archive(args: argparse.Namespace) -> int:
    out = check_output(args.out)
    if out.exists() and out.samefile(args.scores):
        raise UsageError(f"{out}: is the file to read; full scores cannot be made again from the small form")
    small = compact(Scores.load(args.scores), args.top)
    small.save(out)
    sizes = {"bytes": out.stat().st_size, "full_bytes": Path(args.scores).stat().st_size}
    if args.json:
        tail = {"mean": float(small.tail.mean()), "most": float(small.tail.max())}
        print(json.dumps({"out": str(out), "positions": len(small.text), "top": args.top, **sizes, "tail": tail}))
    else:
        print(f"{out}: {sizes['bytes']:,} of {sizes['full_bytes']:,} bytes; {small.describe()}")
    return 0
