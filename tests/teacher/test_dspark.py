"""Draft rounds against dspark.* of the oracles: drafts exact, logits and confidence close."""

import numpy as np
import pytest

from ds4.teacher.dspark import Drafter
from ds4.teacher.run import Teacher, Trace
from tests.teacher.oracles import reference, source, whole, worst_row

CASES = [
    (name, "", mode) for name in ("oracle-a", "oracle-b", "oracle-e") for mode in ("owner", "released")
] + [("oracle-e", "short.", "owner")]  # fmt: skip


@pytest.mark.parametrize(("name", "prompt", "mode"), CASES)
def test_rounds(name: str, prompt: str, mode: str) -> None:
    """Round k drafts from the anchor that step k's logits give; its ring ends at position T + k."""
    ref, trace = reference(name), Trace()
    teacher = Teacher(source(name), index_keys=mode)
    state, drafter = teacher.new_state(), Drafter(teacher)
    teacher.forward(state, ref[prompt + "input_ids"], trace=trace)
    drafter.commit(trace.main_hidden[-1])
    key = f"{prompt}dspark.{mode}."
    rounds = []
    for k, token in enumerate(ref[f"{prompt}decode.{mode}.tokens"]):
        teacher.forward(state, np.array([token]), decode=True, trace=trace)
        drafter.commit(trace.main_hidden[-1])
        anchor, *drafts = ref[key + "drafts"][k].tolist()
        rounds.append(drafter.draft(anchor))
        assert rounds[-1].drafts_B.tolist() == drafts, k
    distance, limit = (worst_row, 1e-4) if name == "oracle-e" else (whole, 2e-5)
    for field, tensor in (("base_BV", "base_logits"), ("logits_BV", "markov_logits"), ("confidence_B", "confidence")):
        if key + tensor in ref:
            got = np.array([getattr(r, field) for r in rounds])
            assert distance(got, ref[key + tensor]) <= limit, tensor
