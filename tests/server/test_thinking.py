"""Thinking under every name: whether, how hard, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from ds4.errors import RequestError
from ds4.model.tokenizer import ASSISTANT, END_THINK, THINK
from ds4.server.fields import Fields
from ds4.server.thinking import Thinking, thinking_of
from tests.server.standin import TOKENIZER, StandIn, events, ids_of, joined, serve

OFF = Thinking(False)
SAID: list[tuple[dict[str, Any], Thinking]] = [
    ({}, OFF),
    (dict.fromkeys(("thinking", "think", "enable_thinking", "reasoning_effort", "chat_template_kwargs")), OFF),
    ({"thinking": True}, Thinking(True)),
    ({"thinking": {"type": "enabled"}}, Thinking(True)),
    ({"thinking": {"type": "adaptive"}}, Thinking(True)),
    ({"thinking": {"type": "disabled"}}, OFF),
    ({"enable_thinking": True}, Thinking(True)),
    ({"think": True}, Thinking(True)),
    ({"think": False}, OFF),
    ({"think": "high"}, Thinking(True, "high")),
    ({"think": "medium"}, Thinking(True, 62)),
    ({"think": "none"}, OFF),
    ({"reasoning_effort": "none"}, OFF),
    ({"reasoning_effort": "minimal"}, Thinking(True, 25)),
    ({"reasoning_effort": "low"}, Thinking(True, "low")),
    ({"reasoning_effort": "medium"}, Thinking(True, 62)),
    ({"reasoning_effort": "xhigh"}, Thinking(True, 87)),
    ({"reasoning_effort": "max"}, Thinking(True, "max")),
    ({"reasoning_effort": 1}, Thinking(True, 1)),
    ({"reasoning_effort": 100, "thinking": False}, Thinking(False, 100)),
    ({"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"}}, Thinking(True, "low")),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, Thinking(True, None, 9)),
    ({"think": True, "thinking_budget": 0}, Thinking(True, None, 0)),
    ({"reasoning_effort": "low", "max_thinking_tokens": 9, "thinking_budget": 9}, Thinking(True, "low", 9)),
    ({"model": "m:thinking"}, Thinking(True)),
    ({"model": "m:no-thinking"}, OFF),
    ({"model": "m:none"}, OFF),
    ({"model": "m:low"}, Thinking(True, "low")),
    ({"model": "m:xhigh"}, Thinking(True, 87)),
    ({"model": "a/b:c:37"}, Thinking(True, 37)),
    ({"model": "m:no-thinking", "thinking": True}, Thinking(True)),  # a field is stronger
    ({"model": "m:max", "reasoning_effort": "none"}, OFF),
    *(({"model": m}, OFF) for m in ("m", "m-thinking", "m:", "m:0", "m:101", "m:70b", "thinking", "m:\u0663")),
]  # fmt: skip
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"think": 1}, "think"),
    ({"think": "hard"}, "think"),
    ({"think": {"type": "enabled"}}, "think"),
    ({"enable_thinking": "yes"}, "enable_thinking"),
    ({"thinking": {"type": "between_tools"}}, "thinking"),
    ({"thinking": {}}, "thinking"),
    ({"thinking": True, "think": False}, "thinking"),
    ({"think": "low", "reasoning_effort": "high"}, "reasoning_effort"),
    ({"reasoning_effort": 101}, "reasoning_effort"),
    ({"reasoning_effort": ""}, "reasoning_effort"),
    ({"reasoning_effort": ["low"]}, "reasoning_effort"),
    ({"thinking_budget": -1}, "thinking_budget"),
    ({"max_thinking_tokens": True}, "max_thinking_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1.5}}, "thinking.budget_tokens"),
    ({"thinking_budget": 1, "max_thinking_tokens": 2}, "thinking.budget_tokens"),
    ({"chat_template_kwargs": {"tone": "warm"}}, "chat_template_kwargs.tone"),
]


@pytest.mark.parametrize(("body", "meant"), SAID)
def test_what_is_meant(body: dict[str, Any], meant: Thinking) -> None:
    assert thinking_of(Fields(body)) == meant


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_what_means_nothing(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as e:
        thinking_of(Fields(body))
    assert e.value.param == param


def test_every_api_takes_a_name_with_a_suffix() -> None:
    """One model is listed, by its name alone, and its answers say that name."""
    hi = [{"role": "user", "content": "hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": hi}, "/v1/messages": {"messages": hi, "max_tokens": 99},
        "/v1/responses": {"input": "hi"},
    }  # fmt: skip
    with serve(StandIn(ids_of("Hm</think>ok"))) as server:
        for path, body in bodies.items():
            for suffix, mark in (("", END_THINK), (":thinking", THINK), (":37", THINK)):
                response = server.post(path, body | {"model": f"stand-in{suffix}"})
                assert response.status_code == 200 and response.json()["model"] == "stand-in"
                told = TOKENIZER.decode(server.engine.prompts[-1])
                assert told.endswith(ASSISTANT + mark) and ("Effort: 37" in told) == (suffix == ":37")
        assert [m["id"] for m in server.get("/v1/models").json()["data"]] == ["stand-in"]
        stream = events(server.chat("hi", think="low", stream=True))
        assert (joined(stream, "reasoning_content"), joined(stream)) == ("Hm", "ok")
