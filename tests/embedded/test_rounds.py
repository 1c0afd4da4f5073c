"""Drafts change nothing of the embedded model's answers, on a long prompt, and its own draft head's often stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4 import embedded
from ds4.engine import Engine, Sampling
from ds4.model.tokenizer import Tokenizer
from tests.conftest import opened
from tests.embedded.conftest import judge_ids
from tests.engine.drafted import GREEDY, answer, fixed, restless, same_as_plain

SEEDED = (Sampling(0.7, top_p=0.95, seed=4), Sampling(1.3, seed=5))
PROMPT = 700


@pytest.fixture(scope="module", params=["owner", pytest.param("released", marks=pytest.mark.long)])
def drafting(base: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine.open(
        base, engram_dir=embedded.checkpoint(), dspark=True, index_keys=request.param,
        device=opened("fast", "greedy"),
    )  # fmt: skip
    yield engine
    engine.close()


@pytest.mark.long
def test_a_long_prompt_and_the_whole_block(
    drafting: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = judge_ids(tokenizer, "law", PROMPT).tolist()
    same_as_plain(drafting, monkeypatch, ids, 26, GREEDY, ks=(drafting.block,))


@pytest.mark.long
@pytest.mark.parametrize("sampling", [GREEDY, *SEEDED], ids=["greedy", "cold", "hot"])
@pytest.mark.parametrize("domain", ["code", "medicine"])
def test_a_long_prompt_and_every_number_of_drafts(
    drafting: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, domain: str, sampling: Sampling
) -> None:
    ids = judge_ids(tokenizer, domain, PROMPT).tolist()
    same_as_plain(drafting, monkeypatch, ids, 40, sampling)


def test_the_heads_own_drafts_often_stand(drafting: Engine, tokenizer: Tokenizer) -> None:
    """And the tokens are plain decode's; the scheduler's too, on any clock."""
    ids = judge_ids(tokenizer, "general", 200).tolist()
    for sampling in (GREEDY, SEEDED[0]):
        want = answer(drafting.session(fixed(0)), ids, 48, sampling)
        session = drafting.session(fixed(2))
        assert answer(session, ids, 48, sampling) == want
        assert session.rounds.accepted[0] > 0.25 * session.rounds.verified[2]
        assert answer(drafting.session(restless), ids, 48, sampling) == want
