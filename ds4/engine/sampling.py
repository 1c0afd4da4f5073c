"""A request's sampling settings, checked; what the kernel reads is in ops/sample.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds4.errors import RequestError

LEAST_TEMPERATURE = 1e-5  # below it the division would overflow; 0 itself means greedy


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature 0: the largest logit, lowest id on ties. Otherwise softmax(logits / temperature) is cut to the `top_k`
    likeliest (0: all), then to the shortest prefix with mass `top_p` (1: all), then to tokens of at least `min_p` of
    the likeliest one's probability (0: all), and one is drawn. A seed, with the position, decides every draw.

    Raises:
        RequestError: a value outside its range, named.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0; it must be above 0 and at most 1", "top_p")
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _integer("seed", self.seed, -(2**63), 2**64 - 1)

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
