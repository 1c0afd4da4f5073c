"""`ds4 diff`: the first layer and position where two runs made with --streams part."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from ds4.errors import UsageError
from ds4.teacher.compare import Comparison, compare
from ds4.teacher.files import load_results


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "diff",
        help="find where two runs part",
        description="Compare two results of `ds4 teacher` or `ds4 score` made with --streams. Exit 1: they part, or "
        "are of different lengths.",
    )
    p.add_argument("a", metavar="A.npz", help="the run in question")
    p.add_argument("b", metavar="B.npz", help="the reference of relative differences")
    p.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X",
        help="relative L2 of one stream copy at one position that still counts as equal (0: bit for bit)",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="print the comparison as JSON")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not (math.isfinite(args.tolerance) and args.tolerance >= 0):
        raise UsageError(f"--tolerance {args.tolerance}: must be a number of at least 0")
    found = compare(load_results(args.a), load_results(args.b), args.tolerance)
    if args.json:
        print(json.dumps(_json(found)))
    else:
        _print(found)
    return 0 if found.agree else 1


def _json(found: Comparison) -> dict[str, object]:
    """Infinity is no JSON: a relative difference against zero is null."""

    def finite(x: float) -> float | None:
        return x if math.isfinite(x) else None

    out: dict[str, object] = {"agree": found.agree, **asdict(found)}
    out["layers"] = [{**asdict(d), "worst": finite(d.worst)} for d in found.layers]
    out["logits_worst"] = finite(found.logits_worst)
    for key in ("first_bits", "first_apart"):
        pair = getattr(found, key)
        out[key] = None if pair is None else {"layer": pair[0], "position": pair[1]}
    return out


def _print(found: Comparison) -> None:
    last = len(found.layers) - 1
    table = Table("entering", "not bit-equal", "apart", "first", "worst relative", "at")
    for d in found.layers:
        first = d.first_apart if d.first_apart is not None else d.first_bits
        table.add_row(
            "the head" if d.layer == last else f"layer {d.layer}", str(d.n_bits_differ), str(d.n_apart),
            "-" if first is None else f"position {first}", f"{d.worst:.2e}",
            "-" if d.worst_position is None else f"position {d.worst_position}, copy {d.worst_copy}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    lines = [f"{found.n_positions} positions compared, {found.n_skipped} of them not computed by one side"]
    if found.n_left_out:
        lines.append(f"not of one length: {found.n_left_out} positions of the longer run are left out")
    if found.first_hash is not None:
        p, g, column = found.first_hash
        lines.append(f"engram rows part first at position {p}, engram layer {g}, column {column}")
    if found.logits_worst_position is not None:
        lines.append(f"logits differ most at position {found.logits_worst_position}: {found.logits_worst:.2e}")
    for what, pair in (("bits", found.first_bits), (f"more than {found.tolerance:g}", found.first_apart)):
        if pair is None:
            lines.append(f"no difference in {what}" if what == "bits" else f"nowhere apart by {what}")
        else:
            lines.append(f"streams first differ by {what} entering {_place(pair[0], last)}, position {pair[1]}")
    for line in lines:
        console.print(line, highlight=False)


def _place(layer: int, last: int) -> str:
    return f"the head: layer {layer - 1} is the one to look at" if layer == last else f"layer {layer}"
