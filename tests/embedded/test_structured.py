"""Formats, grammars, forced calls and budgets with the embedded model, drafts and all: from request to answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ds4 import embedded
from ds4.constrain import Calls, Compiler, read_format
from ds4.engine import Engine, Sampling
from ds4.model.chat import render
from ds4.model.tokenizer import EOS
from ds4.server.request import ServedEngine
from tests.conftest import opened
from tests.engine.drafted import fixed
from tests.server.standin import Served, StandIn, serve

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["ok", "n"], "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "vote", "parameters": {
    "type": "object", "properties": {"side": {"enum": ["left", "right"]}, "times": {"type": "integer", "maximum": 3}},
    "required": ["side"],
}}}  # fmt: skip


@pytest.fixture(scope="module")
def drafting(base: Path) -> Engine:
    shards = embedded.checkpoint()
    return Engine.open(base, engram_dir=shards, prefill="replay", device=opened("fast", "greedy"), dspark=True)


@pytest.fixture(scope="module")
def server(drafting: Engine) -> Iterator[Served]:
    def load(progress: object) -> ServedEngine:
        return drafting

    with serve(StandIn(), open_engine=load, sessions=3) as served:
        yield served


@pytest.mark.long
def test_drafts_change_nothing_and_everything_obeys(drafting: Engine) -> None:
    """Greedy and seeded: token for token what plain decode says; without a seed: a whole value of the schema."""
    t, compiler = drafting.tokenizer, Compiler()
    ids = t.encode_segments(render([{"role": "user", "content": "Is it right, and how often?"}], thinking=False))
    told = compiler.compile(t, content=read_format(FORMAT, "response_format"))
    call = compiler.compile(t, calls=Calls([TOOL], one=True))
    assert told is not None and call is not None
    end = t.special_id(EOS)
    for made, sampling in ((told, Sampling()), (call, Sampling(1.0, seed=4))):
        answers = []
        for policy in (fixed(0), fixed(3)):
            session = drafting.session(policy)
            session.sync(ids)
            session.constrain(made.start())
            answer = []
            while not answer or (answer[-1] != end and len(answer) < 80):
                answer.append(session.next(sampling))
            answers.append(answer)
        assert answers[0] == answers[1] and answers[0][-1] == end
        assert sum(session.rounds.verified[1:]) > 0
    session = drafting.session(fixed(3))
    session.sync(ids)
    session.constrain(told.start())
    drawn = []
    while not drawn or drawn[-1] != end:
        drawn.append(session.next(Sampling(1.0, seed=1, seeded=False)))
    value = json.loads(t.decode(drawn[:-1]))
    assert set(value) == {"ok", "n"} and 10 <= value["n"] <= 99 and isinstance(value["ok"], bool)


def chat(server: Served, **fields: Any) -> dict[str, Any]:
    response = server.chat("Is it right?", **{"temperature": 1, "max_tokens": 90, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_answers_of_the_server_obey(server: Served) -> None:
    asked: list[dict[str, Any]] = [
        {"response_format": FORMAT, "seed": 1}, {"grammar": 'start: "yes" | "no, " /[a-z]{3}/'},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    ]  # fmt: skip
    with ThreadPoolExecutor(3) as pool:  # each has its own mask in a pass
        given, said, called = (a["choices"][0] for a in pool.map(lambda fields: chat(server, **fields), asked))
    value = json.loads(given["message"]["content"])
    assert given["finish_reason"] == "stop" and 10 <= value["n"] <= 99
    assert said["message"]["content"] == "yes" or len(said["message"]["content"]) == 7
    assert called["finish_reason"] == "tool_calls" and called["message"]["content"] is None
    (call,) = called["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "vote" and arguments["side"] in ("left", "right")
    assert arguments.get("times", 0) <= 3
    cut = chat(server, response_format={"type": "json_object"}, max_tokens=2)["choices"][0]
    assert cut["finish_reason"] == "length"


def test_a_budget_closes_the_reasoning_in_time(server: Served) -> None:
    answer = chat(server, thinking=True, thinking_budget=4, response_format=FORMAT, seed=2)
    usage = answer["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= 5  # and its closing tag
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] and 10 <= json.loads(message["content"])["n"] <= 99
