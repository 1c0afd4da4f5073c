"""Where a correction decides: the token in which two answers part, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4 import embedded
from ds4.model.chat import render
from ds4.model.tokenizer import DSML, END_THINK, EOS, THINK, Tokenizer
from ds4.posttrain.corrections import Correction
from ds4.posttrain.decisions import Decision, NoDecision, decision, decisions

MESSAGES = [{"role": "user", "content": "What time is it?"}]
CONTEXT = 4096
ENDS = st.text("abcxyz é.😀<", max_size=6)
TOKENIZER = Tokenizer.from_file(embedded.checkpoint() / "tokenizer.json")


def correction(given: str, wanted: str, *, line: int = 1, **more: Any) -> Correction:
    return Correction(line, more.pop("messages", MESSAGES), given, wanted, **more)


def decide(given: str, wanted: str, *, context: int = CONTEXT, **more: Any) -> Decision:
    return decision(correction(given, wanted, **more), TOKENIZER, context)


def reason(given: str, wanted: str, *, context: int = CONTEXT, **more: Any) -> str:
    with pytest.raises(NoDecision) as e:
        decide(given, wanted, context=context, **more)
    return str(e.value)


def text(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(ids)


def test_the_first_token_that_differs() -> None:
    d = decide("It is three o'clock.", "It is four o'clock.")
    assert (text(d.answer), text([d.a]), text([d.given or 0])) == ("It is", " four", " three")
    assert list(d.prompt) == TOKENIZER.encode_segments(render(MESSAGES, thinking=False))
    assert d.position == len(d.prompt) + 2


def test_an_answer_that_ended_too_early_or_said_nothing() -> None:
    d = decide("It is three", "It is three o'clock")
    assert (text([d.a]), d.given) == (" o", None)
    assert decide("", "Yes.").answer == ()


def test_an_answer_that_should_have_ended_is_reported() -> None:
    assert "a special token, not by a word" in reason("It is three o'clock", "It is three")


def test_the_same_letters_in_other_tokens() -> None:
    """ " released" is " rele" + "ased" and " releasex" is " release" + "x": no word is decided at " rele"."""
    assert [text([i]) for i in TOKENIZER.encode(" releasex")] == [" release", "x"]
    said = reason("It was released", "It was releasex")
    assert "tokenizes differently" in said and "' rele' was given and ' release' wanted" in said


def test_a_prompt_that_the_answer_grows_together_with() -> None:
    """A prompt that ends in text: in one text with the answer its last tokens are others."""
    messages = [*MESSAGES, {"role": "assistant", "content": "It was release", "wo_eos": True}]
    assert "when prompt and answer are one text" in reason("d", "x", messages=messages)
    apart = [*MESSAGES, {"role": "assistant", "content": "It was", "wo_eos": True}]
    assert text([decide(" three", " four", messages=apart).a]) == " four"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (f"Well {THINK}one{END_THINK} yes", f"Well {THINK}two{END_THINK} yes"),
        (f"Well {THINK}one, open", f"Well {THINK}two, open"),
        ("Yes.", f'Yes.<{DSML} calls><{DSML} invoke name="a"></{DSML} invoke></{DSML} calls>'),
        (f"<{DSML} calls>one</{DSML} calls>", f"<{DSML} calls>two</{DSML} calls>"),
        (f"<{DSML} calls>one", f"<{DSML} calls>two"),
        ("<tool_result>one</tool_result>", "<tool_result>two</tool_result>"),
        ("Say <｜User｜> now", "Say <｜Assistant｜> now"),
    ],
)
def test_inside_markup(given: str, wanted: str) -> None:
    assert "inside markup" in reason(given, wanted)


def test_before_and_after_markup() -> None:
    spelled = f"<{DSML} calls>one</{DSML} calls>"
    assert text([decide(f"a {spelled} b", f"a {spelled} c").a]) == " c"
    assert text([decide(f"one {spelled}", f"two {spelled}").a]) != ""
    assert text([decide(f"ünd {THINK}x{END_THINK} b", f"ünd {THINK}x{END_THINK} c").a]) == " c"


def test_drawn_tokens_are_the_answer() -> None:
    """An answer that was drawn in other tokens than its text has: what follows was decided after those."""
    ids = TOKENIZER.encode("It is three o'clock.")
    end = TOKENIZER.special_id(EOS)
    d = decide("It is three o'clock.", "It is four o'clock.", drawn=(*ids, end))
    assert d == decide("It is three o'clock.", "It is four o'clock.")
    letters = [TOKENIZER.encode(c)[0] for c in "It"]
    odd = (*letters, *ids[1:], end)
    assert text(odd[:-1]) == "It is three o'clock."
    said = reason("It is three o'clock.", "It is four o'clock.", drawn=odd)
    assert "tokenizes differently" in said and "'I' was given and 'It' wanted" in said
    before = (*ids[:3], *(TOKENIZER.encode(c)[0] for c in " o'clock."), end)  # odd only after the decision
    assert text([decide("It is three o'clock.", "It is four o'clock.", drawn=before).a]) == " four"


def test_drawn_tokens_of_something_else() -> None:
    assert "do not spell its answer" in reason("a", "b", drawn=tuple(TOKENIZER.encode("c")))
    assert "token 4096" in reason("a", "b", drawn=(4096,))


def test_an_answer_cut_short() -> None:
    ids = tuple(TOKENIZER.encode("It is three"))
    assert "cut at its token limit" in reason("It is three", "It is three o'clock", drawn=ids, cut=True)
    assert text([decide("It is three", "It is four", drawn=ids, cut=True).a]) == " four"
    stopped = (*ids, *TOKENIZER.encode(" END"))  # a stop string ended it: its tokens were drawn
    assert text([decide("It is three", "It is three o'clock", drawn=stopped).a]) == " o"


def test_a_special_token_that_was_drawn() -> None:
    """Spelled in the answer, or not told any more as a stop string began with it."""
    ids = (*TOKENIZER.encode("It is"), TOKENIZER.special_id(DSML))
    assert "inside markup" in reason("It is" + DSML, "It is three", drawn=ids)
    assert "decides at a special token" in reason("It is", "It is three", drawn=ids)


def test_reasoning_is_in_front_of_the_answer() -> None:
    d = decide("It is three.", "It is four.", thinking=True, effort="low", reasoning="Hm, so.")
    assert text(d.answer) == f"Hm, so.{END_THINK}It is" and TOKENIZER.special_id(END_THINK) in d.answer
    assert list(d.prompt) == TOKENIZER.encode_segments(render(MESSAGES, thinking=True, effort="low"))
    assert "does not say what" in reason("It is three.", "It is four.", thinking=True)


def test_reasoning_as_it_was_drawn() -> None:
    """Other tokens of the same reasoning: they are the ones that the answer came after."""
    end = TOKENIZER.special_id(END_THINK)
    odd = [TOKENIZER.encode(c)[0] for c in "Hm"]
    drawn = (*odd, end, *TOKENIZER.encode("It is three."))
    d = decide("It is three.", "It is four.", thinking=True, reasoning="Hm", drawn=drawn)
    assert d.answer[:3] == (*odd, end) and text([d.a]) == " four"
    said = reason("", "It is four.", thinking=True, reasoning="Hm", drawn=tuple(odd), cut=True)
    assert "ended inside its reasoning" in said


def test_messages_that_no_request_could_have() -> None:
    for messages, says in (
        ([], "empty"),
        ([{"role": "owner", "content": "x"}], "'owner'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "images"),
        (["x"], "object"),
    ):
        assert says in reason("a", "b", messages=messages)
    assert "reasoning_effort" in reason("a", "b", effort=900)


def test_a_decision_beyond_the_context() -> None:
    d = decide("It is three", "It is four")
    assert decide("It is three", "It is four", context=d.position + 1) == d
    assert f"token {d.position}" in reason("It is three", "It is four", context=d.position)


def test_contradictions_are_told_on_both_sides() -> None:
    """Another token after the same tokens; a second mistake of the same answer, or another prompt, is none."""
    rows = [
        correction("It is three.", "It is four.", line=1),
        correction("It is three.", "It is five.", line=2),
        correction("It is three.", "It is three!", line=3),
        correction("It is six", "It is four", line=4),
        correction(
            "It is three.", "It is four.", line=5, messages=[{"role": "user", "content": "Another question?"}]
        ),
    ]
    found, problems = decisions(rows, TOKENIZER, CONTEXT)
    assert [d.line for d in found] == [3, 5]
    assert [(p.line, p.reason.split(":")[0]) for p in problems] == [
        (1, "contradicts line 2"), (2, "contradicts line 1, 4"), (4, "contradicts line 2")
    ]  # fmt: skip


def test_repeats_count_once() -> None:
    rows = [correction("It is three.", f"It is four{end}", line=n) for n, end in enumerate(".!?", start=7)]
    rows.append(correction("no", "It is five", line=3, thinking=True))
    found, problems = decisions(rows, TOKENIZER, CONTEXT)
    assert [d.line for d in found] == [7]
    assert [p.line for p in problems] == [3, 8, 9] and all("repeats line 7" in p.reason for p in problems[1:])


@settings(deadline=None, max_examples=300)
@given(start=st.text("abc isreld.ü\n<｜", max_size=12), a=ENDS, b=ENDS)
def test_a_decision_is_what_it_says(start: str, a: str, b: str) -> None:
    """Whatever the texts: before it the answers are one text and one row of tokens, and its token goes where the
    given answer does not.
    """
    given, wanted = start + a, start + b
    if given == wanted:
        return
    try:
        d = decide(given, wanted)
    except NoDecision:
        return
    ids = TOKENIZER.encode(wanted)
    p = len(d.answer)
    assert list(d.answer) == ids[:p] == TOKENIZER.encode(given)[:p] and d.a == ids[p]
    after = [b"".join(TOKENIZER.token_bytes(i) for i in (*d.answer, t)) for t in (d.a, d.given) if t is not None]
    assert wanted.encode().startswith(after[0])
    assert not given.encode().startswith(after[0]) or not wanted.encode().startswith(after[-1]) or d.given is None
