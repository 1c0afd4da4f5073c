"""The dimensions of the embedded model, and the working folder's files that every command of `train` reads.

One place says them: the toy checkpoint's `TEXT_CONFIG`, with what the trained model has different.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer
from train import make_toy

WORK = Path("var/train")
DOMAINS = ("code", "law", "medicine", "science", "finance", "general", "chinese")  # trained on
DIALOGUES = "dialogues"
UNSEEN = "unseen"  # judged, never trained on
SPLITS = ("train", "fit", "judge")

TEXT_CONFIG: dict[str, Any] = {**make_toy.TEXT_CONFIG, "dspark_markov_rank": 64}


def read_config(work: Path) -> tuple[dict[str, Any], ModelConfig]:
    """The working folder's config.json, raw and checked; its dimensions must be those of this checkout.

    Raises:
        FileFormatError: missing, not JSON, or made for other dimensions.
        ConfigError: a key is missing, unknown or impossible.
    """
    path = work / "config.json"
    raw = _json(path, "run `python -m train.tokenizer` first")
    config = ModelConfig.from_json(raw)
    for key, value in TEXT_CONFIG.items():
        found = raw["text_config"].get(key)
        if found != value:
            raise FileFormatError(
                f"{path}: {key} is {found!r}, this checkout trains {value!r}; "
                "use another --work folder, or the checkout that made this one"
            )
    return raw, config


def read_tokenizer(work: Path) -> Tokenizer:
    """The working folder's tokenizer.json.

    Raises:
        FileFormatError: missing or not this model's.
    """
    path = work / "tokenizer.json"
    if not path.is_file():
        raise FileFormatError(f"{path}: is not there; run `python -m train.tokenizer` first")
    return Tokenizer.from_file(path, read_config(work)[1])


def corpus_path(work: Path, domain: str, split: str) -> Path:
    return work / "corpora" / f"{domain}.{split}.jsonl"


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file, one after the other.

    Raises:
        FileFormatError: missing, or a line that is not an object; names the line.
    """
    n = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for n, line in enumerate(lines, 1):
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise FileFormatError(f"{path}: line {n} is not an object")
                yield row
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e}); run `python -m train.corpora`") from e
    except ValueError as e:
        raise FileFormatError(f"{path}: line {n} is not JSON ({e})") from e


def _json(path: Path, hint: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e}); {hint}") from e
    except ValueError as e:
        raise FileFormatError(f"{path}: is not JSON ({e}); {hint}") from e
