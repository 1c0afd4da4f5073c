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
from ds4.engine import rounds as rounds_module
from ds4.engine.ops.accept import accept
from tests.engine.drafted import Policy, answer, fixed, restless
from tests.engine.test_against_teacher import prompt

BINS = (0, 1, 4, 16, 64, 320)  # ranks
T, TOP_K = 1.5, 64
LEAST_P = 1e-3


def p_value(engine: Engine, policy: Policy, draws: int, of_a_text: int = 200, least: float = 0.05) -> float:
    """Of the chi-square statistic over the bins. More than `least` of the draws kept a first draft, as many refused
    one.
    """
    ids, seen, expected = prompt("oracle-a", 9), np.zeros(5), np.zeros(5)
    kept, refused = 0, 0
    for seed in range(-(-draws // of_a_text)):
        session = engine.session(policy)
        tokens = answer(session, ids, of_a_text, Sampling(T, top_k=TOP_K, seed=seed, seeded=False))
        kept += session.rounds.accepted[0]
        refused += sum(session.rounds.verified[1:]) - session.rounds.accepted[0]
        judge = engine.session(fixed(0))
        judge.sync(ids)
        rows = np.concatenate([judge.logits()[None], judge.step(tokens[:-1])]).astype(float) / T
        order = np.argsort(-rows, axis=1, kind="stable")
        p = np.exp(np.take_along_axis(rows, order, axis=1) - rows.max(axis=1, keepdims=True))
        p[:, TOP_K:] = 0
        p /= p.sum(axis=1, keepdims=True)
        rank = (order == np.asarray(tokens)[:, None]).argmax(axis=1)
        seen += np.histogram(rank, BINS)[0]
        expected += np.add.reduceat(p, BINS[:-1], axis=1).sum(axis=0)
    assert kept > least * draws and refused > least * draws
    if seen[4]:  # a token that is never said
        return 0.0
    seen, expected = seen[:4], expected[:4]
    return float(stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), 3))


@pytest.mark.long
@pytest.mark.parametrize("draft", ["drawn", "argmax"])
@pytest.mark.parametrize("policy", [fixed(4), restless], ids=["fixed", "scheduler"])
def test_two_thousand_draws(engines: Callable[..., Engine], policy: Policy, draft: str) -> None:
    assert p_value(engines("oracle-a", dspark=True, draft=draft), policy, 2000, least=0.0) > LEAST_P


def test_some_draws_and_a_rule_that_keeps_every_draft(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("oracle-a", dspark=True)
    assert p_value(engine, fixed(2), 400) > LEAST_P
    assert p_value(engines("oracle-a", dspark=True, draft="argmax"), fixed(2), 400, least=0.0) > LEAST_P

    def gullible(dev: Device, out: Buffer, *args: object, **kwargs: object) -> None:
        accept(dev, out, *args, **kwargs)  # type: ignore[arg-type]
        drafts = args[2]
        assert isinstance(drafts, Buffer)
        for row in range(drafts.size - 1):  # the last one is judged
            dev.copy(out, drafts, 4, dst_offset=16 * row, src_offset=4 * row)

    monkeypatch.setattr(rounds_module, "accept", gullible)
    assert p_value(engine, fixed(2), 400, least=-1.0) < LEAST_P
