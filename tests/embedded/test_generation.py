"""The embedded model as it is served: it answers, stops, closes its thinking, and says the same again.

What it says is not judged, but for its form.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds4.engine import Engine, Sampling
from ds4.model.chat import render
from ds4.model.completion import Completion, parse_ids
from ds4.model.tokenizer import END_THINK
from tests.embedded.conftest import judge_ids

BUDGET = 256
PROMPTS = (
    "Hello!", "Who are you?", "Thank you!", 'What does "river" mean?', "What is 3 + 4?", "Count to 5.",
    "Which element has the symbol O?", "How do I end this conversation?", "你好！", "Is 12 greater than 7?",
    "Write a Python function `double(x)`: return twice x.",
)  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def prompt_ids(engine: Engine, messages: list[dict[str, Any]], thinking: bool) -> list[int]:
    return engine.tokenizer.encode_segments(render(messages, thinking=thinking))


def answer(engine: Engine, prompt: list[int], n: int, sampling: Sampling | None = None, **how: Any) -> list[int]:
    """Up to n tokens after a prompt, the end of sentence included."""
    session = engine.session()
    session.sync(prompt, **how)
    ids: list[int] = []
    while len(ids) < n and engine.config.eos_token_id not in ids:
        ids.append(session.next(sampling or Sampling()))
    return ids


def completion(engine: Engine, messages: list[dict[str, Any]], thinking: bool) -> Completion:
    """A greedy answer, which must end within the budget."""
    ids = answer(engine, prompt_ids(engine, messages, thinking), BUDGET)
    shown = engine.tokenizer.decode(ids)
    assert ids[-1] == engine.config.eos_token_id, f"{messages} goes on and on: {shown!r}"
    if thinking:
        assert ids.count(engine.tokenizer.special_id(END_THINK)) == 1, f"{messages}: {shown!r}"
    return parse_ids(ids, engine.tokenizer, thinking=thinking)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_answer_ends(engine: Engine, prompt: str) -> None:
    said = completion(engine, [{"role": "user", "content": prompt}], thinking=False)
    assert said.content.strip() and not said.reasoning and not said.malformed


@pytest.mark.parametrize("prompt", PROMPTS[:6])
def test_thinking_is_closed(engine: Engine, prompt: str) -> None:
    said = completion(engine, [{"role": "user", "content": prompt}], thinking=True)
    assert said.reasoning.strip() and said.content.strip() and not said.malformed


def test_it_answers_in_turn(engine: Engine) -> None:
    """A second question after its own first answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello!"}]
    for question in ("Who are you?", "Thank you!"):
        said = completion(engine, messages, thinking=False)
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": question}]
    assert completion(engine, messages, thinking=False).content.strip()


def test_tools_are_called_in_the_grammar(engine: Engine) -> None:
    """Declared tools, a question for one: calls parse, name what was declared, and an answer follows a result."""
    called = 0
    for city in ("Paris", "Rome", "Tokyo"):
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "", "tools": [WEATHER]},
            {"role": "user", "content": f"What is the weather in {city}?"},
        ]
        said = completion(engine, messages, thinking=False)
        assert not said.malformed
        for call in said.calls:
            assert call.name == "get_weather" and set(json.loads(call.arguments)) <= {"city"}
            called += 1
        if said.calls:
            calls = [{"id": "c", "function": {"name": c.name, "arguments": c.arguments}} for c in said.calls[:1]]
            messages += [
                {"role": "assistant", "content": said.content, "tool_calls": calls},
                {"role": "tool", "tool_call_id": "c", "content": "sunny, 21 degrees"},
            ]
            assert completion(engine, messages, thinking=False).content.strip()
    assert called >= 1


def test_drawn_answers_end_too(engine: Engine) -> None:
    prompt = prompt_ids(engine, [{"role": "user", "content": "Who are you?"}], False)
    for seed in range(3):
        drawn = answer(engine, prompt, BUDGET, Sampling(0.7, seed=seed))
        assert drawn[-1] == engine.config.eos_token_id
        assert drawn == answer(engine, prompt, BUDGET, Sampling(0.7, seed=seed))


@pytest.mark.parametrize("domain", ["general", "code"])
def test_temperature_0_does_not_depend_on_runs_or_chunks(engine: Engine, domain: str) -> None:
    """The same continuation of 300 tokens of text, however they were read."""
    prompt = judge_ids(engine.tokenizer, domain, 300).tolist()
    once = answer(engine, prompt, 24)
    for chunk in (300, 64, 7):
        assert answer(engine, prompt, 24, chunk=chunk) == once, chunk
