"""What an answer may say next: a grammar, a schema, a budget. The engine asks for allowed tokens and knows no more.

Tokens that are forbidden have probability 0: their logits become -inf after penalties and before everything else
(sample_mask.cu), so every rule of docs/sampling.md stays as it is. ds4.constrain makes these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenConstraint(Protocol):
    """One answer's state, on the host. Not thread-safe: it belongs to the thread that owns the device."""

    def rows(self, ahead: Sequence[int]) -> NDArray[np.uint32] | None:
        """Allowed next tokens after the text so far, and after each prefix of `ahead`; the state stays.

        Returns:
            u32 [1 + n, ceil(V / 32)], token v in bit v % 32 of word v / 32, at least one token a row; None: nothing
            is forbidden anywhere. A row after a token that is not allowed may say anything: nobody comes there.
            It never fails, as others may share the pass: what cannot go on says so in `advance`.
        """
        ...

    def valid(self, ahead: Sequence[int]) -> int:
        """How many leading tokens of `ahead` are allowed, one after the other; the state stays. It never fails."""
        ...

    def advance(self, token: int) -> None:
        """The text goes on with `token`.

        Raises:
            Ds4Error: it is not allowed here, or what decides it gave up (a limit of time or memory), and why.
        """
        ...

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back. It never fails."""
        ...


class Constrained(Protocol):
    """What was asked of an answer, compiled. Many answers may share it, in any thread."""

    def start(self) -> TokenConstraint:
        """The state of an answer that has no token yet."""
        ...


class Anything:
    """A TokenConstraint that forbids nothing, by masks that say so: what warms a device up, or counts its memory."""

    def __init__(self, vocab: int) -> None:
        self._words = -(-vocab // 32)

    def rows(self, ahead: Sequence[int]) -> NDArray[np.uint32]:
        return np.full((1 + len(ahead), self._words), 2**32 - 1, np.uint32)

    def valid(self, ahead: Sequence[int]) -> int:
        return len(ahead)

    def advance(self, token: int) -> None:
        pass

    def rollback(self, count: int) -> None:
        pass
