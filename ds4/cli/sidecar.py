"""`ds4 sidecar`: what a sidecar or post-training folder holds, and whether a base can mount it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.base.reader import Base
from ds4.cli.model_flags import some_text
from ds4.sidecar.look import look, verify_folder
from ds4.teacher.source import BaseSource
from rulers.identity import model_fingerprint

DOWN = 2  # of an expert's three matrices, as a base numbers them


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "sidecar",
        help="look at a sidecar, or check it against a base",
        description="Sidecars: gains and router biases of a domain, and post-training folders (docs/format.md).",
    )
    commands = p.add_subparsers(dest="sidecar_command", metavar="COMMAND", required=True)
    s = commands.add_parser(
        "show",
        help="what a folder holds",
        description="List the layer files of a sidecar or post-training folder: types, sizes, how far factors are "
        "from 1; a broken or unknown file is an error.",
    )
    s.add_argument("folder", metavar="DIR", help="a folder of gr_Lnn.bin and rb_Lnn.bin")
    s.add_argument("--json", action="store_true", help="print everything as JSON")
    s.set_defaults(run=_show)
    v = commands.add_parser(
        "verify",
        help="whether a base can mount a folder",
        description="Read every layer file against a base and say everything that would refuse the load. A folder "
        "with a base.fnv is a post-training folder.",
    )
    v.add_argument("folder", metavar="DIR", help="a folder of gr_Lnn.bin and rb_Lnn.bin")
    v.add_argument("-m", "--model", required=True, metavar="BASE", help="the base file (.gguf)")
    v.add_argument(
        "--zchain", type=some_text, metavar="DIR", help="the sidecar that a post-training folder is mounted on"
    )
    v.add_argument(
        "--engram-dir", type=some_text, metavar="D", help="where the two n-gram shards lie (default: beside the base)"
    )
    v.add_argument("--json", action="store_true", help="print the findings as JSON")
    v.set_defaults(run=_verify)


def _show(args: argparse.Namespace) -> int:
    found = look(args.folder)
    if args.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0


def _print(found: dict[str, Any]) -> None:
    print(f"{found['folder']}: {found['files']} layer files, {found['bytes']:,} bytes")
    print(f"fingerprint {found['fingerprint']}")
    if found["solved_on"] is not None:
        print(f"post-training, solved on {found['solved_on']}")
    for layer in found["layers"]:
        g, b = layer["gains"], layer["bias"]
        parts = []
        if g is not None:
            parts.append(
                f"{g['type']} {g['experts']} x {g['width']}, s - 1 has rms {g['rms']:.4f}, s {g['least']:.4f} to "
                f"{g['largest']:.4f}, {g['ones']:.1%} exactly 1"
            )
        if b is not None:
            parts.append(f"router bias {b['least']:+.4f} to {b['largest']:+.4f}")
        print(f"  layer {layer['layer']:02d}: {'; '.join(parts)}")


def _verify(args: argparse.Namespace) -> int:
    base = Base.open(args.model, args.engram_dir)

    def base_gains(layer: int) -> NDArray[np.float32]:
        blob = base.experts(f"blk.{layer}")
        rows = [np.asarray(blob.payload(e, DOWN).gains, np.float32) for e in range(base.config.n_routed_experts)]
        return np.stack(rows)

    found = verify_folder(base.config, args.folder, args.zchain, base_gains)
    found.problems.extend(_other_model(Path(args.folder) / "manifest.json", base))
    kind = "posttrain" if found.posttrain else "zchain"
    if args.json:
        told = {"folder": args.folder, "base": args.model, "mounts_as": kind, "sound": not found.problems}
        print(json.dumps({**told, "problems": found.problems, "warnings": found.warnings}))
        return 1 if found.problems else 0
    for line in found.problems:
        print(line)
    for line in found.warnings:
        print(f"warning: {line}", file=sys.stderr)
    n = len(found.problems)
    if n:
        print(f"{args.folder}: {n} problem{'s' * (n != 1)}", file=sys.stderr)
    else:
        print(f"{args.folder}: sound for {args.model}, mounts as --{kind}")
    return 1 if n else 0


def _other_model(manifest: Path, base: Base) -> list[str]:
    """Whether a manifest, which a sidecar may lack, says that it was solved for another model of these dimensions."""
    try:
        solved_for = json.loads(manifest.read_bytes())["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    ours = model_fingerprint(BaseSource(base))
    if solved_for == ours:
        return []
    return [f"{manifest}: solved for model {solved_for}, {base.path} is of model {ours}"]
