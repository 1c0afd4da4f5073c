"""Without a seed, rounds of drafts draw from plain decode's distribution: the whole way, from weights to tokens.

Texts are drawn by rounds, then read by plain steps, which say what each token's distribution was. Tokens fall into
bins by their rank in it; the expected counts are the bins' masses, summed. The rule itself is tested with more
draws in tests/cuda/test_accept_distribution.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from ds4.device import Buffer, Device
from ds4.engine import Engine, Sampling
from ds4.engine import choose as choose_module
from ds4.engine.ops.accept import accept
from tests.engine.drafted import Policy, fixed, restless
from tests.engine.test_against_teacher import prompt

BINS = (0, 1, 4, 16, 64, 320)  # ranks
T, TOP_K = 1.5, 64
PASS, FAIL = 1e-3, 1e-6  # as in tests/cuda/test_accept_distribution.py
OF_A_TEXT = 200


def p_value(engine: Engine, policy: Policy, draws: int, *, honest: bool = True) -> tuple[float, float]:
    """Of the chi-square statistic over the bins, 0 for a token never said; and the share of rounds whose first
    draft stood. `honest`: the log-probabilities told are those of the tokens.
    """
    ids, seen, expected = prompt("oracle-a", 9), np.zeros(5), np.zeros(5)
    kept, offered = 0, 0
    for seed in range(1000, 1000 + -(-draws // OF_A_TEXT)):
        session, judge = engine.session(policy), engine.session(fixed(0))
        tokens, logprobs = [], []
        session.sync(ids)
        for i in range(OF_A_TEXT):
            tokens.append(session.next(Sampling(T, top_k=TOP_K, seed=seed, seeded=False), left=OF_A_TEXT - i))
            logprobs.append(session.last.logprob)
        kept += session.rounds.accepted[0]
        offered += sum(session.rounds.verified[1:])
        judge.sync(ids)
        rows = np.concatenate([judge.logits()[None], judge.step(tokens[:-1])]).astype(float)
        own = rows - np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        own -= rows.max(axis=1, keepdims=True)
        if honest:  # the rows are the same
            assert np.abs(own[np.arange(OF_A_TEXT), tokens] - logprobs).max() < 1e-4
        order = np.argsort(-rows, axis=1, kind="stable")
        p = np.exp((np.take_along_axis(rows, order, axis=1) - rows.max(axis=1, keepdims=True)) / T)
        p[:, TOP_K:] = 0
        p /= p.sum(axis=1, keepdims=True)
        rank = (order == np.asarray(tokens)[:, None]).argmax(axis=1)
        seen += np.histogram(rank, BINS)[0]
        expected += np.add.reduceat(p, BINS[:-1], axis=1).sum(axis=0)
    if seen[4]:
        return 0.0, kept / offered
    seen, expected = seen[:4], expected[:4]
    return float(stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), 3)), kept / offered


@pytest.mark.long
@pytest.mark.parametrize("draft", ["drawn", "argmax"])
@pytest.mark.parametrize("policy", [fixed(4), restless], ids=["fixed", "scheduler"])
def test_two_thousand_draws(engines: Callable[..., Engine], policy: Policy, draft: str) -> None:
    assert p_value(engines("oracle-a", dspark=True, draft=draft), policy, 2000)[0] > PASS


def test_some_draws_and_a_rule_that_keeps_every_draft(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("oracle-a", dspark=True)
    p, stood = p_value(engine, fixed(2), 400)
    assert p > PASS and 0.05 < stood < 0.95  # some stand and some fall

    def gullible(dev: Device, out: Buffer, *args: object, **kwargs: object) -> None:
        accept(dev, out, *args, **kwargs)  # type: ignore[arg-type]
        drafts = args[2]
        assert isinstance(drafts, Buffer)
        for row in range(drafts.size):
            dev.copy(out, drafts, 4, dst_offset=16 * row, src_offset=4 * row)

    monkeypatch.setattr(choose_module, "accept", gullible)
    engine.drop_idle()  # its graphs hold the right rule
    p, stood = p_value(engine, fixed(2), 200, honest=False)
    engine.drop_idle()
    assert p < FAIL and stood == 1.0
