"""Any JSON is read by every API, or refused by name: no other exception, whatever stands where."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4.errors import RequestError
from ds4.server.fields import Fields
from ds4.server.messages import ask_messages, count_tokens
from ds4.server.request import Limits
from ds4.server.responses import ask_response
from ds4.server.responses_store import ResponseStore
from ds4.server.text_routes import apply_template, detokenize, tokenize
from tests.server.standin import StandIn, StandInConfig

KEYS = (
    "role", "content", "type", "text", "thinking", "tool_use_id", "id", "name", "input", "is_error", "effort",
    "format", "call_id", "arguments", "output", "namespace", "tools", "parameters", "input_schema",
    "budget_tokens", "schema",
)  # fmt: skip
TYPES = (
    "text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "input_text", "output_text",
    "refusal", "reasoning_text", "function", "namespace", "custom", "any", "tool", "auto", "json_schema",
    "enabled", "function_call", "function_call_output", "reasoning", "message", "item_reference", "user",
    "assistant", "system", "required", "none",
)  # fmt: skip
NAMES = (
    "system", "instructions", "tools", "tool_choice", "thinking", "output_config", "output_format", "reasoning",
    "text", "metadata", "include", "store", "previous_response_id", "max_tokens", "max_output_tokens",
    "stop_sequences", "stream", "temperature", "top_logprobs", "parallel_tool_calls", "model", "grammar", "think",
    "user",
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers(-2, 300) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES |= st.sampled_from(TYPES) | st.text(max_size=3) | st.just("\ud800")
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
BLOCK = st.fixed_dictionaries({"type": st.sampled_from(TYPES)}, optional={k: JSON for k in KEYS if k != "type"})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool"])},
    optional={"content": JSON | st.lists(BLOCK, max_size=3), "type": st.just("message"), "id": JSON},
)
FIELDS = st.dictionaries(st.sampled_from(NAMES), JSON | st.lists(BLOCK, max_size=2), max_size=3)
ENGINE, LIMITS, STORE = StandIn(config=StandInConfig(500)), Limits(), ResponseStore()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(FIELDS, st.lists(MESSAGE | BLOCK, min_size=1, max_size=3), JSON)
def test_any_body_is_read_or_refused(fields: dict[str, Any], messages: list[Any], value: Any) -> None:
    chat, items = {"messages": messages} | fields, {"input": messages} | fields
    items.pop("previous_response_id", None)  # of strings it is a 404
    reads: list[tuple[Any, dict[str, Any]]] = [
        (ask_messages, chat), (count_tokens, chat), (lambda f, e, n: ask_response(f, e, n, STORE).asked, items),
        (apply_template, chat), (tokenize, {"content": value}), (detokenize, {"tokens": value}),
    ]  # fmt: skip
    for read, body in reads:
        try:
            asked = read(Fields(body), ENGINE, LIMITS)
        except RequestError as e:
            assert str(e)
            continue
        if not isinstance(asked, dict):
            g = asked.generation
            assert g.prompt_ids and g.max_tokens >= 1 and len(g.prompt_ids) + g.max_tokens <= 500
            assert asked.logged["messages"]
