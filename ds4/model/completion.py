"""A finished completion to reasoning, content and tool calls (encoding.md 6). Pure functions.

Structure is decided by which ids the model produced, not by spelling: a `</think>` or a marker that it wrote as
ordinary text counts as text. A calls block that breaks the grammar in any place is content, whole, and calls
nothing. Streaming is the server's; what it may send early is `held_back`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds4.model.tokenizer import DSML, END_THINK, EOS, Special, Tokenizer
from ds4.model.tools import RawNumber, json_text, json_value

# Genuine added tokens are one noncharacter each while parsing. The same code points in text become a shield and
# another character, so the two cannot be mistaken for one another.
_MARK = {DSML: "\ufdd0", END_THINK: "\ufdd1", EOS: "\ufdd2"}
_SHIELD = "\ufdd3"
_D = _MARK[DSML]
BLOCK_START = f"\n\n<{_D} calls"


@dataclass(frozen=True)
class Call:
    """One tool call; `arguments` is JSON text of an object, keys as the model ordered them."""

    name: str
    namespace: str | None
    arguments: str


@dataclass(frozen=True)
class Completion:
    """What a completion says. `malformed`: a calls block was begun and did not parse."""

    reasoning: str
    content: str
    calls: tuple[Call, ...] = ()
    malformed: bool = False


def parse_ids(ids: Sequence[int], tokenizer: Tokenizer, *, thinking: bool) -> Completion:
    """Parse generated ids, end-of-sentence included if the model wrote one.

    Args:
        thinking: the prompt ended with `<think>`: the text begins inside the reasoning.
    """
    parts: list[str] = []
    run: list[int] = []
    marks = {tokenizer.added[name]: mark for name, mark in _MARK.items() if name in tokenizer.added}
    for i in ids:
        if i in marks:
            parts += [_shield(tokenizer.decode(run)), marks[i]]
            run = []
        else:
            run.append(i)
    return _parse("".join([*parts, _shield(tokenizer.decode(run))]), thinking)


def parse_segments(segments: Sequence[Special | str], *, thinking: bool) -> Completion:
    """Parse a completion given as segments: for tests, and for text whose tokens are known."""
    text = "".join(_MARK.get(s.name, _shield(s.name)) if isinstance(s, Special) else _shield(s) for s in segments)
    return _parse(text, thinking)


def _parse(text: str, thinking: bool) -> Completion:
    reasoning, end = "", _MARK[END_THINK]
    if thinking:
        before, found, text = text.partition(end)
        if not found:  # cut off, or the model never closed it: all of it is reasoning
            return Completion(_spelled(before.partition(_MARK[EOS])[0]), "")
        reasoning = _spelled(before)
    body, ended, _ = text.partition(_MARK[EOS])
    start = body.find(BLOCK_START)
    if start < 0:
        return Completion(reasoning, _spelled(body))
    calls = _calls(body[start + len(BLOCK_START) :]) if ended else None
    if calls is None:
        return Completion(reasoning, _spelled(body), malformed=True)
    return Completion(reasoning, _spelled(body[:start]), calls)


class _Cursor:
    """A place in the block; every read either advances or leaves the place alone and says None or False."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self, expected: str) -> bool:
        found = self.text.startswith(expected, self.at)
        self.at += len(expected) if found else 0
        return found

    def until(self, end: str) -> str | None:
        """Text up to the first `end`, which is passed too."""
        place = self.text.find(end, self.at)
        if place < 0:
            return None
        out, self.at = self.text[self.at : place], place + len(end)
        return out


def _calls(rest: str) -> tuple[Call, ...] | None:
    """The block after its opening words, up to the end of the text; None if it breaks the grammar."""
    cursor = _Cursor(rest)
    calls: list[Call] = []
    if not cursor.take(">\n"):
        return None
    while cursor.take(f'<{_D} invoke name="'):
        name = cursor.until('">\n')
        arguments = None if name is None else _parameters(cursor)
        call = None if name is None or arguments is None else _call(_spelled(name), arguments)
        if call is None or not cursor.take(f"</{_D} invoke>\n"):
            return None
        calls.append(call)
    # white space after the block is what some models add before they stop
    complete = cursor.take(f"</{_D} calls>") and not rest[cursor.at :].strip()
    return tuple(calls) if calls and complete else None


def _parameters(cursor: _Cursor) -> dict[str, str] | None:
    """The parameters of one call, key to JSON text; None if one is broken or comes twice."""
    arguments: dict[str, str] = {}
    while cursor.take(f'<{_D} parameter name="'):
        key = cursor.until('" string="')
        is_text = cursor.take('true">')
        if key is None or not (is_text or cursor.take('false">')):
            return None
        value = cursor.until(f"</{_D} parameter")
        if value is None or not cursor.take(">\n") or _spelled(key) in arguments:
            return None
        try:
            shown = json_text(_spelled(value)) if is_text else _checked_json(_spelled(value))
        except ValueError:
            return None
        arguments[_spelled(key)] = shown
    if not arguments:
        cursor.take("\n")  # our own rendering of a call without parameters has an empty line
    return arguments


def _call(full_name: str, arguments: dict[str, str]) -> Call | None:
    head, sep, tail = full_name.partition("::")
    if not head or (sep and (not tail or "::" in tail)):
        return None
    pairs = (f"{json_text(key)}: {value}" for key, value in arguments.items())
    return Call(tail if sep else head, head if sep else None, "{" + ", ".join(pairs) + "}")


def _checked_json(value: str) -> str:
    """A value that stands as JSON, as the model wrote it.

    Raises:
        ValueError: not JSON.
    """
    json_value(value, strict=True)
    return value.strip()


def argument_values(call: Call) -> dict[str, Any]:
    """A call's arguments parsed; an integer too long for Python stays text."""

    def plain(value: Any) -> Any:
        return value.text if isinstance(value, RawNumber) else value

    return {key: plain(value) for key, value in json_value(call.arguments).items()}


def held_back(text: str) -> int:
    """How many characters at the end of streamed content may still become the start of a calls block.

    `text` spells the marker out. A stream keeps these back until more text decides.
    """
    opening = BLOCK_START.replace(_D, DSML)
    longest = min(len(opening) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(opening[:n])), 0)


def _shield(text: str) -> str:
    """Text whose own noncharacters cannot pass for marks: each gets a shield in front."""
    return re.sub("[\ufdd0-\ufdd3]", lambda m: _SHIELD + chr(ord(m[0]) + 0x10), text)


def _spelled(text: str) -> str:
    """Marks as the names of their tokens, shielded characters as themselves."""
    text = text.translate({ord(mark): name for name, mark in _MARK.items()})
    return re.sub(f"{_SHIELD}(.)", lambda m: chr(ord(m[1]) - 0x10), text, flags=re.DOTALL)
