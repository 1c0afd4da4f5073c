"""`ds4`: people come in here. One file a command; this one lists them and turns errors into exit codes.

Without a command name the arguments are `generate`'s: `ds4 -m BASE -p TEXT`.
Exit codes: 0 done, 1 the run failed, 2 the command line or a setting is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from ds4 import __version__
from ds4.cli.output import written
from ds4.errors import Ds4Error, RequestError, UsageError

# name -> module with add_parser(subparsers); read top to bottom it is the order of use
COMMANDS = {
    "fetch": "ds4.cli.fetch",
    "preflight": "ds4.cli.preflight",
    "quantize": "ds4.cli.quantize",
    "inspect": "ds4.cli.inspect",
    "verify": "ds4.cli.verify",
    "estimate": "ds4.cli.estimate",
    "doctor": "ds4.cli.doctor",
    "generate": "ds4.cli.generate",
    "score": "ds4.cli.score",
    "teacher": "ds4.cli.teacher",
    "diff": "ds4.cli.diff",
    "corpus": "ds4.cli.corpus",
    "sidecar": "ds4.cli.sidecar",
    "ruler": "ds4.cli.ruler",
    "solve": "ds4.cli.solve",
    "posttrain": "ds4.cli.posttrain",
    "nightly": "ds4.cli.nightly",
    "forget": "ds4.cli.forget",
}


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, or of one: a command's imports are paid for when it is used."""
    parser = argparse.ArgumentParser(
        prog="ds4",
        description="An engine for DeepSeek-V4.1-Flash on one machine.",
        epilog="ds4 -m BASE -p TEXT is short for ds4 generate -m BASE -p TEXT. The server is ds4-server.",
    )
    parser.add_argument("--version", action="version", version=f"ds4 {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        if only is None or name == only:
            importlib.import_module(module).add_parser(subparsers)
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse and run one command; argparse exits with 2 by itself."""
    return guarded(lambda: _run(list(argv)))


def _run(args: list[str]) -> int:
    if args and args[0].startswith("-") and args[0] not in ("-h", "--help", "--version"):
        args.insert(0, "generate")
    only = args[0] if args and args[0] in COMMANDS else None
    parsed = build_parser(only).parse_args(args)
    return int(parsed.run(parsed))


def guarded(work: Callable[[], int]) -> int:
    """Run `work`; an error meant for the user becomes one line on stderr and an exit code."""
    try:
        return written(work)
    except (UsageError, RequestError) as e:  # wrong flags, or ids and prompts that the model cannot take
        print(f"error: {e}", file=sys.stderr)
        return 2
    except Ds4Error as e:
        print(f"error: {e}", file=sys.stderr)
        for line in getattr(e, "problems", ()):
            print(f"  {line}", file=sys.stderr)
        return 1
    except OSError as e:  # what no room foresaw
        print(f"error: {e.filename or 'input or output'}: {e.strerror or e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
