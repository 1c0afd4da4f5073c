"""Who comes in: keys in two headers and in a file, browsers of another origin, questions without a key."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ds4.cli.serve import parse, set_oom_score
from ds4.errors import UsageError
from tests.server.standin import ADMIN_KEY, StandIn, ids_of, serve

CHAT = "/v1/chat/completions"
ORIGIN = "https://chat.example.org"


def test_both_headers_open_and_nothing_else() -> None:
    with serve(StandIn(ids_of("ok")), api_key="secret") as server:
        for headers, status in (
            ({"x-api-key": "secret"}, 200), ({"Authorization": "Bearer secret"}, 200),
            ({"x-api-key": "secret", "Authorization": "Bearer other"}, 200), ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401), ({"Authorization": "Basic secret"}, 401), ({}, 401),
        ):  # fmt: skip
            answer = server.get("/v1/models", headers=headers)
            assert answer.status_code == status, headers
            if status == 401:
                error = answer.json()["error"]
                assert error["code"] == "invalid_api_key" and "x-api-key" in error["message"]
                assert "secret" not in answer.text


def test_orders_have_one_way_in() -> None:
    with serve(StandIn(ids_of("ok")), api_key="secret") as server:
        assert server.post("/admin/reload", b"", headers={"x-api-key": ADMIN_KEY}).status_code == 401
        assert server.post("/admin/reload", b"", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).status_code == 200


def options(server_url: str, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    import httpx

    answer = httpx.options(server_url + path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    return answer.status_code, dict(answer.headers)


def test_options_needs_no_key_and_opens_nothing() -> None:
    engine = StandIn(ids_of("ok"))
    with serve(engine, api_key="secret") as server:
        for path in (CHAT, "/v1/models", "/admin/reload"):
            status, headers = options(server.url, path, Origin=ORIGIN, Access_Control_Request_Method="POST")
            assert status == 405 and not [h for h in headers if h.startswith("access-control")]
        assert engine.prompts == []


@pytest.mark.parametrize("cors", [ORIGIN, "*"])
def test_pages_of_an_origin_that_was_given(cors: str) -> None:
    asked = {"Origin": ORIGIN, "Access_Control_Request_Method": "POST"}
    with serve(StandIn(ids_of("ok")), api_key="secret", cors=cors) as server:
        status, headers = options(server.url, CHAT, **asked)
        assert status == 204 and headers["access-control-allow-origin"] == cors
        assert "authorization" in headers["access-control-allow-headers"]
        answer = server.get("/v1/models", headers={"Origin": ORIGIN})  # the page can read why it was refused
        assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == cors
        assert "access-control-allow-origin" not in server.get("/health").headers
        status, headers = options(server.url, "/admin/reload", **asked)
        assert status == 405 and "access-control-allow-origin" not in headers


def test_pages_of_another_origin() -> None:
    with serve(StandIn(ids_of("ok")), cors=ORIGIN) as server:
        asked = {"Origin": "https://evil.example", "Access_Control_Request_Method": "POST"}
        _, headers = options(server.url, CHAT, **asked)
        answer = server.get("/v1/models", headers={"Origin": "https://evil.example"})
        for found in (headers, answer.headers):
            assert "access-control-allow-origin" not in found and found["vary"] == "origin"


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_key_from_a_file(tmp_path: Path) -> None:
    given = key_file(tmp_path, "0123456789abcdef\n")
    args = parse(["-m", "x.gguf", "--host", "0.0.0.0", "--api-key-file", given])
    assert args.api_key == "0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "mode", "flags", "said"),
    [
        ("0123456789abcdef", 0o640, [], "others may use this key"),
        ("0123456789abcdef", 0o604, [], "others may use this key"),
        ("short", 0o600, [], "at least 16"),
        ("two words of text", 0o600, [], "holds no key"),
        ("0123456789abcdef", 0o600, ["--api-key", "k"], "two ways to give one key"),
    ],
)
def test_a_key_file_that_is_refused(tmp_path: Path, text: str, mode: int, flags: list[str], said: str) -> None:
    given = key_file(tmp_path, text, mode)
    with pytest.raises(UsageError, match=said) as told:
        parse(["-m", "x.gguf", "--api-key-file", given, *flags])
    assert text not in str(told.value)


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the API key cannot be read"):
        parse(["-m", "x.gguf", "--api-key-file", str(tmp_path / "none")])


@pytest.mark.parametrize(
    "flags",
    [
        ["--cors", "chat.example.org"], ["--cors", "https://a.example/path"], ["--cors", "https://a, https://b"],
        ["--stall-seconds", "0"], ["--oom-score-adj", "1001"],
    ],
)  # fmt: skip
def test_flags_that_are_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError, match=flags[0]):
        parse(["-m", "x.gguf", *flags])


def test_a_score_that_the_kernel_does_not_take_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def denied(self: Path, text: str) -> int:
        written.append((str(self), text))
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", denied)
    with caplog.at_level(logging.WARNING, "ds4.server"):
        set_oom_score(-900)
    assert written == [("/proc/self/oom_score_adj", "-900")]
    assert "cannot be set: Permission denied" in caplog.text
