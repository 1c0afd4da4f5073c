"""A finished completion to reasoning, content and tool calls (encoding.md 6). Pure functions.

Structure is decided by which ids the model produced, not by spelling: a `</think>` or a marker that it wrote as
ordinary text counts as text. Calls are those that a stream of the same tokens has (call_stream.py); a call that
breaks the grammar in any place is content, from where its markup begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds4.model.call_stream import MARK, Begun, Broken, CallParser, Event, Grown, Said, split_name
from ds4.model.tokenizer import DSML, END_THINK, EOS, Special, Tokenizer
from ds4.model.tools import RawNumber, json_value


@dataclass(frozen=True)
class Call:
    """One tool call; `arguments` is JSON text of an object, keys as the model ordered them."""

    name: str
    namespace: str | None
    arguments: str


@dataclass(frozen=True)
class Completion:
    """What a completion says. `malformed`: a calls block was begun that does not keep to the grammar."""

    reasoning: str
    content: str
    calls: tuple[Call, ...] = ()
    malformed: bool = False


def parse_ids(ids: Sequence[int], tokenizer: Tokenizer, *, thinking: bool) -> Completion:
    """Parse generated ids, end-of-sentence included if the model wrote one.

    Args:
        thinking: the prompt ended with `<think>`: the text begins inside the reasoning.
    """
    names = {tokenizer.added[name]: name for name in (DSML, END_THINK, EOS) if name in tokenizer.added}
    segments: list[Special | str] = []
    run: list[int] = []
    for i in ids:
        if i in names:
            segments += [tokenizer.decode(run), Special(names[i])]
            run = []
        else:
            run.append(i)
    return parse_segments([*segments, tokenizer.decode(run)], thinking=thinking)


def parse_segments(segments: Sequence[Special | str], *, thinking: bool) -> Completion:
    """Parse a completion given as segments. Without a `</think>`, one that thinks is reasoning, all of it."""
    reasoning: list[str] = []
    parser = CallParser()
    events: list[Event] = []
    for segment in segments:
        name = segment.name if isinstance(segment, Special) else None
        text = segment.name if isinstance(segment, Special) else segment.replace(MARK, "\ufffd")
        if name == EOS:
            break
        if thinking and name == END_THINK:
            thinking = False
        elif thinking:
            reasoning.append(text)
        else:
            events += parser.push(MARK if name == DSML else text)
    events += parser.finish()
    content = "".join(e.text for e in events if isinstance(e, Said))
    return Completion("".join(reasoning), content, _calls(events), parser.malformed)


def _calls(events: Sequence[Event]) -> tuple[Call, ...]:
    names = {e.index: e.name for e in events if isinstance(e, Begun)}
    broken = {e.index for e in events if isinstance(e, Broken)}
    calls = []
    for index, full in names.items():
        parts = split_name(full)
        if index not in broken and parts is not None:
            arguments = "".join(e.text for e in events if isinstance(e, Grown) and e.index == index)
            calls.append(Call(parts[1], parts[0], arguments))
    return tuple(calls)


def argument_values(call: Call) -> dict[str, Any]:
    """A call's arguments parsed; an integer too long for Python stays text."""

    def plain(value: Any) -> Any:
        return value.text if isinstance(value, RawNumber) else value

    return {key: plain(value) for key, value in json_value(call.arguments).items()}
