"""stream.py: what is sent, joined, is the text before the first stop string, however tokens cut it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.model.tokenizer import END_THINK
from ds4.server.stream import CONTENT, REASONING, StopFilter, TextStream
from tests.server.standin import TOKENIZER, ids_of

ALPHABET = "a\U0001f600"  # few letters: stop strings overlap each other and themselves
TEXTS = st.text(ALPHABET, max_size=24)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=6), max_size=4)


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The definition: the text before the earliest place at which any stop string begins."""
    places = [i for i in range(len(text)) if any(text.startswith(s, i) for s in stops)]
    return (text[: places[0]], True) if places else (text, False)


def run_filter(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    f, out = StopFilter(stops), []
    for piece in pieces:
        out.append(f.push(piece))
        if f.stopped:
            return "".join(out), True
    out.append(f.flush())
    return "".join(out), f.stopped


@settings(deadline=None)
@given(TEXTS, STOPS, st.data())
def test_deltas_are_the_text_cut_at_the_first_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)])]
    assert run_filter(pieces, stops) == cut(text, stops)


@settings(deadline=None)
@given(TEXTS, STOPS)
def test_no_more_is_held_back_than_must_be(text: str, stops: list[str]) -> None:
    """What is held back is the beginning of some stop string: a stream never lags without a reason."""
    f, sent = StopFilter(stops), ""
    for i, c in enumerate(text):
        sent += f.push(c)
        if f.stopped:
            return
        held = text[len(sent) : i + 1]
        assert not held or any(s.startswith(held[:k]) for s in stops for k in range(1, len(held) + 1))
        assert not any(s in sent for s in stops)


@settings(deadline=None)
@given(st.text(max_size=30), STOPS, st.booleans())
def test_a_token_stream_of_single_bytes(text: str, stops: list[str], in_reasoning: bool) -> None:
    """Every character arrives in pieces; text before `</think>` is reasoning and no stop string touches it."""
    stream = TextStream(TOKENIZER, in_reasoning=in_reasoning, stops=stops)
    ids = [*(ids_of("a stop: abba" + END_THINK) if in_reasoning else []), *TOKENIZER.encode(text)]
    out = {CONTENT: "", REASONING: ""}
    for i in ids:
        for delta in stream.push(i):
            assert delta.text
            delta.text.encode()  # whole characters
            out[delta.channel] += delta.text
        if stream.stopped:
            break
    else:
        for delta in stream.finish():
            out[delta.channel] += delta.text
    want, stopped = cut(text, stops)
    assert out == {CONTENT: want, REASONING: "a stop: abba" if in_reasoning else ""}
    assert stream.stopped == stopped


@pytest.mark.parametrize(
    ("pieces", "stops", "want"),
    [
        (["ab", "cd"], ["abcd", "c"], ("", True)),
        (["abc", "d"], ["abcd", "c"], ("", True)),  # the earlier beginning wins, though it ends later
        (["abc", "x"], ["abcd", "c"], ("ab", True)),  # ... unless it does not come
        (["abc"], ["abcd", "c"], ("ab", True)),  # ... or the text ends first
        (["aa", "ab"], ["aab"], ("a", True)),  # a false start inside the true one
        (["x\n", "\ny"], ["\n\n"], ("x", True)),
        (["x\n"], ["\n\n"], ("x\n", False)),
        (["", "stop"], ["stop"], ("", True)),
    ],
)
def test_hard_cases(pieces: list[str], stops: list[str], want: tuple[str, bool]) -> None:
    assert run_filter(pieces, stops) == want


def test_only_the_token_ends_the_reasoning() -> None:
    """`</think>` spelled with other tokens is text."""
    stream = TextStream(TOKENIZER, in_reasoning=True, stops=[])
    spelled = [d for i in TOKENIZER.encode(END_THINK) for d in stream.push(i)]
    assert {d.channel for d in spelled} == {REASONING}
    assert "".join(d.text for d in spelled) == END_THINK
    stream.push(TOKENIZER.special_id(END_THINK))
    assert [d.channel for d in stream.push(ids_of("a")[0])] == [CONTENT]
    assert stream.reasoning_tokens == len(END_THINK) + 1


def test_an_unfinished_character_before_the_end_of_reasoning() -> None:
    """It stays in the reasoning; the content begins clean."""
    stream = TextStream(TOKENIZER, in_reasoning=True, stops=[])
    ids = [*ids_of("\U0001f600")[:2], *ids_of(END_THINK), *ids_of("ok")]
    deltas = [d for i in ids for d in stream.push(i)]
    assert [(d.channel, d.text) for d in deltas] == [(REASONING, "\ufffd"), (CONTENT, "o"), (CONTENT, "k")]


def test_an_unfinished_character_at_the_end_is_one_replacement() -> None:
    stream = TextStream(TOKENIZER, in_reasoning=False, stops=[])
    assert [d for i in ids_of("\U0001f600")[:3] for d in stream.push(i)] == []
    assert [d.text for d in stream.finish()] == ["\ufffd"]


def test_reasoning_that_never_closes_stays_reasoning() -> None:
    stream = TextStream(TOKENIZER, in_reasoning=True, stops=["a"])
    deltas = [d for i in ids_of("bad\u00e9")[:-1] for d in stream.push(i)] + stream.finish()
    assert "".join(d.text for d in deltas) == "bad\ufffd" and {d.channel for d in deltas} == {REASONING}
