"""What a candidate has to show before it is mounted: figures in, verdicts with their reasons out. Runs no model.

    flipped        of the trained points that the base with its sidecar decides wrong, the share decided right
    kept           of other positions, the share whose likeliest token stays what it was
    correlation    between margins as the solve predicts them and as a real forward has them; and the night reads the
                   same real margins as the solve
    ruler NAME     Sigma-min and KL of text NAME against the original, paired with those without the candidate:
                   not worse by more than a number of standard errors of the difference
    endings        answers drawn freely that end by themselves: not fewer than without it, by more than that number of
                   standard errors of the difference of two shares

What a gate is compared with is always the base with its sidecar alone, never last night's: a little worse every night
would add up. A gate without figures (no teacher, no points) is left out and says why; it does not fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from ds4.errors import UsageError

APART = 0.02  # logits between two readings of one margin: the same kernels, perhaps other rows beside it


@dataclass(frozen=True)
class Thresholds:
    """flipped, kept, correlation: at least these. ruler_errors, ending_errors: standard errors that a ruler, or the
    share of answers that end, may be worse by.
    """

    flipped: float = 0.85
    kept: float = 0.995
    correlation: float = 0.99
    ruler_errors: float = 1.0
    ending_errors: float = 1.0

    def __post_init__(self) -> None:
        """Raises UsageError: a value that no figure can be held against."""
        for field in fields(self):
            value = getattr(self, field.name)
            low, high = (
                (0.0, np.inf) if field.name.endswith("errors") else (-1.0 if "corr" in field.name else 0.0, 1.0)
            )
            if not (np.isfinite(value) and low <= value <= high):
                upper = "up" if high == np.inf else f"to {high:g}"
                raise UsageError(f"--gate-{field.name.replace('_', '-')} is {value:g}; expected {low:g} {upper}")

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """passed: None where the gate was left out. reason: why it failed or was left out; empty where it passed."""

    gate: str
    passed: bool | None
    measured: float | None
    threshold: float | None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def left_out(gate: str, reason: str) -> Verdict:
        return Verdict(gate, None, None, None, reason)


def passes(verdicts: Sequence[Verdict]) -> bool:
    """Whether no gate failed, and at least one was there to fail."""
    return all(v.passed is not False for v in verdicts) and any(v.passed for v in verdicts)


def reasons(verdicts: Sequence[Verdict]) -> str:
    """Why a candidate is not taken, in a line."""
    failed = "; ".join(f"{v.gate}: {v.reason}" for v in verdicts if v.passed is False)
    return failed or "no gate had anything to measure"


def flipped(before: Sequence[float], after: Sequence[float], least: float) -> Verdict:
    """Margins of the trained points without and with the candidate, by a real forward."""
    wrong = [i for i, m in enumerate(before) if m <= 0]
    if not wrong:
        return Verdict("flipped", True, 1.0, least, "")
    right = sum(after[i] > 0 for i in wrong)
    share = right / len(wrong)
    ok = share >= least
    why = (
        f"{right} of {len(wrong)} points that were decided wrong are right, {share:.1%}; at least {least:.1%} must be"
    )
    return Verdict("flipped", ok, share, least, "" if ok else why)


def more_right(before: Sequence[float], after: Sequence[float]) -> Verdict:
    """Of a solve that pulls trained points and promises none of them: more are right than without."""
    was, now = sum(m > 0 for m in before), sum(m > 0 for m in after)
    if was == len(before):
        return Verdict("flipped", True, float(now), float(was), "")
    why = f"{now} of {len(before)} trained points are right, {was} were without it; there must be more"
    return Verdict("flipped", now > was, float(now), float(was + 1), "" if now > was else why)


def kept(same: int, positions: int, least: float) -> Verdict:
    """How many of the other positions keep their likeliest token."""
    if positions == 0:
        return Verdict.left_out("kept", "the requests have no other position that an answer decided")
    share = same / positions
    ok = share >= least
    why = f"{positions - same} of {positions:,} other positions changed their likeliest token, {share:.2%} kept it; "
    return Verdict("kept", ok, share, least, "" if ok else why + f"at least {least:.2%} must")


def correlation(found: float | None, apart: float, least: float) -> Verdict:
    """Predicted margins with real ones, as the solve has them, over all that it moved or kept; `apart`: the most that
    the night's own forward differs by from the solve's real one.
    """
    if found is None:
        return Verdict.left_out("correlation", "this method predicts no margins")
    why = ""
    if not found >= least:
        why = f"predicted and real margins correlate by {found:.4f}; at least {least:g} is needed"
    elif not apart <= APART:
        why = (
            f"a margin is {apart:.3f} from what the solve read with the same folder mounted; at most {APART:g} may be"
        )
    return Verdict("correlation", not why, found, least, why)


def ruler(text: str, difference: Mapping[str, Any], errors: float) -> list[Verdict]:
    """Sigma-min and KL of one text. `difference`: with the candidate minus without, as rulers.compare gives it."""
    out = []
    for name, sign, words in (("sigma_min", -1.0, "Sigma-min fell"), ("kl", 1.0, "KL rose")):
        mean, se = difference[name]["mean"], difference[name]["se"]
        gate = f"ruler {text} {'Sigma-min' if name == 'sigma_min' else 'KL'}"
        worse = sign * mean
        if se is None:
            out.append(Verdict.left_out(gate, "a single document has no standard error; read more tokens"))
            continue
        allowed = errors * se
        ok = worse <= allowed
        why = f"{words} by {worse:.5f}, {_times(worse, se)}; at most {errors:g} ({allowed:.5f}) is allowed"
        out.append(Verdict(gate, ok, mean, sign * allowed, "" if ok else why))
    return out


def endings(before: tuple[int, int], after: tuple[int, int], errors: float) -> Verdict:
    """(answers that ended by themselves, answers) without and with the candidate."""
    (b, n), (a, m) = before, after
    if n == 0 or m == 0:
        return Verdict.left_out("endings", "no answers were drawn")
    pooled = (a + b) / (n + m)
    se = float(np.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m)))
    fewer, allowed = b / n - a / m, errors * se
    ok = fewer <= allowed
    why = f"{a} of {m} answers end by themselves, {b} of {n} without it: {fewer:.3f} fewer, {_times(fewer, se)}; "
    return Verdict("endings", ok, a / m, b / n - allowed, "" if ok else why + f"at most {errors:g} is allowed")


def _times(value: float, se: float) -> str:
    return f"{value / se:.1f} standard errors" if se > 0 else "with a standard error of 0"
