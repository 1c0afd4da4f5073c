"""`/health` of what runs, and what a stream hears while its prompt is read."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from ds4.engine import Engine
from ds4.server.request import Limits
from tests.base.toys import toy_base, toy_dir
from tests.conftest import opened
from tests.server.standin import Served, StandIn, StandInConfig, ids_of, serve, until
from tests.server.test_life import Gate

CHAT = "/v1/chat/completions"
CONFIG = StandInConfig(100_000)


def ask(server: Served, mark: str, text: str, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    return httpx.post(server.url + CHAT, json=body, timeout=30, headers={"x-request-id": mark})


def test_how_far_each_request_is() -> None:
    """By its id: one that answers, one whose prompt is read; gone when they are."""
    tokens, chunks = Gate(3), Gate(-1)
    engine = StandIn(ids_of("abcdefgh"), config=CONFIG, before_token=tokens, before_chunk=chunks)
    with serve(engine, sessions=2) as server, ThreadPoolExecutor() as pool:
        try:
            first = pool.submit(ask, server, "first", "x")
            assert tokens.reached.wait(20)
            chunks.at = 2
            second = pool.submit(ask, server, "second", "y" * 600)
            until(lambda: server.worker.waiting == 1)
            tokens.open.set()
            assert chunks.reached.wait(20)
            told = {r["id"]: r for r in server.get("/health").json()["requests"]}
            assert set(told) == {"first", "second"}
            assert told["first"]["read"] == told["first"]["prompt"] and told["first"]["drawn"] >= 3
            assert 0 < told["second"]["read"] < told["second"]["prompt"] and told["second"]["drawn"] == 0
            assert told["second"]["read"] == 2 * 64 and told["second"]["cached"] == 0
            assert told["first"]["seconds"] >= 0
        finally:
            tokens.open.set()
            chunks.open.set()
        assert first.result().status_code == second.result().status_code == 200
        until(lambda: server.get("/health").json()["requests"] == [])


def test_whose_requests_they_are_is_told_with_the_key_only() -> None:
    with serve(StandIn(ids_of("ab")), api_key="secret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            told = server.get("/health", headers=headers)
            assert told.status_code == 200 and "requests" not in told.json()
        for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            assert server.get("/health", headers=headers).json()["requests"] == []


def test_progress_on_the_real_engine() -> None:
    """Chunk by chunk while it happens; the numbers grow to the prompt's length."""
    engine = Engine.open(
        toy_base("oracle-e", bits=6), engram_dir=toy_dir("oracle-e"), prefill="full", chunk=16,
        device=opened("fast", "greedy"),
    )  # fmt: skip
    body = {"prompt": [5] * 100, "max_tokens": 2, "stream": True}
    with serve(StandIn(), open_engine=lambda progress: engine, limits=Limits(ping_s=0.0001)) as server:
        plain = server.post("/v1/completions", body).text
        comments = [x for x in plain.split("\n\n") if x.startswith(": read ")]
        assert comments and comments == sorted(comments, key=lambda c: int(c.split()[2]))
        assert all(c.endswith("of 100 tokens") for c in comments)
        text = server.post("/v1/completions", {**body, "return_progress": True}).text
        chunks = [json.loads(x[6:]) for x in text.split("\n\n") if x.startswith("data: {")]
        told = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
        assert told and all(p["total"] == 100 and p["cache"] == 0 for p in told)
        done = [p["processed"] for p in told]
        assert (
            done == sorted(done)
            and set(done) <= set(range(0, 100, 16))
            and not any(c["choices"] for c in chunks[: len(told)])
        )


def test_a_long_chunk_is_waited_for_with_pings() -> None:
    """Nothing is read for a while: the stream says that it is alive, and the answer comes whole."""
    over = threading.Event()
    engine = StandIn(ids_of("ab"), config=CONFIG, before_chunk=lambda i: over.wait(20) and None)
    with serve(engine, limits=Limits(ping_s=0.02)) as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, server, "slow", "x" * 200, stream=True)
        until(lambda: server.worker.running == 1)
        time.sleep(0.2)
        over.set()
        text = answer.result().text
        assert text.count(": waiting") >= 3 and text.endswith("data: [DONE]\n\n")
