"""What `ds4 generate` says beside its text: log-probabilities, and what the engine reports of its rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds4.model.tokenizer import Tokenizer
from ds4.server.logprobs import LEAST, shown


@dataclass(frozen=True)
class Told:
    """A token that was drawn, its log-probability, and (id, log-probability) of the likeliest, largest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs_json(told: Iterable[Told], tokenizer: Tokenizer) -> list[dict[str, object]]:
    """One object a token; JSON has no infinity, so a token that cannot come has -9999."""

    def entry(token: int, logprob: float) -> dict[str, object]:
        return {"id": token, "token": shown(token, tokenizer), "logprob": max(logprob, LEAST)}

    return [entry(t.token, t.logprob) | {"top": [entry(*likely) for likely in t.top]} for t in told]


def print_logprobs(told: Sequence[Told], tokenizer: Tokenizer) -> None:
    """A table for people: a row a token, with the likeliest beside it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("id", "token", "log-probability", *(["likeliest"] if any(t.top for t in told) else []))
    for t in told:
        likely = ", ".join(f"{_quoted(i, tokenizer)} {p:.4f}" for i, p in t.top)
        row = [str(t.token), _quoted(t.token, tokenizer), f"{t.logprob:.4f}", *([likely] if t.top else [])]
        table.add_row(*map(Text, row))  # Text: a token may spell what would be markup
    Console().print(table)


def _quoted(token: int, tokenizer: Tokenizer) -> str:
    piece = tokenizer.token_bytes(token)
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return repr(piece)


def report_lines(report: Mapping[str, object]) -> Iterator[str]:
    """`Session.report()` for people, a line a key, whatever it holds."""
    for name, value in report.items():
        yield f"{_words(name)}: {_said(value)}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        pairs = ((str(k), _said(v)) for k, v in value.items())  # a number and how often, or a name and what
        return ", ".join(f"{k}: {v}" if k.isdecimal() else f"{_words(k)} {v}" for k, v in pairs) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_said, value)) or "none"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
