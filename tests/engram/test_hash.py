"""Engram tables and hashes: the real vocabulary's published facts, the toy fixtures, and numpy's generator."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.numpy import load_file

from ds4.engram.hash import DEAD, EngramTables, derive_tables, hash_rows
from ds4.engram.tables import derive_multipliers, derive_primes, derive_token_map, integer_draws, is_prime, normal_key
from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from tests.model.vocabulary import DATA, TOYS, real, toy

FACTS = json.loads((DATA / "oracle-a" / "engram_facts.json").read_text())


def released_config() -> ModelConfig:
    return ModelConfig.load(DATA / "published" / "config.json")


@pytest.fixture(scope="module")
def released() -> EngramTables:
    return derive_tables(released_config(), real())


def test_the_real_vocabulary_has_99092_compressed_ids() -> None:
    token_map, n_keys = derive_token_map(real())
    assert n_keys == FACTS["compressed_vocab_size"] == 99092
    digest = hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()
    assert digest == FACTS["token_map_sha256_int32_le"]
    for i, want in FACTS["token_map_samples"].items():
        assert token_map[int(i)] == want


def test_released_primes_offsets_multipliers(released: EngramTables) -> None:
    assert released.primes.tolist() == FACTS["primes"]
    assert released.offsets.tolist() == FACTS["offsets"]
    assert released.multipliers.tolist() == [[int(v) for v in row] for row in FACTS["multipliers"]]
    assert released.primes.sum(axis=(1, 2)).tolist() == [384006168, 384016682]
    assert released.multipliers[0].tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert released.pad(released_config()) == FACTS["pad_compressed_id"] == 2


VECTORS = [
    ([1000, 2000, 3000, 4000], 0, [15465977, 28790835, 130437439, 147954272, 261497777, 281534125, 370049875]),
    ([1000, 2000, 3000, 4000], 1, [531236, 19249339, 136118722, 154953410, 257108840, 284056046, 371061263]),
    ([1000, DEAD, 3000], 0, [9785197, 20578235, 132414663, 151555194, 264145882, 274692776, 376028222]),
    ([1000, DEAD, 3000], 1, [7297435, 28283881, 140226488, 152495670, 264295542, 276536105, 377448892]),
]


@pytest.mark.parametrize(("history", "slot", "want"), VECTORS)
def test_hash_vectors(released: EngramTables, history: list[int], slot: int, want: list[int]) -> None:
    rows = hash_rows(released, released_config(), np.array(history), np.array([len(history) - 1]))
    assert rows[0, slot, [0, 1, 8, 9, 16, 17, 23]].tolist() == want


def test_hash_of_the_published_short_text(released: EngramTables) -> None:
    example = FACTS["example"]
    history = released.compress(np.array(example["ids"]))
    assert history.tolist() == example["compressed"]
    rows = hash_rows(released, released_config(), history, np.arange(len(history)))
    assert rows.tolist() == example["hash_ids"]


@pytest.mark.parametrize("name", TOYS)
def test_toy_tables_and_hashes(name: str) -> None:
    config = ModelConfig.load(DATA / name)
    want = load_file(DATA / name / "reference.safetensors")
    tables = derive_tables(config, toy(name))
    for field in ("token_map", "primes", "offsets", "multipliers"):
        assert np.array_equal(getattr(tables, field), want[f"engram.{field}"]), field
    history = tables.compress(want["input_ids"])
    assert np.array_equal(history, want["prefill.compressed_ids"])
    everywhere = np.arange(len(history))
    assert np.array_equal(hash_rows(tables, config, history, everywhere), want["prefill.engram_hash_ids"])
    dead = np.where(want["engram.dead_mask"] == 1, DEAD, history)
    assert np.array_equal(hash_rows(tables, config, dead, everywhere), want["engram.dead_hash_ids"])


def test_a_tail_of_the_history_is_enough() -> None:
    config = ModelConfig.load(DATA / "oracle-b")
    tables = derive_tables(config, toy("oracle-b"))
    history = np.random.default_rng(5).integers(0, config.engram_compressed_vocab_size, 40)
    history[[7, 20]] = DEAD
    whole = hash_rows(tables, config, history, np.arange(40))
    for p in range(40):
        first = max(p - 3, 0)
        assert np.array_equal(
            hash_rows(tables, config, history[first : p + 1], np.array([p]), start=first)[0], whole[p]
        )
    assert hash_rows(tables, config, history, np.array([], np.int64)).shape == (0, 2, config.engram_columns)
    for outside in (-1, 40):
        with pytest.raises(ValueError, match="need a history"):
            hash_rows(tables, config, history, np.array([outside]))
    with pytest.raises(ValueError, match="need a history"):
        hash_rows(tables, config, history[10:], np.array([12]), start=10)
    with pytest.raises(ValueError, match="need a history"):
        hash_rows(tables, config, history[1:], np.array([2]), start=1)


def test_the_restated_generator_is_numpys() -> None:
    rng = np.random.default_rng(1)
    for _ in range(30):
        seed, bound = int(rng.integers(0, 2**32)), int(rng.integers(2**32 + 1, 2**63 - 1))
        want = np.random.default_rng(seed).integers(0, bound, size=64, dtype=np.int64).tolist()
        draws: Iterator[int] = integer_draws(seed, bound)
        assert [next(draws) for _ in range(64)] == want, (seed, bound)
    for layer in (0, 1, 14, 39):
        bound = (2**63 - 1) // 258 // 2
        want = (2 * np.random.default_rng(10007 * layer).integers(0, bound, size=4, dtype=np.int64) + 1).tolist()
        assert derive_multipliers(layer, 258, 4) == want


def test_primes() -> None:
    assert [n for n in range(50) if is_prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47]
    assert not is_prime(16000057 * 3) and not is_prime(4001 * 4001)
    primes = derive_primes(released_config())
    assert len(set(primes.ravel().tolist())) == primes.size  # none is used twice, in any layer


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (" ", " "), ("\n \t", " "), ("", ""), ("\u00a0", " "), (" Über\n\nALLES ", "uber alles"), ("ﬁ", "fi"),
        ("É", "e"),
        ("\u0301", "\u0301"), ("İ", "i"), ("\u0e34", "\u0e34"), ("１２", "12"), ("Σ", "σ"), ("ΑΣ", "ασ"),
    ],
)  # fmt: skip
def test_normal_key(text: str, key: str) -> None:
    assert normal_key(text) == key


def test_the_ascii_shortcut_changes_nothing() -> None:
    for code in range(128):
        for text in (chr(code), f" {chr(code)}A", f"\x1f{chr(code)}\r\n"):
            assert normal_key(text) == normal_key(text + "\u0301").removesuffix("\u0301") or text.strip() == ""


def test_a_foreign_tokenizer_or_table_is_refused() -> None:
    config = ModelConfig.load(DATA / "oracle-a")
    with pytest.raises(FileFormatError, match="336 tokens for a vocabulary of 320"):
        derive_tables(config, toy("oracle-b"))
    with pytest.raises(FileFormatError, match=r"gives 258 compressed ids.* says engram_compressed_vocab_size 259"):
        derive_tables(dataclasses.replace(config, engram_compressed_vocab_size=259), toy("oracle-a"))
    with pytest.raises(FileFormatError, match=r"engram_num_embeddings is \[434, 605\].* sum to \[434, 606\]"):
        derive_tables(dataclasses.replace(config, engram_num_embeddings=(434, 605)), toy("oracle-a"))
    good = derive_tables(config, toy("oracle-a"))
    bad = {
        "token_map": good.token_map + 200,
        "multipliers": good.multipliers * -1,
        "primes": good.primes * 0,
        "offsets": good.offsets + 5,
    }
    for field, value in bad.items():
        with pytest.raises(FileFormatError, match=f"engram.{field}"):
            dataclasses.replace(good, **{field: value}).check(config)
        with pytest.raises(FileFormatError, match=f"engram.{field} has shape"):
            dataclasses.replace(good, **{field: value[:-1]}).check(config)
