"""Two readings of one text against one original: the difference, paired by position, and what it has to exceed.

A difference is B minus A at every position, so that what makes a position hard cancels. Beside it stands the A/A
floor: the same weights read by the other path (reading.py), which two equal engines differ by as well.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ds4.errors import UsageError
from rulers.numbers import Numbers, summarise
from rulers.reading import Floor, Reading

ROUNDING = 1e-3  # nats a token: what the original's own figures may differ by when another kind of CPU computed them
_MUST_AGREE = ("model", "domain", "split", "length", "arithmetic", "path", "weights")


@dataclass(frozen=True)
class Comparison:
    """`difference` holds B - A: means of differences, median and p5 of the differences of Sigma-min, and the ratio of
    the two perplexities. `a`, `b` are the two readings' own numbers.
    """

    domain: str
    a: Numbers
    b: Numbers
    difference: Numbers
    floor_a: Floor | None
    floor_b: Floor | None
    path_a: str
    path_b: str

    def to_json(self) -> dict[str, object]:
        """The paired differences under the names of a reading; then both sides and the floors."""
        return {
            "domain": self.domain,
            **self.difference.to_json(),
            "floor": {side: None if f is None else f.numbers.to_json() for side, f in self._floors()},
            "a": {**self.a.to_json(), "path": self.path_a},
            "b": {**self.b.to_json(), "path": self.path_b},
        }

    def _floors(self) -> list[tuple[str, Floor | None]]:
        return [("a", self.floor_a), ("b", self.floor_b)]


def compare(a: Reading, b: Reading, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Raises UsageError: readings of different models, originals or texts; names them and says what differs."""
    for f in fields(a.teacher):
        mine, other = getattr(a.teacher, f.name), getattr(b.teacher, f.name)
        if f.name in _MUST_AGREE and mine != other:
            raise UsageError(
                f"{names[0]} and {names[1]} cannot be compared: the original's {f.name} is {mine!r} in the first and "
                f"{other!r} in the second; read both with the same original, domain and length"
            )
    if a.text.digest != b.text.digest:
        raise UsageError(
            f"{names[0]} and {names[1]} cannot be compared: they are of different texts "
            f"({len(a.text)} tokens, {a.text.digest[:12]}, and {len(b.text)} tokens, {b.text.digest[:12]}); "
            "read both with the same --tokens"
        )
    apart = float(np.abs(b.figures[3] - a.figures[3]).mean())
    if apart > ROUNDING:
        raise UsageError(
            f"{names[0]} and {names[1]} cannot be compared: the original's own figures differ by {apart:.2g} nats a "
            "token, so these are two originals under one name; read both against one cache of its logits"
        )
    difference = b.figures - a.figures
    return Comparison(
        a.ours.domain, a.numbers, b.numbers, summarise(difference, a.documents), a.floor, b.floor, a.ours.path,
        b.ours.path,
    )  # fmt: skip
