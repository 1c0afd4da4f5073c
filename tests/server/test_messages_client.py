"""Anthropic's official client against the server: messages streamed and not, tools, thinking, counts, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import anthropic
import httpx
import pytest

from ds4.model.chat import render
from ds4.model.tokenizer import DSML
from ds4.server.messages_answer import parsed, signature
from tests.server.standin import TOKENIZER, Served, StandIn, StandInConfig, ids_of, serve
from tests.server.test_tools import CALLS, script_of

PATH = "/v1/messages"
TEXT = "H\u00e9llo \U0001f468\u200d\U0001f469\u200d\U0001f467 \U00020000e\u0301 \ufffd!"
QUESTION: Any = [{"role": "user", "content": "Ping?"}]
TOOLS: Any = [{"name": n, "input_schema": {"type": "object"}} for n in ("wx", "say")]
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
BEGIN = "<｜begin▁of▁sentence｜>"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve(StandIn(ids_of(TEXT), config=StandInConfig(2000))) as served:
        yield served


def client(server: Served, key: str = "none") -> Any:
    return made(server.url, key)


@cache
def made(url: str, key: str) -> Any:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=30)


def ask(server: Served, stream: bool, **fields: Any) -> Any:
    """The message that the official client makes of the answer, streamed or not."""
    later = {n: fields.pop(n) for n in ("temperature", "top_k") if n in fields}  # newer clients know them no more
    body: dict[str, Any] = {"model": "any", "messages": QUESTION, "max_tokens": 500, **fields, "extra_body": later}
    if not stream:
        return client(server).messages.create(**body)
    with client(server).messages.stream(**body) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [True, False])
def test_text(server: Served, stream: bool) -> None:
    message = ask(server, stream, system="Be brief.", temperature=0.5, top_k=5, metadata={"user_id": "u"})
    assert [b.type for b in message.content] == ["text"] and message.content[0].text == TEXT
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert message.model == "stand-in" and message.id.startswith("msg_")
    prompt = ids_of(f"{BEGIN}<｜System｜>Be brief.{USER}Ping?{ASSISTANT}</think>")
    assert server.engine.prompts[-1] == prompt and server.engine.samplings[-1].top_k == 5
    usage = message.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(prompt), len(ids_of(TEXT)))
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, 0)


def test_the_events_of_a_stream(server: Served) -> None:
    raw = list(client(server).messages.create(model="any", messages=QUESTION, max_tokens=500, stream=True))
    kinds = [e.type for e in raw]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(e.delta.text for e in raw if e.type == "content_block_delta") == TEXT
    lines = server.post(PATH, {"messages": QUESTION, "max_tokens": 500, "stream": True}).text.split("\n\n")
    assert lines[1] == 'event: ping\ndata: {"type":"ping"}'
    for event in filter(None, lines):
        name, data = event.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]


@pytest.mark.parametrize("stream", [True, False])
def test_how_an_answer_ends(server: Served, stream: bool) -> None:
    cut = ask(server, stream, stop_sequences=["zzz", "\U0001f469"])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "\U0001f469")
    assert cut.content[0].text == TEXT[: TEXT.index("\U0001f469")]
    short = ask(server, stream, max_tokens=1)
    assert (short.stop_reason, short.stop_sequence) == ("max_tokens", None)
    assert short.content[0].text == "H" and short.usage.output_tokens == 1


@pytest.mark.parametrize("stream", [True, False])
def test_thinking(stream: bool) -> None:
    with serve(StandIn(ids_of(f"Hm {TEXT}</think>Yes."))) as server:
        message = ask(server, stream, thinking={"type": "enabled", "budget_tokens": 400})
        thought, said = message.content
        assert (thought.type, thought.thinking, thought.signature) == (
            "thinking",
            f"Hm {TEXT}",
            signature(f"Hm {TEXT}"),
        )
        assert (said.type, said.text) == ("text", "Yes.")
        assert message.usage.output_tokens_details.thinking_tokens == len(ids_of(f"Hm {TEXT}</think>"))
        told = TOKENIZER.decode(server.engine.prompts[-1])
        assert "Reasoning Effort: 75" in told and told.endswith(f"{ASSISTANT}<think>")
        ask(server, stream, thinking={"type": "adaptive"}, output_config={"effort": "low"})
        assert "Reasoning Effort: 50" in TOKENIZER.decode(server.engine.prompts[-1])


@pytest.mark.parametrize("stream", [True, False])
def test_calls(stream: bool) -> None:
    with serve(StandIn(script_of(CALLS, "Let me see."))) as server:
        message = ask(server, stream, tools=TOOLS)
        said, *calls = message.content
        assert (said.type, said.text, message.stop_reason) == ("text", "Let me see.", "tool_use")
        assert [(c.type, c.name, c.input) for c in calls] == [("tool_use", n, a) for n, a in CALLS]
        assert len({c.id for c in calls}) == len(calls)
        alone = ask(server, stream, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [b.type for b in alone.content] == ["text", "tool_use"]
        none = ask(server, stream, tools=TOOLS, tool_choice={"type": "none"})
        assert [b.type for b in none.content] == ["text"] and DSML in none.content[0].text


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_none(stream: bool) -> None:
    """A call of it may have been begun in a stream; the message says of no tool use."""
    script = script_of(CALLS[:1])[:-60]
    with serve(StandIn(script)) as server:
        message = ask(server, stream, tools=TOOLS)
        assert message.stop_reason == "end_turn"
        text = "".join(b.text for b in message.content if b.type == "text")
        assert text.startswith("\n\n<") and DSML in text
        assert stream or [b.type for b in message.content] == ["text"]


def test_numbers_that_no_reader_could_hold() -> None:
    """They stay texts; the answer stays JSON."""
    digits = "9" * 5000
    script = TOKENIZER.encode_segments(TOKENIZER.split_added(
        f'\n\n<{DSML} calls>\n<{DSML} invoke name="wx">\n<{DSML} parameter name="n" string="false">'
        f"[{digits}, 1e999, 7]</{DSML} parameter>\n</{DSML} invoke>\n</{DSML} calls>"
    ))  # fmt: skip
    with serve(StandIn(script, config=StandInConfig(9000))) as server:
        message = ask(server, False, tools=TOOLS, max_tokens=8000)
        assert message.content[0].input == {"n": [digits, "1e999", 7]}
    assert parsed('{"a": ' + "[" * 250 + "]" * 250 + "}")["a"]
    for n in (300, 100_000):
        text = '{"a": ' + "[" * n + "]" * n + "}"
        assert parsed(text) == {"arguments": text}


def test_what_is_sent_back(server: Served) -> None:
    """Blocks make the prompt that the same chat makes in the chat format: results in the order of their calls, what
    was thought with the calls, texts of a question apart.
    """
    calls = [{"type": "tool_use", "id": f"t{i}", "name": n, "input": a} for i, (n, a) in enumerate(CALLS[:2])]
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "plan", "signature": "x"}, {"type": "redacted_thinking", "data": "?"},
            {"type": "text", "text": "Let "}, {"type": "text", "text": "me."}, *calls]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}]},
            {"type": "tool_result", "tool_use_id": "t0", "is_error": True},
            {"type": "text", "text": "Go on", "cache_control": {"type": "ephemeral"}}]},
    ]  # fmt: skip
    client(server).messages.create(
        model="any", max_tokens=9, system=[{"type": "text", "text": "S"}], messages=messages, tools=TOOLS,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )  # fmt: skip
    tools = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("wx", "say")]
    made = [{"id": f"t{i}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(CALLS[:2])]
    same: list[dict[str, Any]] = [
        {"role": "system", "content": "S", "tools": tools},
        {"role": "user", "content": "A\n\nB"},
        {"role": "assistant", "content": "Let me.", "reasoning_content": "plan", "tool_calls": made},
        {"role": "tool", "tool_call_id": "t0", "content": "error"},
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "user", "content": "Go on"},
    ]
    told = server.engine.prompts[-1]
    assert told == TOKENIZER.encode_segments(render(same, thinking=True, tool_text=TOKENIZER.tool_text))


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_sent_back_is_told_as_it_was_written(stream: bool) -> None:
    """The client's own objects, as its users send them: the prompt goes on where the model's tokens ended."""
    script = [*ids_of("Hm.</think>"), *script_of([("wx", {"city": "Rome"})], "Let me see.")]
    with serve(StandIn(script, config=StandInConfig(9000))) as server:
        on: Any = {"tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        message = ask(server, stream, **on)
        before = server.engine.prompts[-1]
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": "sunny"} for b in message.content[2:]]
        assert len(results) == 1
        ask(server, stream, **on, messages=[
            *QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}
        ])  # fmt: skip
        went_on = ids_of(f"<｜end▁of▁sentence｜>{USER}<tool_result>sunny</tool_result>{ASSISTANT}<think>")
        assert server.engine.prompts[-1] == [*before, *script, *went_on]


def test_the_beginning_of_an_answer(server: Served) -> None:
    """A last message of the assistant is gone on with."""
    client(server).messages.create(
        model="any", max_tokens=9, messages=[*QUESTION, {"role": "assistant", "content": "Po"}]
    )
    assert server.engine.prompts[-1] == ids_of(f"{BEGIN}{USER}Ping?{ASSISTANT}</think>Po")


def test_a_request_as_agents_make_it(server: Served) -> None:
    """With all that asks for nothing here."""
    cache = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "some-model-4-5-20251001", "max_tokens": 400, "stream": True, "temperature": 1,
        "metadata": {"user_id": "u_1"}, "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "service_tier": "auto",
        "system": [{"type": "text", "text": "You are one.", **cache}, {"type": "text", "text": "In a folder."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "<reminder>x</reminder>"},
                                                  {"type": "text", "text": "Go.", **cache}]}],
        "tools": [{"name": "Bash", "description": "Runs.", "eager_input_streaming": True, **cache, "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
            "properties": {"command": {"type": "string"}}, "required": ["command"], "additionalProperties": False}}],
    }  # fmt: skip
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "interleaved-thinking-2025-05-14",
        "x-api-key": "k",
    }
    response = server.post(PATH + "?beta=true", body, headers=headers)
    assert response.status_code == 200 and "message_stop" in response.text
    told = TOKENIZER.decode(server.engine.prompts[-1])
    assert told.startswith(f"{BEGIN}<｜System｜>You are one.\n\nIn a folder.\n\n## Tools")
    assert told.endswith(f"{USER}<reminder>x</reminder>\n\nGo.{ASSISTANT}</think>")


def test_counts(server: Served) -> None:
    before = len(server.engine.prompts)
    for fields in ({}, {"system": "S", "tools": TOOLS}, {"messages": [{"role": "user", "content": "x" * 9000}]}):
        body: Any = {"model": "any", "messages": QUESTION, **fields}
        n = client(server).messages.count_tokens(**body).input_tokens
        if n < 2000:
            assert len(server.engine.prompts) == before
            assert client(server).messages.create(max_tokens=1, **body).usage.input_tokens == n
            before += 1
        else:
            assert n > 9000  # it may be more than the context: nothing is asked of the model


def test_models(server: Served) -> None:
    (model,) = list(client(server).models.list())
    assert (model.id, model.type, model.display_name, model.max_input_tokens) == (
        "stand-in",
        "model",
        "stand-in",
        2000,
    )
    assert client(server).models.retrieve("stand-in").id == "stand-in"
    with pytest.raises(anthropic.NotFoundError):
        client(server).models.retrieve("other")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [7]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
    ({"system": "S", "messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]},
     "messages[1].content[0].name"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "x", "name": "f", "input": 7}]}]}, "messages[1].content[0].input"),
    ({"system": 7}, "system"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"stop_sequences": "x" * 300}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stream": 1}, "stream"),
    ({"thinking": {"type": "much"}}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": "9"}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "much"}, "thinking": {"type": "adaptive"}}, "output_config.effort"),
    ({"tools": [7]}, "tools[0]"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": 7}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ({"tool_choice": {"type": {}}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"metadata": 7}, "metadata"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
]  # fmt: skip


def refused(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body: dict[str, Any] = response.json()
    assert body["type"] == "error" and body["error"]["type"] == kind and body["error"]["message"]
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


def test_wrong_fields_by_name(server: Served) -> None:
    before = len(server.engine.prompts)
    for fields, param in WRONG:
        body = {"messages": QUESTION, "max_tokens": 9} | fields
        error = refused(server.post(PATH, body), 400, "invalid_request_error")
        assert error["param"] == param, (fields, error)
        assert param in error["message"] or "surrogate" in error["message"], (fields, error)
    assert len(server.engine.prompts) == before
    nulls = dict.fromkeys(("system", "temperature", "top_p", "stop_sequences", "tools", "tool_choice", "thinking"))
    assert server.post(PATH, {"messages": QUESTION, "max_tokens": 9, "shoe_size": 44, **nulls}).status_code == 200


def test_errors_have_the_shape_of_this_api(server: Served) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 2100}], "max_tokens": 9}
    error = refused(server.post(PATH, long), 400, "invalid_request_error")
    n = server.post(PATH + "/count_tokens", long).json()["input_tokens"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"prompt is too long: {n} tokens > 1999 maximum, of a context of 2000")
    refused(server.get(PATH), 405, "invalid_request_error")
    refused(server.get(PATH + "/batches"), 404, "not_found_error")
    refused(server.post(PATH, b"{"), 400, "invalid_request_error")
    with pytest.raises(anthropic.BadRequestError) as e:
        client(server).messages.create(model="any", max_tokens=9, messages=[{"role": "user", "content": ""}])
    assert e.value.request_id and e.value.body["error"]["param"] == "messages[0].content"
    with serve(StandIn(ids_of("ok")), api_key="k-of-a-test") as locked:
        refused(locked.post(PATH, {}), 401, "authentication_error")
        assert client(locked, "k-of-a-test").messages.create(model="any", max_tokens=9, messages=QUESTION).content


def test_a_failure_in_the_middle() -> None:
    def fail(i: int) -> None:
        if i == 3:
            raise ValueError("broken")

    with serve(StandIn(ids_of(TEXT), before_token=fail)) as server:
        with pytest.raises(anthropic.APIError) as e:
            ask(server, True)
        assert "internal error" in str(e.value)
        with pytest.raises(anthropic.InternalServerError):
            ask(server, False)
