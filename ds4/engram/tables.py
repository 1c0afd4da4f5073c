"""The engram tables, derived once from a tokenizer and the config: token map, primes, offsets, multipliers.

Everything is integers. What a base file stores must equal what is derived here; `EngramTables.check` refuses
tables that could read outside a shard. Source: model-text.md 9.1.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

_SPACES = re.compile(r"[ \t\r\n]+")
_LONE_SPACE = "\ue000"  # stands in for a key that is exactly one space while the ends are stripped
_COMBINING = ("Mn", "Mc", "Me")


@dataclass(frozen=True)
class EngramTables:
    """What turns ids into row numbers. G engram layers, n = max n-gram size, columns n-gram size major.

    Attributes:
        token_map: i32 [V], token id to compressed id.
        multipliers: i64 [G, n], one a look-back 0..n-1.
        primes: i64 [G, n-1, heads], rows of each bucket.
        offsets: i64 [G, (n-1) * heads], first row of each bucket.
    """

    token_map: I32
    multipliers: I64
    primes: I64
    offsets: I64

    def pad(self, config: ModelConfig) -> int:
        """The compressed id that stands where there is no token."""
        return int(self.token_map[config.engram_pad_token_id])

    def compress(self, ids: NDArray[np.integer]) -> I64:
        """Token ids to compressed ids, i64."""
        out: I64 = self.token_map[np.asarray(ids, np.int64)].astype(np.int64)
        return out

    def check(self, config: ModelConfig, where: str = "engram tables") -> EngramTables:
        """These tables, if they fit the config and every row they can name exists.

        Raises:
            FileFormatError: a shape or a value out of range, named.
        """
        n_layers, n, heads = len(config.engram_layer_ids), config.engram_max_ngram_size, config.engram_n_heads
        want = {
            "token_map": (config.vocab_size,),
            "multipliers": (n_layers, n),
            "primes": (n_layers, n - 1, heads),
            "offsets": (n_layers, config.engram_columns),
        }
        for name, shape in want.items():
            got = getattr(self, name).shape
            if got != shape:
                raise FileFormatError(f"{where}: engram.{name} has shape {got}, this model needs {shape}")
        size = config.engram_compressed_vocab_size

        def need(ok: bool, text: str) -> None:
            if not ok:
                raise FileFormatError(f"{where}: {text}")

        need(bool(np.all((self.token_map >= 0) & (self.token_map < size))), f"engram.token_map leaves 0..{size - 1}")
        need(bool(np.all(self.primes > 0)), "engram.primes has an entry that is not positive")
        # a product of an id below `size` and a multiplier must stay below 2^63
        need(
            bool(np.all((self.multipliers >= 0) & (self.multipliers <= (2**63 - 1) // size))),
            "engram.multipliers can overflow 63 bits",
        )
        rows = np.asarray(config.engram_num_embeddings, np.int64)[:, None]
        buckets = self.primes.reshape(n_layers, -1)
        inside = (self.offsets >= 0) & (self.offsets <= rows) & (buckets <= rows - self.offsets)
        need(bool(np.all(inside)), "engram.offsets and engram.primes name rows past the end of a table")
        return self


def derive_tables(config: ModelConfig, tokenizer: Tokenizer) -> EngramTables:
    """All tables of a model.

    Raises:
        FileFormatError: the tokenizer gives another number of compressed ids than the config says, or the
            primes another number of rows: this is not the tokenizer the tables were trained with.
    """
    token_map, n_keys = derive_token_map(tokenizer)
    if len(token_map) != config.vocab_size:
        raise FileFormatError(f"{tokenizer.where}: {len(token_map)} tokens for a vocabulary of {config.vocab_size}")
    if n_keys != config.engram_compressed_vocab_size:
        raise FileFormatError(
            f"{tokenizer.where}: gives {n_keys} compressed ids, the config says engram_compressed_vocab_size "
            f"{config.engram_compressed_vocab_size}: not the tokenizer this model was trained with"
        )
    primes = derive_primes(config)
    sums = primes.sum(axis=(1, 2)).tolist()
    if sums != list(config.engram_num_embeddings):
        raise FileFormatError(
            f"config: engram_num_embeddings is {list(config.engram_num_embeddings)}, the bucket sizes sum to {sums}"
        )
    flat = primes.reshape(len(sums), -1)
    offsets = np.cumsum(flat, axis=1) - flat
    multipliers = [
        derive_multipliers(layer, config.engram_compressed_vocab_size, config.engram_max_ngram_size)
        for layer in config.engram_layer_ids
    ]
    shape = (len(sums), config.engram_max_ngram_size)
    return EngramTables(token_map, np.array(multipliers, np.int64).reshape(shape), primes, offsets).check(config)


def derive_token_map(tokenizer: Tokenizer) -> tuple[I32, int]:
    """Token id to compressed id, and how many there are: tokens that read alike share one.

    Raw vocabulary strings (of ids that are no whole text) and normalised texts share one name space.
    """
    new_ids: dict[str, int] = {}
    out = np.empty(tokenizer.vocab_size, np.int32)
    for i, (raw, text) in enumerate(zip(tokenizer.tokens, tokenizer.library_texts())):
        key = raw if "\ufffd" in text else normal_key(text)
        out[i] = new_ids.setdefault(key, len(new_ids))
    return out, len(new_ids)


def normal_key(text: str) -> str:
    """Text without case, accents and the kind of its white space; itself if nothing is left."""
    if text.isascii():  # nothing composed, nothing combining: only case and white space
        key = text.lower()
    else:
        decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        key = "".join(c.lower() for c in decomposed if unicodedata.category(c) not in _COMBINING)
    key = _SPACES.sub(" ", key)
    key = _LONE_SPACE if key == " " else key
    return key.strip().replace(_LONE_SPACE, " ") or text


def derive_primes(config: ModelConfig) -> I64:
    """Bucket sizes [G, n-1, heads]: for every layer and n-gram size the next primes not used anywhere before."""
    used: set[int] = set()
    out: list[int] = []
    for _ in config.engram_layer_ids:
        for _ in range(config.engram_max_ngram_size - 1):
            candidate = config.engram_vocab_size - 1
            for _ in range(config.engram_n_heads):
                candidate += 1
                while candidate in used or not is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                out.append(candidate)
    shape = (len(config.engram_layer_ids), config.engram_max_ngram_size - 1, config.engram_n_heads)
    return np.array(out, np.int64).reshape(shape)


def is_prime(n: int) -> bool:
    """By trial division: the numbers here are near 16 million."""
    if n < 4:
        return n >= 2
    if n % 2 == 0:
        return False
    return all(n % d for d in range(3, int(n**0.5) + 2, 2) if d < n)


def derive_multipliers(layer: int, n_compressed: int, count: int) -> list[int]:
    """Odd factors, one a look-back; their products with compressed ids stay below 2^63."""
    bound = (2**63 - 1) // n_compressed // 2
    draw = integer_draws(10007 * layer, bound)
    return [2 * next(draw) + 1 for _ in range(count)]


_U32, _U64, _U128 = 2**32 - 1, 2**64 - 1, 2**128 - 1
_PCG_FACTOR = 0x2360ED051FC65DA44385DF649FCCF645


def integer_draws(seed: int, bound: int) -> Iterator[int]:
    """What numpy's `default_rng(seed).integers(0, bound)` draws, restated so that no release of numpy can move it.

    SeedSequence fills a pool of four words, PCG64 (XSL-RR) runs on it, Lemire's method bounds the result.

    Args:
        seed: below 2^32.
        bound: above 2^32 and below 2^63: numpy draws 64 bits only there.
    """
    s = _seed_words(seed)
    inc = ((s[2] << 64 | s[3]) << 1 | 1) & _U128
    state = ((inc + (s[0] << 64 | s[1])) * _PCG_FACTOR + inc) & _U128
    reject_below = (2**64 - bound) % bound
    while True:
        product = 0
        while True:
            state = (state * _PCG_FACTOR + inc) & _U128
            word, turn = (state >> 64) ^ (state & _U64), state >> 122
            product = ((word >> turn | word << (64 - turn)) & _U64) * bound
            if product & _U64 >= reject_below:
                break
        yield product >> 64


def _seed_words(seed: int) -> list[int]:
    """numpy's SeedSequence for one 32-bit seed, as four 64-bit words."""
    h = 0x43B0D7E5

    def hash_mix(v: int) -> int:
        nonlocal h
        v ^= h
        h = h * 0x931E8875 & _U32
        v = v * h & _U32
        return v ^ v >> 16

    def mix(x: int, y: int) -> int:
        r = (0xCA01F9DD * x - 0x4973F715 * y) & _U32
        return r ^ r >> 16

    pool = [hash_mix(v) for v in (seed, 0, 0, 0)]
    for source in range(4):
        for target in range(4):
            if source != target:
                pool[target] = mix(pool[target], hash_mix(pool[source]))
    h = 0x8B51F9DD
    words = []
    for i in range(8):
        v = pool[i % 4] ^ h
        h = h * 0x58F38DED & _U32
        v = v * h & _U32
        words.append(v ^ v >> 16)
    return [words[2 * i] | words[2 * i + 1] << 32 for i in range(4)]
