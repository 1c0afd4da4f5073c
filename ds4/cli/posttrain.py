"""`ds4 posttrain`: from people's corrections to what a post-training folder is solved on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds4 import embedded
from ds4.base.reader import Base
from ds4.cli import posttrain_refit
from ds4.cli.embedded_base import embedded_base
from ds4.cli.model_flags import add_model_flags, open_engine, progress_bar
from ds4.errors import Ds4Error, UsageError
from ds4.model.tokenizer import Tokenizer
from ds4.posttrain.corrections import read_corrections
from ds4.posttrain.decisions import decisions
from ds4.posttrain.log import Problem, existing_folder
from ds4.posttrain.points import Point, check_target, score_points, write_points
from ds4.teacher.files import check_output
from ds4.teacher.source import BaseSource
from rulers.identity import file_mark, model_fingerprint


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "posttrain",
        help="corrections into what gains are solved on",
        description="What a post-training folder is solved on (docs/posttraining.md).",
    )
    below = p.add_subparsers(dest="posttrain_command", metavar="WHAT", required=True)
    s = below.add_parser(
        "points",
        help="decision points of corrections",
        description="Turn corrections into decision points: after which tokens which one was wanted, which other one "
        "is the strongest there, and by how much, on the path that requests take. Corrections without such a point "
        "are reported with their line and the reason.",
        epilog="Exit code 1, and no file, where no correction gives a point.",
    )
    s.add_argument("corrections", metavar="CORRECTIONS.jsonl", help="a JSON object a line (docs/posttraining.md)")
    s.add_argument("-o", "--out", required=True, metavar="POINTS.jsonl", help="the file to write")
    s.add_argument("--log", metavar="DIR", help="the log of the requests that corrections name")
    s.add_argument(
        "--score-split", type=int, metavar="P",
        help="tokens from place P on go through decode, the others through prefill (default: the answer's)",
    )  # fmt: skip
    s.add_argument("--json", action="store_true", help="print the report as JSON")
    add_model_flags(s, prefill="replay", embedded=True)
    s.set_defaults(run=points)
    posttrain_refit.add_parser(below)


def points(args: argparse.Namespace) -> int:
    out = check_output(args.out, ".jsonl")
    if args.score_split is not None and args.score_split < 1:
        raise UsageError(f"--score-split {args.score_split}: must be at least 1, a prompt's first token is prefilled")
    check_target(out)
    log = None if args.log is None else existing_folder(args.log)
    given = read_corrections(args.corrections, log)
    if args.model is None:
        with progress_bar("making the embedded model's base") as progress:
            args.model = embedded_base(progress)
        args.engram_dir = args.engram_dir or embedded.checkpoint()
    base = Base.open(args.model, args.engram_dir)  # what needs no weights is said before they are loaded
    tokenizer = Tokenizer.from_base(base.tokenizer_data(), base.config, str(base.path), base.folders)
    found, refused = decisions(given.rows, tokenizer, base.config.max_position_embeddings)
    problems = sorted([*given.problems, *refused], key=lambda p: p.line)
    total = len(given.rows) + len(given.problems)
    if not found:
        _print({}, [], problems, total, tokenizer, args.json)
        raise Ds4Error(
            f"{args.corrections}: none of {total} corrections gives a decision point; {out} is not written"
        )
    engine = open_engine(args)
    try:
        with progress_bar("scoring") as progress:
            scored = score_points(found, engine.session, args.score_split, progress)
        head = {
            "base": {
                "file": Path(args.model).name, "mark": file_mark(args.model),
                "model": model_fingerprint(BaseSource(base)),
            },
            "sidecars": engine.sidecars, "teacher": None,
            "score_split": "answer" if args.score_split is None else args.score_split,
            "engine": {
                "activations": args.activations, "kv": args.kv, "prefill": args.prefill,
                "index_keys": args.index_keys,
            },
            "corrections": {"file": Path(args.corrections).name, "sha256": given.sha256},
        }  # fmt: skip
    finally:
        engine.close()
    write_points(out, head, scored)
    _print({"out": str(out), **head}, scored, problems, total, tokenizer, args.json)
    return 0


def _print(
    head: dict[str, Any], scored: Sequence[Point], problems: Sequence[Problem], total: int, tokenizer: Tokenizer,
    as_json: bool,
) -> None:  # fmt: skip
    """The report: every point, and every correction without one."""
    if as_json:
        rows = [
            {
                "line": p.line, "request_id": p.request_id, "position": p.position, "a": p.a, "b": p.b,
                "given": p.given, "margin": p.margin,
            }
            for p in scored
        ]  # fmt: skip
        told = {**head, "corrections_read": total, "points": rows, "reported": [asdict(p) for p in problems]}
        print(json.dumps(told, ensure_ascii=False))
        return
    wrong = sum(p.margin <= 0 for p in scored)
    print(f"{len(scored)} points of {total} corrections, {wrong} where the model decides otherwise today")
    if scored:
        print("  line  place    margin  wanted before the strongest other")
    for p in scored:
        a, b = (repr(tokenizer.decode([i])) for i in (p.a, p.b))
        print(f"{p.line:6d} {p.position:6d} {p.margin:9.3f}  {a} before {b}")
    for problem in problems:
        print(f"{problem.line:6d} reported: {problem.reason}")
    if scored:
        print(f"{head['out']} written", file=sys.stderr)
