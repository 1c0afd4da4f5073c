"""Bases of the embedded model, made once and kept in the build cache: what a bench runs on when no base is given."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import cast

from ds4 import embedded
from ds4.base.experts import Gain
from ds4.base.quantize import quantize
from ds4.checkpoint.reader import Checkpoint
from ds4.engram.tables import derive_tables
from ds4.model.tokenizer import Tokenizer
from ds4.settings import device_settings

ROOT = Path(__file__).resolve().parent.parent


def embedded_base(recipe: embedded.Recipe | None = None, folder: Path | None = None) -> tuple[Path, Path]:
    """(base file, folder of its n-gram shards), made if it is not there yet; by base.toml's recipe if none is given.

    The base's folder is named by a hash of the model, of the recipe and of the quantizer's sources, so that a change
    makes a new one. Published by one rename: two processes may ask at once.

    Raises:
        FileFormatError: the embedded model is not there, or is damaged.
        UsageError: no such width or gain.
    """
    checkpoint = embedded.checkpoint()
    recipe = recipe or embedded.recipe()
    key = cache_key("base", repr(recipe), *sorted((ROOT / "ds4" / "base").glob("*.py")))
    home = (folder or device_settings().cache / "bench") / key
    if not home.exists():
        embedded.verify()
        home.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="making-", dir=home.parent))
        try:
            config = Checkpoint.open(checkpoint).config
            tables = derive_tables(config, Tokenizer.from_file(checkpoint / "tokenizer.json", config))
            workers, gain = os.cpu_count() or 1, cast(Gain, recipe.gain)
            quantize(checkpoint, made / "embedded.gguf", tables, bits=recipe.bits, gain=gain, workers=workers)
            made.rename(home)
        except OSError:
            if not home.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return home / "embedded.gguf", checkpoint


def cache_key(*parts: str | Path) -> str:
    """Sixteen hex digits that change with the embedded model, with a text, or with what a file holds."""
    h = hashlib.sha256()
    for part in (*embedded.key_parts()[1:], *parts):  # the first one is base.toml's recipe; a base here has its own
        data = part.read_bytes() if isinstance(part, Path) else part.encode()
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()[:16]
