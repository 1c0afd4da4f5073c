"""The embedded model's tokenizer and configuration.

    python -m train.tokenizer [--work DIR]

Byte-level BPE of 4,096 ids with the released pre-tokenizer and special tokens, learned from a balanced sample of
the train splits and the dialogues' text. The same corpora give the same file. Writes tokenizer.json and
config.json, the latter last.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from ds4.checkpoint.writer import replace_file
from ds4.errors import Ds4Error, FileFormatError
from ds4.model.tokenizer import Special
from train import data, vocabulary
from train.config import DIALOGUES, DOMAINS, TEXT_CONFIG, WORK, corpus_path, read_rows, read_tokenizer

CAP = 2_500_000  # characters a domain
SMALL_CAP = 1_500_000
SMALL = ("finance", "chinese")
PIECE = 20_000  # characters taken of one document, so that no book fills a domain's share
SEED = 1


def sample(work: Path) -> Iterator[str]:
    """Texts to learn merges from: documents in a shuffled order, each domain up to its cap."""
    for domain in DOMAINS:
        left = SMALL_CAP if domain in SMALL else CAP
        for text in _shuffled(read_texts(work, domain, "train")):
            yield text[:PIECE]
            left -= min(len(text), PIECE)
            if left <= 0:
                break
    left = CAP
    for text in _shuffled(_dialogue_texts(work)):
        yield text
        left -= len(text)
        if left <= 0:
            break


def read_texts(work: Path, domain: str, split: str) -> list[str]:
    """The documents of a plain domain.

    Raises:
        FileFormatError: missing, or a row without text.
    """
    path = corpus_path(work, domain, split)
    rows = list(read_rows(path))
    texts = [text for row in rows if isinstance(text := row.get("text"), str)]
    if not texts or len(texts) < len(rows):
        raise FileFormatError(f"{path}: needs rows with a text; run `python -m train.corpora`")
    return texts


def _dialogue_texts(work: Path) -> list[str]:
    """What lies between special tokens, dialogue by dialogue."""
    rows = read_rows(corpus_path(work, DIALOGUES, "train"))
    return ["\n".join(s for s in data.render_row(row) if not isinstance(s, Special)) for row in rows]


def _shuffled(texts: list[str]) -> list[str]:
    random.Random(SEED).shuffle(texts)
    return texts


def make(work: Path) -> None:
    """Learn the merges, write both files."""
    tokenizer_json = vocabulary.train_tokenizer(sample(work), f"the text in {work / 'corpora'}")
    config = vocabulary.make_config(tokenizer_json, TEXT_CONFIG)
    replace_file(work / "tokenizer.json", tokenizer_json.encode())
    replace_file(work / "config.json", json.dumps(config, indent=2).encode() + b"\n")


def report(work: Path) -> None:
    """Print bytes per token of each domain's judge text (train text where there is none)."""
    backend = data.backend_of(read_tokenizer(work))
    for domain in DOMAINS:
        split = "judge" if corpus_path(work, domain, "judge").is_file() else "train"
        texts = read_texts(work, domain, split)[:200]
        size = sum(len(t.encode()) for t in texts)
        ids = sum(len(e.ids) for e in backend.encode_batch_fast(texts, add_special_tokens=False))
        print(f"{domain:9} {size / ids:.2f} bytes a token")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.tokenizer", description="Learn the tokenizer.")
    parser.add_argument("--work", type=Path, default=WORK, help=f"working folder (default {WORK})")
    args = parser.parse_args(argv)
    try:
        make(args.work)
        report(args.work)
    except Ds4Error as e:
        print(f"tokenizer: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
