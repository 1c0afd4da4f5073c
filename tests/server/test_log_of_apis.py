"""Requests of every API in the log of requests: as chats that nights and corrections make the same prompts of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds4.posttrain.corrections import Correction
from ds4.posttrain.decisions import decision
from ds4.posttrain.log import days
from ds4.server.requests_log import RequestLog
from solvers.nightly.judge import prompt_ids
from tests.server.standin import TOKENIZER, StandIn, StandInConfig, ids_of, serve, until
from tests.server.test_shape import ASKED, FORMAT, JSON, PARAMETERS, PATHS
from tests.server.test_shape import TOOLS as SHAPED

CALLED = {"type": "tool_use", "id": "t", "name": "wx", "input": {"city": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "sunny"}]}
MESSAGES: Any = [
    {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "plan", "signature": "s"}, CALLED]},
    {"role": "user", "content": [RESULT, {"type": "text", "text": "Go on"}]},
]
ITEMS: Any = [
    {"role": "user", "content": "A"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "plan"}]},
    {"type": "function_call", "call_id": "t", "name": "wx", "arguments": '{"city": "x"}'},
    {"type": "function_call_output", "call_id": "t", "output": "sunny"},
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"system": "S", "messages": MESSAGES, "tools": SHAPED["messages"], "thinking": {"type": "enabled"}}),
    ("messages", {"messages": [*MESSAGES[:1], {"role": "assistant", "content": "Be"}]}),
    ("messages", {"tools": SHAPED["messages"], "tool_choice": {"type": "none"}}),
    ("responses", {"instructions": "S", "input": ITEMS, "tools": SHAPED["responses"], "reasoning_effort": "medium"}),
    ("responses", {"input": "x", "store": False, "model": "m:37"}),
    *((api, FORMAT[api]) for api in ("chat", "messages", "responses")),
    ("chat", {"messages": [{"role": "developer", "content": "S"}, {"role": "user", "content": "x"}]}),
    ("completions", {"prompt": "x"}),
]  # fmt: skip


def test_rows_make_the_prompts_of_their_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what waits for the disk is counted with what a request goes on with."""
    sizes: list[int] = []
    put = RequestLog.put
    monkeypatch.setattr(
        RequestLog, "put", lambda log, exchange, end: (sizes.append(exchange.size), put(log, exchange, end))
    )
    engine = StandIn(ids_of(JSON), config=StandInConfig(9000))
    ids = []
    with serve(engine, requests=RequestLog(tmp_path, 30)) as server:
        for api, fields in BODIES:
            response = server.post(PATHS[api], {**ASKED[api], **fields})
            assert response.status_code == 200, response.text
            ids.append(response.json()["id"])
        first = ids[3]
        more = {"input": "And?", "previous_response_id": first, "tools": SHAPED["responses"]}
        ids.append(server.post(PATHS["responses"], more).json()["id"])
        until(lambda: server.get("/health").json()["request_log"]["written"] == len(ids))
        told = server.get("/metrics").text
        for path in PATHS.values():
            assert f'ds4_http_responses_total{{method="POST",path="{path}",status="200"}}' in told
            assert f'ds4_requests_total{{end="stop",path="{path}"}}' in told
    (day,) = days(tmp_path).values()
    rows = [json.loads(line) for line in day.read_text("utf-8").splitlines()]
    assert [r["id"] for r in rows] == ids
    assert sizes[-1] > sizes[3] and len(json.dumps(more)) < sizes[3]
    assert [r["path"] for r in rows] == [PATHS[api] for api, _ in BODIES] + [PATHS["responses"]]
    for row, prompt in zip(rows, engine.prompts, strict=True):
        assert prompt_ids(row, engine) == prompt, row
        if "messages" in row:
            thought = "r" if row["thinking"] else None
            made = Correction(
                1, row["messages"], JSON, "Two.", row["thinking"], row["effort"], thought, tools=row.get("tools", ())
            )
            assert list(decision(made, TOKENIZER, 9000).prompt) == prompt
    assert rows[0]["messages"][2]["reasoning_content"] == "plan" and rows[0]["effort"] == 75
    assert rows[0]["tools"][0]["function"]["parameters"] == PARAMETERS
    assert (rows[4]["effort"], rows[3]["effort"]) == (37, 62)
    assert [m["role"] for m in rows[-1]["messages"]] == ["user", "assistant", "tool", "assistant", "user"]
