"""`ds4 posttrain refit`: gains refitted on the text of logged requests, on the sidecar that is mounted."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from ds4 import embedded
from ds4.base.codebook import Workers
from ds4.base.reader import Base
from ds4.cli.embedded_base import embedded_base
from ds4.cli.model_flags import progress_bar, some_text
from ds4.corpus.domain import Domain
from ds4.engine import Engine
from ds4.errors import UsageError
from ds4.model.tokenizer import Tokenizer
from ds4.posttrain.log import Logged, days, existing_folder, parse_day, read_file
from ds4.server.request import Card
from ds4.teacher.numerics import ARITHMETICS
from ds4.teacher.run import Teacher
from ds4.teacher.source import BaseSource, open_source
from ds4.teacher.tasks import Helpers, worth
from ds4.work.choose import add_flags, crew_of
from rulers.identity import file_mark, model_fingerprint
from rulers.teacher_scores import weights_mark
from solvers.day_text import SLICE, SOURCE, DayText, Unread, beside, day_text, domain_text, domains_beside
from solvers.fixture import DTYPES, Fixture, make_fixture, plan_fixture
from solvers.refit import LAYERS, refit, report, require_requests
from solvers.workfolder import check_name

TOKENS, LENGTH = 8192, 512
BESIDE_TOKENS, NONE = 4096, "none"
MOST_UNREAD = 20  # told line by line


def add_parser(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    s = below.add_parser(
        "refit",
        help="gains refitted on the text of requests",
        description="Solve a post-training folder on the text of logged requests: gains that bring each layer "
        "nearer to the original on it, on the sidecar that is mounted (docs/solver.md, Refit). Goes on where an "
        "interrupted run stopped.",
        epilog="The folder appears when all layers are done. manifest.json has every figure, manifest.txt a table. "
        "Until then DIR.requests has the requests' tokens; forget a request, and run the command again or remove it.",
    )
    s.add_argument("--log", required=True, metavar="DIR", help="the log of ds4-server --log-requests")
    s.add_argument("--day", metavar="D", help="the day, 2026-11-30 (default: the newest of the log)")
    s.add_argument("--days", type=int, default=1, metavar="N", help="and days before it, N in all (default 1)")
    s.add_argument("-m", "--model", metavar="BASE", help="the base file (.gguf) (default: the embedded model's)")
    s.add_argument(
        "--engram-dir", type=some_text, metavar="D", help="where the two n-gram shards lie (default: beside the base)"
    )
    s.add_argument("--teacher", metavar="CKPT", help="the original: a checkpoint folder (default: the embedded one)")
    s.add_argument("--arith", choices=ARITHMETICS, default="none", help="where the original rounds activations")
    s.add_argument(
        "--zchain", type=some_text, metavar="DIR", help="the sidecar that the folder is for (default: none)"
    )
    s.add_argument("-o", "--out", required=True, metavar="DIR", help="the folder to make")
    s.add_argument("--layers", choices=LAYERS, default="all", help="all layers in sequence, or the last one alone")
    s.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N",
        help=f"at most N tokens, requests taken evenly (default {TOKENS})",
    )  # fmt: skip
    s.add_argument(
        "--length", type=int, default=LENGTH, metavar="N",
        help=f"at most N tokens of a request, its last ones (default {LENGTH})",
    )  # fmt: skip
    s.add_argument(
        "--beside", action="append", metavar="NAME",
        help="text of this domain too, which is not to suffer; may be repeated; none: without (default: general, and "
        "the domain of the sidecar)",
    )  # fmt: skip
    s.add_argument(
        "--beside-tokens", type=int, default=BESIDE_TOKENS, metavar="N",
        help=f"about N tokens of each (default {BESIDE_TOKENS})",
    )  # fmt: skip
    s.add_argument(
        "--fixture-dtype", choices=DTYPES, default="f32", help="how the original's inputs and outputs are kept"
    )
    add_flags(s)
    s.add_argument("--json", action="store_true", help="print the manifest as JSON")
    s.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    out = Path(args.out)
    check_name(out)
    Workers(args.workers)  # says at once if that cannot be
    logged, broken, split = _logged(args)
    zchain = None if args.zchain is None else Path(args.zchain)
    domains = [Domain.open(name) for name in args.beside or domains_beside(zchain) if name != NONE]
    checkpoint = Path(args.teacher) if args.teacher is not None else embedded.checkpoint()
    teacher = Teacher(open_source(checkpoint), args.arith)
    if args.model is None:
        with progress_bar("making the embedded model's base") as progress:
            args.model = embedded_base(progress)
        args.engram_dir = args.engram_dir or embedded.checkpoint()
    base = Base.open(args.model, args.engram_dir)
    ours, theirs = model_fingerprint(BaseSource(base)), model_fingerprint(teacher.stream.source)
    if ours != theirs:  # before the hours that the original takes
        raise UsageError(
            f"{args.model} is of model {ours}, {checkpoint} of model {theirs}: refit a base against the checkpoint "
            "that it was made from (--teacher)"
        )
    tokenizer = Tokenizer.from_base(base.tokenizer_data(), base.config, str(base.path), base.folders)
    day = day_text(
        logged, Card(base.path.name, base.config, tokenizer, {}), length=args.length, tokens=args.tokens
    )  # fmt: skip
    _tell(day, [*broken, *day.unread])
    require_requests(len(day.documents), f"{args.log}, {split}")
    others = [
        domain_text(d, tokenizer, base.config.bos_token_id, length=args.length, tokens=args.beside_tokens)
        for d in domains
    ]
    text, documents = beside(day, others)
    about = {
        "base": f"{Path(args.model).name} {file_mark(args.model)}",
        "teacher": f"{checkpoint.resolve().name} {weights_mark(checkpoint)}",
        "zchain": None if zchain is None else zchain.resolve().name, "length": args.length,
        "beside": [
            {"domain": d.name, "tokens": len(more), "slice_sha256": d.sha256(SLICE)}
            for d, (more, _) in zip(domains, others, strict=True)
        ],
    }  # fmt: skip
    with _private(out) as folder:
        name = f"{text.digest[:16]}-{args.arith}-{args.fixture_dtype}.fixture"
        for path in folder.iterdir():
            if not path.name.startswith(name):
                path.unlink()  # of other requests, which may have been forgotten since
        plan = plan_fixture(
            folder / name, teacher, text, documents, domain=SOURCE, split=split, dtype=args.fixture_dtype
        )  # fmt: skip
        with crew_of(args.workers, args.cluster) as crew, progress_bar("the original works") as progress:
            crew = worth(crew, teacher.config)
            helpers = None if crew is None else Helpers(crew, str(checkpoint.resolve()), args.arith)
            fixture = make_fixture(plan, teacher, say=_say, progress=progress, helpers=helpers)
        manifest = _solve(args, teacher, fixture, about)
    print(json.dumps(manifest, ensure_ascii=False) if args.json else report(manifest), end="\n" if args.json else "")
    return 0


def _logged(args: argparse.Namespace) -> tuple[list[Logged], list[Unread], str]:
    """The wanted days' requests, their broken lines, and the name of the time that they are of."""
    if args.days < 1:
        raise UsageError(f"--days {args.days}: must be at least 1")
    there = days(existing_folder(args.log))
    if not there:
        raise UsageError(f"--log {args.log}: has no requests; ds4-server --log-requests {args.log} keeps them")
    last = max(there) if args.day is None else parse_day(args.day)
    wanted = [day for day in there if 0 <= (last - day).days < args.days]
    split = _span(last, args.days)
    if not wanted:
        raise UsageError(
            f"--log {args.log}: has no requests of {split}; its days go from {min(there)} to {max(there)}"
        )
    logged: list[Logged] = []
    broken: list[Unread] = []
    for day in wanted:
        found, problems = read_file(there[day])
        logged += found
        broken += [Unread(there[day], p) for p in problems]
    return logged, broken, split


def _span(last: date, n: int) -> str:
    first = date.fromordinal(max(last.toordinal() - n + 1, 1))
    return str(last) if n == 1 else f"{first} to {last}"


@contextmanager
def _private(out: Path) -> Iterator[Path]:
    """OUT.requests, a folder that nobody else can look into; gone when the work is done, kept for a resume if not."""
    folder = out.with_name(f"{out.name}.requests")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
    except OSError as e:
        raise UsageError(f"{folder}: cannot be the folder of the requests' text ({e.strerror}); remove it") from e
    yield folder
    shutil.rmtree(folder)


def _solve(args: argparse.Namespace, teacher: Teacher, fixture: Fixture, about: dict[str, Any]) -> dict[str, Any]:
    with progress_bar("loading layers") as progress:
        engine = Engine.open(args.model, engram_dir=args.engram_dir, progress=progress)
    try:
        with (
            crew_of(1, args.cluster) as far,
            Workers(args.workers, far) as workers,
            progress_bar("solving") as progress,
        ):
            return refit(
                engine, teacher, fixture, None if args.zchain is None else Path(args.zchain), Path(args.out), about,
                layers=args.layers, workers=workers, say=_say, progress=progress,
            )  # fmt: skip
    finally:
        engine.close()


def _tell(day: DayText, unread: Sequence[Unread]) -> None:
    """What is refitted on, and what not."""
    _say(
        f"{day.requests} requests, {len(day.documents)} conversations, {len(day.text):,} tokens; {day.repeated} "
        f"repeat others, {day.passed_over} had no room, {len(unread)} cannot be read"
    )
    for line in unread[:MOST_UNREAD]:
        _say(f"  {line}")
    if len(unread) > MOST_UNREAD:
        _say(f"  and {len(unread) - MOST_UNREAD} more")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
