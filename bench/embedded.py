"""The embedded model's base, made once and kept in the build cache: what a bench runs on when no base is given."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ds4.base.quantize import quantize
from ds4.checkpoint.reader import Checkpoint
from ds4.engram.tables import derive_tables
from ds4.errors import FileFormatError
from ds4.model.tokenizer import Tokenizer
from ds4.settings import device_settings

ROOT = Path(__file__).resolve().parent.parent
MAKER = ROOT / "train" / "make_toy.py"


def embedded_base(folder: Path | None = None) -> tuple[Path, Path]:
    """(base file, folder of its n-gram shards), made if they are not there yet.

    The folder's name holds a hash of the scripts that make them, so that a change makes new ones. Published by one
    rename: two processes may ask at once.

    Raises:
        FileFormatError: the checkpoint could not be made; says what its maker said.
    """
    key = hashlib.sha256()
    for source in (MAKER, *sorted((ROOT / "ds4" / "base").glob("*.py"))):
        key.update(source.read_bytes())
    home = (folder or device_settings().cache / "bench") / key.hexdigest()[:16]
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="making-", dir=home.parent))
        try:
            _make(made)
            made.rename(home)
        except OSError:
            if not home.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return home / "embedded.gguf", home / "checkpoint"


def _make(folder: Path) -> None:
    checkpoint = folder / "checkpoint"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    ran = subprocess.run([sys.executable, str(MAKER), "-o", str(checkpoint)], capture_output=True, text=True, env=env)
    if ran.returncode:
        raise FileFormatError(f"{MAKER.name} failed: {ran.stderr.strip()}")
    config = Checkpoint.open(checkpoint).config
    tables = derive_tables(config, Tokenizer.from_file(checkpoint / "tokenizer.json", config))
    quantize(checkpoint, folder / "embedded.gguf", tables)
