"""What a body may not hold anywhere: halves of characters, and numbers that nobody can write again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ds4.errors import RequestError
from ds4.server.fields import parse_object
from tests.server.standin import Served, StandIn, StandInConfig, ids_of, serve
from tests.server.test_errors import CHAT, COMPLETIONS, HI, check

HALF = "a\udfff"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve(StandIn(ids_of("ok"), config=StandInConfig(500))) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "fields", "place", "param"),
    [
        ("/v1/responses", {"input": "hi", "metadata": {"k": HALF}}, "metadata.k holds", "metadata"),
        ("/v1/responses", {"input": "hi", "metadata": {HALF: "v"}}, "metadata has a name with", "metadata"),
        (CHAT, {"messages": HI, "model": HALF}, "model holds", "model"),
        (CHAT, {"messages": HI, "stop": ["x", HALF]}, "stop[1] holds", "stop"),
        (CHAT, {"messages": [*HI, {"role": "tool", "tool_call_id": HALF, "content": ""}]},
         "messages[1].tool_call_id holds", "messages"),
        (CHAT, {"messages": HI, HALF: 1}, "the body has a name with", None),
        (COMPLETIONS, {"prompt": HALF}, "prompt holds", "prompt"),
        ("/v1/messages", {"messages": HI, "max_tokens": 1, "metadata": {"user_id": HALF}}, "metadata.user_id holds",
         "metadata"),
        ("/tokenize", {"content": HALF}, "content holds", "content"),
    ],
)  # fmt: skip
def test_half_a_character_is_refused_wherever_it_stands(
    server: Served, path: str, fields: dict[str, Any], place: str, param: str | None
) -> None:
    answer = server.post(path, fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"] == f"{place} a lone surrogate, U+DFFF, which no text has"
    assert not server.engine.prompts


def test_whole_characters_and_escapes_of_escapes_are_text() -> None:
    told = {"metadata": {"\U0001f600": "\U0001f600 \\ud800"}}
    assert b"\\ud83d\\ude00" in json.dumps(told).encode()
    assert parse_object(json.dumps(told).encode()).raw == told


def test_a_number_of_many_digits_gets_our_own_words(server: Served) -> None:
    said = check(server.post(CHAT, b'{"n": ' + b"9" * 10_000 + b"}"), 400, None, "invalid_json")
    assert said == f"the body is not valid JSON: {'9' * 40} is too large a number"
    assert parse_object(b'{"n": -%d}' % 10**307).raw == {"n": -(10**307)}
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:  # not Python's limit, but that of what a float can be
        with pytest.raises(RequestError, match="too large a number"):
            parse_object(b'{"n": %d}' % 10**309)
    finally:
        sys.set_int_max_str_digits(before)


def test_an_image_is_refused_in_the_singular(server: Served) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    said = check(
        server.post(CHAT, {"messages": [{"role": "user", "content": [picture]}]}), 400, "messages",
        "unsupported_parameter",
    )  # fmt: skip
    assert said == "messages: an image is not supported by this server"
