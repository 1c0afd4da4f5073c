"""The embedded model answers, stops, closes its thinking, calls tools in the grammar, and says the same again.

What it says is not judged, but for its form: strictly on the checkpoint, by the teacher. Its base has lost a quarter
of every distribution, and there most answers must still have the form.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ds4.engine import Engine, Sampling
from ds4.model.chat import render
from ds4.model.completion import Completion, parse_ids
from ds4.model.tokenizer import ASSISTANT, END_THINK, SYSTEM, USER, Tokenizer
from ds4.teacher.run import Teacher
from tests.embedded.conftest import judge_ids

BUDGET = 128
PROMPTS = (
    "Hello!", "Who are you?", "Thank you!", 'What does "river" mean?', "What is 3 + 4?", "Count to 5.",
    "Which element has the symbol O?", "How do I end this conversation?", "你好！", "Is 12 greater than 7?",
    "Goodbye.",
)  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def prompt_ids(tokenizer: Tokenizer, messages: list[dict[str, Any]], thinking: bool) -> list[int]:
    return tokenizer.encode_segments(render(messages, thinking=thinking))


def teacher_answer(teacher: Teacher, prompt: list[int]) -> list[int]:
    """The greedy answer of the checkpoint, the end of sentence included."""
    state, ids = teacher.new_state(), []
    row = teacher.forward(state, np.array(prompt))[-1]
    while len(ids) < BUDGET:
        ids.append(int(row.argmax()))
        if ids[-1] == teacher.config.eos_token_id:
            break
        row = teacher.forward(state, np.array(ids[-1:]), decode=True)[-1]
    return ids


def answer(engine: Engine, prompt: list[int], n: int, sampling: Sampling | None = None, **how: Any) -> list[int]:
    """Up to n tokens of the base after a prompt, the end of sentence included."""
    session = engine.session()
    session.sync(prompt, **how)
    ids: list[int] = []
    while len(ids) < n and engine.config.eos_token_id not in ids:
        ids.append(session.next(sampling or Sampling()))
    return ids


# -- the checkpoint


def completion(
    teacher: Teacher, tokenizer: Tokenizer, messages: list[dict[str, Any]], thinking: bool = False
) -> Completion:
    """An answer that must end, and take no other turn than its own."""
    ids = teacher_answer(teacher, prompt_ids(tokenizer, messages, thinking))
    shown = f"{messages[-1]['content']!r}: {tokenizer.decode(ids)!r}"
    assert ids[-1] == teacher.config.eos_token_id, f"goes on and on: {shown}"
    assert not {tokenizer.special_id(name) for name in (USER, ASSISTANT, SYSTEM)} & set(ids), shown
    assert ids.count(tokenizer.special_id(END_THINK)) == int(thinking), shown
    return parse_ids(ids, tokenizer, thinking=thinking)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_answer_ends(teacher: Teacher, tokenizer: Tokenizer, prompt: str) -> None:
    said = completion(teacher, tokenizer, [{"role": "user", "content": prompt}])
    assert said.content.strip() and not said.reasoning and not said.malformed


@pytest.mark.parametrize("prompt", PROMPTS[:6])
def test_thinking_is_closed(teacher: Teacher, tokenizer: Tokenizer, prompt: str) -> None:
    said = completion(teacher, tokenizer, [{"role": "user", "content": prompt}], thinking=True)
    assert said.reasoning.strip() and said.content.strip() and not said.malformed


def test_it_answers_in_turn(teacher: Teacher, tokenizer: Tokenizer) -> None:
    """Further questions after its own answers."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello!"}]
    for question in ("Who are you?", "Thank you!"):
        said = completion(teacher, tokenizer, messages)
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": question}]
    assert completion(teacher, tokenizer, messages).content.strip()


def test_tools_are_called_in_the_grammar(teacher: Teacher, tokenizer: Tokenizer) -> None:
    """Half of the answers to questions for a declared tool are calls of it that parse, and text follows a result."""
    called = 0
    for city in ("Paris", "Rome", "Tokyo", "Oslo"):
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "", "tools": [WEATHER]},
            {"role": "user", "content": f"What is the weather in {city}?"},
        ]
        said = completion(teacher, tokenizer, messages)
        if not said.calls:
            continue
        assert all(c.name == "get_weather" and set(json.loads(c.arguments)) <= {"city"} for c in said.calls)
        called += 1
        calls = [{"id": "c", "function": {"name": c.name, "arguments": c.arguments}} for c in said.calls[:1]]
        messages += [
            {"role": "assistant", "content": said.content, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c", "content": "sunny, 21 degrees"},
        ]
        after = completion(teacher, tokenizer, messages)
        assert after.content.strip() or after.calls
    assert called >= 2


# -- the base, as it is served


def test_most_served_answers_end(engine: Engine) -> None:
    """Greetings always; of all prompts four in five."""
    ended = {}
    for prompt in PROMPTS:
        ids = answer(engine, prompt_ids(engine.tokenizer, [{"role": "user", "content": prompt}], False), BUDGET)
        ended[prompt] = ids[-1] == engine.config.eos_token_id
    assert all(ended[prompt] for prompt in ("Hello!", "Who are you?", "Thank you!", "你好！")), ended
    assert sum(ended.values()) >= 0.8 * len(PROMPTS), ended


def test_most_served_thinking_is_closed(engine: Engine) -> None:
    closed = 0
    for prompt in PROMPTS[:6]:
        ids = answer(engine, prompt_ids(engine.tokenizer, [{"role": "user", "content": prompt}], True), BUDGET)
        closed += engine.tokenizer.special_id(END_THINK) in ids and ids[-1] == engine.config.eos_token_id
    assert closed >= 5


def test_drawn_answers_are_drawn_again(engine: Engine) -> None:
    """The same seed, the same answer; most of them end."""
    prompt = prompt_ids(engine.tokenizer, [{"role": "user", "content": "Thank you!"}], False)
    drawn = [answer(engine, prompt, BUDGET, Sampling(0.7, seed=seed)) for seed in range(3)]
    assert sum(ids[-1] == engine.config.eos_token_id for ids in drawn) >= 2
    assert drawn[0] == answer(engine, prompt, BUDGET, Sampling(0.7, seed=0))


@pytest.mark.parametrize("domain", ["general", pytest.param("code", marks=pytest.mark.long)])
def test_temperature_0_does_not_depend_on_runs_or_chunks(engine: Engine, domain: str) -> None:
    """The same continuation of 300 tokens of text, however they were read."""
    prompt = judge_ids(engine.tokenizer, domain, 300).tolist()
    once = answer(engine, prompt, 24)
    for chunk in (300, 64, 7):
        assert answer(engine, prompt, 24, chunk=chunk) == once, chunk
