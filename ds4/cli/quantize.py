"""`ds4 quantize`: a checkpoint in the released layout becomes a base file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ds4.base.codebook import Assigner
from ds4.base.experts import DEFAULT_GAIN, GAINS
from ds4.base.inspect import packed_bytes, plan_rows
from ds4.base.plan import PlannedTensor, plan
from ds4.base.quantize import quantize
from ds4.checkpoint.reader import Checkpoint
from ds4.device.driver import NVIDIA_NODES
from ds4.engram.tables import EngramTables, derive_tables
from ds4.errors import UsageError
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer
from ds4.teacher.files import check_output
from ds4.work.choose import add_flags, crew_of


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "quantize",
        help="make a base file from a checkpoint",
        description="Vector-quantize the experts and store the rest in blocks. An interrupted run goes on.",
    )
    p.add_argument("path", metavar="DIR", nargs="?", help="a checkpoint folder in the released layout")
    p.add_argument("-o", "--out", metavar="BASE.gguf", help="the file to write")
    p.add_argument(
        "--bits",
        metavar="N",
        help="index bits of the experts: one number, or N,N,... with one a layer",
    )
    p.add_argument(
        "--gain", choices=GAINS, default=DEFAULT_GAIN, help=f"the rule of the row gains (default {DEFAULT_GAIN})"
    )
    add_flags(p)
    p.add_argument(
        "--assign", choices=("auto", "blas", "gpu"), default="auto",
        help="what assigns vectors to codewords: auto is the GPU where there is one (its bytes differ from BLAS')",
    )  # fmt: skip
    p.add_argument("--force", action="store_true", help="replace BASE.gguf if it exists")
    p.add_argument("--plan", metavar="DIR|CONFIG", help="only list the tensors of the base; needs no weights")
    p.add_argument("--json", action="store_true", help="print the plan, or the report, as JSON")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    bits = _bits(args.bits)
    if args.plan is not None:
        if args.path is not None or args.out is not None:
            raise UsageError("--plan takes the checkpoint or its config.json itself: leave DIR and -o out")
        return _print_plan(plan(ModelConfig.load(args.plan), bits), args.json)
    if args.path is None or args.out is None:
        raise UsageError("give a checkpoint folder and -o BASE.gguf, or --plan DIR")
    if args.workers < 1:
        raise UsageError(f"--workers is {args.workers}; it must be at least 1")
    if check_output(args.out, ".gguf").exists() and not args.force:
        raise UsageError(f"{args.out} exists; replace it with --force, or choose another name")
    assigner = _assigner(args.assign)
    if assigner is not None and args.cluster is not None:
        raise UsageError("--cluster computes with BLAS, here a GPU would assign: add --assign blas")
    workers = args.workers if assigner is None else 1  # processes quantize with BLAS, a GPU does it alone
    with crew_of(workers, args.cluster) as crew, _bar() as progress:
        report = quantize(
            args.path, args.out, tables_of(args.path), bits=bits, gain=args.gain, workers=args.workers,
            progress=progress, assigner=assigner, crew=crew, overwrite=args.force,
        )  # fmt: skip
    if args.json:
        print(json.dumps(report))
    else:
        size = Path(args.out).stat().st_size
        print(f"{args.out}: {size:,} bytes; errors by tensor in {Path(args.out).name}.report.json")
    return 0


def tables_of(folder: str | Path) -> EngramTables | None:
    """The n-gram tables of a checkpoint, derived from its tokenizer; None for a model without engram layers.

    Raises:
        FileFormatError: no tokenizer.json, or one that gives other numbers than config.json says.
    """
    config = Checkpoint.open(folder).config
    if not config.engram_layer_ids:
        return None
    return derive_tables(config, Tokenizer.from_file(Path(folder) / "tokenizer.json", config))


def _assigner(wanted: str) -> Assigner | None:
    """None: BLAS. A GPU that is there but does not work is an error, not a slower run."""
    if wanted == "blas" or (wanted == "auto" and not any(Path(node).exists() for node in NVIDIA_NODES)):
        return None
    from ds4.base.lloyd_gpu import GpuAssigner
    from ds4.device import Device

    return GpuAssigner(Device.open(driver="nvidia"))


def _bits(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--bits is {text!r}; expected a number, or numbers separated by commas") from None
    return values[0] if len(values) == 1 else values


def _print_plan(planned: list[PlannedTensor], as_json: bool) -> int:
    rows = plan_rows(planned)
    if as_json:
        print(json.dumps(rows))
        return 0
    table = Table("tensor", "type", "dims", "bytes")
    for row in rows:
        table.add_row(row["name"], row["type"], "x".join(map(str, row["dims"])), f"{row['bytes']:,}")
    Console().print(table)
    print(f"{len(rows)} tensors, {packed_bytes(planned):,} bytes as packed in the file")
    return 0


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("quantizing", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
