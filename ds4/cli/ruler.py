"""`ds4 ruler`: how far an engine is from the original, in numbers with their standard errors."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ds4 import embedded
from ds4.base.reader import Base
from ds4.checkpoint.reader import Checkpoint
from ds4.cli.embedded_base import embedded_base
from ds4.cli.home import key_of
from ds4.cli.model_flags import add_model_flags, open_engine, progress_bar
from ds4.cli.ruler_archive import add_archive
from ds4.cli.ruler_tables import print_comparison, print_endings, print_reading
from ds4.corpus.domain import SLICES, Domain
from ds4.engine import Sampling
from ds4.errors import UsageError
from ds4.model.tokenizer import Tokenizer
from ds4.posttrain.nights import resolve
from ds4.settings import device_settings
from ds4.teacher.files import check_output
from ds4.teacher.numerics import ARITHMETICS
from ds4.teacher.source import BaseSource, CheckpointSource
from ds4.teacher.tasks import worth
from ds4.work.choose import add_flags, crew_of
from rulers.compare import compare
from rulers.endings import PROMPTS, endings, load_prompts
from rulers.identity import file_mark, folder_mark, model_fingerprint
from rulers.journal import Journal
from rulers.reading import Reading
from rulers.report import make
from rulers.routing import original_picks
from rulers.run import PATHS, Ruler
from rulers.scores import Meta
from rulers.teacher_scores import teacher_scores
from rulers.text import Text

DOMAIN, TOKENS, LENGTH, FLOOR_TOKENS = "general", 8192, 512, 4096


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "ruler",
        help="measure an engine against the original",
        description="How far an engine's next-token distributions are from the original's (docs/rulers.md).",
    )
    below = p.add_subparsers(dest="ruler_command", metavar="WHAT", required=True)
    _add_run(below)
    _add_compare(below)
    _add_report(below)
    _add_endings(below)
    add_archive(below)


def _add_run(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = below.add_parser(
        "run",
        help="read a domain's text, against the original",
        description="Read a domain's text with the engine and compare every position with the original. Goes on "
        "where an interrupted run stopped; the original's logits are kept in the cache.",
    )
    add_model_flags(p, prefill="full", embedded=True)
    p.add_argument("--teacher", metavar="CKPT", help="the original: a checkpoint folder (default: the embedded one)")
    p.add_argument("--arith", choices=ARITHMETICS, default="none", help="where the original rounds activations")
    p.add_argument("--domain", default=DOMAIN, metavar="NAME", help=f"a domain, or its folder (default {DOMAIN})")
    p.add_argument("--slice", choices=SLICES, default="judge", help="which part of its text")
    p.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"about N tokens of it (default {TOKENS})")
    p.add_argument(
        "--length", type=int, default=LENGTH, metavar="N", help=f"in windows of at most N tokens (default {LENGTH})"
    )
    p.add_argument("--path", choices=PATHS, default="prefill", help="which kernels read")
    p.add_argument("--routing", action="store_true", help="tell by layer how often the experts are the original's")
    floor = p.add_argument("--floor-tokens", type=int, default=FLOOR_TOKENS, metavar="N")
    floor.help = f"read about N tokens by the other path too, for the A/A floor; 0: none (default {FLOOR_TOKENS})"
    add_flags(p)
    p.add_argument("-o", "--out", metavar="READING.npz", help="keep every position's figures, to compare and report")
    p.add_argument("--json", action="store_true", help="print the numbers as JSON")
    p.set_defaults(run=run)


def _add_compare(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = below.add_parser(
        "compare",
        help="the paired difference of two readings",
        description="B minus A, paired by position, with the A/A floor beside it. Both must be readings of one text "
        "against one original.",
    )
    p.add_argument("a", metavar="A.npz", help="the reading before")
    p.add_argument("b", metavar="B.npz", help="the reading after")
    p.add_argument("--json", action="store_true", help="print the differences as JSON")
    p.set_defaults(run=run_compare)


def _add_report(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = below.add_parser(
        "report",
        help="readings as Markdown, JSON and one HTML page",
        description="Write report.md, report.json and report.html of readings, a domain each, into a folder.",
    )
    p.add_argument("readings", nargs="+", metavar="READING.npz", help="what `ds4 ruler run -o` kept")
    p.add_argument(
        "--before", action="append", default=[], metavar="A.npz",
        help="a reading of one of these domains before a change; may be repeated",
    )  # fmt: skip
    p.add_argument("-o", "--out", required=True, metavar="DIR", help="the folder, made if it is not there")
    p.set_defaults(run=run_report)


def _add_endings(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = below.add_parser(
        "endings",
        help="how answers end: by themselves, in a loop, or never",
        description="Draw answers without a limit but the context's and tell how they end. Goes on where an "
        "interrupted run stopped.",
    )
    add_model_flags(p, prefill="full", embedded=True)
    p.add_argument("--prompts", metavar="FILE.jsonl", help='questions, {"prompt": TEXT} a line (default: twelve)')
    p.add_argument("--thinking", action="store_true", help="let the model think first; tell whether it closes")
    p.add_argument("--temp", type=float, default=1.0, metavar="T", help="temperature; 0 is greedy (default 1)")
    p.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the first answer, then one more each (default 0)"
    )
    p.add_argument("--json", action="store_true", help="print shares and answers as JSON")
    p.set_defaults(run=run_endings)


def run(args: argparse.Namespace) -> int:
    out = None if args.out is None else check_output(args.out)
    if args.prefill != "full":
        raise UsageError("--prefill replay computes only some rows' logits; a ruler reads with --prefill full")
    if args.floor_tokens < 0:
        raise UsageError(f"--floor-tokens is {args.floor_tokens}; it must be at least 0")
    got = read(args)
    if out is not None:
        got.save(out)
    if args.json:
        print(json.dumps(got.to_json(), ensure_ascii=False))
    else:
        print_reading(got)
    return 0


def read(args: argparse.Namespace) -> Reading:
    """What `ds4 ruler run`'s flags ask for, measured."""
    checkpoint = Path(args.teacher) if args.teacher is not None else embedded.checkpoint()
    domain = Domain.open(args.domain)
    _default_model(args)
    original = CheckpointSource(Checkpoint.open(checkpoint))
    tokenizer = Tokenizer.from_file(checkpoint / "tokenizer.json", original.config)
    documents = [d.text for d in domain.documents(args.slice)]
    text = Text.cut(documents, tokenizer.encode, original.config.bos_token_id, length=args.length, tokens=args.tokens)
    model = model_fingerprint(BaseSource(Base.open(args.model, args.engram_dir)))
    theirs = model_fingerprint(original)
    if model != theirs:  # before the hours that the original takes
        raise UsageError(
            f"{args.model} is of model {model}, {checkpoint} of model {theirs}: judge a base by the checkpoint that "
            "it was made from (--teacher)"
        )
    cache = device_settings().cache
    with crew_of(args.workers, args.cluster) as crew, progress_bar("the original reads") as progress:
        teacher = teacher_scores(
            checkpoint, text, domain=domain.name, split=args.slice, length=args.length, arith=args.arith,
            folder=cache / "teacher", say=lambda line: print(line, file=sys.stderr), progress=progress,
            crew=worth(crew, original.config),
        )  # fmt: skip
    weights = _weights(args)
    ours = Meta(
        model, domain.name, args.slice, args.length, f"{args.activations} {args.kv}", args.path, weights
    )  # fmt: skip
    picks = None
    if args.routing:
        with progress_bar("the original's experts") as progress:
            picks = original_picks(checkpoint, text, arith=args.arith, folder=cache / "teacher", progress=progress)
    ruler = Ruler(teacher, args.floor_tokens, picks)
    options = f"{ruler.job(ours)} {args.index_keys}"
    with Journal(cache / "rulers" / f"{key_of([options])}.jsonl", options) as journal:
        engine = open_engine(args)
        try:
            with progress_bar("reading") as progress:
                got = ruler.read(engine, ours, journal, progress)
        finally:
            engine.close()
        journal.discard()
    return got


def _weights(args: argparse.Namespace) -> str:
    """Which weights the engine computes with: the base, and what is mounted on it."""
    parts = [f"{Path(args.model).name} {file_mark(args.model)}"]
    for flag, folder in (("zchain", args.zchain), ("posttrain", args.posttrain)):
        if folder is not None:
            parts.append(f"{flag} {Path(folder).resolve().name} {folder_mark(folder)}")
    return " + ".join(parts)


def _default_model(args: argparse.Namespace) -> None:
    """Without -m: the embedded model's base. Of a folder of nights the one that is current now, to the end."""
    if args.posttrain is not None:
        args.posttrain = resolve(args.posttrain)
    if args.model is None:
        with progress_bar("making the embedded model's base") as progress:
            args.model = embedded_base(progress)
        args.engram_dir = args.engram_dir or embedded.checkpoint()


def run_compare(args: argparse.Namespace) -> int:
    found = compare(Reading.load(args.a), Reading.load(args.b), (args.a, args.b))
    if args.json:
        print(json.dumps(found.to_json(), ensure_ascii=False))
    else:
        print_comparison(found)
    return 0


def run_report(args: argparse.Namespace) -> int:
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise UsageError(f"{args.out}: is there and is no folder; name another one")
    made = make([(p, Reading.load(p)) for p in args.readings], [(p, Reading.load(p)) for p in args.before])
    for path in made.write(args.out):
        print(path)
    return 0


def run_endings(args: argparse.Namespace) -> int:
    prompts = PROMPTS if args.prompts is None else load_prompts(args.prompts)
    Sampling(args.temp, seed=args.seed)  # refuses what cannot be before anything is opened
    _default_model(args)
    weights = _weights(args)
    asked = [weights, args.activations, args.kv, args.prefill, args.index_keys, args.thinking, args.temp, args.seed]
    job = json.dumps(["endings", *asked, *prompts])
    with Journal(device_settings().cache / "rulers" / f"{key_of([job])}.jsonl", job) as journal:
        engine = open_engine(args)
        try:
            with progress_bar("answers") as progress:
                got = endings(
                    engine, prompts, thinking=args.thinking, temperature=args.temp, seed=args.seed, journal=journal,
                    progress=progress,
                )  # fmt: skip
        finally:
            engine.close()
        journal.discard()
    if args.json:
        print(json.dumps({"weights": weights, **got.to_json()}, ensure_ascii=False))
        return 0
    print_endings(got)
    return 0
