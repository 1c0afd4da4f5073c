"""Is it all here, before an hour of work: everything wrong with a checkpoint folder, in one list."""

from __future__ import annotations

from pathlib import Path

from ds4.checkpoint.scan import scan

TOKENIZER = "tokenizer.json"


def preflight(path: str | Path) -> list[str]:
    """Every problem of the checkpoint in `path`, one line each; an empty list means that work can begin.

    Broken files come first (each names file and place), then one line a tensor that is missing, extra or
    misshapen, then what the quantizer needs besides. Only headers are read.
    """
    folder = Path(path)
    problems = scan(folder).problems
    if folder.is_dir() and not (folder / TOKENIZER).is_file():
        problems.append(f"{folder / TOKENIZER}: is absent; the engram tables and the chat are derived from it")
    return problems
