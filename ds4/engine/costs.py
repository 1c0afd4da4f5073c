"""What a round costs, fitted to the rounds that were run.

A pass over n rows takes `pass_s + row_s * n` seconds: weights are read once a pass, the rest grows with the rows.
Drawing drafts takes `draft_s`, however many of them are verified. `CostFit` estimates the three by weighted least
squares over the row counts seen. It times nothing: callers say how many seconds went by.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MEMORY = 8  # latest times kept a row count: costs follow a context that grows


@dataclass(frozen=True)
class RoundCosts:
    """Seconds: `draft_s` to draw the drafts of a round, `pass_s` + `row_s` n for a pass over n rows; none below 0."""

    draft_s: float
    pass_s: float
    row_s: float

    @property
    def plain_s(self) -> float:
        """A token by plain decode: one row, no drafts."""
        return self.pass_s + self.row_s

    def drafted_s(self, k: int) -> float:
        """A round that draws drafts and verifies `k` of them in a pass over 1 + k rows."""
        return self.draft_s + self.pass_s + self.row_s * (1 + k)


class CostFit:
    """Times of passes by row count, and of drawing drafts.

    A row count is one point, the median of its latest times, so that an interrupted pass moves little once there are
    three; it weighs as much as the times it keeps.
    """

    def __init__(self) -> None:
        self._passes: dict[int, deque[float]] = {}
        self._drafts: deque[float] = deque(maxlen=MEMORY)

    def add_pass(self, n_rows: int, seconds: float) -> None:
        """A pass over `n_rows` rows took `seconds`; a time that is not above 0 says nothing and is dropped."""
        if seconds > 0:
            self._passes.setdefault(n_rows, deque(maxlen=MEMORY)).append(seconds)

    def add_draft(self, seconds: float) -> None:
        """Drawing a round's drafts took `seconds`; a time below 0 is dropped."""
        if seconds >= 0:
            self._drafts.append(seconds)

    def forget_drafting(self) -> None:
        """Keep only what plain decode took."""
        self._passes = {n_rows: times for n_rows, times in self._passes.items() if n_rows == 1}
        self._drafts.clear()

    @property
    def knows_one_row(self) -> bool:
        """Whether a pass over one row was timed."""
        return 1 in self._passes

    @property
    def knows_drafting(self) -> bool:
        """Whether a pass over several rows and the drawing of drafts were timed."""
        return bool(self._drafts) and any(n_rows > 1 for n_rows in self._passes)

    def costs(self) -> RoundCosts | None:
        """The fit; None until one row, several rows and drafts were timed.

            (pass_s, row_s) = argmin over both >= 0 of  sum_n weight_n (pass_s + row_s n - median_n)^2

        Both are at least 0 because a longer pass that looks cheaper is noise, not an invitation to verify more.
        """
        if not (self.knows_one_row and self.knows_drafting):
            return None
        points = [(n_rows, len(times), _median(times)) for n_rows, times in self._passes.items()]
        weight = sum(w for _, w, _ in points)
        mean_rows = sum(w * n for n, w, _ in points) / weight
        mean_s = sum(w * s for _, w, s in points) / weight
        spread = sum(w * (n - mean_rows) ** 2 for n, w, _ in points)
        row_s = sum(w * (n - mean_rows) * (s - mean_s) for n, w, s in points) / spread
        pass_s = mean_s - row_s * mean_rows
        # in two dimensions the bound that is broken is the one that holds at the optimum
        if row_s < 0:
            row_s, pass_s = 0.0, mean_s
        elif pass_s < 0:
            row_s = sum(w * n * s for n, w, s in points) / sum(w * n * n for n, w, _ in points)
            pass_s = 0.0
        return RoundCosts(_median(self._drafts), pass_s, row_s)


def _median(times: deque[float]) -> float:
    ordered = sorted(times)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
