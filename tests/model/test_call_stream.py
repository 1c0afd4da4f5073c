"""call_stream.py: calls as they are drawn. What comes out does not depend on how the answer is cut, and is JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.model.call_stream import (
    END_VALUE,
    MARK,
    MOST_HEADER,
    Begun,
    Broken,
    CallParser,
    CallStream,
    Ended,
    Event,
    Grown,
    Said,
    split_name,
)
from ds4.model.tokenizer import DSML, Special, Tokenizer
from ds4.model.tools import render_calls
from tests.model.text_cases import calls as calls_block
from tests.model.text_cases import invoke, parameter
from tests.model.vocabulary import real

M = MARK
# pieces that the grammar is made of, right and nearly right: garbage that comes close
PIECES = (
    "\n", "\n\n", "<", "</", M, " calls", ">", ">\n", f"\n\n<{M} calls>\n", f'<{M} invoke name="', "f", "ns::g",
    '">\n', f'<{M} invoke name="f">\n', f'<{M} parameter name="', "k", '" string="', 'true">', 'false">',
    f'<{M} parameter name="a" string="true">', f'<{M} parameter name="b" string="false">', "1", "[1, ", "{", "}", "]",
    '"', "\\", " x", "\u00e9", f"</{M} parameter>\n", f"</{M} parameter", f"</{M} invoke>", f"</{M} invoke>\n",
    f"</{M} calls>", DSML, "::", ",", ": ",
)  # fmt: skip
NAMES = st.text(
    st.characters(exclude_characters='"', exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12
).filter(lambda n: split_name(n) is not None)
KEYS = st.text(st.characters(exclude_characters='"', exclude_categories=["Cs"]), max_size=12)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(KEYS, JSON, max_size=4)), min_size=1, max_size=4)


def raw_calls(calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    segments = render_calls([{"name": n, "arguments": a} for n, a in calls])
    return "\n\n" + "".join(M if isinstance(s, Special) else s for s in segments)


@st.composite
def nearly(draw: st.DrawFn) -> str:
    """Two answers with calls, with pieces put in, left out or doubled in a few places."""
    text = "".join(draw(st.sampled_from(["Hm.", "\n", "<", M])) + raw_calls(draw(CALLS)) for _ in range(2))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        to = at + draw(st.sampled_from([0, 0, 1, 2, 8, 30]))
        text = text[:at] + draw(st.sampled_from(["", text[at:to] * 2, *PIECES])) + text[to:]
    return text


GARBAGE = st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | nearly() | nearly()


def run(pieces: Sequence[str]) -> tuple[list[Event], bool]:
    parser = CallParser()
    events = [e for piece in pieces for e in parser.push(piece)] + parser.finish()
    assert parser.received == sum(map(len, pieces))
    return events, parser.malformed


def whole(events: Sequence[Event]) -> list[Event]:
    """Events with text and arguments in one piece each."""
    out: list[Event] = []
    for e in events:
        last = out[-1] if out else None
        if isinstance(e, Said) and isinstance(last, Said) and last.at + len(last.raw) == e.at:
            out[-1] = Said(last.at, last.raw + e.raw)
        elif isinstance(e, Grown) and isinstance(last, Grown) and last.index == e.index:
            out[-1] = Grown(e.index, last.text + e.text)
        else:
            out.append(e)
    return out


def arguments(events: Sequence[Event]) -> dict[int, str]:
    grown = [e for e in events if isinstance(e, Grown)]
    return {i: "".join(e.text for e in g) for i, g in groupby(grown, key=lambda e: e.index)}


@settings(deadline=None, max_examples=250)
@given(GARBAGE, st.data())
def test_any_cutting_gives_the_same_events(text: str, data: st.DataObject) -> None:
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)])]
    (cut, cut_bad), (one, one_bad), (each, each_bad) = run(pieces), run([text]), run(list(text))
    assert whole(cut) == whole(one) == whole(each)
    assert cut_bad == one_bad == each_bad


@settings(deadline=None, max_examples=250)
@given(GARBAGE)
def test_garbage_gives_no_call_that_was_not_written(text: str) -> None:
    """Calls are of names that stand in the text as such, their arguments are objects; text is text, in its order and
    place; a call that broke is shown whole and was sent as no JSON.
    """
    events, malformed = run(list(text))
    begun = {e.index: e.name for e in events if isinstance(e, Begun)}
    ended = {e.index for e in events if isinstance(e, Ended)}
    broken = {e.index for e in events if isinstance(e, Broken)}
    assert ended | broken == set(begun) and not ended & broken
    assert sorted(begun) == list(range(len(begun)))
    sent = arguments(events)
    for index, name in begun.items():
        assert f'<{M} invoke name="{name}">\n' in text and split_name(name) is not None
        if index in ended:
            assert isinstance(json.loads(sent[index]), dict)
        else:
            with pytest.raises(ValueError):
                json.loads(sent.get(index, ""))
    at = 0
    for said in (e for e in events if isinstance(e, Said)):
        assert said.at >= at and text[said.at : said.at + len(said.raw)] == said.raw
        assert M not in said.text and said.raw
        at = said.at + len(said.raw)
    assert malformed or not broken
    if not begun:
        assert "".join(e.text for e in events if isinstance(e, Said)) == text.replace(M, DSML)


@settings(deadline=None)
@given(st.text(), st.lists(st.integers(0, 300), max_size=6))
def test_text_never_opens_a_block(text: str, places: list[int]) -> None:
    """Whatever it spells, a block too; only the marker does."""
    for at in places:
        text = text[:at] + calls_block(invoke("f", parameter("a", True, "x"))) + text[at:]
    events, malformed = run(list(text))
    assert "".join(e.text for e in events if isinstance(e, Said)) == text and not malformed
    assert all(isinstance(e, Said) for e in events)


@settings(deadline=None)
@given(CALLS, st.text(max_size=20))
def test_what_we_render_comes_back(calls: list[tuple[str, dict[str, Any]]], before: str) -> None:
    text = before.rstrip("\n") + raw_calls(calls)
    events, malformed = run(list(text))
    assert not malformed and not any(isinstance(e, Broken) for e in events)
    assert "".join(e.text for e in events if isinstance(e, Said)) == before.rstrip("\n")
    assert [e.name for e in events if isinstance(e, Begun)] == [n for n, _ in calls]
    got = arguments(events)
    assert [json.loads(got[i]) for i in range(len(calls))] == [a for _, a in calls]
    # a value that is no text is sent as it was written, byte by byte
    plain = [(n, {k: v for k, v in a.items() if not isinstance(v, str)}) for n, a in calls]
    if [a for _, a in plain] == [a for _, a in calls]:
        assert [got[i] for i in range(len(calls))] == [json.dumps(a, ensure_ascii=False) for _, a in calls]


@settings(deadline=None, max_examples=60)
@given(CALLS, st.text("\u00e9\U0001f600\U00020000e\u0301\ufffd", min_size=1, max_size=6))
def test_tokens_of_a_real_vocabulary(calls: list[tuple[str, dict[str, Any]]], letters: str) -> None:
    """Characters that several tokens share come whole, in text and in arguments."""
    calls = [(n, {**a, letters: letters}) for n, a in calls]
    tokenizer: Tokenizer = real()
    segments = ["\n\n", *render_calls([{"name": n, "arguments": a} for n, a in calls])]
    stream = CallStream(tokenizer)
    events: list[Event] = []
    for token in tokenizer.encode_segments([letters, *segments]):
        events += stream.push(token)
    events += stream.finish()
    assert "".join(e.text for e in events if isinstance(e, Said)) == letters
    for e in events:
        if isinstance(e, (Said, Grown)):
            e.text.encode()
    got = arguments(events)
    assert [(e.name, json.loads(got[e.index])) for e in events if isinstance(e, Begun)] == calls


@settings(deadline=None)
@given(st.text(max_size=60), JSON)
def test_a_value_flows(text: str, value: Any) -> None:
    """Never more is held back than the beginning of a closing tag; of JSON, than its last bracket."""
    head = f'\n\n<{M} calls>\n<{M} invoke name="f">\n<{M} parameter name="a" string="true">'
    parser = CallParser()
    sent = "".join(e.text for e in parser.push(head) if isinstance(e, Grown))
    assert sent == '{"a": "'
    for i, c in enumerate(text, start=1):
        sent += "".join(e.text for e in parser.push(c) if isinstance(e, Grown))
        shown = json.loads(sent + '"}')["a"]
        assert text[:i].startswith(shown) and END_VALUE.startswith(text[len(shown) : i])
    if isinstance(value, (list, dict)):
        parser, shown = CallParser(), json.dumps(value)
        sent = "".join(e.text for e in parser.push(head.replace("true", "false") + shown) if isinstance(e, Grown))
        assert sent == '{"a": ' + shown[:-1]


def test_a_name_is_sent_when_it_is_complete() -> None:
    parser = CallParser()
    assert parser.push(f'Hm.\n\n<{M} calls>\n<{M} invoke name="get') == [Said(0, "Hm.")]
    assert parser.push('_time">') == []
    assert parser.push("\n") == [Begun(0, "get_time")]


@pytest.mark.parametrize("extra", [0, 1])
def test_headers_have_a_limit(extra: int) -> None:
    name = "n" * (MOST_HEADER + extra)
    for text in (
        f'<{M} calls>\n<{M} invoke name="{name}">\n</{M} invoke>\n</{M} calls>',
        f'<{M} calls>\n<{M} invoke name="f">\n<{M} parameter name="{name}" string="true">x</{M} parameter>\n'
        f"</{M} invoke>\n</{M} calls>",
    ):
        for pieces in ([text], list(text)):
            events, malformed = run(pieces)
            assert malformed == bool(extra) and any(isinstance(e, Ended) for e in events) != bool(extra)


@pytest.mark.parametrize(
    "value",
    [
        "{", "[1", "nan", "NaN", "", " ", "1, 2", '"a" "b"', "[1]]", "[1] 2", '{"a": 1}, "b": {"c": 2}', "'a'",
        '"a\nb"', '["\\"]', "01", "tru", "[1}", '"', "[" * 20_000, '{"a": [1, 2}', "1}", '[1], "x": [2',
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", ["", f'<{M} parameter name="ok" string="true">x</{M} parameter>\n'])
def test_a_value_that_is_no_json_breaks_its_call(value: str, before: str) -> None:
    """And nothing that was sent of it can be taken for the call's arguments."""
    body = f'{before}<{M} parameter name="a" string="false">{value}</{M} parameter>\n'
    text = f'\n\n<{M} calls>\n<{M} invoke name="f">\n{body}</{M} invoke>\n</{M} calls>'
    events, malformed = run(list(text))
    assert malformed and [type(e) for e in events if isinstance(e, (Ended, Broken))] == [Broken]
    assert "".join(e.text for e in events if isinstance(e, Said)) == text.replace(M, DSML)
    with pytest.raises((ValueError, RecursionError)):
        json.loads(arguments(events)[0])


def test_a_long_value_takes_time_in_proportion() -> None:
    """A million characters, a few at a time, are not looked at again with each of them."""
    parser = CallParser()
    parser.push(f'<{M} calls>\n<{M} invoke name="f">\n<{M} parameter name="a" string="true">')
    n = 0
    for _ in range(200_000):
        n += sum(len(e.text) for e in parser.push("</a>x") if isinstance(e, Grown))
        assert len(parser._buffer) < len(END_VALUE)
    assert n == 1_000_000
