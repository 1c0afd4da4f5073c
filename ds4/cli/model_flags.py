"""Flags of every command that opens an engine, and the engine that they ask for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ds4.errors import FileFormatError, UsageError

if TYPE_CHECKING:
    from ds4.base.reader import Base
    from ds4.engine import Engine

Progress = Callable[[int, int], None]
MOST_CHUNK = 32_768  # temporaries of the released model take 20 GB then
MOST_MB = 1 << 30  # a petabyte


def add_model_flags(
    p: argparse.ArgumentParser, *, prefill: str, drafts: bool = False, embedded: bool = False, nightly: bool = False,
    optional: bool = False,
) -> None:  # fmt: skip
    """-m and how the engine computes; `prefill` is the command's default, `drafts`: it decodes, so it may draft;
    `embedded`: without -m it takes the embedded model's base; `optional`: it does without one; `nightly`: it makes
    what others mount, beside a server.
    """
    which = "the base file (.gguf)" + (" (default: the embedded model's)" if embedded else "")
    p.add_argument("-m", "--model", type=some_text, required=not (embedded or optional), metavar="BASE", help=which)
    p.add_argument(
        "--engram-dir", type=some_text, metavar="D", help="where the two n-gram shards lie (default: beside the base)"
    )
    p.add_argument(
        "--zchain", type=some_text, metavar="DIR",
        help="mount a domain's sidecar: a folder of gr_Lnn.bin and rb_Lnn.bin",
    )  # fmt: skip
    if not nightly:
        p.add_argument(
            "--posttrain", type=some_text, metavar="DIR",
            help="mount a post-training folder, solved on that sidecar; of `ds4 nightly`'s folder, the current night",
        )  # fmt: skip
    p.add_argument("--activations", choices=("bf16", "f32"), default="bf16", help="rounding between blocks")
    p.add_argument("--kv", choices=("fp4", "f32"), default="fp4", help="how caches are stored")
    p.add_argument("--prefill", choices=("full", "replay"), default=prefill, help=f"default here: {prefill}")
    p.add_argument("--index-keys", choices=("owner", "released"), default="owner", help="index keys of decode")
    p.add_argument("--chunk", type=_chunk, default=512, metavar="N", help="positions a prefill pass (same bits)")
    p.add_argument("--no-graph", action="store_true", help="launch every kernel of a step directly (same bits)")
    if drafts:
        p.add_argument("--no-dspark", action="store_true", help="no drafts: a token a pass (docs/sampling.md)")
        p.add_argument("--dspark-block", type=at_least_1, metavar="N", help="at most N drafts a round")
        p.add_argument(
            "--draft", choices=("drawn", "argmax"), help="how drafts are picked, no seed given (default: drawn)"
        )
        p.add_argument("--draft-k", type=_at_least_0, metavar="N", help="N drafts in every round, not what pays")
    budget = (
        "memory beside the server; what takes more borrows its device"
        if nightly
        else "refuse a model larger than this"
    )
    p.add_argument("--mem-budget-mb", type=at_least_1, metavar="N", help=budget)


def some_text(text: str) -> str:
    """A flag's value; an unset variable of a script is no path, and not the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; give it a value, or leave the flag away")
    return text


def between(low: int, high: int, text: str) -> int:
    """A flag's value; argparse names the flag and exits with 2."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number") from None
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text:.80}: must be between {low} and {high}")
    return value


def _chunk(text: str) -> int:
    return between(1, MOST_CHUNK, text)


def at_least_1(text: str) -> int:
    return _at_least(1, text)


def _at_least_0(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    """A flag's value; argparse names the flag and exits with 2."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value}: must be at least {least}")
    return value


def open_engine(args: argparse.Namespace) -> Engine:
    """The engine of these flags, with a bar while it loads."""
    with progress_bar("loading layers") as progress:
        engine = engine_of(args, progress)
    for warning in engine.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return engine


def engine_of(args: argparse.Namespace, progress: Progress | None) -> Engine:
    """The engine of these flags; `progress` gets (layers done, layers). It drafts where the command has the flags.

    Raises:
        UsageError: flags that contradict each other, or a value that the engine refuses.
        FileFormatError: the base, a sidecar, or a folder of nights whose current one is not there.
    """
    from ds4.engine import Engine
    from ds4.posttrain.nights import resolve

    check_draft_flags(args)
    return Engine.open(
        args.model,
        engram_dir=args.engram_dir,
        activations=args.activations,
        kv=args.kv,
        prefill=args.prefill,
        index_keys=args.index_keys,
        chunk=args.chunk,
        graphs=not args.no_graph,
        dspark=not getattr(args, "no_dspark", True),
        dspark_block=getattr(args, "dspark_block", None),
        draft_k=getattr(args, "draft_k", None),
        draft=getattr(args, "draft", None) or "drawn",
        zchain=args.zchain,
        posttrain=None if args.posttrain is None else resolve(args.posttrain),
        mem_budget_mb=args.mem_budget_mb,
        sessions=getattr(args, "sessions", 1),
        progress=progress,
    )


def check_draft_flags(args: argparse.Namespace) -> None:
    """Raises UsageError for flags about drafts beside --no-dspark."""
    if getattr(args, "no_dspark", False):
        for flag in ("dspark_block", "draft_k", "draft"):
            if getattr(args, flag) is not None:
                raise UsageError(f"--no-dspark makes no drafts: leave --{flag.replace('_', '-')} out, or --no-dspark")


def base_of(args: argparse.Namespace, *, with_shards: bool = True) -> Base:
    """The base of -m, from its headers and tables; nothing is placed.

    Raises:
        FileFormatError, MissingTensorError: it cannot be loaded, and why.
    """
    from ds4.base.reader import Base

    path = Path(args.model)
    if path.exists() and not path.is_file():  # reading a pipe would wait for its writer
        raise FileFormatError(f"{path}: is not a regular file; -m takes a base file (.gguf)")
    try:
        return Base.open(path, args.engram_dir, with_shards=with_shards)
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e})") from e


@contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """A bar on a terminal's stderr, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
