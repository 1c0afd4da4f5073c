"""Several requests at once over HTTP: who runs, who waits, who is sent away; and each one's answer is its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from ds4.engine import Engine
from ds4.server.request import Limits
from tests.base.toys import toy_base, toy_dir
from tests.conftest import opened
from tests.server.standin import Served, StandIn, StandInConfig, ids_of, serve, until

CONFIG = StandInConfig(100_000)
ANSWER = {"max_tokens": 300}


class Crowd:
    """Lets the device go on until `size` requests are under way, then holds it until `open`."""

    def __init__(self, size: int) -> None:
        self.size, self.open = size, threading.Event()
        self.server: Served | None = None

    def __call__(self, i: int) -> None:
        if self.server is not None and self.server.worker.running >= self.size:
            assert self.open.wait(30)
        elif not self.open.is_set():
            time.sleep(0.01)  # nobody is done before the last one came


@contextmanager
def crowded(size: int, **kw: Any) -> Iterator[tuple[Served, Crowd, ThreadPoolExecutor]]:
    crowd = Crowd(size)
    engine = StandIn(ids_of("ab"), endless=True, config=CONFIG, before_token=crowd)
    with serve(engine, sessions=size, **kw) as server, ThreadPoolExecutor(12) as pool:
        crowd.server = server
        try:
            yield server, crowd, pool
        finally:
            crowd.open.set()


def test_as_many_run_as_may_and_the_others_wait_in_line() -> None:
    with crowded(3, limits=Limits(queue=2)) as (server, crowd, pool):
        answers = [pool.submit(server.chat, str(i), **ANSWER) for i in range(3)]
        until(lambda: server.worker.running == 3)
        answers += [pool.submit(server.chat, str(i), **ANSWER) for i in (3, 4)]
        until(lambda: server.worker.waiting == 2)
        refused = server.chat("5")
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
        assert refused.json()["error"]["code"] == "queue_full"
        assert server.get("/health").json()["queue"] == {"running": 3, "waiting": 2}
        crowd.open.set()
        for answer in answers:
            body = answer.result().json()
            assert (
                body["choices"][0]["message"]["content"] == "ab" * 150 and body["usage"]["completion_tokens"] == 300
            )
        assert max(server.engine.passes) == 3
        until(lambda: server.worker.running == 0)
        assert len(server.engine.sessions) == 0


def test_orders_wait_for_all_that_run() -> None:
    """Other sidecars come when the last answer under way has ended, and before the next one begins."""
    order: list[int] = []
    with crowded(2, remount=lambda e: order.append(len(e.prompts))) as (server, crowd, pool):
        answers = [pool.submit(server.chat, str(i), **ANSWER) for i in range(2)]
        until(lambda: server.worker.running == 2)
        reload = pool.submit(server.admin, "reload")
        until(lambda: server.worker._reloads)
        late = pool.submit(server.chat, "late", max_tokens=2)
        until(lambda: server.worker.waiting == 1)
        assert not reload.done()
        crowd.open.set()
        assert [a.result().status_code for a in (*answers, late, reload)] == [200] * 4
        assert order == [2] and len(server.engine.prompts) == 3


def test_a_client_that_leaves_takes_only_its_own_request_along() -> None:
    with crowded(3) as (server, crowd, pool):
        stays = [pool.submit(server.chat, str(i), **ANSWER) for i in range(2)]
        until(lambda: server.worker.running == 2)
        sock = server.raw(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 90_000, "stream": True},
        )
        until(lambda: server.worker.running == 3)
        leaver = server.worker._running[-1]
        sock.close()
        until(lambda: leaver.cancelled)
        crowd.open.set()
        assert all(a.result().json()["usage"]["completion_tokens"] == 300 for a in stays)
        assert len(leaver.drawn) <= 301


def completion(server: Served, n: int, **fields: Any) -> dict[str, Any]:
    """Request n: its own prompt, settings and seed."""
    body = {
        "prompt": [5 + n, 9, 3 * n + 1, 7] * (n + 1), "max_tokens": 10 + n, "temperature": [0, 0.9][n % 2],
        "seed": n, "logprobs": 2, **fields,
    }  # fmt: skip
    answer: dict[str, Any] = server.post("/v1/completions", body).json()
    return {"choices": answer["choices"], "tokens": answer["usage"]["completion_tokens"]}


@pytest.mark.parametrize("drafts", [False, True])
def test_an_answer_does_not_depend_on_those_beside_it(drafts: bool) -> None:
    """Eight requests one after the other, then all at once, twice: the same text and the same log-probabilities."""
    engine = Engine.open(
        toy_base("oracle-e", bits=6), engram_dir=toy_dir("oracle-e"), prefill="replay", sessions=4, chunk=8,
        device=opened("fast", "greedy"), dspark=drafts,
    )  # fmt: skip
    with (
        serve(StandIn(), open_engine=lambda progress: engine, sessions=4) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        alone = [completion(server, n) for n in range(8)]
        for _ in range(2):
            assert list(pool.map(lambda n: completion(server, n), range(8))) == alone
    assert engine._together is not None and engine._together.counts.passes > 0
