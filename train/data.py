"""Token files, and the windows that training and judging draw from them.

    python -m train.data [--work DIR]

Encodes every corpus and the dialogues. A plain document is BOS, its ids, EOS; a dialogue is exactly what
`ds4.model.chat` renders, ids from the product's tokenizer, so special tokens are real and text that spells one
stays text. A file whose text and tokenizer have not changed since is kept, so an interrupted run goes on.

    tokens/{domain}.{split}.bin         uint16, little endian
    tokens/{domain}.{split}.starts.bin  int64, where each document begins
    tokens/index.json                   tokens, bytes of text, documents, and the hash of what it was made from
"""

from __future__ import annotations

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # before the library's import; order is kept

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from ds4.checkpoint.writer import replace_file
from ds4.errors import Ds4Error, FileFormatError
from ds4.model import chat
from ds4.model.tokenizer import BOS, EOS, Segment, Special, Tokenizer
from train.config import DIALOGUES, DOMAINS, SPLITS, UNSEEN, WORK, corpus_path, read_rows, read_tokenizer

TOKEN = np.dtype("<u2")
START = np.dtype("<i8")
LOT = 256  # documents encoded at a time
# The share of windows that begin where a document begins.
START_SHARE = 0.5
DIALOGUE_START_SHARE = 0.8


class Batches:
    """Endless training windows drawn from token files.

    The n-th batch depends on (seed, rank, n) only, so a resumed run goes on with the same batches. Domains are
    drawn systematically: in each batch a domain has its share of the rows, rounded up or down at random.

    Args:
        work: the working folder.
        weights: domain to its share of the rows; they need not sum to 1.
        batch, length: rows a batch, tokens a row without the one more that is only predicted.
        seed, rank: of the run, and of the process in it.

    Raises:
        FileFormatError: a domain has no token file, or one shorter than a window.
    """

    def __init__(
        self, work: Path, weights: Mapping[str, float], batch: int, length: int, seed: int, rank: int
    ) -> None:
        if not weights or min(weights.values()) <= 0:
            raise FileFormatError(f"the mix {dict(weights)} needs domains with weights above 0")
        self._files = [TokenFile(work, domain, "train") for domain in weights]
        for file in self._files:
            file.need(length + 1)
        self._shares = np.cumsum(np.array(list(weights.values()), np.float64)) / sum(weights.values())
        self._batch, self._length, self._seed, self._rank = batch, length, seed, rank

    def batch(self, step: int) -> NDArray[np.int64]:
        """Batch number `step`, from 0: i64 [batch, length + 1]."""
        rng = np.random.default_rng([self._seed, self._rank, step])
        points = (rng.permutation(self._batch) + rng.random()) / self._batch
        which = np.minimum(np.searchsorted(self._shares, points, side="right"), len(self._files) - 1)
        out = np.empty((self._batch, self._length + 1), np.int64)
        for row, k in zip(out, which):
            row[:] = self._files[k].draw(rng, self._length + 1)
        return out


class TokenFile:
    """One domain's tokens of one split, mapped.

    Attributes:
        ids: u16 [tokens].
        starts: i64 [documents], rising, the first 0.
    """

    def __init__(self, work: Path, domain: str, split: str) -> None:
        """Map the files.

        Raises:
            FileFormatError: they are not there, or do not fit together.
        """
        self.path = token_path(work, domain, split)
        self._dialogues = domain == DIALOGUES
        try:
            self.ids: NDArray[np.uint16] = np.memmap(self.path, TOKEN, mode="r")
            self.starts: NDArray[np.int64] = np.fromfile(starts_path(work, domain, split), START)
        except (OSError, ValueError) as e:  # ValueError: an empty file cannot be mapped
            raise FileFormatError(f"{self.path}: cannot be used ({e}); run `python -m train.data`") from e
        if not len(self.starts) or self.starts[0] != 0 or self.starts[-1] >= len(self.ids):
            raise FileFormatError(f"{self.path}: does not fit its starts file; run `python -m train.data` again")

    def need(self, count: int) -> None:
        """Refuse a file of fewer than `count` tokens."""
        if len(self.ids) < count:
            raise FileFormatError(f"{self.path}: has {len(self.ids)} tokens, a window needs {count}; get more text")

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.uint16]:
        """A window of `count` tokens, at a document's start or anywhere.

        In a plain domain of long documents fewer windows than the share begin at a start, so that a beginning is
        not read more often than what follows it.
        """
        last = len(self.ids) - count
        eligible = int(np.searchsorted(self.starts, last, side="right"))
        share = DIALOGUE_START_SHARE if self._dialogues else min(START_SHARE, eligible * count / len(self.ids))
        at = int(self.starts[rng.integers(eligible)]) if rng.random() < share else int(rng.integers(last + 1))
        return self.ids[at : at + count]


def held_out(work: Path, domain: str, split: str, count: int, length: int) -> NDArray[np.int64]:
    """Evenly spaced windows of held-out text: i64 [count, length + 1]; fewer if they would overlap.

    Raises:
        FileFormatError: no such file, or not one window of text.
    """
    file = TokenFile(work, domain, split)
    file.need(length + 1)
    count = min(count, len(file.ids) // (length + 1))
    at = np.linspace(0, len(file.ids) - length - 1, count).astype(np.int64)
    return np.stack([file.ids[a : a + length + 1] for a in at]).astype(np.int64)


def bytes_per_token(work: Path) -> dict[str, float]:
    """UTF-8 bytes of text by token, BOS and EOS counted as tokens; keys are "<domain>.<split>"."""
    return {name: entry["bytes"] / entry["tokens"] for name, entry in read_index(work).items()}


def token_path(work: Path, domain: str, split: str) -> Path:
    return work / "tokens" / f"{domain}.{split}.bin"


def starts_path(work: Path, domain: str, split: str) -> Path:
    return work / "tokens" / f"{domain}.{split}.starts.bin"


def read_index(work: Path) -> dict[str, dict[str, Any]]:
    """`tokens/index.json`; empty if nothing is encoded yet.

    Raises:
        FileFormatError: it is not JSON.
    """
    path = work / "tokens" / "index.json"
    try:
        index: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise FileFormatError(f"{path}: cannot be read ({e}); remove the folder and encode again") from e
    return index


def encode_all(work: Path) -> dict[str, dict[str, Any]]:
    """Encode what is not encoded yet; returns the index.

    Raises:
        FileFormatError: a train split is missing, a row is not one, the disk refuses.
    """
    tokenizer = read_tokenizer(work)
    vocabulary = hashlib.sha256((work / "tokenizer.json").read_bytes()).hexdigest()
    (work / "tokens").mkdir(parents=True, exist_ok=True)
    for domain in (*DOMAINS, DIALOGUES, UNSEEN):
        for split in SPLITS:
            source = corpus_path(work, domain, split)
            if not source.is_file():
                if split == "train" and domain != UNSEEN:
                    maker = "dialogues" if domain == DIALOGUES else "corpora"
                    raise FileFormatError(f"{source}: is not there; run `python -m train.{maker}` first")
                continue
            _encode_file(work, domain, split, tokenizer, vocabulary)
    return read_index(work)


def _encode_file(work: Path, domain: str, split: str, tokenizer: Tokenizer, vocabulary: str) -> None:
    name, source, began = f"{domain}.{split}", corpus_path(work, domain, split), time.monotonic()
    with source.open("rb") as f:
        text = hashlib.file_digest(f, "sha256").hexdigest()
    made_from = hashlib.sha256(f"{vocabulary} {text}".encode()).hexdigest()
    index = read_index(work)
    if index.get(name, {}).get("made_from") == made_from and token_path(work, domain, split).is_file():
        print(f"{name}: is there", flush=True)
        return
    documents = dialogue_ids(tokenizer, source) if domain == DIALOGUES else plain_ids(tokenizer, source)
    pieces, starts, tokens, size = [], [], 0, 0
    for ids, n_bytes in documents:
        starts.append(tokens)
        pieces.append(np.array(ids, TOKEN))
        tokens += len(ids)
        size += n_bytes
    if not pieces:
        raise FileFormatError(f"{source}: has no documents")
    replace_file(starts_path(work, domain, split), np.array(starts, START).tobytes())
    replace_file(token_path(work, domain, split), np.concatenate(pieces).tobytes())
    index[name] = {"tokens": tokens, "bytes": size, "documents": len(starts), "made_from": made_from}
    replace_file(work / "tokens" / "index.json", json.dumps(index, indent=1).encode() + b"\n")
    print(
        f"{name}: {len(starts)} documents, {size / 1e6:.2f} MB, {tokens / 1e6:.2f} M tokens, "
        f"{size / tokens:.2f} bytes a token, {time.monotonic() - began:.1f} s",
        flush=True,
    )


def plain_ids(tokenizer: Tokenizer, source: Path) -> Iterator[tuple[list[int], int]]:
    """Each document's ids with BOS and EOS, and its bytes. Batches run on the library's threads.

    Raises:
        FileFormatError: a row without text.
    """
    backend = backend_of(tokenizer)
    bos, eos = tokenizer.special_id(BOS), tokenizer.special_id(EOS)
    rows = read_rows(source)
    while lot := list(islice(rows, LOT)):
        texts = [text for row in lot if isinstance(text := row.get("text"), str) and text]
        if len(texts) < len(lot):
            raise FileFormatError(f"{source}: a row has no text")
        for text, encoding in zip(texts, backend.encode_batch_fast(texts, add_special_tokens=False)):
            yield [bos, *encoding.ids, eos], len(text.encode())


def backend_of(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The library's tokenizer without added tokens, as the product builds it: text never becomes one."""
    parsed = json.loads(tokenizer.json_text or "{}")
    return tokenizers.Tokenizer.from_str(json.dumps({**parsed, "added_tokens": [], "post_processor": None}))


def dialogue_ids(tokenizer: Tokenizer, source: Path) -> Iterator[tuple[list[int], int]]:
    """Each dialogue's ids as served, and the bytes of its text without special tokens."""
    for row in read_rows(source):
        segments = render_row(row)
        text = sum(len(s.encode()) for s in segments if not isinstance(s, Special))
        yield tokenizer.encode_segments(segments), text


def render_row(row: Mapping[str, Any]) -> list[Segment]:
    """A dialogue as the product renders it, from BOS to the last answer's EOS.

    Args:
        row: `messages`, `thinking`; optional `tools` and `effort`.

    Raises:
        RequestError: not a dialogue.
    """
    messages = chat.attach_tools(row["messages"], row.get("tools"))
    return chat.render(messages, thinking=row["thinking"], effort=row.get("effort"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.data", description="Encode the corpora to token files.")
    parser.add_argument("--work", type=Path, default=WORK, help=f"working folder (default {WORK})")
    args = parser.parse_args(argv)
    try:
        index = encode_all(args.work)
    except Ds4Error as e:
        print(f"data: {e}", file=sys.stderr)
        return 1
    total = sum(e["tokens"] for name, e in index.items() if name.endswith(".train"))
    print(f"{args.work / 'tokens'}: {total / 1e6:.1f} M tokens to train on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
