"""The device, lent: what was asked before goes first, what comes meanwhile waits and is answered, and whatever
becomes of the borrower, the server has its device back.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from ds4.errors import CapacityError
from ds4.server import worker as workers
from ds4.server.request import Limits, Progress, ServedEngine
from tests.server.standin import ADMIN_KEY, Served, StandIn, StandInConfig, events, ids_of, joined, serve, until
from tests.server.test_life import Gate, cut_short, waiting

CONFIG = StandInConfig(20_000)
LEND = {"for": "a test", "lease_s": 60}


@dataclass
class Opener:
    """Opens a new stand-in each time; `failing` times it cannot. `gate` is what their tokens go through."""

    gate: Callable[[int], None] = lambda i: None
    failing: int = 0
    made: list[StandIn] = field(default_factory=list)

    def __call__(self, progress: Progress) -> ServedEngine:
        progress(1, 1)
        if self.made and self.failing:
            self.failing -= 1
            raise CapacityError("the weights take 114000 MB, 3 MB of memory are available")
        self.made.append(StandIn(ids_of(f"engine {len(self.made)}"), config=CONFIG, before_token=self.gate))
        return self.made[-1]


@contextmanager
def lending(opener: Opener, *gates: Gate, **kw: Any) -> Iterator[tuple[Served, ThreadPoolExecutor]]:
    """A server, and threads to ask it from."""
    with serve(StandIn(), open_engine=opener, **kw) as server, ThreadPoolExecutor(16) as pool:
        try:
            yield server, pool
        finally:
            for gate in gates:
                gate.open.set()


def lent(server: Served, **more: object) -> str:
    response = server.admin("lend", LEND | more)
    assert response.status_code == 200, response.text
    return str(response.json()["lease"])


def give_back(server: Served, lease: str) -> httpx.Response:
    return server.admin(f"lend/{lease}/return")


def answer(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def failed(response: httpx.Response, status: int, code: str) -> str:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), response.text
    return str(error["message"])


def test_what_runs_ends_what_comes_waits() -> None:
    """One answer runs when the device is asked for: its end is waited for. Of those that come while it is away none
    is refused, bad ones but for their faults; all are answered by the engine that is opened afterwards."""
    gate = Gate(3)
    opener = Opener(gate)
    with lending(opener, gate, limits=Limits(ping_s=0.02)) as (server, pool):
        first = pool.submit(server.chat)
        assert gate.reached.wait(30)
        lease = pool.submit(lent, server)
        time.sleep(0.1)
        assert not lease.done() and not opener.made[0].closed  # it waits for the answer
        gate.open.set()
        assert answer(first.result()) == "engine 0"
        lease_id = lease.result()
        assert opener.made[0].closed and server.worker.engine is None
        whole, streamed = pool.submit(server.chat, "a"), pool.submit(server.chat, "b", stream=True)
        until(lambda: server.worker.waiting == 2)
        health = server.get("/health")
        assert health.status_code == 200 and health.json()["status"] == "lent"
        assert health.json()["queue"] == {"running": 0, "waiting": 2}
        assert health.json()["lent"]["for"] == "a test" and 50 < health.json()["lent"]["left_s"] <= 60
        assert lease_id not in health.text and health.json()["model"] == "stand-in"
        assert server.get("/v1/models").json()["data"][0]["context_length"] == CONFIG.max_position_embeddings
        failed(server.chat("x" * 30_000), 400, "context_length_exceeded")
        assert server.chat(temperature="hot").status_code == 400
        assert server.admin(f"lend/{lease_id}/keep").json() == {"lease_s": 60, "waiting": 2}
        time.sleep(0.05)
        assert not whole.done() and not streamed.done()
        assert give_back(server, lease_id).status_code == 202
        assert answer(whole.result()) == "engine 1"
        assert streamed.result().text.count(": waiting") >= 2  # it was told that it is alive
        assert "engine 1" in joined(events(without_pings(streamed.result())))
        assert server.get("/health").json()["status"] == "ok" and len(opener.made) == 2


def without_pings(streamed: httpx.Response) -> httpx.Response:
    return httpx.Response(200, text=streamed.text.replace(": waiting\n\n", ""))


def test_first_come_first_served() -> None:
    """Requests that waited when the device was asked for are answered before it goes, later ones are not."""
    gate = Gate(0)
    opener = Opener(gate)
    with lending(opener, gate) as (server, pool):
        before = [pool.submit(server.chat, "0")]
        assert gate.reached.wait(30)
        for i in (1, 2):
            before.append(pool.submit(server.chat, str(i)))
            until(functools.partial(waiting, server, i))
        lease = pool.submit(lent, server)
        until(lambda: server.worker._lend is not None)
        after = pool.submit(server.chat, "after")
        until(lambda: server.worker.waiting == 3)
        gate.open.set()
        lease_id = lease.result()
        assert [answer(f.result()) for f in before] == ["engine 0"] * 3
        assert server.worker.waiting == 1 and not after.done()
        give_back(server, lease_id)
        assert answer(after.result()) == "engine 1"


def test_a_borrower_that_is_silent_loses_the_device() -> None:
    opener = Opener()
    with lending(opener) as (server, pool):
        lease = lent(server, lease_s=0.5)
        waits = pool.submit(server.chat)
        assert answer(waits.result()) == "engine 1"
        for path in (f"lend/{lease}/keep", f"lend/{lease}/return"):
            failed(server.admin(path), 404, "lease_over")


def test_a_lease_lasts_as_long_as_it_is_kept() -> None:
    opener = Opener()
    with lending(opener) as (server, _):
        lease = lent(server, lease_s=0.8)
        for _ in range(8):
            time.sleep(0.2)
            assert server.admin(f"lend/{lease}/keep").status_code == 200
        assert server.worker.state == "lent" and len(opener.made) == 1
        server.admin(f"lend/{lease}/keep", {"lease_s": 0.5})  # for the last time
        until(lambda: server.worker.state == "ready")
        assert len(opener.made) == 2


def test_two_borrowers() -> None:
    """The second one is told so, also while the first one's turn has not come; after the return it may have it."""
    gate = Gate(0)
    with lending(Opener(gate), gate) as (server, pool):
        runs = pool.submit(server.chat)
        assert gate.reached.wait(30)
        first = pool.submit(lent, server)
        until(lambda: server.worker._lend is not None)
        assert "a test" in failed(server.admin("lend", LEND), 409, "lent_already")
        gate.open.set()
        lease = first.result()
        refused = server.admin("lend", LEND)
        failed(refused, 409, "lent_already")
        assert int(refused.headers["retry-after"]) > 0 and runs.result().status_code == 200
        give_back(server, lease)
        until(lambda: server.worker.lease is None)  # the worker takes it back in its own time
        assert lent(server) != lease


def test_an_order_that_takes_too_long_is_called_off() -> None:
    gate = Gate(0)
    opener = Opener(gate)
    with lending(opener, gate) as (server, pool):
        runs = pool.submit(server.chat)
        assert gate.reached.wait(30)
        refused = server.admin("lend", LEND | {"wait_s": 0.2})
        failed(refused, 503, "device_in_use")
        assert int(refused.headers["retry-after"]) > 0
        gate.open.set()
        assert answer(runs.result()) == "engine 0" and answer(server.chat()) == "engine 0"
        assert server.worker.lease is None and not opener.made[0].closed


@pytest.mark.parametrize("when", ["while it waits", "while the engine closes"])
def test_a_borrower_that_left_is_lent_nothing(when: str) -> None:
    """Whether its turn has come or not; at the end the device is where it belongs."""
    gate, closing, close = Gate(0), threading.Event(), threading.Event()
    opener = Opener(gate if when == "while it waits" else lambda i: None)

    def settle() -> None:
        closing.set()
        assert when == "while it waits" or close.wait(30)

    with lending(opener, gate, settle=settle) as (server, pool):
        runs = pool.submit(server.chat)
        until(lambda: gate.reached.is_set() or runs.done())
        borrower = server.raw("/admin/lend", LEND, key=ADMIN_KEY)
        until(lambda: server.worker._lend is not None and (when == "while it waits" or closing.is_set()))
        borrower.close()
        if when == "while it waits":
            until(lambda: server.worker._lend is None)
            gate.open.set()
        else:
            time.sleep(0.2)  # the server sees it leave
            close.set()
            until(lambda: len(opener.made) == 2)
        assert answer(runs.result()) == "engine 0"
        until(lambda: server.worker.state == "ready")
        assert answer(server.chat()) == f"engine {len(opener.made) - 1}" and server.worker.lease is None


def test_a_full_queue_and_those_who_leave_it() -> None:
    """As ever: what is beyond the bound is refused, who leaves makes room, and is not run."""
    opener = Opener()
    with lending(opener, limits=Limits(queue=2)) as (server, pool):
        lease = lent(server)
        socks = [server.raw("/v1/completions", {"prompt": f"{i}", "stream": i == 1}) for i in range(3)]
        until(lambda: server.worker.waiting == 3)
        failed(server.chat(), 503, "queue_full")
        for sock in socks[:2]:
            sock.close()
        until(lambda: server.worker.waiting == 1)
        waits = pool.submit(server.chat)
        until(lambda: server.worker.waiting == 2)
        give_back(server, lease)
        assert answer(waits.result()) == "engine 1" and socks[2].recv(100).startswith(b"HTTP/1.1 200")
        assert len(opener.made[1].prompts) == 2
        socks[2].close()


def test_taking_the_device_back_may_need_several_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a dying borrower still holds. Nothing is refused meanwhile, and /health says what is the matter:
    for a while in so many words, then with a 503."""
    monkeypatch.setattr(workers, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(workers, "MOST_PAUSE_S", 0.2)
    settled: list[int] = []
    opener = Opener(failing=12)
    with lending(opener, settle=lambda: settled.append(1)) as (server, pool):
        lease = lent(server)
        waits = pool.submit(server.chat)
        until(lambda: server.worker.waiting == 1)
        give_back(server, lease)
        until(lambda: server.worker.trouble)
        said = server.get("/health")
        assert said.status_code == 200 and said.json()["status"] == "returning"
        assert "114000 MB" in said.json()["trouble"] and server.get("/v1/models").status_code == 200
        until(lambda: server.get("/health").status_code == 503)
        said = server.get("/health")
        assert said.json()["status"] == "failing" and "114000 MB" in failed(said, 503, "device_failing")
        assert answer(waits.result()) == "engine 1"
        assert server.get("/health").json()["status"] == "ok" and opener.failing == 0
        assert len(settled) == 13  # what a failed attempt has placed is let go before the next


@pytest.mark.parametrize("state", ["lent", "returning"])
def test_the_end_of_the_server_does_not_wait_for_the_borrower(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits has drain_s, as ever, and is told so."""
    opener = Opener(failing=10**6)
    with ThreadPoolExecutor() as pool:
        with serve(StandIn(), open_engine=opener, limits=Limits(drain_s=0.3)) as server:
            lease = lent(server)
            waits, streamed = pool.submit(server.chat), pool.submit(server.chat, stream=True)
            until(lambda: server.worker.waiting == 2)
            if state == "returning":
                give_back(server, lease)
                until(lambda: server.worker.trouble)
        assert cut_short(waits.result()) and cut_short(streamed.result())
    assert not server.worker._thread.is_alive()


def test_asked_for_while_the_model_loads_or_when_it_could_not_be() -> None:
    go = threading.Event()

    def slow(progress: Progress) -> StandIn:
        assert go.wait(30)
        return StandIn(ids_of("x"))

    def broken(progress: Progress) -> StandIn:
        raise CapacityError("too large")

    for opener, ends in ((slow, 200), (broken, 503)):
        with serve(StandIn(), open_engine=opener, wait=False) as server, ThreadPoolExecutor() as pool:
            order = pool.submit(server.admin, "lend", LEND)
            until(lambda: server.worker._lend is not None or server.worker.state == "failed")
            go.set()
            assert order.result().status_code == ends
            if ends == 503:
                failed(server.admin("lend", LEND), 503, "model_failed")


def test_who_may() -> None:
    """The admin key, as a bearer, and nothing else; it opens nothing else either."""
    paths = ["lend", "reload", "lend/x/keep", "lend/x/return", "none"]
    with serve(StandIn(ids_of("ok")), api_key="the-key-of-users") as server:
        headers = (None, "Bearer the-key-of-users", "Bearer", f"Basic {ADMIN_KEY}", f"Bearer {ADMIN_KEY}x",
                   f"Bearer {ADMIN_KEY[:-1]}", "Bearer \u00e9")  # fmt: skip
        tries = [("lend", header) for header in headers] + [(path, headers[1]) for path in (*paths, "l%65nd")]
        for path, header in tries:
            given = {} if header is None else {"Authorization": header.encode()}
            refused = server.post("/admin/" + path, LEND, headers=given)
            failed(refused, 401, "invalid_admin_key")
            assert ADMIN_KEY not in refused.text and refused.headers["www-authenticate"] == "Bearer"
        assert server.worker.lease is None and server.worker._lend is None
        refused = server.post("/v1/completions", {"prompt": "x"}, headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        failed(refused, 401, "invalid_api_key")
        key = {"Authorization": f"bearer  {ADMIN_KEY}"}
        failed(server.get("/admin/lend", headers=key), 405, "method_not_allowed")
        failed(server.post("/admin/none", {}, headers=key), 404, "not_found")
        assert server.post("/admin/reload", {}, headers=key).status_code == 200
    with serve(StandIn(ids_of("ok")), admin_key=None) as server:
        for path in paths:
            assert "--admin-key" in failed(server.admin(path, LEND), 403, "admin_disabled")


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"", None), (b"[]", None), ({}, "for"), ({"for": ""}, "for"), ({"for": "x" * 101}, "for"),
        ({"for": "a\nb"}, "for"), ({"for": 1}, "for"), ({"for": "x", "lease_s": 0}, "lease_s"),
        ({"for": "x", "lease_s": 1e9}, "lease_s"), ({"for": "x", "lease_s": "60"}, "lease_s"),
        ({"for": "x", "wait_s": -1}, "wait_s"), ({"for": "x", "wait_s": True}, "wait_s"),
    ],
)  # fmt: skip
def test_bad_orders(body: Any, names: str | None) -> None:
    with serve(StandIn(ids_of("ok"))) as server:
        refused = server.admin("lend", body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == names
        assert server.worker.lease is None and server.worker._lend is None
        lease = lent(server)
        assert server.admin(f"lend/{lease}/keep", {"lease_s": -1}).status_code == 400
        failed(server.admin("lend/lease-0/keep"), 404, "lease_over")
        assert server.worker.state == "lent" and server.worker.lease is not None
        give_back(server, lease)
        failed(give_back(server, lease), 404, "lease_over")


def test_many_requests_with_orders_between_them() -> None:
    """A small soak: reloads, leases that are returned and leases that run out, clients that leave. Who stays gets its
    whole answer, from one engine."""
    opener, orders = Opener(), 0

    def one(i: int, server: Served) -> bool:
        if i % 5 == 0:
            server.raw("/v1/completions", {"prompt": "x", "stream": bool(i % 2)}).close()
            return True
        said = server.chat(str(i), stream=bool(i % 2))
        text = joined(events(without_pings(said))) if i % 2 else answer(said)
        return text in [f"engine {n}" for n in range(len(opener.made))]

    with lending(opener, limits=Limits(queue=100, ping_s=0.05)) as (server, pool):
        answers = [pool.submit(one, i, server) for i in range(40)]
        while not all(a.done() for a in answers) or orders < 4:
            assert server.admin("reload").status_code == 200
            lease = lent(server, lease_s=0.5)
            if orders % 3:
                give_back(server, lease)
            until(lambda: server.worker.lease is None)  # by itself, or as soon as the worker has heard of the return
            orders += 1
        assert all(a.result() for a in answers)
        until(lambda: server.worker.state == "ready")
        assert len(opener.made) == orders + 1 and all(engine.closed for engine in opener.made[:-1])
        assert server.worker.waiting == server.worker.running == 0
