"""Answers that obey a constraint: every token allowed, drafts or not; the constraint follows what is taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from ds4.engine import Ask, Engine, Sampling, Session
from ds4.engine.constraint import Anything
from ds4.engine.ops.sample import mask_words
from ds4.engine.sampling import Penalties
from ds4.errors import Ds4Error
from tests.engine.drafted import Forced, Policy, fixed, more, restless
from tests.engine.test_against_teacher import prompt

GREEDY = Sampling()
HARSH = Sampling(1.3, seed=5, top=4, penalties=Penalties(repetition=1.3, logit_bias=((5, 9.0),)))


class Fractions:
    """After tokens of sum s those with v % 4 != s % 4 are allowed; all of them after fewer than `all_below`."""

    def __init__(self, vocab: int, all_below: int = 0) -> None:
        self.vocab, self.all_below = vocab, all_below
        self.text: list[int] = []
        self.drafted = 0  # rows asked for ahead of the text

    def allowed(self, text: Sequence[int]) -> NDArray[np.bool_]:
        v = np.arange(self.vocab)
        return np.ones(self.vocab, bool) if len(text) < self.all_below else v % 4 != sum(text) % 4

    def rows(self, ahead: Sequence[int]) -> NDArray[np.uint32] | None:
        self.drafted += len(ahead)
        if len(self.text) + len(ahead) < self.all_below:
            return None
        bits = np.zeros((1 + len(ahead), 32 * mask_words(self.vocab)), bool)
        for i in range(1 + len(ahead)):
            bits[i, : self.vocab] = self.allowed([*self.text, *ahead[:i]])
        return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)

    def valid(self, ahead: Sequence[int]) -> int:
        return next((i for i, t in enumerate(ahead) if not self.allowed([*self.text, *ahead[:i]])[t]), len(ahead))

    def advance(self, token: int) -> None:
        assert self.allowed(self.text)[token]
        self.text.append(token)

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.text)
        del self.text[-count:]


def constrained(session: Session, ids: Sequence[int], all_below: int = 0) -> Fractions:
    session.sync(ids)
    own = Fractions(session.config.vocab_size, all_below)
    session.constrain(own)
    return own


@pytest.mark.parametrize(
    ("index_keys", "sampling"), [("owner", GREEDY), ("released", HARSH)], ids=["greedy", "penalised"]
)  # fmt: skip
def test_drafts_change_no_constrained_token(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, index_keys: str, sampling: Sampling
) -> None:
    engine, ids = engines("oracle-a", dspark=True, index_keys=index_keys), prompt("oracle-a", 12)
    plain = engine.session(fixed(0))
    own = constrained(plain, ids, all_below=3)
    want = more(plain, 26, sampling)
    assert own.text == want and own.valid([]) == 0
    free = engine.session(fixed(0))
    free.sync(ids)
    assert more(free, 26, sampling) != want  # it does forbid something
    for policy in (fixed(4), restless):
        with monkeypatch.context() as patched:
            Forced(patched, [*ids, *want])
            session = engine.session(policy)
            own = constrained(session, ids, all_below=3)
            assert more(session, 26, sampling) == want and own.text == want
            assert own.drafted and sum(session.rounds.accepted)


def test_what_forbids_nothing_changes_nothing(engines: Callable[..., Engine]) -> None:
    engine, ids = engines("oracle-b"), prompt("oracle-b", 15)
    free, masked = engine.session(), engine.session()
    free.sync(ids)
    masked.sync(ids)
    masked.constrain(Anything(engine.config.vocab_size))
    assert more(masked, 12, HARSH) == more(free, 12, HARSH)


def test_log_probabilities_are_the_models_own(engines: Callable[..., Engine]) -> None:
    engine, ids = engines("oracle-b"), prompt("oracle-b", 15)
    session = engine.session()
    own = constrained(session, ids)
    session.next(Sampling(top=3))
    judge = engine.session()
    judge.sync(ids)
    row = judge.logits().astype(float)
    told = row - np.log(np.exp(row - row.max()).sum()) - row.max()
    best = np.argsort(-row, kind="stable")[:3]
    assert [i for i, _ in session.last.top] == best.tolist()
    assert session.last.logprob == pytest.approx(told[own.text[0]], abs=1e-4)
    assert own.text[0] == int(np.where(own.allowed([]), row, -np.inf).argmax())


@pytest.mark.parametrize("taken", [pytest.param(1, marks=pytest.mark.long), 3])
def test_what_was_drawn_ahead_is_taken_back(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """Another constraint, other settings, another text: the constraint is where the text is."""
    engine, ids = engines("oracle-a", dspark=True), prompt("oracle-a", 20)
    plain = engine.session(fixed(0))
    constrained(plain, ids)
    want = more(plain, 20)
    Forced(monkeypatch, [*ids, *want], always_right=True)
    session = engine.session(fixed(4))
    own = constrained(session, ids)
    n = 1 + taken  # one from the prompt, some of a round of five
    assert [session.next(GREEDY) for _ in range(n)] == want[:n] and own.text == want[:6]
    assert session.logits().shape == (session.config.vocab_size,) and own.text == want[:n]
    assert more(session, 20 - n) == want[n:] and own.text == want
    own = constrained(session, ids)
    assert [session.next(GREEDY) for _ in range(n)] == want[:n]
    session.constrain(None)
    assert own.text == want[:n]
    free = engine.session(fixed(0))
    constrained(free, ids)
    more(free, n)
    free.constrain(None)
    assert more(session, 8) == more(free, 8) and own.text == want[:n]
    for end in (lambda: session.step([7]), lambda: session.sync(ids), lambda: session.rollback(len(ids))):
        own = constrained(session, ids)
        session.next(GREEDY)
        end()
        session.next(GREEDY)
        assert len(own.text) == 1


def p_value(
    engine: Engine, policy: Policy, draws: int, T: float = 1.5, top_k: int = 48, first: int = 2000
) -> tuple[float, float]:
    """As in test_rounds_distribution.py, of texts that obey: the expected counts are of the masked distribution."""
    bins, n = (0, 1, 4, 16, 48, 320), 150
    ids, seen, expected = prompt("oracle-a", 9), np.zeros(5), np.zeros(5)
    kept = offered = 0
    for seed in range(first, first + -(-draws // n)):
        session, judge = engine.session(policy), engine.session(fixed(0))
        own = constrained(session, ids)
        tokens = more(session, n, Sampling(T, top_k=top_k, seed=seed, seeded=False))
        kept, offered = kept + session.rounds.accepted[0], offered + sum(session.rounds.verified[1:])
        judge.sync(ids)
        rows = np.concatenate([judge.logits()[None], judge.step(tokens[:-1])]).astype(float)
        for i in range(n):
            rows[i, ~own.allowed(tokens[:i])] = -np.inf
        order = np.argsort(-rows, axis=1, kind="stable")
        p = np.exp((np.take_along_axis(rows, order, axis=1) - rows.max(axis=1, keepdims=True)) / T)
        p[:, top_k:] = 0
        p /= p.sum(axis=1, keepdims=True)
        rank = (order == np.asarray(tokens)[:, None]).argmax(axis=1)
        seen += np.histogram(rank, bins)[0]
        expected += np.add.reduceat(p, bins[:-1], axis=1).sum(axis=0)
    assert not seen[4]
    return float(stats.chi2.sf(((seen[:4] - expected[:4]) ** 2 / expected[:4]).sum(), 3)), kept / offered


class Refusing(Fractions):
    """It gives up at the token after the fourth."""

    def advance(self, token: int) -> None:
        if len(self.text) == 4:
            raise Ds4Error("enough")
        super().advance(token)


@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.long), 4])
def test_a_constraint_that_gives_up_is_this_sessions_error(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    engine, ids = engines("oracle-a", dspark=True), prompt("oracle-a", 12)
    plain = engine.session(fixed(0))
    constrained(plain, ids)
    want = more(plain, 12)
    Forced(monkeypatch, [*ids, *want], always_right=True)
    session = engine.session(fixed(k))
    session.sync(ids)
    own = Refusing(session.config.vocab_size)
    session.constrain(own)
    got: list[int] = []
    for _ in range(2):
        with pytest.raises(Ds4Error, match="enough"):
            for _ in range(12):
                got.append(session.next(GREEDY))
    assert got == own.text == want[: len(got)] and len(got) == (1 if k else 4)
    kept = session.snapshot()
    session.restore(kept)
    session.next(GREEDY)  # what is restored is free
    session.restore(kept)
    own = Fractions(session.config.vocab_size)
    own.text = list(got)
    session.constrain(own)  # the session is as it was before
    assert more(session, 12 - len(got)) == want[len(got) :]


def test_who_shares_a_pass_with_one_that_gives_up_goes_on(engines: Callable[..., Engine]) -> None:
    engine, ids = engines("oracle-b"), prompt("oracle-b", 15)
    alone = engine.session()
    alone.sync(ids)
    want = more(alone, 10)
    first, second = engine.session(), engine.session()
    for session in (first, second):
        session.sync(ids)
    own = Refusing(engine.config.vocab_size)
    first.constrain(own)
    got: list[int] = []
    failed = []
    while len(got) < 10:
        engine.draw([Ask(first, GREEDY), Ask(second, GREEDY)])
        got.append(second.next(GREEDY))
        try:
            first.next(GREEDY)
        except Ds4Error as e:
            failed.append(str(e))
    assert got == want and len(own.text) == 4 and failed == ["enough"] * 6


@pytest.mark.long
@pytest.mark.parametrize("draft", ["drawn", "argmax"])
@pytest.mark.parametrize("policy", [fixed(4), restless], ids=["fixed", "scheduler"])
def test_two_thousand_masked_draws(engines: Callable[..., Engine], policy: Policy, draft: str) -> None:
    p, stood = p_value(engines("oracle-a", dspark=True, draft=draft), policy, 2000)
    assert p > 1e-3
    assert draft == "argmax" or 0.02 < stood < 0.95  # of this model's likeliest drafts hardly any stands
