"""Requests that queue, leave, stall or are cut short; a server that loads, drains and stops."""

from __future__ import annotations

import functools
import gc
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import pytest

from ds4.errors import FileFormatError
from ds4.server.request import Limits, Progress
from tests.server.standin import Served, StandIn, StandInConfig, events, ids_of, serve, until

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10**6}
CONFIG = StandInConfig(2 * 10**6)
SMALL = 1 << 16  # bytes that the system takes for a connection: the rest waits in the server


class Gate:
    """Blocks the device thread at call number `at` until opened; counts the calls."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.calls = at, 0
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, i: int) -> None:
        self.calls += 1
        if i == self.at:
            self.reached.set()
            assert self.open.wait(30)


@contextmanager
def server_with(engine: StandIn, *gates: Gate, limits: Limits | None = None) -> Iterator[Served]:
    """Gates are opened at the end, so that a failing test does not hang."""
    with serve(engine, limits=limits) as server:
        try:
            yield server
        finally:
            for gate in gates:
                gate.open.set()


def idle(server: Served) -> bool:
    gc.collect()
    return server.worker.running == server.worker.waiting == 0 and len(server.engine.sessions) == 0


def answered(server: Served) -> bool:
    """A small request goes through: nothing is stuck."""
    response = server.chat(max_tokens=1)
    return bool(response.status_code == 200)


def waiting(server: Served, count: int) -> bool:
    return server.worker.waiting == count


def close_hard(sock: socket.socket) -> None:
    """Reset, as a killed client does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


@pytest.mark.parametrize("close", [socket.socket.close, close_hard])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("place", ["prefill", "decode"])
def test_a_client_that_leaves_frees_the_device(
    place: str, stream: bool, close: Callable[[socket.socket], None]
) -> None:
    """Within one chunk or one step: the number of calls after it left is at most one more."""
    chunks, tokens = Gate(2 if place == "prefill" else -1), Gate(5 if place == "decode" else -1)
    gate = chunks if place == "prefill" else tokens
    engine = StandIn(ids_of("abc"), endless=True, config=CONFIG, before_chunk=chunks, before_token=tokens)
    with server_with(engine, gate) as server:
        sock = server.raw(CHAT, {**BODY, "stream": stream, "messages": [{"role": "user", "content": "x" * 900}]})
        assert gate.reached.wait(30)
        (job,) = server.worker._running
        close(sock)
        until(lambda: job.cancelled)
        calls = gate.calls
        gate.open.set()
        until(lambda: idle(server))
        assert gate.calls <= calls + 1
        assert place == "decode" or tokens.calls == 0
        assert answered(server)


def test_a_client_that_leaves_the_queue_is_never_run() -> None:
    gate = Gate()
    engine = StandIn(ids_of("abc"), config=CONFIG, before_token=gate)
    with server_with(engine, gate) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(server.chat)
        assert gate.reached.wait(30)
        waiting = server.raw(CHAT, {"messages": [{"role": "user", "content": "never"}]})
        until(lambda: server.worker.waiting == 1)
        waiting.close()
        until(lambda: server.worker.waiting == 0)
        gate.open.set()
        assert first.result().status_code == 200
        until(lambda: idle(server))
        assert len(engine.prompts) == 1


def test_first_come_first_served_and_a_full_queue() -> None:
    gate = Gate()
    engine = StandIn(ids_of("abc"), config=CONFIG, before_token=gate)
    with server_with(engine, gate, limits=Limits(queue=3)) as server, ThreadPoolExecutor() as pool:
        futures = [pool.submit(server.chat, "0")]
        assert gate.reached.wait(30)
        for i in (1, 2, 3):
            futures.append(pool.submit(server.chat, str(i)))
            until(functools.partial(waiting, server, i))
        health = server.get("/health")  # answered while the device is busy
        assert health.json()["queue"] == {"running": 1, "waiting": 3}
        refused = server.chat("4")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        gate.open.set()
        assert [f.result().status_code for f in futures] == [200] * 4
        asked = [engine.tokenizer.decode(p)[-len("0<｜Assistant｜></think>")] for p in engine.prompts]
        assert asked == ["0", "1", "2", "3"]
        assert server.chat().status_code == 200


def test_a_queue_of_none_still_runs_one() -> None:
    with serve(StandIn(ids_of("abc")), limits=Limits(queue=0)) as server:
        assert server.chat().status_code == 200


def test_a_reader_that_stalls_is_cut_off() -> None:
    engine = StandIn(ids_of("\u00e9" * 50), endless=True, config=CONFIG)
    with serve(engine, limits=Limits(outbox_chars=10**9, stall_s=0.2), send_buffer=SMALL) as server:
        sock = server.raw(CHAT, {**BODY, "stream": True}, receive_buffer=4096)
        until(lambda: server.worker.running == 1)
        until(lambda: server.worker.running == 0)  # by the write that waited too long
        assert answered(server)
        until(lambda: idle(server))
        read = b""
        while piece := sock.recv(65536):
            read += piece
        assert b"[DONE]" not in read and not read.endswith(b"0\r\n\r\n")  # cut off, not ended
        sock.close()


def test_a_slow_reader_does_not_keep_the_device() -> None:
    """Its text waits up to the limit; then its request ends, and it is told so when it reads on."""
    engine = StandIn(ids_of("\u00e9" * 50), endless=True, config=CONFIG)
    with serve(engine, limits=Limits(outbox_chars=20_000), send_buffer=SMALL) as server:
        sock = server.raw(CHAT, {**BODY, "stream": True}, receive_buffer=4096)
        until(lambda: server.worker.running == 1)
        until(lambda: server.worker.running == 0)
        assert answered(server)
        read = b""
        while b"[DONE]" not in read[-100:]:
            read += sock.recv(1 << 20)
        assert b"characters wait for the reader" in read
        sock.close()
        until(lambda: idle(server))


def test_a_reader_that_pauses_loses_nothing() -> None:
    engine = StandIn(ids_of("\U0001f600" * 4_000), config=CONFIG)
    with serve(engine) as server:
        sock = server.raw(CHAT, {**BODY, "stream": True}, receive_buffer=4096)
        until(lambda: len(engine.samplings) == 16_001)  # the device never waited for it
        answer = b""
        while b"[DONE]" not in answer[-100:]:
            answer += sock.recv(1 << 20)
        sock.close()
        # chunked transfer: drop the length lines
        lines = [
            line[6:] for line in answer.decode().split("\r\n\r\n", 1)[1].split("\n") if line.startswith("data: {")
        ]
        text = "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines)
        assert text == "\U0001f600" * 4_000


def test_a_long_prefill_opens_the_stream_and_pings() -> None:
    gate = Gate()
    with server_with(StandIn(ids_of("abc"), before_chunk=gate), gate, limits=Limits(ping_s=0.02)) as server:
        sock = server.raw(CHAT, {**BODY, "max_tokens": 9, "stream": True})
        answer = b""
        while b": waiting\n\n" not in answer:
            answer += sock.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200 ")
        gate.open.set()
        while b"[DONE]" not in answer:
            answer += sock.recv(4096)
        sock.close()


def test_loading_and_failing_to_load() -> None:
    step, go = threading.Event(), threading.Event()

    def slow(progress: Progress) -> StandIn:
        progress(3, 40)
        step.set()
        assert go.wait(30)
        return StandIn(ids_of("ok"))

    with serve(StandIn(), open_engine=slow, wait=False) as server:
        assert step.wait(30)
        health = server.get("/health")
        assert health.status_code == 503 and health.json()["progress"] == {"done": 3, "total": 40}
        assert health.json()["status"] == "loading" and "retry-after" in health.headers
        head = httpx.head(server.url + "/health", timeout=30)
        assert head.status_code == 503 and head.content == b"" and "retry-after" in head.headers
        for response in (server.chat(), server.get("/v1/models")):
            assert response.status_code == 503 and response.json()["error"]["code"] == "model_loading"
        go.set()
        until(lambda: server.get("/health").status_code == 200)
        assert httpx.head(server.url + "/health", timeout=30).status_code == 200
        assert server.chat().status_code == 200

    def broken(progress: Progress) -> StandIn:
        raise FileFormatError("x.gguf: cut off at byte 7")

    with serve(StandIn(), open_engine=broken) as server:
        health = server.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert "cut off at byte 7" in server.chat().json()["error"]["message"]


def test_stopping_while_loading() -> None:
    """The next progress report ends the load."""
    started = threading.Event()
    reports = 0

    def endless(progress: Progress) -> StandIn:
        nonlocal reports
        started.set()
        while True:
            reports += 1
            progress(reports, 0)

    with serve(StandIn(), open_engine=endless, wait=False) as server:
        assert started.wait(30)
    assert not server.worker._thread.is_alive()


def test_draining_lets_the_running_answer_end() -> None:
    gate = Gate(3)
    engine = StandIn(ids_of("hello"), before_token=gate)
    with ThreadPoolExecutor() as pool:
        with serve(engine) as server:
            future = pool.submit(server.chat)
            assert gate.reached.wait(30)
            pool.submit(open_when_draining, server, gate)
        assert future.result().json()["choices"][0]["message"]["content"] == "hello"
    assert engine.closed and not server.worker._thread.is_alive()


def open_when_draining(server: Served, gate: Gate) -> None:
    until(lambda: refuses(server))
    gate.open.set()


def refuses(server: Served) -> bool:
    """The listening socket is closed: the drain has begun."""
    try:
        server.get("/health")
    except httpx.TransportError:
        return True
    return False


def cut_short(response: httpx.Response) -> bool:
    error = response.json()["error"]
    return response.status_code == 503 and (error["code"], error["type"]) == ("shutting_down", "server_error")


def test_draining_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    """After drain_s answers end as errors do: what streams by an event, the rest by a 503; no traceback is logged."""
    engine = StandIn(ids_of("abc"), endless=True, config=StandInConfig(10**9))
    with ThreadPoolExecutor() as pool:
        with serve(engine, limits=Limits(drain_s=0.3)) as server:
            streamed = pool.submit(server.chat, stream=True)
            until(lambda: server.worker.running == 1)
            whole = pool.submit(server.chat)
            waits = pool.submit(server.chat, stream=True)
            until(lambda: server.worker.waiting == 2)
        assert cut_short(whole.result()) and cut_short(waits.result())
        assert streamed.result().status_code == 200
        assert events(streamed.result())[-1]["error"]["code"] == "shutting_down"
    assert engine.closed and not server.worker._thread.is_alive()
    assert not [r for r in caplog.records if r.exc_info or r.levelno > logging.WARNING]


def test_the_end_of_the_drain_does_not_wait_for_the_device(caplog: pytest.LogCaptureFixture) -> None:
    """One not streamed answer runs; the device is in the middle of a step until it has been answered."""
    gate = Gate(3)
    engine = StandIn(ids_of("abc"), endless=True, config=CONFIG, before_token=gate)
    with ThreadPoolExecutor() as pool:
        with server_with(engine, limits=Limits(drain_s=0.1)) as server:
            running = pool.submit(server.chat)
            assert gate.reached.wait(30)
            running.add_done_callback(lambda _: gate.open.set())
        assert cut_short(running.result())
    assert engine.closed and not [r for r in caplog.records if r.exc_info or r.levelno > logging.WARNING]


def unread(server: Served) -> int:
    return sum(job.outbox._chars for job in server.worker._running)


def test_what_outlasts_the_drain(caplog: pytest.LogCaptureFixture) -> None:
    """A body that never comes is answered, a reader that does not read is cut off; neither leaves a traceback."""
    engine = StandIn(ids_of("\u00e9" * 50), endless=True, config=CONFIG)
    limits = Limits(drain_s=0.1, close_s=0.1, outbox_chars=10**9)
    with serve(engine, limits=limits, send_buffer=SMALL) as server:
        stalled = server.raw(CHAT, {**BODY, "stream": True}, receive_buffer=4096)
        until(lambda: unread(server) > 50_000)  # a write waits
        half = socket.create_connection(("127.0.0.1", server.port), 30)
        half.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n".encode())
        assert half.recv(100).startswith(b"HTTP/1.1 100 ")  # the server waits for the body
    answer = b""
    while piece := half.recv(4096):
        answer += piece
    assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"shutting_down"' in answer
    half.close()
    read = b""
    with suppress(ConnectionResetError):
        while piece := stalled.recv(1 << 20):
            read += piece
    assert b"[DONE]" not in read
    stalled.close()
    assert engine.closed and not [
        r for r in caplog.records if r.exc_info or (r.levelno > logging.WARNING and "ASGI" in r.message)
    ]


def test_many_at_once_with_some_leaving() -> None:
    """A small soak: all that stay get their whole answer, all sessions are freed."""
    engine = StandIn(ids_of("abcdefgh" * 8))

    def one(i: int, server: Served) -> bool:
        if i % 3 == 0:
            server.raw(CHAT, {**BODY, "max_tokens": 64, "stream": bool(i % 2)}).close()
            return True
        response = server.chat(str(i), stream=bool(i % 2))
        return response.status_code == 200 and "stop" in response.text

    with serve(engine, limits=Limits(queue=100)) as server, ThreadPoolExecutor(12) as pool:
        assert all(pool.map(lambda i: one(i, server), range(90)))
        until(lambda: idle(server))
        assert answered(server)
