"""The whole way from logits to a token on the device, as a step takes it, against docs/sampling.md in float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.device import Device
from ds4.engine.ops.sample import (
    DRAFT_STREAM,
    count_tokens,
    pack_bias,
    pack_params,
    pack_penalties,
    penalize,
    sample,
    top_logprobs,
)
from ds4.engine.sampling import Penalties, Sampling
from tests import reference_sampling as reference
from tests.cuda.test_accept_distribution import FAIL, PASS, Rows, exact, head, p_value, target

FAST = pytest.mark.parametrize("device", ["fast"], indirect=True)
MARGIN = 1e-4  # scores are of the order of 10: float32 keeps them to 1e-6, log and exp to a few of its last places
PENALTIES = Penalties(0.6, 0.4, 1.2, ((3, -100.0), (11, 4.0), (12, -2.5)))
SETTINGS = [
    Sampling(0.0, penalties=PENALTIES),
    Sampling(1.0, seed=2**63 + 12345),
    Sampling(0.7, seed=5, penalties=PENALTIES),
    Sampling(1.3, top_k=40, top_p=0.9, min_p=0.01, seed=2**40, penalties=PENALTIES),
    Sampling(1.0, top_p=0.5, seed=7, penalties=Penalties(frequency=-2.0)),
    Sampling(0.9, min_p=0.2, seed=8, penalties=Penalties(repetition=0.5)),
]


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_the_reference_is_the_published_generator(
    key: tuple[int, int], counter: tuple[int, int, int, int], words: str
) -> None:
    """Known answers of its authors' library."""
    assert " ".join(f"{w:08x}" for w in reference.philox(key, counter)) == words


def chain(
    device: Device, logits: NDArray[np.float32], s: Sampling, prompt: list[int], answer: list[int],
    drafts: list[int], first: int, stream: int, top: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:  # fmt: skip
    """Rows of one pass: tokens with their log-probabilities, and the likeliest."""
    R, V = logits.shape
    raw, seen = device.upload(logits), device.zeros((V,), "u32")
    count_tokens(device, seen, device.upload(np.array(prompt, np.int32)), prompt=True)
    count_tokens(device, seen, device.upload(np.array(answer, np.int32)))
    changed, out = device.empty((R, V), "f32"), device.empty((R, 4), "i32")
    pending = device.upload(np.array(drafts, np.int32)) if drafts else None
    penalize(
        device, changed, raw, seen, device.upload(pack_penalties(s.penalties)), R,
        pending=pending, bias=device.upload(pack_bias(s.penalties, V)),
    )  # fmt: skip
    params = pack_params(R, s.device_temperature, s.top_k, s.top_p, s.min_p, s.seed, stream)
    pos = device.upload(np.arange(first, first + R, dtype=np.int32))
    sample(device, out, changed, device.upload(params), pos, R, raw=raw)
    ids, values = device.empty((R, top), "i32"), device.empty((R, top), "f32")
    top_logprobs(device, ids, values, raw, R)
    return device.download(out), device.download(ids), device.download(values)


def check(device: Device, logits: NDArray[np.float32], s: Sampling, stream: int, first: int) -> int:
    """Compare every row; how many were decided by more than MARGIN."""
    R, V = logits.shape
    prompt, answer = [5, 9, 9, V - 1], [9, 11, 11, 11, 4]
    drafts = [9, 20, 20, 4, 20, 9, 0][: R - 1]
    got, ids, values = chain(device, logits, s, prompt, answer, drafts, first, stream, top=5)
    decided = 0
    for t, row in enumerate(logits.astype(float)):
        changed = reference.penalised(row, s, prompt, answer + drafts[:t])
        token, margin = reference.drawn(changed, s, first + t, stream)
        exact = reference.logprobs(row)
        if margin > MARGIN:
            decided += 1
            assert got[t, 0] == token, (s, t, margin)
        assert got[t, 1].view(np.float32) == pytest.approx(exact[got[t, 0]], abs=1e-5 if V < 1000 else 1e-3)
        likely = np.lexsort((np.arange(V), -row))[:5]
        assert ids[t].tolist() == likely.tolist()
        assert values[t] == pytest.approx(exact[likely], abs=1e-5 if V < 1000 else 1e-3)
    return decided


@FAST
@pytest.mark.parametrize("stream", [0, DRAFT_STREAM])
@pytest.mark.parametrize("s", SETTINGS, ids=range(len(SETTINGS)))
def test_a_pass_draws_what_the_document_says(device: Device, s: Sampling, stream: int) -> None:
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((8, 331)) * 3).astype(np.float32)
    logits[2, ::3] = -np.inf
    logits[3] = np.round(logits[3])
    logits[4] = 0.25
    logits[5, 17] = 60.0
    assert check(device, logits, s, stream, first=1000) >= 6


@FAST
def test_the_released_vocabulary(device: Device) -> None:
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((2, 129_280)) * 3).astype(np.float32)
    logits[1, ::2] = -np.inf
    s = Sampling(1.1, top_k=300, top_p=0.95, seed=2**33 + 3, penalties=PENALTIES)
    assert check(device, logits, s, 0, first=262_143) == 2


@FAST
def test_drafts_of_a_penalised_text_give_its_distribution(device: Device) -> None:
    """20,000 draws: head and target both see the penalties, and drafts are judged by the rows that they came from."""
    s = Sampling(0.9, top_p=0.95, penalties=Penalties(0.8, 0.5, 1.4, ((2, 1.5), (7, -2.0))))
    prompt, answer = [0, 4, 9], [1, 1, 1, 4, 10]

    def penalised(logits: NDArray[np.float32]) -> NDArray[np.float32]:
        V = len(logits)
        seen, out = device.zeros((V,), "u32"), device.empty((1, V), "f32")
        count_tokens(device, seen, device.upload(np.array(prompt, np.int32)), prompt=True)
        count_tokens(device, seen, device.upload(np.array(answer, np.int32)))
        values, bias = device.upload(pack_penalties(s.penalties)), device.upload(pack_bias(s.penalties, V))
        penalize(device, out, device.upload(logits[None]), seen, values, 1, bias=bias)
        return np.asarray(device.download(out)[0])

    cut = (s.top_k, s.top_p, s.min_p)
    rows = Rows(device, s.temperature, cut)
    p = exact(reference.penalised(target().astype(float), s, prompt, answer).astype(np.float32), s.temperature, cut)
    q = exact(reference.penalised(head().astype(float), s, prompt, answer).astype(np.float32), s.temperature, cut)
    drafts = rows.draw(penalised(head()), DRAFT_STREAM)
    tokens = rows.judge(penalised(target()), drafts, penalised(head()))
    assert p_value(drafts, q) > PASS and p_value(tokens, p) > PASS
    assert p_value(tokens, exact(target(), s.temperature, cut)) < FAIL  # what no penalties would give
    broken = rows.judge(penalised(target()), drafts, head())  # q is not what drafts were drawn from
    assert p_value(broken, p) < FAIL
