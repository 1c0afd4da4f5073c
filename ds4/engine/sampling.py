"""A request's sampling settings, checked; what the kernels read is in ops/sample.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ds4.errors import RequestError

LEAST_TEMPERATURE = 1e-5  # below it the division would overflow; 0 itself means greedy
MOST_TOP = 20  # of how many tokens the log-probabilities can be told


@dataclass(frozen=True)
class Penalties:
    """What is changed in the logits before a token is chosen, from what the text has so far.

    Logits of tokens in the prompt or the answer are divided by `repetition` where positive, multiplied by it
    otherwise; then `frequency` times the token's count in the answer is taken off, and `presence` if it is there at
    all; then `logit_bias`, (token, value) pairs, is added.

    Raises:
        RequestError: a value outside its range, named as in a request.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _number("presence_penalty", self.presence, -2.0, 2.0)
        _number("frequency_penalty", self.frequency, -2.0, 2.0)
        _number("repetition_penalty", self.repetition, 0.1, 10.0)
        for token, value in self.logit_bias:
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", value, -100.0, 100.0)

    @property
    def neutral(self) -> bool:
        """Whether no logit would change: nothing needs to be launched."""
        settings = (self.presence, self.frequency, self.repetition)
        return settings == (0, 0, 1) and not any(value for _, value in self.logit_bias)

    def check_vocab(self, vocab: int) -> None:
        """Refuse a bias on a token that is not there.

        Raises:
            RequestError: an id of `logit_bias` is `vocab` or more.
        """
        for token, _ in self.logit_bias:
            if token >= vocab:
                raise RequestError(f"logit_bias names token {token}; ids run from 0 to {vocab - 1}", "logit_bias")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature 0: the largest logit, lowest id on ties. Otherwise softmax(logits / temperature) is cut to the `top_k`
    likeliest (0: all), then to the shortest prefix with mass `top_p` (1: all), then to tokens of at least `min_p` of
    the likeliest one's probability (0: all), and one is drawn. A seed, with the position, decides every draw.
    `seeded`: somebody gave the seed, so drafts must not change a token; else it is any number, and they may decide
    which of the equally right answers comes out (docs/sampling.md).
    `penalties` change the logits that all of this starts from. `top`: of how many of the likeliest tokens the model's
    own log-probabilities are told with each token; it changes no token.

    Raises:
        RequestError: a value outside its range, named.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    seeded: bool = True
    penalties: Penalties = field(default_factory=Penalties)
    top: int = 0

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0; it must be above 0 and at most 1", "top_p")
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _integer("seed", self.seed, -(2**63), 2**64 - 1)
        _integer("top_logprobs", self.top, 0, MOST_TOP)

    @property
    def device_temperature(self) -> float:
        """What the kernel divides by: 0 for greedy, else at least LEAST_TEMPERATURE."""
        return max(self.temperature, LEAST_TEMPERATURE) if self.temperature > 0 else 0.0


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}; it must be a number", name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}; it must be between {low:g} and {high:g}", name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; it must be an integer", name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}; it must be between {low} and {high}", name)
