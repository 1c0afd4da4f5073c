"""Tokens, text and prompts without an answer: exact, and what is written stays text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ds4.model.tokenizer import USER
from tests.model.vocabulary import real
from tests.server.standin import BOS, TOKENIZER, Served, StandIn, StandInConfig, ids_of, serve
from tests.server.test_errors import check
from tests.server.test_tools import TOOLS
from tests.server.test_utf8 import ALL

TEMPLATE = "/apply-template"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve(StandIn(ids_of("ok"), config=StandInConfig(900))) as served:
        yield served


def test_tokenize_and_back(server: Served) -> None:
    for text in (ALL, "", f"a{USER}b", "</think>"):
        ids = server.post("/tokenize", {"content": text}).json()["tokens"]
        assert ids == TOKENIZER.encode(text) and not any(TOKENIZER.is_added(i) for i in ids)
        assert server.post("/detokenize", {"tokens": ids}).json() == {"content": text}
    special = {"content": f"a{USER}b", "add_special": True, "parse_special": True}
    assert server.post("/tokenize", special).json()["tokens"] == [BOS, *ids_of(f"a{USER}b")]
    plain = server.post("/tokenize", special | {"parse_special": None}).json()["tokens"]
    assert plain == [BOS, *TOKENIZER.encode(f"a{USER}b")]


def test_pieces() -> None:
    """Text where a token is text, else its bytes."""
    with serve(StandIn(ids_of("ok"), tokenizer=real())) as server:
        told = server.post("/tokenize", {"content": ALL, "with_pieces": True}).json()["tokens"]
        assert [t["id"] for t in told] == real().encode(ALL)
        pieces = [t["piece"] for t in told]
        assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces).decode() == ALL
        assert {type(p) for p in pieces} == {str, list}


def test_the_prompt_of_a_chat(server: Served) -> None:
    """The one that the chat would get; its ids tell what its text cannot."""
    messages: Any = [{"role": "developer", "content": "S"}, {"role": "user", "content": f"a{USER}b"}]
    for more in (
        {},
        {"thinking": True, "reasoning_effort": 30},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
    ):
        body = {"messages": messages, **more}
        told = server.post(TEMPLATE, {**body, "tokens": True}).json()
        assert server.post(TEMPLATE, body).json() == {"prompt": told["prompt"]}
        before = len(server.engine.prompts)
        assert server.post("/v1/chat/completions", body).status_code == 200
        assert server.engine.prompts[before:] == [told["tokens"]]
        assert TOKENIZER.decode(told["tokens"]) == told["prompt"]
        assert ids_of(told["prompt"]) != told["tokens"]  # somebody wrote a control token's name


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": None}, "content"),
        ("/tokenize", {"content": ["x"]}, "content"),
        ("/tokenize", {"content": "\ud800"}, "content"),
        ("/tokenize", {"content": "x", "add_special": 1}, "add_special"),
        ("/tokenize", {"content": "x", "parse_special": "no"}, "parse_special"),
        ("/tokenize", {"content": "x", "with_pieces": 0}, "with_pieces"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        (TEMPLATE, {}, "messages"),
        (TEMPLATE, {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        (TEMPLATE, {"messages": [{"role": "user", "content": "x"}], "tokens": 1}, "tokens"),
    ],
)
def test_wrong_fields_by_name(server: Served, path: str, body: dict[str, Any], param: str) -> None:
    check(server.post(path, body), 400, param)


def test_they_need_the_key_and_a_model() -> None:
    def load(progress: Any) -> Any:
        progress(1, 2)
        raise ValueError("no such file")

    with serve(StandIn(ids_of("ok")), api_key="k-of-a-test") as locked:
        for path in ("/tokenize", "/detokenize", TEMPLATE, "/v1/messages/count_tokens"):
            assert locked.post(path, {}).status_code == 401
    with serve(StandIn(ids_of("ok")), open_engine=load) as broken:
        for path in ("/tokenize", "/detokenize", TEMPLATE, "/v1/messages/count_tokens"):
            assert broken.post(path, {"content": "x"}).status_code == 503
