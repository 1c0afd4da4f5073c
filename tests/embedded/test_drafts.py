"""The embedded model's draft stages, on the teacher: they guess what the trunk would choose, and know how well."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.model.tokenizer import Tokenizer
from ds4.teacher.dspark import Drafter
from ds4.teacher.run import Teacher, Trace
from tests.embedded.conftest import judge_ids

DOMAINS = ("code", "law", "medicine", "science", "general")
N, FIRST, EVERY = 400, 40, 5  # tokens a domain; the first anchor; tokens between anchors


@dataclass(frozen=True)
class Rounds:
    """First rows of drafting rounds on judge text, A anchors."""

    same_A: NDArray[np.bool_]  # the first draft is what the trunk would choose there
    overlap_A: NDArray[np.float64]  # sum_v min(draft's, trunk's): the chance to be accepted at temperature 1
    confidence_A: NDArray[np.float64]  # raw


def softmax(logits_V: NDArray[np.float32]) -> NDArray[np.float64]:
    e = np.exp(logits_V.astype(np.float64) - logits_V.max())
    return np.asarray(e / e.sum())


@pytest.fixture(scope="module")
def rounds(teacher: Teacher, tokenizer: Tokenizer) -> Rounds:
    """At position p all up to p is committed, token p + 1 is the text's, and the first draft is for p + 2."""
    same, overlap, confidence = [], [], []
    for domain in DOMAINS:
        ids, trace, drafter = judge_ids(tokenizer, domain, N), Trace(), Drafter(teacher)
        logits_TV = teacher.forward(teacher.new_state(), ids, trace=trace)
        (hidden_R,) = trace.main_hidden
        for p in range(FIRST, N - 1, EVERY):
            drafter.commit(hidden_R[drafter.position : p + 1])
            found = drafter.draft(int(ids[p + 1]))
            same.append(found.drafts_B[0] == logits_TV[p + 1].argmax())
            overlap.append(np.minimum(softmax(found.logits_BV[0]), softmax(logits_TV[p + 1])).sum())
            confidence.append(found.confidence_B[0])
    return Rounds(np.array(same), np.array(overlap), np.array(confidence, np.float64))


def test_the_first_draft_is_the_trunks_choice(rounds: Rounds) -> None:
    """Half of the time and more."""
    assert rounds.same_A.mean() >= 0.5


def test_the_first_draft_would_be_accepted(rounds: Rounds) -> None:
    assert rounds.overlap_A.mean() >= 0.45


def test_confidence_means_something(rounds: Rounds) -> None:
    """It rises with the chance of acceptance, and is right on average."""
    assert np.corrcoef(rounds.confidence_A, rounds.overlap_A)[0, 1] > 0.3
    probability = 1 / (1 + np.exp(-rounds.confidence_A))
    assert abs(probability.mean() - rounds.overlap_A.mean()) < 0.15
