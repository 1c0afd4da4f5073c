"""What quantization costs the embedded model, and that the bench which says so computes it right."""

from __future__ import annotations

import json
from pathlib import Path

import damage  # bench/damage.py
import numpy as np
import pytest

from ds4 import embedded
from ds4.base.reader import Base
from ds4.model.tokenizer import Tokenizer
from ds4.teacher.run import Teacher
from ds4.teacher.source import BaseSource
from tests.embedded.conftest import judge_ids

DOMAINS = ("code", "law", "medicine", "science", "general")


def test_the_base_loses_what_the_released_one_loses(base: Path, teacher: Teacher, tokenizer: Tokenizer) -> None:
    """Sigma-min of .70 to .77, with some room for a short sample."""
    lossy = Teacher(BaseSource(Base.open(base, embedded.checkpoint())))
    found = []
    for domain in DOMAINS:
        ids = judge_ids(tokenizer, domain, 256)
        found.append(damage.compare(teacher.run(ids)["logits_TV"], lossy.run(ids)["logits_TV"], ids))
    assert 0.67 <= damage.summary(found, 1)["sigma_min"] <= 0.80


def test_figures_of_one_position() -> None:
    """Against the formulas, by hand: p = (.5, .25, .25), q = (.25, .5, .25); the token that follows is 0."""
    p = np.log(np.array([[0.5, 0.25, 0.25], [1, 1, 1]], np.float32))
    q = np.log(np.array([[0.25, 0.5, 0.25], [1, 1, 1]], np.float32)) + np.float32(3)  # logits have no zero point
    found = damage.compare(p, q, np.array([2, 0]))
    assert {name: row.shape for name, row in found.items()} == dict.fromkeys(found, (1,))
    assert found["sigma_min"][0] == pytest.approx(0.75)
    assert found["same_first"][0] == 0
    assert found["kl"][0] == pytest.approx(0.25 * np.log(2))
    out = damage.summary([found], n_bytes=2)
    assert out["ppl_ratio"] == pytest.approx(2) and out["positions"] == 1
    assert out["teacher_bits_per_byte"] == pytest.approx(0.5) and out["base_bits_per_byte"] == pytest.approx(1)
    same = damage.summary([damage.compare(p, p, np.array([2, 0]))], n_bytes=2)
    assert (same["sigma_min"], same["same_first"], same["kl"], same["ppl_ratio"]) == pytest.approx((1, 1, 0, 1))


def test_standard_errors_count_neighbours_once() -> None:
    """Blocks of equal values: as many independent values as blocks, not as positions."""
    rng = np.random.default_rng(1)
    blocks = rng.normal(size=400)
    mean, se = damage._mean([np.repeat(blocks[i : i + 8], damage.BLOCK) for i in range(0, 400, 8)])
    assert mean == pytest.approx(blocks.mean())
    assert se == pytest.approx(blocks.std(ddof=1) / 20, rel=1e-6)


def test_windows_are_spread_over_the_text(tokenizer: Tokenizer) -> None:
    documents = [f"document {i} " + "some words follow here " * 40 for i in range(40)]
    all_of_it = damage.windows(tokenizer, 0, documents, 10**9)
    assert len(all_of_it) == 40 and all(w[0] == 0 and len(w) <= damage.WINDOW for w in all_of_it)
    some = damage.windows(tokenizer, 0, documents, sum(map(len, all_of_it)) // 4)
    assert len(some) == 10
    assert {tuple(w) for w in some} <= {tuple(w) for w in all_of_it}
    assert len(damage.windows(tokenizer, 0, documents, 1)) == 1
    assert damage.windows(tokenizer, 0, ["short"], 100) == []


def test_rows_of_domains_and_of_all(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second run has the teacher's logits from the cache, and says the same."""
    answers = []
    for _ in range(2):
        assert damage.main(["--domains", "code,law", "--tokens", "300", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    code, law, both = answers[0]["rows"]
    assert [row["domain"] for row in (code, law, both)] == ["code", "law", "all"]
    assert both["positions"] == code["positions"] + law["positions"] >= 200
    assert min(code["kl"], law["kl"]) <= both["kl"] <= max(code["kl"], law["kl"])
    recipe = embedded.recipe()
    assert all((row["bits"], row["gain"]) == (recipe.bits, recipe.gain) for row in (code, law, both))


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--bits", "ten"], 2, "whole numbers"),
        (["--gain", "best"], 2, "expected some of ls, rms, norm"),
        (["--tokens", "5"], 2, "at least"),
        (["--bits", "14"], 2, "from 1 to 13"),
        (["--domains", "poems"], 2, "'poems' is unknown"),
    ],
)
def test_usage(flags: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        got = damage.main(flags)
    except SystemExit as e:  # argparse's own
        got = int(e.code or 0)
    assert got == code and said in capsys.readouterr().err
