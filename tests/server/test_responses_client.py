"""OpenAI's official client against /v1/responses: streamed and not, items, tools, what is stored, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ds4.model.chat import render
from ds4.server.errors import HttpError
from ds4.server.responses_store import Kept, ResponseStore
from tests.server.standin import TOKENIZER, Served, StandIn, StandInConfig, ids_of, serve
from tests.server.test_errors import check
from tests.server.test_tools import CALLS, script_of

PATH = "/v1/responses"
TEXT = "H\u00e9llo \U0001f468\u200d\U0001f469\u200d\U0001f467 \U00020000e\u0301 \ufffd!"
TOOLS: Any = [{"type": "function", "name": n, "parameters": {"type": "object"}} for n in ("wx", "say")]
USER, ASSISTANT, END = "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
BEGIN = "<｜begin▁of▁sentence｜>"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve(StandIn(ids_of(TEXT), config=StandInConfig(2000))) as served:
        yield served


def ask(server: Served, stream: bool, **fields: Any) -> Any:
    """The response that the official client makes of the answer, streamed or not."""
    body: dict[str, Any] = {"model": "any", "input": "Ping?", **fields}
    if not stream:
        return server.client().responses.create(**body)
    last = None
    with server.client().responses.stream(**body) as events:
        for number, event in enumerate(events):
            assert getattr(event, "sequence_number", number) == number
            last = event
    assert last is not None and last.type in ("response.completed", "response.incomplete")
    return last.response


@pytest.mark.parametrize("stream", [True, False])
def test_text(server: Served, stream: bool) -> None:
    answer = ask(server, stream, instructions="Be brief.", temperature=0.5, metadata={"a": "b"}, user="u")
    assert answer.output_text == TEXT and answer.status == "completed" and answer.error is None
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.model, answer.instructions, answer.temperature) == ("stand-in", "Be brief.", 0.5)
    assert (
        answer.metadata == {"a": "b"} and answer.id.startswith("resp_") and answer.completed_at >= answer.created_at
    )
    prompt = ids_of(f"{BEGIN}<｜System｜>Be brief.{USER}Ping?{ASSISTANT}</think>")
    assert server.engine.prompts[-1] == prompt
    usage, n = answer.usage, len(ids_of(TEXT))
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (len(prompt), n, len(prompt) + n)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)


def test_the_events_of_a_stream() -> None:
    """Thought, said, called: every item is added, grows, is done, and stands in the response at the end."""
    script = [*ids_of("Hm.</think>"), *script_of(CALLS[:2], "Let me see.")]
    with serve(StandIn(script)) as server:
        body: Any = {"model": "any", "input": "x", "tools": TOOLS, "reasoning": {"effort": "high"}}
        events = list(server.client().responses.create(**body, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type.removeprefix("response.") for e in events]
    short = [k for i, k in enumerate(kinds) if not (k.endswith(".delta") and kinds[i - 1] == k)]
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert short == [
        "created", "in_progress", *(k.format("reasoning_text") for k in text),
        *(k.format("output_text") for k in text), *call, *call, "completed",
    ]  # fmt: skip
    end = events[-1].response
    assert [i.type for i in end.output] == ["reasoning", "message", "function_call", "function_call"]
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [d.to_dict() for d in done] == [i.to_dict() for i in end.output]
    for index, item in enumerate(end.output):
        mine = [e for e in events if getattr(e, "output_index", None) == index]
        assert {getattr(e, "item_id", item.id) for e in mine} == {item.id}
        grown = "".join(e.delta for e in mine if e.type.endswith(".delta"))
        assert grown == (item.arguments if item.type == "function_call" else item.content[0].text)
    assert end.usage.output_tokens_details.reasoning_tokens == len(ids_of("Hm.</think>"))


@pytest.mark.parametrize("stream", [True, False])
def test_calls(stream: bool) -> None:
    space = {"type": "namespace", "name": "ns", "description": "D.", "tools": TOOLS[1:]}
    script = script_of([CALLS[0], ("ns::say", {})], "Let me see.")
    with serve(StandIn(script)) as server:
        answer = ask(server, stream, tools=[TOOLS[0], space], parallel_tool_calls=True)
        calls = answer.output[1:]
        assert answer.output_text == "Let me see." and answer.status == "completed"
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [CALLS[0], ("say", {})]
        assert [c.namespace for c in calls] == [None, "ns"] and {c.status for c in calls} == {"completed"}
        assert len({c.call_id for c in calls}) == len({c.id for c in calls}) == 2
        assert '"name": "ns::say", "parameters"' in TOKENIZER.decode(server.engine.prompts[-1])
        alone = ask(server, stream, tools=TOOLS, parallel_tool_calls=False)
        assert [i.type for i in alone.output] == ["message", "function_call"]
        none = ask(server, stream, tools=TOOLS, tool_choice="none")
        assert [i.type for i in none.output] == ["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_cut_off(server: Served, stream: bool) -> None:
    short = ask(server, stream, max_output_tokens=1)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert short.output_text == "H" and short.output[0].status == "incomplete" and short.completed_at is None
    with serve(StandIn(script_of(CALLS[:1])[:-60])) as broken:
        answer = ask(broken, stream, tools=TOOLS)
        kinds = [(i.type, i.status) for i in answer.output]
        told = [("function_call", "incomplete")] if stream else []  # its name may have been sent
        assert kinds == [*told, ("message", "completed")]
        again = ask(broken, False, tools=TOOLS, input="And?", previous_response_id=answer.id)
        assert "<tool_result>" not in TOKENIZER.decode(broken.engine.prompts[-1]) and again.status == "completed"
    with serve(StandIn()) as silent:
        answer = ask(silent, stream)
        assert answer.output_text == "" and [i.type for i in answer.output] == ["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs(server: Served, stream: bool) -> None:
    answer = ask(server, stream, include=["message.output_text.logprobs"], top_logprobs=2)
    entries = answer.output[0].content[0].logprobs
    assert len(entries) == len(ids_of(TEXT)) and {len(e.top_logprobs) for e in entries} == {2}
    assert bytes(b for e in entries for b in e.bytes).decode() == TEXT
    assert not ask(server, stream).output[0].content[0].logprobs


def test_a_conversation_makes_one_prompt_however_it_is_sent() -> None:
    """By the ids of what came before, or with all of it: the same as the chat form makes."""
    script = [*ids_of("Hm.</think>"), *script_of(CALLS[:2], "Let me see.")]
    with serve(StandIn(script, config=StandInConfig(9000))) as server:
        common: Any = {"tools": TOOLS, "reasoning": {"effort": "low"}, "instructions": "S"}
        first = ask(server, False, input="Both?", **common)
        ids = [i.call_id for i in first.output if i.type == "function_call"]
        results: Any = [
            {"type": "function_call_output", "call_id": ids[1], "output": "two"},
            {"type": "function_call_output", "call_id": ids[0], "output": [{"type": "input_text", "text": "one"}]},
            {"role": "developer", "content": "Now."},
        ]
        ask(server, True, input=results, previous_response_id=first.id, **common)
        by_id = server.engine.prompts[-1]
        history: Any = [{"role": "user", "content": "Both?"}, *(i.to_dict() for i in first.output), *results]
        ask(server, False, input=history, store=False, **common)
        assert server.engine.prompts[-1] == by_id
        referred: Any = [{"role": "user", "content": "Both?"}]
        referred += [{"type": "item_reference", "id": i.id} for i in first.output]
        ask(server, False, input=[*referred, *results], **common)
        assert server.engine.prompts[-1] == by_id
        tools = [
            {"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("wx", "say")
        ]
        made = [{"id": i, "function": {"name": n, "arguments": a}} for i, (n, a) in zip(ids, CALLS)]
        same: Any = [
            {"role": "system", "content": "S", "tools": tools},
            {"role": "user", "content": "Both?"},
            {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": made},
            {"role": "tool", "tool_call_id": ids[0], "content": "one"},
            {"role": "tool", "tool_call_id": ids[1], "content": "two"},
            {"role": "system", "content": "Now."},
        ]
        told = render(same, thinking=True, effort="low", tool_text=TOKENIZER.tool_text)
        assert by_id == TOKENIZER.encode_segments(told)


def test_a_request_as_agents_make_it(server: Served) -> None:
    """With all that asks for nothing here."""
    said = [{"type": "input_text", "text": "Rules."}]
    asked = [{"type": "input_text", "text": "Go."}]
    body = {
        "model": "some-model", "instructions": "You are one.", "stream": True, "store": False, "tool_choice": "auto",
        "input": [{"type": "message", "role": "developer", "content": said},
                  {"type": "message", "role": "user", "content": asked}],
        "tools": [{"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": {
            "type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}}}],
        "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "c", "text": {"verbosity": "low"},
        "service_tier": "auto", "client_metadata": {"a": "b"},
    }  # fmt: skip
    response = server.post(PATH, body)
    assert response.status_code == 200 and "event: response.completed" in response.text
    told = TOKENIZER.decode(server.engine.prompts[-1])
    assert told.startswith(f"{BEGIN}<｜System｜>Reasoning Effort: 62 (") and "You are one.\n\n## Tools" in told
    assert told.endswith(f"<｜System｜>Rules.{USER}Go.{ASSISTANT}<think>")


def test_what_is_stored(server: Served) -> None:
    client = server.client()
    first = ask(server, False, input="One")
    second = ask(server, False, input=[{"role": "user", "content": "Two"}], previous_response_id=first.id)
    spelled = f"{BEGIN}{USER}One{ASSISTANT}</think>{TEXT}{END}{USER}Two{ASSISTANT}</think>"
    assert server.engine.prompts[-1] == ids_of(spelled)
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    pages = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [i.content[0].text for i in pages] == ["One", TEXT, "Two"]  # its iterator asks for the next page
    newest = next(iter(client.responses.input_items.list(second.id)))
    assert (newest.role, newest.content[0].text) == ("user", "Two")
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as e:
        ask(server, False, input="Three", previous_response_id=second.id)
    assert e.value.code == "previous_response_not_found" and first.id in e.value.message
    forgotten = ask(server, True, store=False)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as e:
            call(forgotten.id)
        assert forgotten.id in e.value.message
    for query in ("order=up", "limit=0", "limit=x", "after=nothing"):
        check(server.get(f"{PATH}/{ask(server, False).id}/input_items?{query}"), 400, query.partition("=")[0])


def kept(name: str, size: int = 0, previous: str | None = None) -> Kept:
    return Kept.of({"id": name, "output": []}, [{"id": f"item-{name}", "text": "x" * size}], previous)


def test_the_store_is_bounded() -> None:
    store = ResponseStore(most=3, most_bytes=10_000)
    for name, previous in (("a", None), ("b", "a"), ("c", None)):
        store.put(kept(name, previous=previous))
    assert [i["id"] for i in store.before("b")[0]] == ["item-a", "item-b"]  # all of it was used just now
    assert store.before("b")[1] == store.get("a").size + store.get("b").size
    store.put(kept("d"))
    assert [i["id"] for i in store.before("b")[0]] == ["item-a", "item-b"]
    with pytest.raises(HttpError):
        store.get("c")
    store.put(kept("e", 9_940))
    for name in ("a", "b", "d"):
        with pytest.raises(HttpError):
            store.get(name)
    store.put(kept("f", 20_000))  # larger than all there is room for: what is there stays
    assert store.get("e").id == "e" and store.item("item-e") and store.item("item-f") is None
    with pytest.raises(HttpError):
        store.get("f")
    store.delete("e")
    store.put(kept("g", 9_940))
    assert store.get("g").id == "g"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 7}, "input"),
    ({"input": ""}, "input[0].content"),
    ({"input": [7]}, "input[0]"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 7}]}]}, "input[0].content[0].text"),
    ({"instructions": "S", "input": [{"role": "user", "content": ""}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": "x", "id": 7}]}, "input[0].id"),
    ({"input": [{"type": "reasoning", "content": [{"type": "text"}]}]}, "input[0].content[0]"),
    ({"instructions": 7}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "9"}, "max_output_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"stream": "yes"}, "stream"),
    ({"store": "yes"}, "store"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"metadata": {"a": 7}}, "metadata.a"),
    ({"user": 7}, "user"),
    ({"include": "x"}, "include"),
    ({"include": [7]}, "include"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"reasoning": "high"}, "reasoning"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"text": "x"}, "text"),
    ({"text": {"format": 7}}, "text.format"),
    ({"tools": [7]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 7}]}, "tools[0].parameters"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f"}]}]},
     "tools[0].tools[0].type"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"previous_response_id": 7}, "previous_response_id"),
]  # fmt: skip
UNSUPPORTED = ("input[0].content[0]", "background", "truncation", "conversation", "prompt", "tools[0].type",
               "tools[0].tools[0].type")  # fmt: skip


def test_wrong_fields_by_name(server: Served) -> None:
    before = len(server.engine.prompts)
    for fields, param in WRONG:
        response = server.post(PATH, {"input": "hi"} | fields)
        body = response.json()
        assert response.status_code == 400 and body["error"]["param"] == param, (fields, body)
        assert body["error"]["code"] in (None, "unsupported_parameter") and param in body["error"]["message"], body
        assert (body["error"]["code"] is not None) <= (param in UNSUPPORTED), body
    for name, value in (("input", [{"role": "user", "content": "x"}]), ("tools", []), ("text", {})):
        body = json.dumps({"input": "x", name: value}).encode()
        inner = b'{"type": "function", "name": "f", "x": ' + b"[" * 600 + b"]" * 600 + b"}"
        holes = {"input": (b'"x"}]', b'"x"}, ' + inner + b"]"), "tools": (b"[]", b"[" + inner + b"]"),
                 "text": (b"{}", inner)}  # fmt: skip
        check(server.post(PATH, body.replace(*holes[name])), 400, name)
    check(server.post(PATH, {"input": "x" * 2100}), 400, "input", "context_length_exceeded")
    missing = {"input": "x", "previous_response_id": "resp_none"}
    check(server.post(PATH, missing), 404, "previous_response_id", "previous_response_not_found")
    assert len(server.engine.prompts) == before
    nulls = dict.fromkeys(
        ("instructions", "metadata", "tools", "tool_choice", "reasoning", "text", "include", "store")
    )
    assert server.post(PATH, {"input": "hi", "shoe_size": 44, **nulls}).status_code == 200


def test_a_failure_in_the_middle() -> None:
    def fail(i: int) -> None:
        if i == 3:
            raise ValueError("broken")

    with serve(StandIn(ids_of(TEXT), before_token=fail)) as server:
        events = list(server.client().responses.create(model="any", input="x", stream=True))
        assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
        assert "internal error" in events[-1].response.error.message
        with pytest.raises(openai.InternalServerError):
            ask(server, False)
        with pytest.raises(openai.NotFoundError):
            server.client().responses.retrieve(events[-1].response.id)
