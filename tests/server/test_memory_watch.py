"""The watch on memory: what it does at which level, that it is told everywhere, and that it is over again."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from ds4.engine.budget import host_available
from ds4.server.memory_watch import DROP, END, LOW, OK, REFUSE, REFUSING, MemoryWatch
from ds4.server.prefix_store import PrefixStats
from ds4.server.request import Limits, ServedEngine, ServedSession
from ds4.server.worker import Worker
from tests.server.standin import Served, StandIn, StandInConfig, ids_of, serve, until
from tests.server.test_metrics import samples

FLOOR = 1000 << 20
CHAT = "/v1/chat/completions"


def mb(n: int) -> int:
    return n << 20


@dataclass
class Asked:
    """Writes down what it is asked for."""

    calls: list[str] = field(default_factory=list)
    relieving: bool = False

    def relieve(self, why: str | None) -> None:
        self.calls.append("drop" if why is None else "end")

    def refuse(self, why: str | None) -> None:
        self.calls.append("let in" if why is None else "refuse")


@dataclass
class Machine:
    """A machine with so much memory available; with less until a request was ended for it."""

    free: int = mb(8000)
    less: int | None = None
    watch: MemoryWatch | None = None

    def available(self) -> int:
        less = self.less is not None and self.watch is not None and not self.watch.done[END]
        return self.less if less and self.less is not None else self.free


@pytest.mark.parametrize(
    ("looks", "want"),
    [
        ([2000, 1000], []),
        ([999], ["drop"]),
        ([999, 1100, 1249, 1000], ["drop"]),  # not enough again, and no worse: nothing is done
        ([999, 1250, 999], ["drop", "let in", "drop"]),
        ([999, 998, 997], ["drop", "refuse", "drop", "refuse", "drop"]),  # never ended: above half
        ([499], ["refuse", "drop"]),
        ([499, 498, 497], ["refuse", "drop", "refuse", "end", "refuse", "end"]),
        ([900, 499, 499, 900], ["drop", "refuse", "drop", "refuse", "end", "refuse", "drop"]),
        ([499, 499, 1300, 400], ["refuse", "drop", "refuse", "end", "let in", "refuse", "drop"]),
    ],
)
def test_steps(looks: Sequence[int], want: Sequence[str]) -> None:
    asked, machine = Asked(), Machine()
    watch = MemoryWatch(asked, FLOOR, available=machine.available)
    for look in looks:
        machine.free = mb(look)
        watch.look()
    assert asked.calls == list(want)
    assert watch.done == Counter(c for c in want if c in (DROP, END)) + Counter(
        {REFUSE: sum(a == "refuse" for a in _runs(want))}
    ) + Counter({DROP: want.count("end")})


def _runs(calls: Sequence[str]) -> list[str]:
    """Refusals that began: those in a row count once until somebody is let in."""
    begun, refusing = [], False
    for call in calls:
        if call == "refuse" and not refusing:
            begun.append(call)
        refusing = call == "refuse" or (refusing and call != "let in")
    return begun


def test_a_device_that_is_busy_is_asked_once() -> None:
    """What was asked for is waited for: no second request is ended for the same memory."""
    asked = Asked()
    watch = MemoryWatch(asked, FLOOR, available=lambda: mb(10))
    watch.look()
    asked.relieving = True
    for _ in range(3):
        watch.look()
    assert asked.calls == ["refuse", "drop"] + ["refuse"] * 3 and watch.done[END] == 0
    asked.relieving = False
    watch.look()
    assert asked.calls[-1] == "end"


def test_where_nobody_can_say(caplog: pytest.LogCaptureFixture) -> None:
    asked = Asked()
    watch = MemoryWatch(asked, FLOOR, available=lambda: None, every_s=0.001)
    watch.start()
    watch.look()
    watch.stop()
    assert not asked.calls and "cannot be read" in caplog.text and watch.told()["state"] == OK


def test_a_look_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    looks: list[int] = []

    def available() -> int:
        looks.append(1)
        if len(looks) == 3:
            raise ValueError("odd")
        return mb(8000)

    watch = MemoryWatch(Asked(), FLOOR, available=available, every_s=0.001)
    watch.start()
    until(lambda: len(looks) > 5)
    watch.stop()
    assert "looking at memory failed" in caplog.text
    count = len(looks)
    assert not watch._thread.is_alive() and len(looks) == count


def test_this_machine_says_how_much_there_is() -> None:
    found = host_available()
    assert found is not None and mb(16) < found < 1 << 50


FREED = """
import numpy as np
from ds4.server.memory_watch import trim

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

before = rss()
for _ in range(2):
    blocks = [np.ones(3 << 20, np.uint8) for _ in range(100)]
    stays = [np.ones(100, np.uint8) for _ in range(1000)]
    more = [np.ones(200 << 10, np.uint8) for _ in range(500)]
    above = [np.ones(5000, np.uint8) for _ in range(100)]
    del blocks, more
kept = rss()
trim()
print(before, kept, rss())
"""


def test_what_was_freed_goes_back_to_the_machine() -> None:
    """The C library keeps blocks under something small that stays; in a process of its own, whose heap is known."""
    ran = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    before, kept, trimmed = map(int, ran.stdout.split())
    assert kept > before + 200 and trimmed < before + 30


# ---- the whole server


class Kept:
    """Prefixes that keep nothing and count how often they were told to forget it."""

    def __init__(self) -> None:
        self.forgotten = 0
        self.stats = PrefixStats()

    def begin(self, engine: ServedEngine, prompt_ids: Sequence[int]) -> tuple[ServedSession, int]:
        return engine.session(), 0

    def reading(self, session: ServedSession, prompt_ids: Sequence[int]) -> Generator[tuple[int, int], None, object]:
        return session.reading(prompt_ids)

    def ended(self, session: ServedSession, *, sound: bool = True) -> None:
        pass

    def forget(self) -> None:
        self.forgotten += 1


@dataclass
class Dropping(StandIn):
    dropped: int = 0

    def drop_idle(self) -> None:
        self.dropped += 1


@contextmanager
def watched(machine: Machine, sessions: int = 2) -> Iterator[tuple[Served, Dropping, Kept]]:
    # a moment for the tests, which need the processor too
    engine = Dropping(
        ids_of("ab"), endless=True, config=StandInConfig(10**7), before_token=lambda i: time.sleep(0.001)
    )
    kept = Kept()

    def watch(worker: Worker) -> MemoryWatch:
        machine.watch = MemoryWatch(worker, FLOOR, available=machine.available, every_s=0.01)
        return machine.watch

    with serve(engine, sessions=sessions, prefixes=kept, watch=watch, limits=Limits(outbox_chars=10**9)) as server:
        yield server, engine, kept


def test_what_is_kept_goes_also_when_nothing_runs() -> None:
    machine = Machine()
    with watched(machine) as (server, engine, kept):
        assert server.get("/health").json()["memory"]["state"] == OK
        machine.free = mb(900)
        until(lambda: kept.forgotten and engine.dropped)
        until(lambda: server.get("/health").json()["memory"]["state"] == REFUSING)
        machine.free = mb(1249)
        assert server.chat(max_tokens=1).status_code == 503
        machine.free = mb(1250)
        until(lambda: server.get("/health").json()["memory"]["state"] == OK)
        assert server.chat(max_tokens=1).status_code == 200


def test_refused_sent_away_and_ended(caplog: pytest.LogCaptureFixture) -> None:
    """Two run, one waits: the one that waits is sent away, the younger one is ended with its reason in the stream,
    the older one goes on. New ones are refused, and let in again.
    """
    caplog.set_level(logging.INFO, "ds4.server")
    machine = Machine()
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10**6, "stream": True}
    with watched(machine) as (server, _, _), ThreadPoolExecutor() as pool:
        older = server.raw(CHAT, body)
        until(lambda: server.worker.running == 1)
        younger = pool.submit(httpx.post, server.url + CHAT, json=body, timeout=30, headers={"x-request-id": "y-1"})
        until(lambda: server.worker.running == 2)
        late = pool.submit(server.chat)
        until(lambda: server.worker.waiting == 1)
        machine.free = mb(900)
        sent_away = late.result()
        assert sent_away.status_code == 503 and sent_away.json()["error"]["code"] == "no_memory"
        assert int(sent_away.headers["Retry-After"]) > 0
        refused = server.chat()
        assert refused.status_code == 503 and "--memory-floor-mb" in refused.json()["error"]["message"]
        assert server.worker.running == 2  # above half of the floor nobody is ended
        machine.less = mb(400)
        until(lambda: server.worker.running == 1)
        told = [json.loads(x[6:]) for x in younger.result().text.split("\n\n") if x.startswith("data: {")][-1]
        assert told["error"]["code"] == "no_memory" and "400 MB are available" in told["error"]["message"]
        (stays,) = server.worker.turns.runs
        assert stays.number == 1
        until(lambda: samples(server)["ds4_memory_available_bytes",] == mb(900))  # the next look
        found = samples(server)
        assert found["ds4_memory_low",] == 2 and found["ds4_memory_floor_bytes",] == FLOOR
        assert found["ds4_memory_relief_total", REFUSE] == 1 and found["ds4_memory_relief_total", END] == 1
        assert found["ds4_memory_relief_total", DROP] >= 1
        assert found["ds4_requests_total", "no_memory", CHAT] == 2  # sent away and ended; refused was never queued
        ended = [r for r in caplog.records if "ended to make room" in r.getMessage()]
        assert ended and "requests are refused" in caplog.text
        machine.free = mb(2000)
        until(lambda: server.worker.low is None)
        assert server.chat(max_tokens=1).status_code == 200
        older.close()
        until(lambda: server.worker.running == 0)
        assert "are available again" in caplog.text


def test_low_is_said_before_refusing() -> None:
    asked = Asked()
    watch = MemoryWatch(asked, FLOOR, available=lambda: mb(700))
    watch.look()
    assert watch.told() == {"state": LOW, "available_bytes": mb(700), "floor_bytes": FLOOR}
