"""How far a prompt is read, and what of it was not run again: told by every API in its own words."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from ds4.engine import Sampling
from ds4.server.answer import Answer, Writer
from ds4.server.fields import Fields
from ds4.server.job import Job
from ds4.server.messages_answer import MessagesAnswer
from ds4.server.outbox import Finished, Outbox, Reading, Started
from ds4.server.request import Generation, Limits
from ds4.server.respond import EventStream, Log
from ds4.server.responses import ask_response
from ds4.server.responses_answer import ResponsesAnswer
from ds4.server.responses_store import ResponseStore
from ds4.server.worker import Worker
from tests.server.standin import TOKENIZER, StandIn, events, ids_of, serve
from tests.server.test_utf8 import PATHS

LONG = "x" * 300
ASKED: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": LONG}]}, "completions": {"prompt": LONG},
    "messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9}, "responses": {"input": LONG},
}  # fmt: skip


def test_a_stream_that_asks_hears_of_every_chunk() -> None:
    """It opens at once, and ends as any other."""
    with serve(StandIn(ids_of("ok"), before_chunk=lambda i: time.sleep(0.02))) as server:
        for api in ("chat", "completions"):
            chunks = events(server.post(PATHS[api], {**ASKED[api], "stream": True, "return_progress": True}))
            told = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
            n = len(server.engine.prompts[-1])
            assert len(told) >= 3 and {t["total"] for t in told} == {n} and {t["cache"] for t in told} == {0}
            assert [t["processed"] for t in told] == sorted(t["processed"] for t in told)
            assert told[-1]["processed"] <= n and 0 < told[0]["time_ms"] <= told[-1]["time_ms"]
            assert all(not c["choices"] for c in chunks if "prompt_progress" in c)
            plain = server.post(PATHS[api], {**ASKED[api], "stream": True})
            assert ": read" not in plain.text and "prompt_progress" not in plain.text
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        (plain,) = [server.post(PATHS["chat"], {**ASKED["chat"], "return_progress": True}).json()]
        assert plain["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("api", [*PATHS])
def test_a_stream_that_waits_long_hears_in_comments(api: str) -> None:
    """Which no client of it takes for events."""
    limits = Limits(ping_s=0.05)
    with serve(StandIn(ids_of("ok"), before_chunk=lambda i: time.sleep(0.04)), limits=limits) as server:
        text = server.post(PATHS[api], {**ASKED[api], "stream": True}).text
        n = len(server.engine.prompts[-1])
        comments = [line for line in text.split("\n\n") if line.startswith(": read ")]
        assert comments and all(c.endswith(f" of {n} tokens") for c in comments)
        assert text.index(comments[-1]) < text.index("data: ")


def generation() -> Generation:
    return Generation([1] * 10, Sampling(), 5)


def writers() -> dict[str, Writer]:
    plain = generation()
    store = ResponseStore()
    asked = ask_response(Fields({"input": "x"}), StandIn(), Limits(), store)
    asked = replace(asked, asked=replace(asked.asked, generation=plain))
    return {
        "chat": Answer(True, "m", replace(plain, include_usage=True), TOKENIZER),
        "completions": Answer(False, "m", replace(plain, include_usage=True), TOKENIZER),
        "messages": MessagesAnswer("m", plain),
        "responses": ResponsesAnswer("m", asked, TOKENIZER, store),
    }


USAGE: dict[str, Any] = {
    "messages": {"input_tokens": 3, "cache_read_input_tokens": 7, "output_tokens": 4},
    "responses": {"input_tokens": 10, "output_tokens": 4, "total_tokens": 14,
                  "input_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 0}},
    "chat": {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 7}},
}  # fmt: skip


@pytest.mark.parametrize("api", [*PATHS])
def test_cached_tokens(api: str) -> None:
    end = Finished("stop", 4, 1, {}, cached=7)
    wanted = USAGE.get(api, USAGE["chat"])
    usage: Any = writers()[api].whole([], end)["usage"]
    assert usage | wanted == usage
    writer = writers()[api]
    writer.reading(Reading(8, 10, 7))
    stream = (writer.opening() + writer.closing(end)).decode()
    told = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: {")]
    of_end: Any = next(t for t in reversed(told) if t.get("usage") or (t.get("response") or {}).get("usage"))
    usage = of_end.get("usage") or of_end["response"]["usage"]
    assert usage | wanted == usage
    if api == "messages":
        begun: Any = told[0]["message"]["usage"]
        assert (begun["input_tokens"], begun["cache_read_input_tokens"]) == (3, 7)


def test_what_is_cached_is_told_at_the_beginning() -> None:
    """Of a stream that opened with its first token, too: nothing of what came before was written, all was heard."""

    async def sent() -> str:
        job = Job(generation(), Outbox(1000))
        for event in (Reading(10, 10, 7), Started(), Finished("stop", 0, 0, {}, cached=7)):
            assert job.outbox.put(event)
        out: list[bytes] = []

        async def send(message: Any) -> None:
            out.append(message.get("body", b""))

        worker = Worker(lambda progress: StandIn(), 1)
        line = Log("/v1/messages", job, None)
        stream = EventStream(job, writers()["messages"], worker, 30.0, line)
        await stream({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
        return b"".join(out).decode()

    text = asyncio.run(sent())
    assert text.startswith("event: message_start\n") and ": read" not in text
    assert '"cache_read_input_tokens":7' in text.partition("\n\n")[0]
