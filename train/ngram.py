"""The baseline to beat: a Witten-Bell interpolated trigram over the same tokens, in bits per byte of held-out text.

    python -m train.ngram [--work DIR] [--split judge|fit]

One trigram a domain, on that domain's training tokens, and one on all domains together.  Prints a table and writes
DIR/ngram.json.  Every token after a document's BOS is predicted, its EOS too, from at most the two before it in the
same document; the bits are divided by the UTF-8 bytes of the text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint.writer import replace_file
from ds4.errors import Ds4Error, FileFormatError
from train.config import DIALOGUES, DOMAINS, UNSEEN, WORK, read_config
from train.data import TokenFile, read_index

ORDER = 3
SLICE = 1 << 20  # positions judged at a time

Keys = NDArray[np.int64]


def events(ids: NDArray[np.integer], starts: NDArray[np.int64], vocabulary: int) -> list[Keys]:
    """What is predicted and from what, as numbers: [word, previous * V + word, two before * V**2 + ...].

    Args:
        ids: [tokens]; starts: [documents], where each begins.  A document's first token is only context; it stands
            for the token before it too.

    Returns:
        ORDER arrays i64 [tokens - documents], for histories of 0, 1 and 2 tokens.
    """
    words = ids.astype(np.int64)
    first = np.zeros(len(words), bool)
    first[starts] = True
    back = words
    keys = [words.copy()]
    for n in range(1, ORDER):
        # The history reaches back over no document's beginning: its first token is repeated before it.
        moved = np.concatenate([back[:1], back[:-1]])
        back = np.where(first, words, moved)
        keys.append(keys[-1] + back * vocabulary**n)
    return [key[~first] for key in keys]


@dataclass(frozen=True)
class Counts:
    """Of one order: each n-gram and how often it came; each history, its total C and its distinct successors T."""

    grams: Keys
    times: NDArray[np.int64]
    histories: Keys
    totals: NDArray[np.int64]
    kinds: NDArray[np.int64]


class WittenBell:
    """p_n(w|h) = (c(hw) + T(h) p_{n-1}(w|h')) / (C(h) + T(h)), down to p_0 = 1/V; an unseen history passes p_{n-1}.

    C(h) is how often the history h came, T(h) how many different words came after it, h' is h without its oldest
    word.
    """

    def __init__(self, keys: Sequence[Keys], vocabulary: int) -> None:
        """Count `keys`, as `events` gives them (of many domains: joined per order)."""
        self.vocabulary = vocabulary
        self.orders = [self._count(key) for key in keys]

    def _count(self, keys: Keys) -> Counts:
        grams, times = np.unique(keys, return_counts=True)
        # The grams are sorted, so the ones of a history lie together.
        of = grams // self.vocabulary
        histories, first = np.unique(of, return_index=True)
        totals = np.add.reduceat(times, first) if len(first) else times
        return Counts(grams, times, histories, totals, np.diff(np.append(first, len(grams))))

    def probabilities(self, keys: Sequence[Keys]) -> NDArray[np.float64]:
        """The probability of each event: f64, one for each of `keys`' positions."""
        p = np.full(len(keys[0]), 1.0 / self.vocabulary)
        for order, key in zip(self.orders, keys):
            at, known = _find(order.histories, key // self.vocabulary)
            total = np.where(known, order.totals[at], 0)
            kinds = np.where(known, order.kinds[at], 0)
            at, seen = _find(order.grams, key)
            times = np.where(seen, order.times[at], 0)
            p = np.where(known, (times + kinds * p) / np.maximum(total + kinds, 1), p)
        return p

    def bits(self, keys: Sequence[Keys]) -> float:
        """The bits that all events together cost."""
        total = 0.0
        for at in range(0, len(keys[0]), SLICE):
            total -= float(np.log2(self.probabilities([key[at : at + SLICE] for key in keys])).sum())
        return total


def _find(sorted_keys: Keys, keys: Keys) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """(place, whether it is there) of each key; the place is a valid index either way."""
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return at, sorted_keys[at] == keys


def domain_events(work: Path, domain: str, split: str, vocabulary: int) -> list[Keys]:
    """`events` of one domain's token file.

    Raises:
        FileFormatError: it is not there, or holds ids outside the vocabulary.
    """
    file = TokenFile(work, domain, split)
    if int(file.ids.max()) >= vocabulary:
        raise FileFormatError(
            f"{file.path}: holds id {int(file.ids.max())} of a vocabulary of {vocabulary}; run `python -m train.data`"
        )
    return events(file.ids, file.starts, vocabulary)


def run(work: Path, split: str, vocabulary: int) -> dict[str, dict[str, float | int | None]]:
    """Count and judge; returns {domain: {"own", "pooled": bits per byte, "train_tokens", "tokens", "bytes"}}.

    Raises:
        FileFormatError: token files are missing or broken.
    """
    index = read_index(work)
    trained = [domain for domain in (*DOMAINS, DIALOGUES) if f"{domain}.train" in index]
    judged = [domain for domain in (*DOMAINS, DIALOGUES, UNSEEN) if f"{domain}.{split}" in index]
    if not trained or not judged:
        raise FileFormatError(f"{work / 'tokens'}: no tokens to count and judge; run `python -m train.data` first")
    held_out = {domain: domain_events(work, domain, split, vocabulary) for domain in judged}
    size = {domain: int(index[f"{domain}.{split}"]["bytes"]) for domain in judged}
    out: dict[str, dict[str, float | int | None]] = {}
    all_keys: list[list[Keys]] = []
    for domain in [*trained, *(domain for domain in judged if domain not in trained)]:
        began = time.monotonic()
        keys = domain_events(work, domain, "train", vocabulary) if domain in trained else None
        if keys is not None:
            all_keys.append(keys)
        if domain not in judged:
            continue
        own = WittenBell(keys, vocabulary).bits(held_out[domain]) / size[domain] if keys is not None else None
        out[domain] = {
            "own": own,
            "pooled": None,
            "train_tokens": len(keys[0]) if keys is not None else 0,
            "tokens": len(held_out[domain][0]),
            "bytes": size[domain],
        }
        print(f"{domain}: counted and judged, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    pooled = WittenBell([np.concatenate(keys) for keys in zip(*all_keys)], vocabulary)
    for domain, row in out.items():
        row["pooled"] = pooled.bits(held_out[domain]) / size[domain]
    return out


def table(rows: dict[str, dict[str, float | int | None]], split: str) -> str:
    """The rows for a reader."""
    lines = [f"{'domain':10} {'own text':>9} {'all text':>9}   trigram, bits per byte of {split}"]
    for domain, row in rows.items():
        cells = [f"{row[key]:9.4f}" if row[key] is not None else f"{'-':>9}" for key in ("own", "pooled")]
        counted = f"{row['train_tokens']} tokens counted, {row['bytes']} bytes judged"
        lines.append(f"{domain:10} {' '.join(cells)}   {counted}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.ngram", description="A trigram's bits per byte, to beat.")
    parser.add_argument("--work", type=Path, default=WORK, help=f"working folder (default {WORK})")
    parser.add_argument("--split", choices=("judge", "fit"), default="judge", help="what to judge on (default judge)")
    args = parser.parse_args(argv)
    try:
        rows = run(args.work, args.split, read_config(args.work)[1].vocab_size)
        document = {"order": ORDER, "smoothing": "Witten-Bell", "split": args.split, "bits_per_byte": rows}
        replace_file(args.work / "ngram.json", json.dumps(document, indent=1).encode() + b"\n")
    except Ds4Error as e:
        print(f"ngram: {e}", file=sys.stderr)
        return 1
    print(table(rows, args.split))
    return 0


if __name__ == "__main__":
    sys.exit(main())
