"""sample_penalty.cu: penalties and biases bit for bit, counts of tokens, rows that see those before them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.device import Device
from ds4.engine.ops.sample import count_tokens, pack_bias, pack_penalties, penalize
from ds4.engine.sampling import Penalties
from ds4.errors import RequestError

V = 301
F32 = NDArray[np.float32]
ORDERS = pytest.mark.parametrize("device", ["rising", "falling", "greedy"], indirect=True)


def expected(logits: F32, p: Penalties, prompt: list[int], answer: list[int]) -> F32:
    """One row, in the kernel's order of operations."""
    out = logits.copy()
    for v in set(prompt) | set(answer):
        r = np.float32(p.repetition)
        out[v] = out[v] / r if out[v] > 0 else out[v] * r
    for v in set(answer):
        out[v] = out[v] - np.float32(p.frequency) * np.float32(answer.count(v)) - np.float32(p.presence)
    return out + pack_bias(p, len(out))


def rows(R: int) -> F32:
    return (np.random.default_rng(R).standard_normal((R, V)) * 4).astype(np.float32)


@ORDERS
def test_every_row_counts_what_came_before_it(device: Device) -> None:
    p = Penalties(0.7, 0.3, 1.3, ((4, -100.0), (300, 2.5)))
    prompt, answer, drafts = [5, 9, 9, 300], [9, 17, 17, 4], [17, 200, 200]
    logits = rows(4)
    logits[2, 17] = -np.inf
    seen = device.zeros((V,), "u32")
    count_tokens(device, seen, device.upload(np.array(prompt, np.int32)), prompt=True)
    count_tokens(device, seen, device.upload(np.array(answer, np.int32)))
    before = device.download(seen)
    out = device.empty((4, V), "f32")
    constants = device.upload(pack_penalties(p)), device.upload(pack_bias(p, V))
    pending = device.upload(np.array(drafts, np.int32))
    penalize(device, out, device.upload(logits), seen, constants[0], 4, pending=pending, bias=constants[1])
    got = device.download(out)
    for t in range(4):
        assert np.array_equal(got[t], expected(logits[t], p, prompt, answer + drafts[:t])), t
    assert np.array_equal(device.download(seen), before)

    one = device.empty((1, V), "f32")  # row 2 alone, as a draft head that picks one by one asks for it
    alone = device.upload(logits[2:3])
    penalize(device, one, alone, seen, constants[0], 1, pending=pending, bias=constants[1], first=2)
    assert np.array_equal(device.download(one)[0], got[2])


def test_neutral_settings_change_no_bit(device: Device) -> None:
    assert Penalties().neutral and Penalties(logit_bias=((1, 0.0),)).neutral
    assert not Penalties(logit_bias=((2, 0.0), (1, 0.5))).neutral
    logits = rows(2)
    seen = device.zeros((V,), "u32")
    count_tokens(device, seen, device.upload(np.arange(V, dtype=np.int32)))
    out = device.empty((2, V), "f32")
    penalize(device, out, device.upload(logits), seen, device.upload(pack_penalties(Penalties())), 2)
    assert np.array_equal(device.download(out), logits)


@ORDERS
def test_a_round_counts_its_accepted_tokens_only(device: Device) -> None:
    out = np.zeros((5, 4), np.int32)
    out[:, 0] = [7, 7, 8, 9, 10]
    seen, ids = device.zeros((V,), "u32"), device.upload(out)
    for accepted in (0, 2, 4):
        count_tokens(device, seen, ids, round_=device.upload(np.array([accepted, 0, 0, 0], np.int32)))
    counts = device.download(seen)
    assert {v: int(counts[v]) for v in np.flatnonzero(counts)} == {7: 5, 8: 2, 9: 1, 10: 1}


def test_many_tokens_and_ids_that_are_none(device: Device) -> None:
    ids = np.concatenate([np.arange(700) % 50, [-1, V, 2**31 - 1]]).astype(np.int32)
    seen = device.zeros((V,), "u32")
    count_tokens(device, seen, device.upload(ids))
    count_tokens(device, seen, device.upload(ids), prompt=True)
    got = device.download(seen)
    assert np.all(got[:50] == 14 + 2**31) and not got[50:].any()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("presence_penalty", {"presence": 2.5}),
        ("frequency_penalty", {"frequency": float("nan")}),
        ("repetition_penalty", {"repetition": 0.0}),
        ("logit_bias", {"logit_bias": ((3, 101.0),)}),
        ("logit_bias", {"logit_bias": ((-1, 1.0),)}),
    ],
)
def test_values_outside_their_range_are_refused(name: str, bad: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=name):
        Penalties(**bad)  # type: ignore[arg-type]


def test_a_bias_on_a_token_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match="token 301; ids run from 0 to 300"):
        Penalties(logit_bias=((301, 1.0),)).check_vocab(V)
