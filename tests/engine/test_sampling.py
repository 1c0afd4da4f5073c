"""Sampling settings: what is out of range is refused by the name that a request gives it."""

from __future__ import annotations

import math

import pytest

from ds4.engine.sampling import Penalties, Sampling
from ds4.errors import RequestError


@pytest.mark.parametrize(
    ("field", "param", "bad", "good"),
    [
        ("temperature", "temperature", (-0.1, 100.5, math.nan, True, "1"), (0, 100.0)),
        ("top_p", "top_p", (0, 0.0, 1.01, math.inf), (1e-9, 1)),
        ("min_p", "min_p", (-0.1, 1.5), (0, 1.0)),
        ("top_k", "top_k", (-1, 1.0, True, 2**31), (0, 2**31 - 1)),
        ("seed", "seed", (1.5, 2**64, -(2**63) - 1), (0, -(2**63), 2**64 - 1)),
        ("top", "top_logprobs", (-1, 21, 1.0, True), (0, 20)),
    ],
)
def test_ranges_of_sampling(field: str, param: str, bad: tuple[object, ...], good: tuple[object, ...]) -> None:
    for value in good:
        Sampling(**{field: value})  # type: ignore[arg-type]
    for value in bad:
        with pytest.raises(RequestError, match=f"^{param} is ") as refused:
            Sampling(**{field: value})  # type: ignore[arg-type]
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("field", "param", "bad", "good"),
    [
        ("presence", "presence_penalty", (-2.1, 2.1, math.nan, True), (-2, 2.0)),
        ("frequency", "frequency_penalty", (-2.1, 2.1, "1"), (-2, 2.0)),
        ("repetition", "repetition_penalty", (0, 0.0, 10.5, math.inf), (0.1, 10)),
        (
            "logit_bias", "logit_bias",
            (((-1, 1.0),), ((0, 100.5),), ((0, math.nan),), ((2**31, 1.0),)), ((), ((7, -100.0),)),
        ),
    ],
)  # fmt: skip
def test_ranges_of_penalties(field: str, param: str, bad: tuple[object, ...], good: tuple[object, ...]) -> None:
    for value in good:
        Penalties(**{field: value})  # type: ignore[arg-type]
    for value in bad:
        with pytest.raises(RequestError, match=f"^{param} is ") as refused:
            Penalties(**{field: value})  # type: ignore[arg-type]
        assert refused.value.param == param


def test_settings_are_values() -> None:
    """The engine packs what it has not packed yet, so equal settings must be equal, penalties included."""
    a = Sampling(penalties=Penalties(presence=0.5, logit_bias=((3, 1.0),)), top=2)
    assert a == Sampling(penalties=Penalties(presence=0.5, logit_bias=((3, 1.0),)), top=2)
    assert a != Sampling(penalties=Penalties(presence=0.5, logit_bias=((3, 2.0),)), top=2) != Sampling(top=2)
    assert Sampling().penalties.neutral and not a.penalties.neutral


def test_a_bias_on_a_token_that_is_not_there() -> None:
    Penalties(logit_bias=((9, 1.0),)).check_vocab(10)
    with pytest.raises(RequestError, match="logit_bias names token 10; ids run from 0 to 9") as refused:
        Penalties(logit_bias=((9, 1.0), (10, 1.0))).check_vocab(10)
    assert refused.value.param == "logit_bias"
