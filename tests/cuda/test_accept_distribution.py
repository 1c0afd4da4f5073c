"""What comes out of drafting and judging follows the target's distribution: 20,000 draws a setting, chi-squared.

A launch judges 20,000 rows of the same logits at as many positions; each row is one draw. Broken rules, put together
from the same kernels, have to fail the same test.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2_contingency, chisquare

from ds4.device import Buffer, Device
from ds4.engine.ops.accept import accept
from ds4.engine.ops.sample import DRAFT_STREAM, pack_params, sample
from tests.cuda.test_sample import kept_set

F32, F64, I32 = NDArray[np.float32], NDArray[np.float64], NDArray[np.int32]
N, V = 20_000, 12
RESIDUAL_STREAM = 3  # of truncate.cuh
WHOLE, CUT, NUCLEUS = (0, 1.0, 0.0), (8, 0.95, 0.03), (0, 0.8, 0.0)  # top_k, top_p, min_p
# On the fixed seeds the p-value of a right rule is above the first, of a broken one below the second.
PASS, FAIL = 1e-3, 1e-6

pytestmark = pytest.mark.parametrize("device", ["fast"], indirect=True)


def target(offset: float = 0.0) -> F32:
    """Twelve logits; softmax does not see the offset, rounding does."""
    return (np.random.default_rng(21).standard_normal(V) * 1.3 + offset).astype(np.float32)


def head(offset: float = 0.0) -> F32:
    """A draft head that is often wrong."""
    return (target(offset) + np.random.default_rng(26).standard_normal(V).astype(np.float32)).astype(np.float32)


def exact(logits: F32, T: float, cut: tuple[int, float, float]) -> F64:
    """The truncated, tempered softmax."""
    kept = kept_set(logits, T, *cut)
    p = np.zeros(V)
    p[kept] = np.exp((logits[kept].astype(float) - logits.max()) / T)
    return p / p.sum()


def p_value(tokens: I32, p: F64) -> float:
    """Of `tokens` being drawn from p; cells of less than 5 expected draws are one. 0: a token that p never says."""
    counts = np.bincount(tokens, minlength=V)
    if counts[p == 0].any() or tokens.min() < 0:
        return 0.0
    large = p * len(tokens) >= 5
    cells, expected = counts[large].astype(float), p[large] * len(tokens)
    if (rest := p[~large].sum() * len(tokens)) > 0:
        cells, expected = np.append(cells, counts[~large].sum()), np.append(expected, rest)
    return float(chisquare(cells, expected).pvalue)


@dataclass
class Rows:
    """N rows of the same logits under one setting."""

    device: Device
    T: float
    cut: tuple[int, float, float]
    seed: int = 1
    pos: Buffer = field(init=False)

    def __post_init__(self) -> None:
        self.pos = self.device.upload(np.arange(N, dtype=np.int32))

    def params(self, stream: int = 0) -> Buffer:
        return self.device.upload(pack_params(N, self.T, *self.cut, self.seed, stream))

    def tiled(self, logits: F32) -> Buffer:
        return self.device.upload(np.tile(logits, (N, 1)))

    def draw(self, logits: F32, stream: int) -> I32:
        out = self.device.empty((N, 4), "i32")
        sample(self.device, out, self.tiled(logits), self.params(stream), self.pos, N)
        return self.device.download(out)[:, 0]

    def judge(self, logits: F32, drafts: I32, draft_logits: F32 | None) -> I32:
        dev = self.device
        q = None if draft_logits is None else self.tiled(draft_logits)
        out, shares = dev.empty((N, 4), "i32"), dev.empty((N if q is None else 2 * N, 8), "i32")
        ids = dev.upload(drafts)
        accept(dev, out, shares, self.tiled(logits), ids, self.params(), self.pos, N, draft_logits=q)
        return dev.download(out)[:, 0]

    def sampled(self) -> tuple[I32, I32]:
        """Drafts drawn from the head, and what came of them."""
        drafts = self.draw(head(), DRAFT_STREAM)
        return drafts, self.judge(target(), drafts, head())

    def argmax(self) -> tuple[I32, I32]:
        """The head's argmax as the draft of every row, and what came of it."""
        drafts = np.full(N, head().argmax(), np.int32)
        return drafts, self.judge(target(), drafts, None)


SETTINGS = [
    pytest.param(0.7, WHOLE, id="0.7-whole"),
    pytest.param(1.0, CUT, id="1.0-cut"),
    pytest.param(1.5, WHOLE, id="1.5-whole", marks=pytest.mark.long),
    pytest.param(0.7, CUT, id="0.7-cut", marks=pytest.mark.long),
    pytest.param(1.0, WHOLE, id="1.0-whole", marks=pytest.mark.long),
    pytest.param(1.5, CUT, id="1.5-cut", marks=pytest.mark.long),
]


@pytest.mark.parametrize("kind", ["sampled", "argmax"])
@pytest.mark.parametrize(("T", "cut"), SETTINGS)
def test_tokens_follow_the_target(device: Device, T: float, cut: tuple[int, float, float], kind: str) -> None:
    rows = Rows(device, T, cut)
    drafts, tokens = rows.sampled() if kind == "sampled" else rows.argmax()
    p, q = exact(target(), T, cut), exact(head(), T, cut)
    assert p_value(tokens, p) > PASS
    assert p_value(tokens, exact(target(), T * 1.1, cut)) < FAIL  # the test sees a temperature that is a tenth off
    rate = np.minimum(p, q).sum() if kind == "sampled" else p[head().argmax()]
    spread = np.sqrt(rate * (1 - rate) / N)
    assert abs((tokens == drafts).mean() - rate) < 4 * spread and 0.1 < rate < 0.95
    if kind == "sampled":
        assert p_value(drafts, q) > PASS and p_value(drafts, p) < FAIL


def test_equal_picks_are_as_frequent_as_theory_says(device: Device) -> None:
    """Draft and target drawn by the same noise: both follow their distributions, and agree in a share of
    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i).
    """
    rows = Rows(device, 1.0, WHOLE)
    drafts, tokens = rows.draw(head(), 0), rows.draw(target(), 0)
    p, q = exact(target(), 1.0, WHOLE), exact(head(), 1.0, WHOLE)
    assert p_value(tokens, p) > PASS and p_value(drafts, q) > PASS
    rate = (1 / np.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)).sum()
    assert abs((tokens == drafts).mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / N)
    assert rate < np.minimum(p, q).sum()  # what a seed costs


def test_neighbouring_positions_are_independent(device: Device) -> None:
    _, tokens = Rows(device, 1.5, WHOLE).sampled()
    table = np.zeros((V, V))
    np.add.at(table, (tokens[:-1:2], tokens[1::2]), 1)
    often = np.bincount(tokens, minlength=V) > 400
    assert chi2_contingency(table[often][:, often]).pvalue > PASS


# -- broken rules


def test_a_rejection_that_draws_from_the_whole_target_fails(device: Device) -> None:
    """Accept with p / q, but no residual."""
    rows = Rows(device, 1.0, WHOLE)
    drafts, tokens = rows.sampled()
    again = rows.draw(target(), RESIDUAL_STREAM)
    assert p_value(np.where(tokens == drafts, drafts, again), exact(target(), 1.0, WHOLE)) < FAIL


def test_a_ban_before_the_truncation_fails(device: Device) -> None:
    """Point mass: -inf for the draft, then top_p again, lets tokens in that p never says, and gives the rest less."""
    rows = Rows(device, 1.0, NUCLEUS)
    drafts, tokens = rows.argmax()
    banned = target()
    banned[drafts[0]] = -np.inf
    again = rows.draw(banned, RESIDUAL_STREAM)
    p = exact(target(), 1.0, NUCLEUS)
    broken = np.where(tokens == drafts, drafts, again)
    assert p_value(tokens, p) > PASS and p_value(broken, p) < FAIL
    said = p > 0  # not only by the tokens that p never says
    inside = broken[said[broken]]
    assert p_value(inside, p) < FAIL


def test_a_q_that_is_rounded_differently_from_what_was_drawn_fails(device: Device) -> None:
    """Drafts drawn from f32 logits, judged by the same logits in bf16."""
    at = 100.0  # where bf16 has steps of a half
    rows = Rows(device, 1.0, WHOLE)
    drafts = rows.draw(head(at), DRAFT_STREAM)
    rounded = ((head(at).view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)
    p = exact(target(at), 1.0, WHOLE)
    assert p_value(rows.judge(target(at), drafts, head(at)), p) > PASS
    assert p_value(rows.judge(target(at), drafts, rounded), p) < FAIL


def test_a_residual_that_shares_the_drafts_noise_fails(device: Device) -> None:
    """Why the streams differ: what won among the drafts would win among the replacements too."""
    rows = Rows(device, 1.0, WHOLE)
    drafts = rows.draw(head(), RESIDUAL_STREAM)
    assert p_value(rows.judge(target(), drafts, head()), exact(target(), 1.0, WHOLE)) < FAIL
