"""`ds4 inspect PATH`: config, tensors and sizes by part of a base or a checkpoint."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from ds4.base.inspect import inspect_path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "inspect",
        help="list what a base or a checkpoint holds",
        description="Print the configuration, the tensors and the sizes by part; reads headers only.",
    )
    p.add_argument("path", metavar="PATH", help="a base file or a checkpoint folder")
    p.add_argument("--json", action="store_true", help="print everything as JSON")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = inspect_path(args.path)
    if args.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0


def _print(found: dict[str, Any]) -> None:
    console = Console()
    console.print(f"{found['path']}: {found['kind']}, {len(found['tensors'])} tensors, {found['bytes']:,} bytes")
    config = Table("setting", "value", title="config")
    for key, value in found["config"].items():
        config.add_row(key, str(value))
    console.print(config)
    tensors = Table("tensor", "type", "dims", "bytes", title="tensors")
    for t in found["tensors"]:
        dims = t.get("dims", t.get("shape"))
        tensors.add_row(t["name"], t["type"], "x".join(map(str, dims)), f"{t['bytes']:,}")
    console.print(tensors)
    parts = Table("part", "bytes", "share", title="sizes by part")
    for part, n in sorted(found["parts"].items(), key=lambda item: -item[1]):
        parts.add_row(part, f"{n:,}", f"{n / max(sum(found['parts'].values()), 1):.1%}")
    console.print(parts)
