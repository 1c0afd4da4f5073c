"""`ds4 teacher`: logits (and streams) of the original in full precision."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from types import ModuleType

import numpy as np

from ds4.cli.ids import model_ids
from ds4.cli.model_flags import progress_bar, some_text
from ds4.errors import UsageError
from ds4.teacher.files import check_output, load_ids, save_results
from ds4.teacher.numerics import ARITHMETICS
from ds4.teacher.run import INDEX_KEYS, Teacher
from ds4.teacher.source import CheckpointSource, open_source


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "teacher",
        help="logits of the original in full precision",
        description="Run the model in float32 (numpy), one layer in memory at a time, and write its logits.",
    )
    p.add_argument("path", metavar="PATH", help="a checkpoint folder in the released layout, or a base file")
    p.add_argument("--ids", required=True, metavar="IDS.npy", help="token ids, integers [T]")
    p.add_argument("-o", "--out", required=True, metavar="OUT.npz", help="logits_TV (and what --streams adds)")
    p.add_argument("--arith", choices=ARITHMETICS, default="none", help="where activations are rounded")
    p.add_argument("--index-keys", choices=INDEX_KEYS, default="owner", help="index keys of decoded positions")
    p.add_argument("--decode-from", type=int, metavar="P", help="positions >= P are decoded one at a time")
    p.add_argument("--streams", action="store_true", help="also write streams_LTSD and hash_rows_TGN")
    p.add_argument("--engram-dir", type=some_text, metavar="D", help="where a base's engram shards lie")
    p.add_argument("--arrays", choices=("numpy", "cupy"), default="numpy", help="the array library that computes")
    p.add_argument("--json", action="store_true", help="print the summary as JSON")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    out = check_output(args.out)
    xp = _array_module(args.arrays)
    ids = load_ids(args.ids)
    started = time.monotonic()
    source = open_source(args.path, args.engram_dir)
    if args.engram_dir is not None and isinstance(source, CheckpointSource):
        print("note: a checkpoint holds its own engram tables; --engram-dir is not used", file=sys.stderr)
    ids = model_ids(ids, source.config, args.ids)
    if args.decode_from is not None and not 0 <= args.decode_from <= len(ids):
        raise UsageError(f"--decode-from {args.decode_from}: must lie between 0 and the {len(ids)} tokens given")
    teacher = Teacher(source, args.arith, args.index_keys, xp)
    with progress_bar(f"{len(ids)} tokens, layers") as progress:
        result = teacher.run(ids, args.decode_from, args.streams, progress)
    save_results(out, result)
    split = len(ids) if args.decode_from is None else args.decode_from
    summary = {
        "out": str(out),
        "positions": len(ids),
        "decoded": len(ids) - split,
        "arith": args.arith,
        "index_keys": args.index_keys,
        "arrays": {name: list(array.shape) for name, array in result.items()},
        "seconds": round(time.monotonic() - started, 3),
    }
    if args.json:
        print(json.dumps(summary))
    else:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in result.items())
        print(f"{out}: {shapes}; {len(ids)} positions, {len(ids) - split} decoded, in {summary['seconds']} s")
    return 0


def _array_module(name: str) -> ModuleType:
    if name == "numpy":
        return np
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise UsageError("--arrays cupy: cupy is not installed here; leave the flag out to compute with numpy") from e
