"""The compact form of scores: what is exact from it, and what it cannot know."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds4 import embedded
from ds4.cli.main import run
from ds4.corpus import Domain
from ds4.errors import FileFormatError, UsageError
from ds4.model.tokenizer import Tokenizer
from rulers.compact import Compact, compact
from rulers.scores import Scores
from rulers.teacher_scores import teacher_scores
from rulers.text import Text


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Scores:
    """The embedded model on a little of its own judge text."""
    home = embedded.checkpoint()
    tokenizer = Tokenizer.from_file(home / "tokenizer.json")
    documents = [d.text for d in Domain.open("general").documents("judge")]
    bos = tokenizer.special_id("<｜begin▁of▁sentence｜>")
    text = Text.cut(documents, tokenizer.encode, bos, length=64, tokens=256)
    folder = tmp_path_factory.mktemp("scores")
    return teacher_scores(home, text, domain="general", split="judge", length=64, folder=folder)


@pytest.mark.parametrize("k", [1, 20])
def test_the_compact_form_says_what_it_cannot_know(judged: Scores, k: int) -> None:
    """top-1 and the next token exactly; Sigma-min between its bounds, no further apart than the tail."""
    small = compact(judged, k)
    logits = judged.rows(slice(None)).astype(np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(small.top_ids[:, 0], logits.argmax(axis=1))
    rows = np.arange(len(judged.text))
    top = np.take_along_axis(p, small.top_ids.astype(np.int64), axis=1)
    np.testing.assert_allclose(np.exp(small.top.astype(np.float64)), top, rtol=4e-6)  # f32 logarithms up to 2^5
    rest = p.copy()
    np.put_along_axis(rest, small.top_ids.astype(np.int64), 0, axis=1)
    np.testing.assert_allclose(small.tail, rest.sum(axis=1), rtol=1e-6)
    assert (rest.max(axis=1) <= top[:, -1]).all()
    at = judged.text.scored
    np.testing.assert_allclose(small.following[at], np.log(p[at, judged.text.ids[at + 1]]), rtol=1e-6)
    ours = (logits + np.random.default_rng(2).standard_normal(logits.shape)).astype(np.float32)
    q = np.exp(ours.astype(np.float64))
    q /= q.sum(axis=1, keepdims=True)
    sigma = np.minimum(p, q).sum(axis=1)
    least, most = small.sigma_min(ours, rows)
    assert (least <= sigma + 1e-6).all() and (sigma <= most + 1e-6).all()  # 1e-6: probabilities kept in f32
    assert (most - least <= small.tail.astype(np.float64) + 1e-12).all() and (sigma - least).max() > 1e-3
    assert f"{small.tail.mean():.3g} in the mean, {small.tail.max():.3g} at most" in small.describe()


def test_the_compact_form_comes_back(judged: Scores, tmp_path: Path) -> None:
    small, path = compact(judged, 20), tmp_path / "small.npz"
    small.save(path)
    again = Compact.load(path)
    for name in ("top_ids", "top", "following", "tail"):
        np.testing.assert_array_equal(getattr(again, name), getattr(small, name))
    assert again.meta == judged.meta and again.text.digest == judged.text.digest and again.vocab == judged.vocab_size
    assert path.stat().st_size < judged.logits.nbytes / 50
    replace(small, tail=small.tail[:-1]).save(path)
    with pytest.raises(FileFormatError, match=r"small\.npz: tail is float32 \[\d+\]"):
        Compact.load(path)
    judged.save(path)
    with pytest.raises(FileFormatError, match=r"small\.npz: holds documents, ids, logits"):
        Compact.load(path)
    with pytest.raises(UsageError, match="0 tokens a position: must lie between 1 and the vocabulary of 4096"):
        compact(judged, 0)


def test_the_command(judged: Scores, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full, out = str(tmp_path / "full.npz"), str(tmp_path / "small.npz")
    judged.save(full)
    assert run(["ruler", "archive", full, "-o", out, "--top", "20", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    small = Compact.load(out)
    assert said["tail"] == {"mean": float(small.tail.mean()), "most": float(small.tail.max())}
    assert said["top"] == 20 and said["bytes"] == Path(out).stat().st_size < said["full_bytes"] / 50
    assert run(["ruler", "archive", full, "-o", out]) == 0
    assert Compact.load(out).describe() in capsys.readouterr().out
    for code, argv in ((2, [full, "-o", full]), (2, [full, "-o", out, "--top", "0"]), (1, [out, "-o", out + "x"])):
        assert run(["ruler", "archive", *argv]) == code
        assert capsys.readouterr().err.startswith("error: ")
    assert Scores.load(full).logits.tobytes() == judged.logits.tobytes()


def test_ties_go_to_the_lowest_id(judged: Scores) -> None:
    flat = Scores(judged.text, np.zeros_like(judged.logits), judged.meta)
    small = compact(flat, 3)
    assert (small.top_ids == [0, 1, 2]).all()
    np.testing.assert_allclose(small.tail, 4093 / 4096, rtol=1e-6)
