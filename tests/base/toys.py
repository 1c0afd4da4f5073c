"""Bases of the toy checkpoints, made once a process and shared by the tests of every room."""

import tempfile
from functools import cache
from pathlib import Path

from ds4.base.quantize import HashTables, quantize
from ds4.checkpoint.safetensors import load_arrays

DATA = Path(__file__).resolve().parents[1] / "data"


class ReferenceTables:
    """The engram tables that a fixture lists (its README: computed by the references)."""

    def __init__(self, folder: Path) -> None:
        a = load_arrays(folder / "reference.safetensors")
        self.token_map = a["engram.token_map"].astype("i4")
        self.multipliers, self.primes, self.offsets = (a[f"engram.{k}"] for k in ("multipliers", "primes", "offsets"))


@cache
def tables(name: str) -> HashTables:
    return ReferenceTables(DATA / name)


@cache
def toy_base(name: str, bits: int | None = None) -> Path:
    """The base of `oracle-a`, `-b` or `-e`; open it with engram_dir = toy_dir(name)."""
    folder = Path(tempfile.mkdtemp(prefix="ds4-toy-"))
    out = folder / f"{name}.gguf"
    quantize(toy_dir(name), out, tables(name), bits=bits)
    return out


def toy_dir(name: str) -> Path:
    return DATA / name
