"""Is it all here, before an hour of work: everything wrong with a checkpoint folder, in one list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ds4.checkpoint.files import link_that_leads_out
from ds4.checkpoint.names import companion
from ds4.checkpoint.safetensors import TensorInfo
from ds4.checkpoint.scan import plain_file_name, scan
from ds4.model.config import ModelConfig

TOKENIZER = "tokenizer.json"


def preflight(path: str | Path) -> list[str]:
    """Every problem of the checkpoint in `path`, one line each; an empty list means that work can begin.

    Broken files come first (each names file and place), then one line a tensor that is missing, extra or
    misshapen, then what the quantizer needs besides. Only headers are read.
    """
    folder = Path(path)
    found = scan(folder)
    problems = found.problems
    if found.config is not None:
        problems += engram_shard_problems(folder, found.config, found.infos)
    if folder.is_dir() and not (folder / TOKENIZER).is_file():
        problems.append(f"{folder / TOKENIZER}: is absent; the engram tables and the chat are derived from it")
    return problems


def engram_shard_problems(folder: Path, config: ModelConfig, infos: Mapping[str, TensorInfo]) -> list[str]:
    """One line for each shard with engram tables that a base could not point at: the engine reads these shards
    in place, by name, and refuses links out of their folder. Other shards may be links."""
    weights = [f"layers.{layer}.engram.embed.weight" for layer in config.engram_layer_ids]
    names = [name for weight in weights for name in (weight, companion(weight)) if name in infos]
    problems = []
    for file in sorted({infos[name].file for name in names}):
        if not plain_file_name(file.name):
            problems.append(f"{folder}: shard {file.name!a} holds engram tables: give it a plain file name")
        elif fault := link_that_leads_out(file, folder):
            problems.append(f"{file}: holds engram tables and {fault}")
    return problems
