"""Bad input gets one clear error in one shape, and reaches no device."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4.errors import CapacityError, DeviceError, RequestError
from ds4.server.errors import status_of
from ds4.server.fields import Fields
from ds4.server.openai import read_chat, read_completion
from ds4.server.request import Limits
from tests.server.standin import TOKENIZER, Served, StandIn, StandInConfig, events, ids_of, serve, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMITS = Limits(body_bytes=20_000)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve(StandIn(ids_of("ok"), config=StandInConfig(500)), limits=LIMITS) as served:
        yield served
        assert served.engine.prompts == [], "a refused request reached the device"


def check(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert error["message"] and (error["param"], error["code"]) == (param, code)
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return str(error["message"])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff{}",
        b'{"n": NaN}',
        b"[" * 9999,
        b'{"n": ' + b"9" * 9999 + b"}",
        b'{"x": [1e999]}',
    ],
)
def test_a_body_that_is_no_json_object(server: Served, body: bytes) -> None:
    check(server.post(CHAT, body), 400, None, "invalid_json")


CHAT_WRONG: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [7]}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages"),
    ({"messages": [*HI, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]}, "messages[0].content"),
    ({"messages": [{"role": "system"}, *HI]}, "messages[0].content"),
    ({"messages": [{"role": "system", "content": ""}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "messages"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e999}, None),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": "x"}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens"),
    ({"n": "1"}, "n"),
    ({"n": 0}, "n"),
    ({"model": 7}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": 7}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stop": 7}, "stop"),
    ({"stop": ["a", 7]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"reasoning_effort": "somewhat"}, "reasoning_effort"),
    ({"reasoning_effort": 0}, "reasoning_effort"),
    ({"reasoning_effort": True}, "reasoning_effort"),
    ({"thinking": "yes"}, "thinking"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"reasoning_effort": "somewhat"}}, "reasoning_effort"),
    ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, "thinking"),
    ({"chat_template_kwargs": {"thinking": True}, "thinking": {"type": "disabled"}}, "thinking"),
    ({"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": "yes"}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
]
PENALTIES_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": "1"}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": True}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": [1]}, "repetition_penalty"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {str(TOKENIZER.vocab_size): 1}}, "logit_bias"),
    ({"logit_bias": {str(TOKENIZER.vocab_size): 0}}, "logit_bias"),
    *(
        ({"logit_bias": {name: 1}}, "logit_bias")
        for name in ("", "the", "-1", "05", "1.0", " 5", "\u0665", "9" * 5000)
    ),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_WRONG)
def test_wrong_chat_fields_are_named(server: Served, fields: dict[str, Any], param: str | None) -> None:
    response = server.post(CHAT, {"messages": HI} | fields)
    if param is None:  # json.dumps writes Infinity, which is no JSON
        check(response, 400, None, "invalid_json")
    else:
        check(response, 400, param)


@pytest.mark.parametrize(("fields", "param"), PENALTIES_WRONG)
def test_wrong_penalties_are_named_by_both(server: Served, fields: dict[str, Any], param: str) -> None:
    for path, prompt in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hi"})):
        said = check(server.post(path, prompt | fields), 400, param)
        assert said.startswith("logit_bias" if param.startswith("logit_bias") else f"{param} ") and len(said) < 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_what_is_not_supported_says_so(server: Served, fields: dict[str, Any], param: str) -> None:
    """By both APIs, in a sentence that begins with the field's name."""
    for path, prompt in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hi"})):
        said = check(server.post(path, prompt | fields), 400, param, "unsupported_parameter")
        assert said.startswith(param + " ") and said.split().count(param) == 1


def test_what_one_of_the_two_does_not_support(server: Served) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    check(server.post(CHAT, {"messages": [image]}), 400, "messages", "unsupported_parameter")
    unknown = server.chat(chat_template_kwargs={"custom": 1})
    check(unknown, 400, "chat_template_kwargs.custom", "unsupported_parameter")
    refused = {
        "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required",
        "best_of": 2, "echo": True, "suffix": "x", "thinking": True, "reasoning_effort": "high", "top_logprobs": 2,
        "chat_template_kwargs": {"thinking": True},
    }  # fmt: skip
    for name, value in refused.items():
        check(server.post(COMPLETIONS, {"prompt": "hi", name: value}), 400, name, "unsupported_parameter")
    for logprobs in (True, "3", 1.5, -1, 21):
        check(server.post(COMPLETIONS, {"prompt": "hi", "logprobs": logprobs}), 400, "logprobs")


def test_an_answer_may_be_asked_for_by_either_name() -> None:
    engine = StandIn(config=StandInConfig(500))
    for read, prompt in ((read_chat, {"messages": HI}), (read_completion, {"prompt": "hi"})):
        for asked in ({"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}):
            assert read(Fields({**prompt, **asked}), engine, LIMITS).max_tokens == 7


def test_an_assistant_message_may_have_no_content() -> None:
    engine = StandIn(config=StandInConfig(500))
    for content in ({}, {"content": None}, {"content": ""}):
        messages = [*HI, {"role": "assistant", **content}, *HI]
        assert read_chat(Fields({"messages": messages}), engine, LIMITS).prompt_ids


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [""], ["a", "b"], [[1], [2]], [1, "a"], [1.5], [True], [-1], [10**9], 7, "\udfff"]
)
def test_wrong_prompts(server: Served, prompt: object) -> None:
    check(server.post(COMPLETIONS, {"prompt": prompt}), 400, "prompt")


def test_over_the_context(server: Served) -> None:
    """Both numbers, for a prompt and for what is asked beside it."""
    said = check(server.chat("x" * 496), 400, "messages", "context_length_exceeded")
    assert "500" in said and str(496 + 4) in said
    said = check(server.post(COMPLETIONS, {"prompt": [5] * 500}), 400, "prompt", "context_length_exceeded")
    assert said.count("500") == 2
    said = check(server.chat(max_tokens=501), 400, "max_tokens", "context_length_exceeded")
    assert "500" in said and "501" in said


def test_what_is_asked_for_is_cut_to_the_room() -> None:
    engine = StandIn(config=StandInConfig(500))
    for asked, most in ((100, 10), (10, 10), (9, 9), (None, 10)):
        assert read_completion(Fields({"prompt": [5] * 490, "max_tokens": asked}), engine, LIMITS).max_tokens == most


def test_paths_and_methods(server: Served) -> None:
    check(server.get("/nowhere"), 404, None, "not_found")
    check(server.get("/v1/chat/completions/"), 404, None, "not_found")
    response = server.get(CHAT)
    check(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    check(httpx.delete(server.url + "/v1/models"), 405, None, "method_not_allowed")


def test_large_bodies(server: Served) -> None:
    check(server.post(CHAT, b" " * 20_001), 413, None, "request_too_large")
    chunks = (b"x" * 5_000 for _ in range(6))
    check(httpx.post(server.url + CHAT, content=chunks), 413, None, "request_too_large")
    sock = socket.create_connection(("127.0.0.1", server.port), 30)
    sock.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n".encode()
    )
    assert sock.recv(100).startswith(b"HTTP/1.1 413 ")  # before a byte of it was sent
    sock.close()


@pytest.mark.parametrize("length", ["20001", "99999999999", "9" * 19])
def test_a_length_that_is_too_large_is_answered_before_the_body(length: str) -> None:
    """The whole answer, while the server would wait for ever for a byte of the body."""
    with (
        serve(StandIn(), limits=Limits(body_bytes=20_000, body_s=3600)) as server,
        socket.create_connection(("127.0.0.1", server.port), 30) as sock,
    ):
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode())
        answer = b""
        while b"request_too_large" not in answer:
            piece = sock.recv(4096)
            assert piece, answer
            answer += piece
        assert answer.startswith(b"HTTP/1.1 413 ") and b"transfer-encoding" not in answer.lower()


def test_a_sender_of_a_body_that_is_too_large_gets_its_answer() -> None:
    """More than the sockets' buffers hold: a connection closed before it was read would be reset."""
    with serve(StandIn(), limits=Limits(body_bytes=4 << 20)) as server:
        with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
            size = 24 << 20
            sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode() + bytes(size))
            answer = b""
            while piece := sock.recv(4096):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in answer
        assert answer.lower().count(b"connection: close") == 1
        assert server.chat().status_code == 200


def test_a_body_that_never_comes() -> None:
    with serve(StandIn(), limits=Limits(body_s=0.05)) as server:
        sock = socket.create_connection(("127.0.0.1", server.port), 30)
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
        answer = b""
        while piece := sock.recv(4096):
            answer += piece
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"timeout"' in answer
        sock.close()


def test_what_is_no_http(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ds4.server")
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        peer = sock.getsockname()[1]
        sock.sendall(b"hello\r\n\r\n")
        answer = b""
        while piece := sock.recv(4096):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"invalid_http" in body
    assert f"127.0.0.1:{peer}" in caplog.text


def test_a_request_that_never_begins() -> None:
    with serve(StandIn(), limits=Limits(body_s=0.05)) as server:
        for first in (b"", b"GET /hea"):
            with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
                sock.sendall(first)
                assert sock.recv(100) == b""


def test_null_is_the_default_and_unknown_fields_are_ignored() -> None:
    with serve(StandIn(ids_of("ok"))) as server:
        names = [
            "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens", "n", "stop",
            "stream", "stream_options", "logprobs", "top_logprobs", "tools", "response_format", "logit_bias",
            "presence_penalty", "frequency_penalty", "repetition_penalty", "model", "reasoning_effort", "thinking",
            "chat_template_kwargs", "user", "metadata",
        ]  # fmt: skip
        response = server.chat(
            "hi", **dict.fromkeys(names), some_new_field={"a": [1]}, store=True, tool_choice="auto"
        )
        assert response.json()["choices"][0]["message"]["content"] == "ok"
        same = server.chat(
            n=1, stop=[], logit_bias={}, tools=[], logprobs=False, presence_penalty=0.0, top_k=-1, top_logprobs=0,
            chat_template_kwargs={"custom": None},
        )  # fmt: skip
        assert same.status_code == 200
        nothing = {"best_of": 1, "echo": False, "suffix": "", "thinking": {"type": "disabled"}, "tools": [],
                   "reasoning_effort": "none", "response_format": {"type": "text"}, "top_logprobs": 0,
                   "logprobs": False, "chat_template_kwargs": {}}  # fmt: skip
        assert server.post(COMPLETIONS, {"prompt": "x", **nothing}).status_code == 200


def test_failures_of_the_device() -> None:
    """Before the first token: the error's status. After it: an error event. The next request is served."""
    at: dict[str, int] = {"chunk": 0, "token": -1}

    def fail_in_prefill(i: int) -> None:
        if i == at["chunk"]:
            raise DeviceError("the device caught fire")

    def fail_in_decode(i: int) -> None:
        if i == at["token"]:
            raise ZeroDivisionError("secret")

    engine = StandIn(ids_of("hello"), before_chunk=fail_in_prefill, before_token=fail_in_decode)
    with serve(engine) as server:
        for stream in (True, False):
            assert "fire" in check(server.chat(stream=stream), 500, None, "internal_error")
        until(lambda: len(engine.sessions) == 0)
        assert server.get("/health").status_code == 200
        server.chat()
        unwell = server.get("/health")
        assert unwell.status_code == 503 and unwell.json()["status"] == "failing"
        at["chunk"], at["token"] = -1, 3
        chunks = events(server.chat(stream=True))
        assert chunks[-1]["error"]["code"] == "internal_error"
        assert "secret" not in json.dumps(chunks)  # not ours to tell
        check(server.chat(), 500, None, "internal_error")
        at["token"] = -1
        assert server.chat().json()["choices"][0]["message"]["content"] == "hello"
        assert server.get("/health").status_code == 200


def test_statuses() -> None:
    assert [status_of(e) for e in (RequestError("x"), CapacityError("x"), DeviceError("x"), KeyError("x"))] == [
        400, 503, 500, 500,
    ]  # fmt: skip


KEYS = (
    "role", "content", "type", "text", "tool_calls", "tool_call_id", "function", "name", "arguments", "id",
    "reasoning_content", "task", "include_usage", "thinking", "5",
)  # fmt: skip
NAMES = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens", "n", "stop", "stream",
    "stream_options", "logprobs", "tools", "response_format", "logit_bias", "model", "reasoning_effort", "thinking",
    "prompt", "messages", "echo", "top_logprobs", "chat_template_kwargs", "presence_penalty", "repetition_penalty",
)  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.sampled_from(["user", "system", "assistant", "tool", "text", "high", "\ud800", "a::b"])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "latest_reminder"]), "content": JSON},
    optional={"tool_calls": st.lists(JSON, max_size=2), "tool_call_id": JSON, "reasoning_content": JSON},
)
FIELDS = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(FIELDS, st.lists(MESSAGE, min_size=1, max_size=3), JSON)
def test_any_json_is_read_or_refused(fields: dict[str, Any], messages: list[Any], prompt: Any) -> None:
    """No other exception than a RequestError, and what is accepted fits the context."""
    engine = StandIn(config=StandInConfig(500))
    for read, body in ((read_chat, {"messages": messages} | fields), (read_completion, {"prompt": prompt} | fields)):
        try:
            g = read(Fields(body), engine, LIMITS)
        except RequestError as e:
            assert str(e)
            continue
        assert g.prompt_ids and g.max_tokens >= 1 and len(g.prompt_ids) + g.max_tokens <= 500


def test_a_prompt_that_is_far_too_long_is_not_counted_to_its_end() -> None:
    """Its error has both numbers, the second one as a bound; others are answered meanwhile."""
    with serve(StandIn(ids_of("ok"), config=StandInConfig(500))) as server:
        refused = server.chat("some words, " * 250_000)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        told = refused.json()["error"]["message"]
        assert "500" in told and "more than 1000" in told
        assert "1000" not in server.chat("some words, " * 60).json()["error"]["message"]
        long = server.post("/v1/completions", {"prompt": "some words, " * 250_000})
        assert "more than 1000" in long.json()["error"]["message"]
