"""The embedded model's base for commands that take it when none is given: made once, kept in the build cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import ds4
from ds4 import embedded
from ds4.base.experts import Gain
from ds4.base.quantize import quantize
from ds4.checkpoint.reader import Checkpoint
from ds4.cli.home import source_key
from ds4.cli.model_flags import Progress
from ds4.engram.tables import derive_tables
from ds4.model.tokenizer import Tokenizer
from ds4.settings import device_settings


def embedded_base(progress: Progress | None = None) -> Path:
    """The base by base.toml's recipe; its n-gram shards are `embedded.checkpoint()`'s. An interrupted run goes on.

    The folder is named by a hash of the model, the recipe and the quantizer's sources: a change of either makes a new
    one.

    Raises:
        FileFormatError: the embedded model is not there, or is damaged.
        UsageError: another process is making it.
        CapacityError: the disk is full.
    """
    checkpoint, recipe = embedded.checkpoint(), embedded.recipe()
    key = source_key(Path(ds4.__file__).parent, ["base"], embedded.key_parts())
    out = device_settings().cache / "embedded" / key / "embedded.gguf"
    if out.is_file():
        return out
    embedded.verify()
    out.parent.mkdir(parents=True, exist_ok=True)
    config = Checkpoint.open(checkpoint).config
    tables = derive_tables(config, Tokenizer.from_file(checkpoint / "tokenizer.json", config))
    quantize(
        checkpoint, out, tables, bits=recipe.bits, gain=cast(Gain, recipe.gain), workers=os.cpu_count() or 1,
        progress=None if progress is None else lambda _, done, total: progress(done, total),
    )  # fmt: skip
    return out
