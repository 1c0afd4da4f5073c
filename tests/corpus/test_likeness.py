"""Shared text is found exactly: at PASSAGE bytes and not at one less, wherever it stands, however many passes."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from ds4.corpus.likeness import PASSAGE, Runs, groups, normalised, shared


def words(seed: int, n: int) -> str:
    """n characters that nothing else has in common."""
    rng = random.Random(seed)
    return "".join(rng.choice("abcdefghijklmnop") for _ in range(n))


def pairs(texts: list[str], **kwargs: int) -> set[tuple[int, int]]:
    return {(a, b) for a, b, _ in shared([normalised(t).encode() for t in texts], **kwargs)}


@pytest.mark.parametrize("n", [PASSAGE - 1, PASSAGE])
def test_the_length_of_a_passage_is_exact(n: int) -> None:
    passage = words(0, n)
    texts = [words(1, 500) + "x" + passage + "y" + words(2, 100), "z" + passage + "w" + words(3, 700)]
    found = list(shared([t.encode() for t in texts]))
    assert [(a, b) for a, b, _ in found] == ([(0, 1)] if n == PASSAGE else [])
    if found:
        assert found[0][2] == 501


def test_runs_are_the_windows_and_nothing_else() -> None:
    """Equal hashes are equal runs, over every window of a text with repeats, against Python's own bytes."""
    data = (words(4, 400) * 2 + words(5, 200) + words(4, 350)).encode()
    h = Runs(len(data)).of(data)
    windows = [data[i : i + PASSAGE] for i in range(len(data) - PASSAGE + 1)]
    assert len(h) == len(windows) and len(set(windows)) == len(np.unique(h)) < len(windows)
    same = {}
    for value, window in zip(h.tolist(), windows):
        assert same.setdefault(value, window) == window


def test_equal_when_normalised() -> None:
    short = ["Short  text.\n", "short text.", "another", " SHORT\ttext."]
    assert pairs(short) == {(0, 1), (0, 3)}
    assert pairs(["", " "]) == {(0, 1)} and pairs(["one"]) == set() and pairs([]) == set()


def test_passes_change_nothing() -> None:
    passage = [words(10 + i, PASSAGE + 7 * i) for i in range(6)]
    texts = [words(100 + i, 900) + passage[i % 6] + words(200 + i, 50) for i in range(20)]
    whole = pairs(texts)
    assert whole == pairs(texts, runs_a_pass=1000) == pairs(texts, runs_a_pass=97)
    group = groups(len(texts), iter(whole))
    assert group.tolist() == [i % 6 for i in range(20)]  # each named after its first


def test_chinese_counts_in_bytes() -> None:
    passage = "".join(chr(0x4E00 + int(hashlib.md5(str(i).encode()).hexdigest()[:3], 16)) for i in range(100))
    assert len(passage.encode()) == PASSAGE
    assert pairs(["甲" + passage + "乙", "丙" + passage]) == {(0, 1)}
    assert pairs(["甲" + passage[:99], "丙" + passage[:99] + "丁"]) == set()
