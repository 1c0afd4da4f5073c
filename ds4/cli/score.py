"""`ds4 score`: the engine's logits of given tokens, for rulers, solvers and comparison with the teacher."""

from __future__ import annotations

import argparse
import json
import time

from ds4.cli.ids import model_ids
from ds4.cli.model_flags import add_model_flags, open_engine, progress_bar
from ds4.engine.score import score
from ds4.teacher.files import check_output, load_ids, save_results


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "score",
        help="logits of given tokens on this machine's engine",
        description="Run token ids through prefill (and, from --split on, decode) and write every row's logits.",
    )
    add_model_flags(p, prefill="full")
    p.add_argument("--ids", required=True, metavar="IDS.npy", help="token ids, integers [T]")
    p.add_argument("-o", "--out", required=True, metavar="OUT.npz", help="logits_TV (and what --streams adds)")
    p.add_argument("--split", type=int, metavar="P", help="tokens from position P on go through decode, one by one")
    p.add_argument("--streams", action="store_true", help="also write streams_LTSD and hash_rows_TGN")
    p.add_argument("--json", action="store_true", help="print the summary as JSON")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    out = check_output(args.out)
    given = load_ids(args.ids)
    engine = open_engine(args)
    started = time.monotonic()
    try:
        ids = model_ids(given, engine.config, args.ids)
        with progress_bar("scoring") as progress:
            result = score(
                engine, [int(i) for i in ids], split=args.split, streams=args.streams, on_progress=progress
            )
    finally:
        engine.close()
    save_results(out, result)
    summary = {
        "out": str(out),
        "positions": len(ids),
        "split": args.split if args.split is not None else len(ids),
        "activations": args.activations,
        "kv": args.kv,
        "prefill": args.prefill,
        "index_keys": args.index_keys,
        "sidecars": engine.sidecars,
        "arrays": {name: list(array.shape) for name, array in result.items()},
        "seconds": round(time.monotonic() - started, 3),
    }
    if args.json:
        print(json.dumps(summary))
    else:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in result.items())
        print(f"{out}: {shapes}; {len(ids)} positions in {summary['seconds']} s")
    return 0
