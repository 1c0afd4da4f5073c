"""The five numbers against their definitions, and standard errors against what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ds4.errors import FileFormatError
from rulers import numbers
from rulers.numbers import Mean, clustered_mean, position_figures, summarise

F32 = NDArray[np.float32]


def logits(seed: int, rows: int = 40, vocab: int = 97, size: float = 3.0) -> F32:
    return (size * np.random.default_rng(seed).standard_normal((rows, vocab))).astype(np.float32)


def softmax(row: list[float]) -> list[float]:
    """Of Python's own floats, summed exactly: nothing in common with what is tested."""
    top = max(row)
    powers = [math.exp(x - top) for x in row]
    total = math.fsum(powers)
    return [x / total for x in powers]


def test_figures_are_their_definitions() -> None:
    p_RV, q_RV = logits(1), logits(2)
    following = np.random.default_rng(3).integers(0, 97, 40)
    same, sigma, kl, nll_p, nll_q = position_figures(p_RV, q_RV, following)
    for r in range(40):
        p, q = softmax([float(x) for x in p_RV[r]]), softmax([float(x) for x in q_RV[r]])
        assert same[r] == (p.index(max(p)) == q.index(max(q)))
        assert sigma[r] == pytest.approx(math.fsum(map(min, p, q)), abs=1e-13)
        assert kl[r] == pytest.approx(math.fsum(a * math.log(a / b) for a, b in zip(p, q)), abs=1e-12)
        assert nll_p[r] == pytest.approx(-math.log(p[following[r]]), abs=1e-12)
        assert nll_q[r] == pytest.approx(-math.log(q[following[r]]), abs=1e-12)
    assert kl.min() > 0 and (kl != position_figures(q_RV, p_RV, following)[2]).all()  # its direction matters


def test_a_model_against_itself_is_exactly_one_one_nought_one() -> None:
    x = logits(4, rows=300, vocab=1001, size=9.0)
    x[7] = -80.0  # a flat row, and one of a single candidate
    x[8], x[8, 3] = -3e4, 3e4
    n = summarise(position_figures(x, x.copy(), np.arange(300)), np.arange(300) // 10)
    assert (n.same_top1, n.sigma_min, n.kl, n.ppl_ratio) == (Mean(1, 0), Mean(1, 0), Mean(0, 0), Mean(1, 0))
    assert (n.sigma_min_median, n.sigma_min_p5) == (1, 1)


def test_ties_go_to_the_lowest_id() -> None:
    tied = np.zeros((1, 5), np.float32)
    for id_, agrees in ((0, 1), (3, 0)):
        other = np.zeros((1, 5), np.float32)
        other[0, id_] = 1
        assert position_figures(tied, other, np.array([0]))[0, 0] == agrees
    last = np.array([[0, 2, 0, 2, 2]], np.float32)
    assert position_figures(last, np.array([[0, 9, 0, 9, 0]], np.float32), np.array([0]))[0, 0] == 1


def test_disjoint_distributions() -> None:
    p, q = np.full((1, 4), -1e4, np.float32), np.full((1, 4), -1e4, np.float32)
    p[0, 0] = q[0, 1] = 1e4
    same, sigma, kl, nll_p, nll_q = position_figures(p, q, np.array([0]))[:, 0]
    assert (same, sigma, nll_p) == (0, 0, 0) and kl == nll_q == 2e4


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = position_figures(logits(5), logits(6), np.zeros(40, np.int64))
    monkeypatch.setattr(numbers, "BLOCK_BYTES", 8 * 97 * 7)
    assert position_figures(logits(5), logits(6), np.zeros(40, np.int64)).tobytes() == whole.tobytes()
    bad = logits(6)
    bad[23, 5] = np.inf
    with pytest.raises(FileFormatError, match="ours are not finite at position 23"):
        position_figures(logits(5), bad, np.zeros(40, np.int64))
    with pytest.raises(FileFormatError, match=r"\[40, 97\], \[40, 96\]"):
        position_figures(logits(5), bad[:, :-1], np.zeros(40, np.int64))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.01, 50))
def test_bounds_hold(seed: int, size: float) -> None:
    p, q = logits(seed, 8, 33, size), logits(seed ^ 1, 8, 33, size)
    _, sigma, kl, _, _ = position_figures(p, q, np.zeros(8, np.int64))
    assert (sigma >= -1e-12).all() and (sigma <= 1).all()
    assert (kl >= 2 * (1 - sigma) ** 2 - 1e-12).all()  # Pinsker


def test_standard_error_of_documents_of_one_position_is_the_textbook_one() -> None:
    x = np.random.default_rng(7).standard_normal(50)
    assert clustered_mean(x, np.arange(50)).se == pytest.approx(x.std(ddof=1) / np.sqrt(50))
    assert clustered_mean(x, np.zeros(50, np.int64)).se is None


def test_standard_error_is_the_sandwich_by_matrices() -> None:
    """(X'X)^-1 (sum_g X_g' u_g u_g' X_g) (X'X)^-1 with X a column of ones, times G / (G - 1)."""
    rng = np.random.default_rng(8)
    x, g = rng.standard_normal(60), rng.integers(0, 7, 60)
    u = x - x.mean()
    same = g[:, None] == g[None, :]
    ones = np.ones((60, 1))
    bread = np.linalg.inv(ones.T @ ones)
    meat = ones.T @ (np.outer(u, u) * same) @ ones
    variance = 7 / 6 * (bread @ meat @ bread)[0, 0]
    assert clustered_mean(x, g).se == pytest.approx(np.sqrt(variance))
    assert clustered_mean(x, g * 1000 - 5).se == clustered_mean(x, g).se  # numbers of documents mean nothing


def test_standard_error_covers_documents_that_differ() -> None:
    """Positions share their document's level: the clustered error tells how far means scatter, the naive one does
    not. 400 texts of 20 documents of 1 to 59 positions.
    """
    rng = np.random.default_rng(9)
    means, errors, naive = [], [], []
    for _ in range(400):
        sizes = rng.integers(1, 60, 20)
        clusters = np.repeat(np.arange(20), sizes)
        x = rng.standard_normal(20)[clusters] + 0.3 * rng.standard_normal(len(clusters))
        m = clustered_mean(x, clusters)
        assert m.se is not None
        means.append(m.value)
        errors.append(m.se)
        naive.append(x.std() / np.sqrt(len(x)))
    scatter = float(np.std(means))
    # relative error of a standard deviation from 400 draws is 1/sqrt(800) = 3.5 %; CR1 is low by a few per cent here
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(scatter, rel=0.15)
    assert np.mean(naive) < 0.4 * scatter


def test_ppl_ratio_and_its_error() -> None:
    rng = np.random.default_rng(10)
    figures = np.zeros((5, 90))
    figures[3], figures[4] = rng.random(90), rng.random(90) + 0.2
    clusters = np.repeat(np.arange(9), 10)
    n = summarise(figures, clusters)
    excess = clustered_mean(figures[4] - figures[3], clusters)
    assert n.ppl_ratio.value == pytest.approx(np.exp(figures[4].mean() - figures[3].mean()))
    assert excess.se is not None and n.ppl_ratio.se == pytest.approx(n.ppl_ratio.value * excess.se)
    assert list(n.to_json()) == ["tokens", "documents", "same_top1", "sigma_min", "kl", "ppl_ratio"]
