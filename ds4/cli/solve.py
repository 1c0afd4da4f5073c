"""`ds4 solve`: from a base, its original and a domain's text to what mends the base for that domain."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ds4 import embedded
from ds4.base.codebook import Workers
from ds4.base.reader import Base
from ds4.cli.embedded_base import embedded_base
from ds4.cli.model_flags import progress_bar, some_text
from ds4.corpus import Document
from ds4.corpus.domain import Domain
from ds4.engine import Engine
from ds4.errors import UsageError
from ds4.model.tokenizer import Tokenizer
from ds4.settings import device_settings
from ds4.teacher.numerics import ARITHMETICS
from ds4.teacher.run import Teacher
from ds4.teacher.source import BaseSource, open_source
from ds4.teacher.tasks import Helpers, worth
from ds4.work.choose import add_flags, crew_of
from rulers.identity import file_mark, model_fingerprint
from rulers.teacher_scores import weights_mark
from rulers.text import Text
from solvers.fixture import DTYPES, Fixture, make_fixture, plan_fixture
from solvers.sidecar import WAYS, report, solve_sidecar, to_json
from solvers.workfolder import check_name

TOKENS, LENGTH, SLICE = 8192, 512, "fit"
BESIDE, BESIDE_TOKENS, NONE = "general", 4096, "none"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "solve",
        help="mend a base for a domain",
        description="What mends a base for a domain (docs/solver.md).",
    )
    below = p.add_subparsers(dest="solve_command", metavar="WHAT", required=True)
    s = below.add_parser(
        "sidecar",
        help="router biases and gains for a domain",
        description="Solve a domain's sidecar, layer by layer, on the engine's own captures of the domain's fit "
        "slice against the original. Goes on where an interrupted run stopped; the original's part is kept in the "
        "cache.",
        epilog="The folder appears when all layers are done. manifest.json has every figure, manifest.txt a table.",
    )
    s.add_argument("-m", "--model", metavar="BASE", help="the base file (.gguf) (default: the embedded model's)")
    s.add_argument(
        "--engram-dir", type=some_text, metavar="D", help="where the two n-gram shards lie (default: beside the base)"
    )
    s.add_argument("--teacher", metavar="CKPT", help="the original: a checkpoint folder (default: the embedded one)")
    s.add_argument("--arith", choices=ARITHMETICS, default="none", help="where the original rounds activations")
    s.add_argument("--domain", required=True, metavar="NAME", help="a domain, or its folder")
    s.add_argument("-o", "--out", required=True, metavar="DIR", help="the folder to make")
    s.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"about N tokens of it (default {TOKENS})")
    s.add_argument(
        "--length", type=int, default=LENGTH, metavar="N", help=f"in windows of at most N tokens (default {LENGTH})"
    )
    s.add_argument(
        "--beside", default=BESIDE, metavar="NAME",
        help=f"solve with text of this domain too, which is not to suffer; none: without (default {BESIDE})",
    )  # fmt: skip
    s.add_argument(
        "--beside-tokens", type=int, default=BESIDE_TOKENS, metavar="N",
        help=f"about N tokens of that (default {BESIDE_TOKENS})",
    )  # fmt: skip
    s.add_argument("--way", choices=tuple(WAYS), default="best", help="how a layer is solved")
    s.add_argument(
        "--fixture-dtype", choices=DTYPES, default="f32", help="how the original's inputs and outputs are kept"
    )
    add_flags(s)
    s.add_argument("--json", action="store_true", help="print the manifest as JSON")
    s.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_name(Path(args.out))
    Workers(args.workers)  # says at once if that cannot be
    domain = Domain.open(args.domain)
    beside = None if args.beside == NONE else Domain.open(args.beside)
    if beside is not None and beside.sha256(SLICE) == domain.sha256(SLICE):
        beside = None  # a text need not be kept from harming itself
    checkpoint = Path(args.teacher) if args.teacher is not None else embedded.checkpoint()
    teacher = Teacher(open_source(checkpoint), args.arith)
    if args.model is None:
        with progress_bar("making the embedded model's base") as progress:
            args.model = embedded_base(progress)
        args.engram_dir = args.engram_dir or embedded.checkpoint()
    ours = model_fingerprint(BaseSource(Base.open(args.model, args.engram_dir)))
    theirs = model_fingerprint(teacher.stream.source)
    if ours != theirs:  # before the hours that the original takes
        raise UsageError(
            f"{args.model} is of model {ours}, {checkpoint} of model {theirs}: solve a base against the checkpoint "
            "that it was made from (--teacher)"
        )
    fixture, text_beside = _fixture(args, domain, beside, checkpoint, teacher)
    fixture.require(ours, str(args.model))
    about = {
        "base": f"{Path(args.model).name} {file_mark(args.model)}",
        "teacher": f"{checkpoint.resolve().name} {weights_mark(checkpoint)}",
        "slice_sha256": domain.sha256(SLICE), "length": args.length, "beside": text_beside,
    }  # fmt: skip
    with progress_bar("loading layers") as progress:
        engine = Engine.open(args.model, engram_dir=args.engram_dir, progress=progress)
    try:
        # here threads solve a layer, which share its rows; processes would be sent them
        with (
            crew_of(1, args.cluster) as far,
            Workers(args.workers, far) as workers,
            progress_bar("solving") as progress,
        ):
            manifest = solve_sidecar(
                engine, teacher, fixture, Path(args.out), about,
                way=args.way, workers=workers, say=_say, progress=progress,
            )  # fmt: skip
    finally:
        engine.close()
    print(to_json(manifest) if args.json else report(manifest), end="")
    return 0


def _fixture(
    args: argparse.Namespace, domain: Domain, beside: Domain | None, checkpoint: Path, teacher: Teacher
) -> tuple[Fixture, dict[str, Any] | None]:
    """What the original does on the domain's text and on that beside it, from the cache or made; which text is beside
    it, for the manifest.
    """
    config = teacher.config
    tokenizer = Tokenizer.from_file(checkpoint / "tokenizer.json", config)

    def cut(chosen: Domain, tokens: int) -> tuple[Text, list[Document]]:
        documents = list(chosen.documents(SLICE))
        texts = [d.text for d in documents]
        return Text.cut(texts, tokenizer.encode, config.bos_token_id, length=args.length, tokens=tokens), documents

    text, documents = cut(domain, args.tokens)
    mark, about = domain.sha256(SLICE)[:8], None
    if beside is not None:
        more, its_documents = cut(beside, args.beside_tokens)
        text, documents = text.and_then(more, len(documents)), documents + its_documents
        about = {"domain": beside.name, "tokens": len(more), "slice_sha256": beside.sha256(SLICE)}
        mark += f"-{beside.sha256(SLICE)[:8]}"
    folder = device_settings().cache / "fixtures"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"{folder}: no folder for the original's part can be made there ({e.strerror})") from e
    name = f"{model_fingerprint(teacher.stream.source)}-{weights_mark(checkpoint)}-{text.digest[:16]}"
    out = folder / f"{name}-{args.arith}-{args.fixture_dtype}-{mark}.fixture"
    plan = plan_fixture(
        out, teacher, text, documents, domain=domain.name, split=SLICE, dtype=args.fixture_dtype
    )  # fmt: skip
    with crew_of(args.workers, args.cluster) as crew, progress_bar("the original works") as progress:
        crew = worth(crew, config)
        helpers = None if crew is None else Helpers(crew, str(checkpoint.resolve()), args.arith)
        return make_fixture(plan, teacher, say=_say, progress=progress, helpers=helpers), about


def _say(line: str) -> None:
    print(line, file=sys.stderr)
