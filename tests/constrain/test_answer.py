"""The state of one answer: reasoning, its budget, content, its end; masks ahead of the text leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ds4.constrain import Answer, Calls, Compiled, Compiler, read_format, read_grammar
from ds4.errors import Ds4Error
from ds4.model.chat import other_turns
from ds4.model.tokenizer import END_THINK, EOS, Tokenizer
from tests.constrain.conftest import block, function, invoke

Ids = Callable[[str], list[int]]


def allowed(answer: Answer, ahead: list[int] | None = None) -> list[set[int] | None]:
    """A row's tokens each; None: all of them."""
    rows = answer.rows(ahead or [])
    if rows is None:
        return [None] * (1 + len(ahead or []))
    bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
    return [None if row.all() else {int(i) for i in np.flatnonzero(row)} for row in bits]


def test_masks_are_what_the_grammar_says(tokenizer: Tokenizer, compiler: Compiler, ids: Ids) -> None:
    made = compiler.compile(tokenizer, content=read_grammar('start: "ab" "c"?'))
    assert made is not None
    answer = made.start()
    starts = [i for i in range(tokenizer.vocab_size) if (b := tokenizer.token_bytes(i)) and b"abc".startswith(b)]
    assert allowed(answer) == [set(starts)]
    text, end = ids("ab"), tokenizer.special_id(EOS)
    ahead = allowed(answer, [*text, end, 5])
    assert ahead[len(text)] == {end, *ids("c")} and ahead[len(text) + 1] == {end} and ahead[-1] is None
    assert allowed(answer) == [set(starts)] and answer.valid([*text, end, 5]) == len(text) + 1
    for token in text:
        answer.advance(token)
    answer.advance(end)
    assert allowed(answer) == [{end}] and answer.valid([end, end]) == 2
    answer.rollback(1)
    assert answer.valid([*ids("c"), end]) == 2 and answer.valid(ids("b")) == 0
    with pytest.raises(Ds4Error, match="not what its grammar allows"):
        answer.advance(ids("b")[0])
    answer.rollback(len(text))
    assert allowed(answer) == [set(starts)]
    other = made.start()
    assert allowed(other) == [set(starts)]


def test_what_a_round_takes_back_is_as_if_it_had_not_been(tokenizer: Tokenizer, compiler: Compiler, ids: Ids) -> None:
    """Any rollback, over all parts of an answer: the masks are those of an answer that never was longer."""
    made = compiler.compile(tokenizer, content=read_format({"type": "json_object"}, "f"), in_reasoning=True, budget=6)
    assert made is not None
    close, end = tokenizer.special_id(END_THINK), tokenizer.special_id(EOS)
    text = [*ids("Let me see"), close, *ids('{"a": [1, "x"]}'), end]
    straight = []
    answer = made.start()
    for token in text:
        straight.append(allowed(answer)[0])
        assert allowed(answer, text[len(straight) - 1 : len(straight) + 6])[0] == straight[-1]
        answer.advance(token)
    rng, at = np.random.default_rng(1), len(text)
    for _ in range(60):
        back = int(rng.integers(0, at + 1))
        answer.rollback(back)
        at -= back
        if at < len(text):
            assert allowed(answer)[0] == straight[at]
        ahead = text[at : at + int(rng.integers(0, len(text) + 1))]
        for token in ahead:
            answer.advance(token)
        at += len(ahead)


def test_reasoning_is_free_but_cannot_end_the_answer(tokenizer: Tokenizer, compiler: Compiler, ids: Ids) -> None:
    made = compiler.compile(tokenizer, content=read_format({"type": "json_object"}, "f"), in_reasoning=True)
    assert made is not None
    close, end = tokenizer.special_id(END_THINK), tokenizer.special_id(EOS)
    answer = made.start()
    forbidden = {end, *other_turns(tokenizer)}
    everything = set(range(32 * made.marks.words))
    assert allowed(answer) == [everything - forbidden] and len(forbidden) > 3
    assert answer.valid([*ids("So {"), close]) == len(ids("So {")) + 1 and answer.valid([end]) == 0
    answer.advance(close)
    assert answer.valid(ids("So")) == 0 and answer.valid([*ids("{}"), end]) == len(ids("{}")) + 1
    assert answer.valid([close]) == 0


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_closes_the_block_in_time(tokenizer: Tokenizer, compiler: Compiler, budget: int) -> None:
    made = compiler.compile(tokenizer, in_reasoning=True, budget=budget)
    assert made is not None
    close = tokenizer.special_id(END_THINK)
    answer = made.start()
    forbidden = {tokenizer.special_id(EOS), *other_turns(tokenizer)}  # else the answer would end inside
    free = set(range(32 * made.marks.words)) - forbidden
    assert allowed(answer, [7] * 8)[: budget + 1] == [free] * budget + [{close}]
    assert allowed(answer, [7] * 8)[budget + 1 :] == [None] * (8 - budget)
    assert [answer.valid([token]) for token in forbidden] == [0] * len(forbidden)
    assert answer.valid([7] * 8) == budget and answer.valid([7] * budget + [close, 7]) == budget + 2
    for _ in range(budget):
        answer.advance(7)
    with pytest.raises(Ds4Error):
        answer.advance(7)
    answer.advance(close)
    assert answer.rows([7, 7]) is None  # what follows is free
    early = made.start()
    if budget > 1:
        early.advance(close)
        assert early.rows([7] * 8) is None


def test_without_reasoning_a_budget_says_nothing(tokenizer: Tokenizer, compiler: Compiler) -> None:
    assert compiler.compile(tokenizer, budget=3) is None
    assert compiler.compile(tokenizer) is None and compiler.compile(tokenizer, in_reasoning=True) is None


def test_a_forced_call_comes_after_reasoning(tokenizer: Tokenizer, compiler: Compiler, ids: Ids) -> None:
    made = compiler.compile(tokenizer, calls=Calls([function("ping")]), in_reasoning=True, budget=2)
    assert isinstance(made, Compiled)
    close, end = tokenizer.special_id(END_THINK), tokenizer.special_id(EOS)
    call = [*ids(block(invoke("ping"))), end]
    answer = made.start()
    assert answer.valid(call) == 2 and answer.valid([9, 9, close, *call]) == 3 + len(call)
    assert answer.valid([close, *call]) == 1 + len(call)


def test_a_step_that_takes_too_much_says_so(tokenizer: Tokenizer, compiler: Compiler, ids: Ids) -> None:
    made = compiler.compile(tokenizer, content=read_grammar('start: (("a"{0,900}){0,900}){0,900}'))
    assert made is not None
    answer = made.start()
    with pytest.raises(Ds4Error, match=r"takes too much to go on: .*2000"):
        for _ in range(60):
            answer.rows([])
            answer.advance(ids("a")[0])
    rows = answer.rows(ids("a"))  # what others share does not fail by it
    assert rows is not None and answer.valid(ids("a")) == 0
    answer.rollback(2)
    with pytest.raises(Ds4Error, match="takes too much"):
        answer.advance(ids("a")[0])
