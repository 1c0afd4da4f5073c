"""Every answer has the id of its request, the client's or a new one, and the log's lines say it."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from ds4.server.logs import JsonFormat, TextFormat, id_of, request_id
from tests.server.standin import Served, StandIn, ids_of, serve

NEW = re.compile(r"req_[0-9a-f]{24}")


@pytest.fixture
def server() -> Iterator[Served]:
    with serve(StandIn(ids_of("ok")), api_key="secret") as served:
        yield served


def lines(form: logging.Formatter) -> tuple[io.StringIO, logging.Handler]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(form)
    return stream, handler


def test_a_new_id_or_the_clients(server: Served) -> None:
    key = {"Authorization": "Bearer secret"}
    new = [server.get("/health").headers["x-request-id"] for _ in range(3)]
    assert len(set(new)) == 3 and all(NEW.fullmatch(i) for i in new)
    for path, headers, status in (("/health", {}, 200), ("/nowhere", key, 404), ("/v1/models", {}, 401)):
        answer = server.get(path, headers={**headers, "X-Request-ID": "mine.0-1:a_b"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine.0-1:a_b")
    streamed = server.chat(stream=True, messages=[{"role": "user", "content": "hi"}])
    assert NEW.fullmatch(streamed.headers["x-request-id"])


@pytest.mark.parametrize("given", [b"", b"a" * 65, b"a b", b'a"b', b"a\nb", b"\xe9", b"a/b"])
def test_an_id_that_is_not_safe_is_replaced(given: bytes) -> None:
    assert NEW.fullmatch(id_of(given))


def test_the_log_says_whose_line_it_is(caplog: pytest.LogCaptureFixture, server: Served) -> None:
    text, text_handler = lines(TextFormat())
    objects, json_handler = lines(JsonFormat())
    log = logging.getLogger("ds4.server")
    log.setLevel(logging.INFO)
    for handler in (text_handler, json_handler):
        log.addHandler(handler)
    try:
        server.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]},
            headers={"Authorization": "Bearer secret", "X-Request-ID": "abc"},
        )  # fmt: skip
    finally:
        for handler in (text_handler, json_handler):
            log.removeHandler(handler)
    (line,) = [t for t in text.getvalue().splitlines() if "/v1/chat/completions" in t]
    assert line.endswith(" [abc]")
    (found,) = [json.loads(t) for t in objects.getvalue().splitlines() if "/v1/chat/completions" in t]
    assert found["request_id"] == "abc" and found["level"] == "info" and found["time"].endswith("+00:00")


def test_the_devices_thread_too(caplog: pytest.LogCaptureFixture) -> None:
    """An error there is told with the id, and one line of JSON holds its trace."""
    objects, handler = lines(JsonFormat())
    log = logging.getLogger("ds4.server")
    log.addHandler(handler)

    def fail(i: int) -> None:
        raise ZeroDivisionError("odd")

    try:
        with serve(StandIn(ids_of("ok"), before_token=fail)) as server:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            assert server.post("/v1/chat/completions", body, headers={"X-Request-ID": "xyz"}).status_code == 500
    finally:
        log.removeHandler(handler)
    (found,) = [t for t in map(json.loads, objects.getvalue().splitlines()) if t["message"] == "a request failed"][:1]
    assert found["request_id"] == "xyz" and "ZeroDivisionError: odd" in found["error"]


def test_a_message_of_several_lines_is_one_json_line() -> None:
    record = logging.LogRecord("ds4", logging.ERROR, "", 0, "a\nb %s", ("\u2028",), None)
    told = JsonFormat().format(record)
    assert "\n" not in told and json.loads(told)["message"] == "a\nb \u2028" and "request_id" not in told
    assert request_id.get() is None
    assert TextFormat().format(record).count("[") == 0
