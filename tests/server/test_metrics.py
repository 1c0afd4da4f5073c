"""`/metrics`: what is counted is what happened, whatever a client does; `/health` when a step does not end."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ds4.engine import Ask, Engine, Sampling
from ds4.errors import DeviceError
from ds4.server.prefixes import Prefixes
from ds4.server.request import Limits
from tests.base.toys import toy_base, toy_dir
from tests.conftest import opened
from tests.server.standin import Served, StandIn, StandInConfig, StandInSession, ids_of, serve, until
from tests.server.test_life import Gate, server_with

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def samples(server: Served) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of their names) -> value, read by the format's own parser."""
    response = server.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=1.0.0")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for s in family.samples:
            found[(s.name, *(s.labels[k] for k in sorted(s.labels)))] = s.value
    return found


def test_requests_tokens_and_seconds() -> None:
    with serve(StandIn(ids_of("four"))) as server:
        prompt = 0
        for i in range(3):
            answer = server.chat(stream=i == 2)
            assert answer.status_code == 200
            if i < 2:
                prompt = answer.json()["usage"]["prompt_tokens"]
        assert server.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 2}).status_code == 200
        found = samples(server)
        assert found["ds4_requests_total", "stop", CHAT] == 3
        assert found["ds4_requests_total", "length", COMPLETIONS] == 1
        assert found["ds4_answer_tokens_total",] == 3 * 5 + 2  # the end of sentence was drawn too
        short = found["ds4_prompt_tokens_total",] - 3 * prompt
        assert short == len(server.engine.prompts[-1])
        for name in ("request_queue_seconds", "request_prefill_seconds", "request_decode_seconds"):
            assert found[f"ds4_{name}_count",] == 4
        assert found["ds4_decode_tokens_per_second_count",] == found["ds4_prefill_tokens_per_second_count",] == 4
        assert found["ds4_device_memory_used_bytes",] == 3 << 20 and found["ds4_device_memory_bytes",] == 8 << 20
        assert found["ds4_ready",] == 1 and found["ds4_lent",] == 0


def test_what_never_became_a_request_is_an_answer_only() -> None:
    """Paths and methods that a client makes up are no labels."""
    with serve(StandIn(ids_of("ok"))) as server:
        assert server.post(CHAT, {"messages": 1}).status_code == 400
        for i in range(3):
            assert server.get(f"/made/up/{i}").status_code == 404
            server.get(f"/v1/models/{i}")
        found = samples(server)
        assert found["ds4_http_responses_total", "POST", CHAT, "400"] == 1
        assert found["ds4_http_responses_total", "GET", "other", "404"] == 3
        assert found["ds4_http_responses_total", "GET", "/v1/models/{name}", "404"] == 3
        assert not [key for key in found if key[0] == "ds4_requests_total"]
        assert samples(server)["ds4_http_responses_total", "GET", "/metrics", "200"] == 1


def test_paths_that_name_something_are_counted_as_their_route() -> None:
    with serve(StandIn(ids_of("ok"))) as server:
        made = server.post("/v1/responses", {"input": "hi"}).json()["id"]
        assert server.get(f"/v1/responses/{made}").status_code == 200
        assert server.get(f"/v1/responses/{made}/input_items").status_code == 200
        assert httpx.delete(f"{server.url}/v1/responses/{made}").status_code == 200
        name = server.get("/v1/models").json()["data"][0]["id"]
        assert server.get(f"/v1/models/{name}").status_code == 200
        found = samples(server)
    one = "/v1/responses/{response_id}"
    for method, path in (
        ("GET", one), ("GET", one + "/input_items"), ("DELETE", one), ("GET", "/v1/models/{name}"),
        ("POST", "/v1/responses"), ("GET", "/v1/models"),
    ):  # fmt: skip
        assert found["ds4_http_responses_total", method, path, "200"] == 1
    assert not [key for key in found if made in key or "other" in key]


def test_how_requests_end_badly() -> None:
    def fail(i: int) -> None:
        raise DeviceError("the device is ill")

    with serve(StandIn(ids_of("ok"), before_token=fail)) as server:
        assert server.chat().status_code == 500
        assert samples(server)["ds4_requests_total", "failed", CHAT] == 1
        assert ("ds4_decode_tokens_per_second_count",) in samples(server)


def test_who_waits_and_who_left() -> None:
    import socket

    gate = Gate(0)
    with server_with(StandIn(ids_of("ok"), before_token=gate), gate) as server:
        body = b'{"messages":[{"role":"user","content":"hi"}]}'
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        clients[0].sendall(head + body)
        assert gate.reached.wait(20)
        for client in clients[1:]:
            client.sendall(head + body)
        until(lambda: server.worker.waiting == 2)
        found = samples(server)
        assert found["ds4_requests_running",] == 1 and found["ds4_requests_waiting",] == 2
        clients[2].close()
        until(lambda: samples(server).get(("ds4_requests_total", "cancelled", CHAT)) == 1)
        gate.open.set()
        until(lambda: samples(server).get(("ds4_requests_total", "stop", CHAT)) == 2)
        for client in clients[:2]:
            client.close()


@dataclass
class Drafting(StandIn):
    """Reports rounds as a session with a draft head does."""

    def session(self) -> StandInSession:
        made = super().session()
        made.report = lambda: {  # type: ignore[method-assign]
            "rounds": 10, "verified_drafts": {"0": 4, "2": 6}, "acceptance_by_position": [0.5, 0.1667],
        }  # fmt: skip
        return made


def test_drafts_by_position() -> None:
    with serve(Drafting(ids_of("ok"))) as server:
        for _ in range(2):
            assert server.chat().status_code == 200
        found = samples(server)
        assert found["ds4_decode_rounds_total", "0"] == 8 and found["ds4_decode_rounds_total", "2"] == 12
        assert found["ds4_drafts_verified_total", "1"] == found["ds4_drafts_verified_total", "2"] == 12
        assert found["ds4_drafts_accepted_total", "1"] == 6 and found["ds4_drafts_accepted_total", "2"] == 2


def test_health_when_a_step_does_not_end() -> None:
    """503 with the reason, and 200 again when the step ends."""
    gate = Gate(1)
    engine = StandIn(ids_of("ok"), before_token=gate, config=StandInConfig(500))
    with serve(engine, step_s=0.2, limits=Limits()) as server:
        try:
            with ThreadPoolExecutor() as pool:
                answer = pool.submit(server.chat)
                assert gate.reached.wait(20)
                until(lambda: server.get("/health").status_code == 503)
                told = server.get("/health").json()
                assert told["status"] == "failing"
                assert re.match(
                    r"one request runs and has made no step for \d+ s, none has ended for \d+ s;",
                    told["error"]["message"],
                )
                found = samples(server)
                assert found["ds4_ready",] == 0 and found["ds4_step_age_seconds",] > 0.2
                gate.open.set()
                assert answer.result().status_code == 200
        finally:
            gate.open.set()
        assert server.get("/health").status_code == 200
        time.sleep(0.3)  # nothing runs: however long ago the last step was
        assert server.get("/health").status_code == 200


@pytest.mark.parametrize("key", [None, "wrong"])
def test_metrics_need_the_key(key: str | None) -> None:
    with serve(StandIn(ids_of("ok")), api_key="secret") as server:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        assert server.get("/metrics", headers=headers).status_code == 401
        assert server.get("/metrics", headers={"Authorization": "Bearer secret"}).status_code == 200


class Shared(StandInSession):
    """Drawn for in one pass: a token waits, the next `next` takes it."""

    ready = 0

    @property
    def waiting(self) -> int:
        return self.ready

    def next(self, sampling: Sampling, *, left: int | None = None) -> int:
        self.ready = 0
        return super().next(sampling, left=left)


@dataclass
class Sharing(StandIn):
    def session(self) -> StandInSession:
        made = Shared(self)
        self.sessions.add(made)
        return made

    def draw(self, asks: Sequence[Ask]) -> list[Exception | None]:
        for ask in asks:
            cast("Shared", ask.session).ready = 1
        return super().draw(asks)


def test_passes_that_were_shared_and_what_sequences_hold() -> None:
    """A pass counts by the requests that it drew for; one alone shares nothing."""
    gate = Gate(2)
    engine = Sharing(ids_of("abcdefgh"), before_token=gate)
    with serve(engine, sessions=2) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(server.chat)
        assert gate.reached.wait(20)
        assert samples(server)["ds4_state_bytes",] == 1 << 10 and samples(server)["ds4_state_limit_bytes",] == 1 << 20
        second = pool.submit(server.chat)
        until(lambda: server.worker.waiting == 1)
        gate.open.set()
        assert first.result().status_code == second.result().status_code == 200
        found = samples(server)
        assert found["ds4_shared_passes_total", "2"] == len(engine.passes) > 0
        assert not [key for key in found if key[0] == "ds4_shared_passes_total" and key[1] != "2"]
        until(lambda: gc.collect() >= 0 and not engine.sessions)
        assert server.chat().status_code == 200
        assert samples(server)["ds4_state_bytes",] == 0


def test_kept_prompts_are_counted() -> None:
    """On the real engine: the same prompt again is found, and its tokens are not run."""
    engine = Engine.open(
        toy_base("oracle-e", bits=6), engram_dir=toy_dir("oracle-e"), prefill="full", device=opened("fast", "greedy")
    )
    prefixes = Prefixes(64 << 20, least=16)
    body = {"prompt": list(range(5, 75)), "max_tokens": 2, "temperature": 0}
    with serve(StandIn(), open_engine=lambda progress: engine, prefixes=prefixes) as server:
        for _ in range(2):
            assert server.post(COMPLETIONS, body).status_code == 200
        found = samples(server)
        assert found["ds4_prefix_lookups_total", "none"] == found["ds4_prefix_lookups_total", "memory"] == 1
        cached = found["ds4_cached_tokens_total",]
        assert cached == found["ds4_prefix_tokens_total", "reused"] == 70
        assert found["ds4_prefix_tokens_total", "run"] == 70 and found["ds4_prompt_tokens_total",] == 140
        assert found["ds4_prefix_entries", "memory"] == 1 and found["ds4_prefix_bytes", "memory"] > 1000
        assert found["ds4_prefix_bytes", "disk"] == found["ds4_prefix_lookups_total", "disk"] == 0
        assert found["ds4_prefixes_stored_total", "memory"] >= 1
        assert found["ds4_state_bytes",] == engine.options.budget.held > 0
