"""Penalties, biases and log-probabilities through a session, with drafts and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ds4.engine import Engine, Sampling, Session
from ds4.engine.choose import Drawn
from ds4.engine.draft import Drafter
from ds4.engine.sampling import Penalties
from ds4.errors import CapacityError, RequestError
from tests.engine.drafted import Forced, Policy, fixed, restless, same_as_plain, settled
from tests.engine.test_against_teacher import prompt

HARSH = Penalties(presence=0.7, frequency=0.4, repetition=1.3, logit_bias=((5, 4.0), (17, -50.0)))
GREEDY = Sampling(penalties=HARSH, top=7)
SEEDED = Sampling(1.3, top_k=60, seed=5, penalties=HARSH, top=20)


def drawn(session: Session, ids: Sequence[int], n: int, sampling: Sampling) -> list[Drawn]:
    """What is known of the `n` tokens after the prompt."""
    session.sync(ids)
    out = []
    for i in range(n):
        session.next(sampling, left=n - i)
        out.append(session.last)
    return out


def penalized(logits: np.ndarray, prompt_ids: Sequence[int], answer: Sequence[int], p: Penalties) -> np.ndarray:
    """docs/sampling.md, step 1, in float32 as the kernel does it."""
    out = logits.astype(np.float32).copy()
    seen = sorted({*prompt_ids, *answer})
    out[seen] = np.where(out[seen] > 0, out[seen] / np.float32(p.repetition), out[seen] * np.float32(p.repetition))
    for token in set(answer):
        taken = np.float32(p.frequency) * np.float32(list(answer).count(token))
        out[token] = out[token] - taken - np.float32(p.presence)
    for token, value in p.logit_bias:
        out[token] += np.float32(value)
    return out


def test_penalties_are_those_of_the_text_so_far(engines: Callable[..., Engine]) -> None:
    """Every token is the argmax of what the reference makes of the model's own logits; they do change the text."""
    engine, ids = engines("oracle-b"), prompt("oracle-b", 15)
    got = drawn(engine.session(), ids, 40, GREEDY)
    tokens = [d.token for d in got]
    judge = engine.session()
    judge.sync(ids)
    rows = np.concatenate([judge.logits()[None], judge.step(tokens[:-1])])
    for t, (row, d) in enumerate(zip(rows, got)):
        assert d.token == int(penalized(row, ids, tokens[:t], HARSH).argmax()), t
        own = row.astype(float) - np.log(np.exp(row.astype(float) - row.max()).sum()) - row.max()
        assert d.logprob == pytest.approx(own[d.token], abs=1e-4)
        best = np.argsort(-row, kind="stable")[:7]
        assert [i for i, _ in d.top] == best.tolist()
        assert [lp for _, lp in d.top] == pytest.approx(own[best].tolist(), abs=1e-4)
    assert 17 not in tokens and tokens != [d.token for d in drawn(engine.session(), ids, 40, Sampling())]
    told = drawn(engine.session(), ids, 40, Sampling(top=1))
    assert [d.token for d in told] == [d.token for d in drawn(engine.session(), ids, 40, Sampling())]
    assert all(d.top == ((d.token, d.logprob),) for d in told)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("index_keys", ["owner", "released"])
def test_drafts_change_no_penalised_token(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, index_keys: str, sampling: Sampling
) -> None:
    engine = engines("oracle-a", dspark=True, index_keys=index_keys)
    same_as_plain(engine, monkeypatch, prompt("oracle-a", 12), 26, sampling, ks=(2, 4))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", [fixed(3), restless], ids=["fixed", "scheduler"])
def test_log_probabilities_are_the_same_with_drafts(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, policy: Policy, sampling: Sampling
) -> None:
    engine, ids = engines("oracle-e", dspark=True), prompt("oracle-e", 12)
    want = drawn(engine.session(fixed(0)), ids, 26, sampling)
    Forced(monkeypatch, [*ids, *(d.token for d in want)])
    session = engine.session(policy)
    assert drawn(session, ids, 26, sampling) == want
    assert session.rounds.accepted[0]


def test_direct_launches_say_the_same(engines: Callable[..., Engine]) -> None:
    ids = prompt("oracle-a", 12)
    for sampling in (GREEDY, SEEDED, Sampling(1.0, seed=3, seeded=False, penalties=HARSH, top=3)):
        got = [
            drawn(engines("oracle-a", dspark=True, graphs=graphs).session(fixed(2)), ids, 20, sampling)
            for graphs in (True, False)
        ]
        assert got[0] == got[1]


def test_counts_follow_the_text_back_and_forth(engines: Callable[..., Engine]) -> None:
    """Rolled back, restored, stepped, synced: always what the timeline says, and the prompt is what was synced."""
    engine, ids = engines("oracle-b", dspark=True), prompt("oracle-b", 15)
    only = Sampling(penalties=Penalties(frequency=-2.0, presence=-2.0))  # what the prompt has earns nothing
    want = [d.token for d in drawn(engine.session(fixed(0)), ids, 30, only)]

    def go_on(session: Session, n: int) -> list[int]:
        return [session.next(only, left=n - i) for i in range(n)]

    for policy in (fixed(0), fixed(3)):
        session = engine.session(policy)
        session.sync(ids)
        assert go_on(session, 12) == want[:12]
        kept = session.snapshot()
        assert go_on(session, 10) == want[12:22]
        session.rollback(len(ids) + 5)
        assert go_on(session, 12) == want[5:17]
        session.restore(kept)
        other = engine.session(policy)
        other.restore(kept)
        assert go_on(other, 18) == go_on(session, 18) == want[12:]
        end = settled(session)
        session.restore(kept)
        session.step(want[12:16])
        session.next(Sampling(2.0, seed=1))
        session.rollback(len(session.tokens) - 1)
        assert go_on(session, 14) == want[16:] and settled(session) == end
        session.sync([*ids, *want[:12]])  # now all of it is the prompt
        said: list[int] = []
        for _ in range(8):
            reference = penalized(session.logits(), session.tokens[:27], said, only.penalties)
            said.append(session.next(only))
            assert said[-1] == int(reference.argmax())
        assert said != want[12:20]


def test_settings_that_could_not_be_written_are_written_again(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ends behind the first words: the request before must not go on with half of the new one's."""
    engine, ids = engines("oracle-b", dspark=True), prompt("oracle-b", 15)
    want = [d.token for d in drawn(engine.session(fixed(2)), ids, 8, Sampling())]
    session = engine.session(fixed(2))
    session.sync(ids)
    assert session.next(Sampling()) == want[0]

    def broken(*args: object) -> None:
        raise CapacityError("no bytes of device memory")

    with monkeypatch.context() as patched:
        patched.setattr(Drafter, "pick_by", broken)
        with pytest.raises(CapacityError):
            session.next(Sampling(5.0, seed=1))
    assert [session.next(Sampling()) for _ in range(7)] == want[1:]


def test_a_bias_on_a_token_that_is_not_there_is_refused(engines: Callable[..., Engine]) -> None:
    session = engines("oracle-a").session()
    session.sync(prompt("oracle-a", 5))
    with pytest.raises(RequestError, match="logit_bias names token 320"):
        session.next(Sampling(penalties=Penalties(logit_bias=((320, 1.0),))))
    assert session.next(Sampling()) >= 0
