"""Log-probabilities in the two shapes of OpenAI's API: entries of a chat, lists of a completion.

A token is shown as its text; one that holds a part of a character, as its bytes with those outside ASCII escaped
(`\\xf0\\x9f`), in completions after `bytes:`. JSON has no infinity: a token that cannot come is told as -9999.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds4.model.tokenizer import Tokenizer
from ds4.server.stream import Told

LEAST = -9999.0  # what the API says of a token that is very unlikely


def shown(token: int, tokenizer: Tokenizer, mark: str = "") -> str:
    """A token as text; `mark` stands before one whose bytes are none."""
    piece = tokenizer.token_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return mark + piece.decode("utf-8", "backslashreplace")


def chat_entries(told: Iterable[Told], tokenizer: Tokenizer) -> list[dict[str, object]]:
    """`logprobs.content` of a chat: one entry a token. An id that stands for no text has no bytes."""

    def entry(token: int, logprob: float) -> dict[str, object]:
        piece = tokenizer.token_bytes(token)
        return {
            "token": shown(token, tokenizer), "logprob": max(logprob, LEAST), "bytes": list(piece) if piece else None
        }  # fmt: skip

    return [entry(t.token, t.logprob) | {"top_logprobs": [entry(*likely) for likely in t.top]} for t in told]


def completion_lists(told: Sequence[Told], tokenizer: Tokenizer, start: int) -> dict[str, object]:
    """`logprobs` of a completion: four lists of equal length.

    `top_logprobs` maps the likeliest tokens and the one that was drawn, so it may hold one more than was asked for;
    of tokens that look alike the likelier stands. `text_offset` counts characters from the beginning of the prompt,
    which has `start`.
    """

    def name(token: int) -> str:
        return shown(token, tokenizer, "bytes:")

    top = []
    for t in told:
        likely: dict[str, float] = {}
        for token, logprob in (*t.top, (t.token, t.logprob)):
            likely.setdefault(name(token), max(logprob, LEAST))
        top.append(likely)
    return {
        "tokens": [name(t.token) for t in told],
        "token_logprobs": [max(t.logprob, LEAST) for t in told],
        "top_logprobs": top,
        "text_offset": [start + t.offset for t in told],
    }
