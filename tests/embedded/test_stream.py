"""Chinese through the server's streams: characters of several tokens arrive whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ds4.engine import Engine
from ds4.server.request import ServedEngine
from tests.embedded.conftest import judge_ids
from tests.server.standin import Served, StandIn, events, joined, serve

PROMPTS = ("你好！", "你是谁？", "请介绍一下自己。")


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Served]:
    def load(progress: object) -> ServedEngine:
        return engine

    with serve(StandIn(), open_engine=load) as served:
        yield served


def pieces(response: httpx.Response) -> list[str]:
    """What each event carries of the text; the bytes on the wire must be UTF-8 in every event."""
    assert response.status_code == 200, response.text
    found = []
    for event in response.content.split(b"\n\n"):
        if event.startswith(b"data: ") and event != b"data: [DONE]":
            choice = json.loads(event[6:].decode())["choices"][0]
            found.append(choice["text"])
    return found


def is_cut(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return True
    return False


def test_characters_of_several_tokens_arrive_whole(server: Served, engine: Engine) -> None:
    """A continuation of Chinese text: its tokens cut characters, the events do not."""
    prompt = judge_ids(engine.tokenizer, "chinese", 120).tolist()
    cuts = 0
    for settings in ({"temperature": 0}, {"temperature": 0.8, "seed": 0}):
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 48, **settings}
        whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
        streamed = pieces(server.post("/v1/completions", body | {"stream": True}))
        assert "".join(streamed) == whole
        # a replacement character may stand for bytes that never became a character, not for a cut between events
        assert sum(p.count("\ufffd") for p in streamed) == whole.count("\ufffd")
        cuts += sum(is_cut(engine.tokenizer.token_bytes(i)) for i in engine.tokenizer.encode(whole))
    assert cuts > 0, "no character had several tokens: this tested nothing"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_chinese_answers_are_chinese_and_whole(server: Served, prompt: str) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 128}
    whole = server.chat(prompt, **fields).json()["choices"][0]
    assert whole["finish_reason"] == "stop" and "\ufffd" not in whole["message"]["content"]
    assert any("一" <= c <= "鿿" for c in whole["message"]["content"])
    assert joined(events(server.chat(prompt, stream=True, **fields))) == whole["message"]["content"]
