"""The trigram against counts made by hand, and against a slow one."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from train import ngram
from train.ngram import WittenBell, events

V = 5


def test_events_reach_over_no_document() -> None:
    ids = np.array([0, 3, 4, 0, 2], np.uint16)
    keys = events(ids, np.array([0, 3]), V)
    assert keys[0].tolist() == [3, 4, 2]
    assert keys[1].tolist() == [3 + 0 * V, 4 + 3 * V, 2 + 0 * V]
    # Before a document's first token stands that token again.
    assert keys[2].tolist() == [3 + 0 * V + 0 * V * V, 4 + 3 * V + 0 * V * V, 2 + 0 * V + 0 * V * V]


def test_a_case_by_hand() -> None:
    """Text 0 1 2 1 2 3: words 1 2 1 2 3, so c(1) = c(2) = 2, c(3) = 1, N = 5, T = 3."""
    model = WittenBell(events(np.array([0, 1, 2, 1, 2, 3]), np.array([0]), V), V)
    p1 = {w: (c + 3 * (1 / 5)) / (5 + 3) for w, c in {0: 0, 1: 2, 2: 2, 3: 1, 4: 0}.items()}
    assert sum(p1.values()) == pytest.approx(1)
    # After 2 came 1 and 3: C = 2, T = 2.  After (1, 2) too: C = 2, T = 2.
    p2 = {w: (c + 2 * p1[w]) / (2 + 2) for w, c in {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}.items()}
    p3 = {w: (c + 2 * p2[w]) / (2 + 2) for w, c in {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}.items()}
    for word in range(V):
        asked = [np.array([word + 2 * V**n_history * 0]) for n_history in range(3)]
        asked[1] = np.array([word + 2 * V])
        asked[2] = np.array([word + 2 * V + 1 * V * V])
        assert model.probabilities(asked)[0] == pytest.approx(p3[word])
        # (4, 2) never came: the bigram's say stands; after 4 nothing came: the unigram's.
        asked[2] = np.array([word + 2 * V + 4 * V * V])
        assert model.probabilities(asked)[0] == pytest.approx(p2[word])
        asked[1], asked[2] = np.array([word + 4 * V]), np.array([word + 4 * V + 4 * V * V])
        assert model.probabilities(asked)[0] == pytest.approx(p1[word])


def test_it_is_the_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = np.random.default_rng(3)
    size = 40
    ids = dice.zipf(1.5, 3000) % (size - 1) + 1
    starts = np.arange(0, 3000, 100)
    ids[starts] = 0
    model = WittenBell(events(ids, starts, size), size)
    counts = [defaultdict(Counter) for _ in range(3)]

    def histories(document: list[int], at: int) -> list[tuple[int, ...]]:
        padded = [document[0], *document]
        return [tuple(padded[at + 1 - n : at + 1]) for n in range(3)]

    documents = [ids[at : at + 100].tolist() for at in starts]
    for document in documents:
        for at in range(1, 100):
            for n, history in enumerate(histories(document, at)):
                counts[n][history][document[at]] += 1
    test = [0, *dice.integers(1, size, 200).tolist()]
    bits = 0.0
    for at in range(1, len(test)):
        p = 1 / size
        for n, history in enumerate(histories(test, at)):
            after = counts[n].get(history)
            if after:
                p = (after[test[at]] + len(after) * p) / (after.total() + len(after))
        bits -= np.log2(p)
    monkeypatch.setattr(ngram, "SLICE", 7)
    assert model.bits(events(np.array(test), np.array([0]), size)) == pytest.approx(bits)


def test_every_history_sums_to_one() -> None:
    dice = np.random.default_rng(4)
    ids = dice.integers(0, V, 60)
    model = WittenBell(events(ids, np.array([0]), V), V)
    for history in range(V * V):
        asked = [np.arange(V), np.arange(V) + history % V * V, np.arange(V) + history * V]
        assert model.probabilities(asked).sum() == pytest.approx(1)


def write(work: Path, name: str, ids: list[int], starts: list[int]) -> dict[str, int]:
    (work / "tokens").mkdir(parents=True, exist_ok=True)
    np.array(ids, "<u2").tofile(work / "tokens" / f"{name}.bin")
    np.array(starts, "<i8").tofile(work / "tokens" / f"{name}.starts.bin")
    return {"tokens": len(ids), "bytes": 4 * len(ids), "documents": len(starts)}


def test_domains_apart_and_pooled(tmp_path: Path) -> None:
    index = {
        "code.train": write(tmp_path, "code.train", [0, 1, 2, 1, 2, 4] * 9, list(range(0, 54, 6))),
        "law.train": write(tmp_path, "law.train", [0, 3, 3, 3, 3, 4] * 9, list(range(0, 54, 6))),
        "code.judge": write(tmp_path, "code.judge", [0, 1, 2, 4], [0]),
        "law.judge": write(tmp_path, "law.judge", [0, 3, 3, 4], [0]),
        "unseen.judge": write(tmp_path, "unseen.judge", [0, 1, 3, 4], [0]),
    }
    (tmp_path / "tokens" / "index.json").write_text(json.dumps(index))
    rows = ngram.run(tmp_path, "judge", V)
    assert list(rows) == ["code", "law", "unseen"]
    assert rows["unseen"]["own"] is None
    assert rows["code"]["own"] < rows["code"]["pooled"] < rows["unseen"]["pooled"]
    assert rows["code"]["train_tokens"] == 45 and rows["code"]["tokens"] == 3
    text = ngram.table(rows, "judge")
    assert "unseen" in text and len(text.splitlines()) == 4


def test_no_tokens_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ngram.main(["--work", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
