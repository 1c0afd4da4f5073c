"""Characters come whole in every API, streamed and not: whatever the tokens cut, in reasoning, text and calls."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ds4.model.tokenizer import Special, Tokenizer
from ds4.model.tools import render_calls
from ds4.server.outbox import Outbox
from tests.model.vocabulary import real
from tests.server.standin import TOKENIZER, Served, StandIn, StandInConfig, serve

TEXTS = {
    "emoji sequences": "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd 1\ufe0f\u20e3 "
    "\U0001f1ee\U0001f1f9 \U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f "
    "\u2764\ufe0f\u200d\U0001f525",
    "combining marks": "e\u0301\u0323 Z\u0351\u036b\u0343\u036a\u0302\u036b "
    "\u0915\u094d\u0937\u093f \u1112\u1161\u11ab \u05e9\u05c1\u05b8",
    "CJK extension B": "\U00020000\U0002a6d6 \U00020bb7\u91ce\u5bb6 \U0002a6b2\u3007",
    "a literal U+FFFD": "a\ufffd\ufffdb \ufffd",
    "ends of planes": "\u007f\u0080\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff",
}
ALL = " | ".join(TEXTS.values())
PATHS = {
    "chat": "/v1/chat/completions", "completions": "/v1/completions", "messages": "/v1/messages",
    "responses": "/v1/responses",
}  # fmt: skip
ASKED = {
    "chat": {"messages": [{"role": "user", "content": ALL}]},
    "completions": {"prompt": ALL, "max_tokens": 9000},
    "messages": {"messages": [{"role": "user", "content": ALL}], "max_tokens": 9000},
    "responses": {"input": ALL},
}
ON: dict[str, dict[str, Any]] = {
    "chat": {"thinking": True}, "messages": {"thinking": {"type": "enabled"}},
    "responses": {"reasoning": {"effort": "high"}},
}  # fmt: skip
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": {"name": "f"}}], "messages": [{"name": "f"}],
    "responses": [{"type": "function", "name": "f"}],
}  # fmt: skip
Parts = dict[str, list[str]]


def of_chat(o: Any, parts: Parts) -> None:
    for choice in o["choices"]:
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        parts["content"].append(said.get("content") or "")
        parts["reasoning"].append(said.get("reasoning_content") or "")
        parts["calls"] += [c["function"]["arguments"] for c in said.get("tool_calls") or []]


def of_messages(o: Any, parts: Parts) -> None:
    blocks = o["content"] if o["type"] == "message" else [o["delta"]] if o["type"] == "content_block_delta" else []
    for b in blocks:
        parts["content"].append(b.get("text", ""))
        parts["reasoning"].append(b.get("thinking", ""))
        parts["calls"].append(b.get("partial_json", json.dumps(b["input"]) if "input" in b else ""))


def of_responses(o: Any, parts: Parts) -> None:
    channels = {
        "response.output_text.delta": "content", "response.reasoning_text.delta": "reasoning",
        "response.function_call_arguments.delta": "calls",
    }  # fmt: skip
    if o.get("object") != "response":
        if o["type"] in channels:
            parts[channels[o["type"]]].append(o["delta"])
        return
    for item in o["output"]:
        if item["type"] == "function_call":
            parts["calls"].append(item["arguments"])
        else:
            channel = "reasoning" if item["type"] == "reasoning" else "content"
            parts[channel] += [p["text"] for p in item["content"]]


READ = {"chat": of_chat, "completions": of_chat, "messages": of_messages, "responses": of_responses}


def parts_of(api: str, response: httpx.Response, stream: bool) -> Parts:
    """The texts of an answer, by channel. Its bytes are UTF-8, and so is every text by itself."""
    assert response.status_code == 200, response.text
    parts: Parts = {"content": [], "reasoning": [], "calls": []}
    body = response.content.decode("utf-8", "strict")
    if not stream:
        READ[api](json.loads(body), parts)
    for line in body.split("\n") if stream else []:
        if line.startswith("data: ") and line != "data: [DONE]":
            READ[api](json.loads(line[6:]), parts)
    for texts in parts.values():
        for text in texts:
            text.encode("utf-8", "strict")  # no half of a pair
    return parts


def ask(server: Served, api: str, stream: bool, more: dict[str, Any]) -> Parts:
    return parts_of(api, server.post(PATHS[api], {**ASKED[api], "stream": stream, **more}), stream)


def served_by(tokenizer: Tokenizer, script: list[int]) -> StandIn:
    return StandIn(script, config=StandInConfig(20_000), tokenizer=tokenizer)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, real()], ids=["bytes", "pieces"])
def test_every_delta_is_text_and_all_of_them_the_answer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token's own delta, as a reader gets it that keeps up with the model."""
    monkeypatch.setattr(Outbox, "_add", lambda outbox, event: outbox._events.append(event))
    with serve(served_by(tokenizer, tokenizer.encode(ALL))) as server:
        for api in PATHS:
            for stream in (True, False):
                parts = ask(server, api, stream, {})
                assert "".join(parts["content"]) == ALL and not any(parts["reasoning"] + parts["calls"])
                assert ALL in tokenizer.decode(server.engine.prompts[-1])  # what was asked came whole too
                assert not stream or sum(map(bool, parts["content"])) > len(ALL) // 2
    markup = render_calls([{"name": "f", "arguments": {"x": ALL}}])
    script = tokenizer.encode_segments([ALL, Special("</think>"), ALL, "\n\n", *markup])
    with serve(served_by(tokenizer, script)) as server:
        for api, on in ON.items():
            for stream in (True, False):
                parts = ask(server, api, stream, {**on, "tools": TOOLS[api]})
                assert "".join(parts["reasoning"]) == ALL and "".join(parts["content"]) == ALL
                assert json.loads("".join(parts["calls"])) == {"x": ALL}


@pytest.mark.parametrize("api", [*PATHS])
def test_bytes_that_are_no_text(api: str) -> None:
    """What the model wrote and nobody could read comes as U+FFFD, once for each bad beginning, also at the end."""
    first = TOKENIZER.encode("a")[0] - ord("a")  # the token of byte 0
    script = [first + b for b in b"a\xf0\x9f\x98b\xffc\xe4\xb8"]
    with serve(served_by(TOKENIZER, script)) as server:
        for stream in (True, False):
            assert "".join(ask(server, api, stream, {})["content"]) == "a\ufffdb\ufffdc\ufffd"
