"""What an answer has to be, in every API: formats, grammars, forced calls, budgets; the model is held to them.

The stand-in's script is judged by the constraint: one that does not obey fails its request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from ds4.model.tokenizer import DSML
from tests.server.standin import TOKENIZER, Served, StandIn, StandInConfig, ids_of, serve
from tests.server.test_tools import script_of
from tests.server.test_utf8 import PATHS

SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False
}  # fmt: skip
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
HI: Any = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {
    "chat": {"messages": HI}, "completions": {"prompt": "hi", "max_tokens": 500},
    "messages": {"messages": HI, "max_tokens": 500}, "responses": {"input": "hi"},
}  # fmt: skip
CHATS = ("chat", "messages", "responses")
FORMAT: dict[str, Any] = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    "completions": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
}
TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": {"name": n, "parameters": PARAMETERS}} for n in ("wx", "say")],
    "messages": [{"name": n, "input_schema": PARAMETERS} for n in ("wx", "say")],
    "responses": [{"type": "function", "name": n, "parameters": PARAMETERS} for n in ("wx", "say")],
}
REQUIRED: dict[str, Any] = {"chat": "required", "messages": {"type": "any"}, "responses": "required"}
NAMED: dict[str, Any] = {
    "chat": {"type": "function", "function": {"name": "say"}}, "messages": {"type": "tool", "name": "say"},
    "responses": {"type": "function", "name": "say"},
}  # fmt: skip
ON: dict[str, Any] = {
    "chat": {"thinking": True, "thinking_budget": 2},
    "messages": {"thinking": {"type": "enabled", "budget_tokens": 2}},
    "responses": {"reasoning": {"effort": "low"}, "max_thinking_tokens": 2},
}
JSON, TEXT = '{"a": 7}', "no JSON"
ROME, SAID = [("wx", {"city": "Rome"})], [("say", {"city": "x"})]


class Answer(BaseModel):
    a: int


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Served]]:
    """A server a script."""
    scripts = {
        "json": ids_of(JSON), "text": ids_of(TEXT), "wx": script_of(ROME), "say": script_of(SAID),
        "both": script_of([*ROME, *SAID]), "thought": ids_of(f"Hm</think>{JSON}"),
        "long": ids_of(f"Hmm</think>{JSON}"), "called": [*ids_of("Hm</think>"), *script_of(ROME)],
    }  # fmt: skip
    with_all: dict[str, Served] = {}
    contexts = [(name, serve(StandIn(script, config=StandInConfig(9000)))) for name, script in scripts.items()]
    try:
        for name, context in contexts:
            with_all[name] = context.__enter__()
        yield with_all
    finally:
        for _, context in contexts[: len(with_all)]:
            context.__exit__(None, None, None)


def obeys(server: Served, api: str, stream: bool = False, **fields: Any) -> bool:
    """Whether the script is an answer to such a request."""
    response = server.post(PATHS[api], {**ASKED[api], **fields, "stream": stream})
    assert response.status_code in (200, 500) and (
        stream or (response.status_code == 200) != ("grammar" in response.text)
    )
    return response.status_code == 200 and "grammar allows" not in response.text


@pytest.mark.parametrize("api", [*PATHS])
def test_formats(servers: dict[str, Served], api: str) -> None:
    for stream in (True, False):
        assert obeys(servers["json"], api, stream, **FORMAT[api])
        assert not obeys(servers["text"], api, stream, **FORMAT[api])
    lark = {"grammar": 'start: "no " /[A-Z]+/'}
    assert obeys(servers["text"], api, **lark) and not obeys(servers["json"], api, **lark)
    if api != "messages":
        free = {"text": {"format": {"type": "json_object"}}} if api == "responses" else {}
        free = free or {"response_format": {"type": "json_object"}}
        assert obeys(servers["json"], api, **free) and not obeys(servers["text"], api, **free)


@pytest.mark.parametrize("api", CHATS)
def test_the_model_is_told_of_a_schema(servers: dict[str, Served], api: str) -> None:
    """In its system message, after what it says already."""
    system = {"messages": {"system": "S"}, "responses": {"instructions": "S"}}.get(api, {})
    if api == "chat":
        system = {"messages": [{"role": "system", "content": "S"}, *ASKED["chat"]["messages"]]}
    told = f"## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{json.dumps(SCHEMA)}"
    for more, before in ((system, "<｜System｜>S\n\n"), ({}, "<｜System｜>\n\n")):
        assert obeys(servers["json"], api, **FORMAT[api], **more)
        prompt = TOKENIZER.decode(servers["json"].engine.prompts[-1])
        assert before + told + "<｜User｜>" in prompt


@pytest.mark.parametrize("api", CHATS)
def test_forced_calls(servers: dict[str, Served], api: str) -> None:
    tools = {"tools": TOOLS[api]}
    any_, named = tools | {"tool_choice": REQUIRED[api]}, tools | {"tool_choice": NAMED[api]}
    for script, wanted in (("wx", False), ("say", True), ("text", False), ("json", False)):
        assert obeys(servers[script], api, **named) == wanted
        assert obeys(servers[script], api, **any_) == (script in ("wx", "say"))
    assert obeys(servers["both"], api, True, **any_) and not obeys(servers["both"], api, **named)
    response = servers["wx"].post(PATHS[api], {**ASKED[api], **any_}).json()
    assert '"wx"' in json.dumps(response) and "Rome" in json.dumps(response)
    auto = tools | FORMAT[api]  # either a call or the format
    assert obeys(servers["wx"], api, **auto) and obeys(servers["json"], api, **auto)
    assert not obeys(servers["text"], api, **auto)


@pytest.mark.parametrize("api", CHATS)
def test_reasoning_is_free_within_its_budget(servers: dict[str, Served], api: str) -> None:
    assert obeys(servers["thought"], api, **ON[api])
    assert obeys(servers["thought"], api, **ON[api], **FORMAT[api])
    assert not obeys(servers["long"], api, **ON[api])
    assert obeys(servers["called"], api, **ON[api], tools=TOOLS[api], tool_choice=REQUIRED[api])
    assert not obeys(servers["called"], api, **ON[api], **FORMAT[api])


def test_the_clients_own_ways(servers: dict[str, Served]) -> None:
    client, claude = servers["json"].client(), anthropic.Anthropic(base_url=servers["json"].url, api_key="none")
    chat = client.chat.completions.parse(model="any", messages=HI, response_format=Answer)
    assert chat.choices[0].message.parsed == Answer(a=7)
    assert client.responses.parse(model="any", input="x", text_format=Answer).output_parsed == Answer(a=7)
    message = claude.messages.parse(model="any", max_tokens=99, messages=HI, output_format=Answer)
    assert message.parsed_output == Answer(a=7)


MIN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "array", "contains": {"type": "integer"}}}}
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat", {"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format.schema", "missing"),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"schema": MIN}}},
     "response_format.json_schema.schema", "contains"),
    ("completions", {"response_format": 7}, "response_format", "object"),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": MIN}}}, "text.format.schema",
     "contains"),
    ("messages", {"output_config": {"format": {"type": "json_schema", "schema": MIN}}}, "output_config.format.schema",
     "contains"),
    ("messages", {"output_format": {"type": "yaml"}}, "output_format.type", "yaml"),
    ("messages", {"output_format": {"type": "text"}, "output_config": {"format": {"type": "text"}}},
     "output_config.format", "one thing"),
    ("chat", {"grammar": 7}, "grammar", "string"),
    ("chat", {"grammar": "start: ("}, "grammar", "grammar"),
    ("chat", {"grammar": 'start: "x"', **FORMAT["chat"]}, "grammar", "response_format"),
    ("chat", {"tool_choice": "required"}, "tool_choice", "no tools"),
    ("chat", {"tools": [], "tool_choice": NAMED["chat"]}, "tool_choice", "no tools"),
    ("chat", {"tools": TOOLS["chat"], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "required"),
    ("chat", {"tools": TOOLS["chat"], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice",
     "'f'"),
    ("chat", {"tools": TOOLS["chat"], "tool_choice": "required", **FORMAT["chat"]}, "response_format.json_schema",
     "contradict"),
    ("messages", {"tools": TOOLS["messages"], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice", "'f'"),
    ("messages", {"tools": [{"name": "f", "input_schema": MIN}], "tool_choice": {"type": "any"}},
     "tools[0].input_schema", "contains"),
    ("responses", {"tools": [{"type": "function", "name": "f", "parameters": MIN}], "tool_choice": "required"},
     "tools[0].parameters", "contains"),
]  # fmt: skip


def test_what_cannot_be_held_is_named(servers: dict[str, Served]) -> None:
    before = len(servers["json"].engine.prompts)
    for api, fields, param, says in WRONG:
        response = servers["json"].post(PATHS[api], {**ASKED[api], **fields})
        error = response.json()["error"]
        assert response.status_code == 400 and says in error["message"], (fields, error)
        assert error["param"].startswith(param) and param in error["message"], (fields, error)
    assert len(servers["json"].engine.prompts) == before


def test_a_name_that_one_tool_has(servers: dict[str, Served]) -> None:
    """In full, or bare where that is no other's."""
    tool = {"type": "function", "function": {"name": "say", "parameters": PARAMETERS}}
    spaced = {"tools": [{**tool, "namespace": "ns"}, TOOLS["chat"][0]]}
    with serve(StandIn(script_of([("ns::say", {"city": "x"})]), config=StandInConfig(9000))) as server:
        for name in ("ns::say", "say"):
            assert obeys(server, "chat", tool_choice={"type": "function", "function": {"name": name}}, **spaced)
        assert not obeys(server, "chat", tool_choice={"type": "function", "function": {"name": "wx"}}, **spaced)
    twice = {"tools": [*spaced["tools"], {**tool, "namespace": "other"}]}
    choice = {"type": "function", "function": {"name": "say"}}
    error = servers["json"].post(PATHS["chat"], {**ASKED["chat"], **twice, "tool_choice": choice}).json()["error"]
    assert "ns::say, other::say" in error["message"] and DSML not in error["message"]
