"""Whatever may be drawn under a mask is right: random walks over allowed tokens, read by the readers of answers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ds4.constrain import Calls, Compiled, Compiler, read_format
from ds4.model.call_stream import Begun, Broken, CallParser, Ended, Grown, Said
from ds4.model.tokenizer import DSML, EOS, Tokenizer
from tests.constrain.conftest import M, function

TOOLS = [
    function(
        "plan",
        {
            "title": {"type": "string", "maxLength": 6},
            "steps": {"type": "array", "items": {"enum": ["go", "stop", 3, None]}, "maxItems": 3},
            "when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
            "deep": {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False},
            "count": {"type": "integer", "minimum": -3, "maximum": 12},
        },
        ["title", "count"],
    ),
    {"type": "function", "namespace": "ns", "function": {"name": "ping"}},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5}, "kind": {"enum": ["a", "b\n", "é"]},
        "pairs": {"type": "array", "items": {"type": "array", "prefixItems": [{"type": "integer", "maximum": 9},
                  {"const": None}], "items": False, "minItems": 2}, "maxItems": 2},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "pairs", "next"], "additionalProperties": False,
}  # fmt: skip


def walk(tokenizer: Tokenizer, made: Compiled, seed: int) -> list[int]:
    """Tokens of one answer, without its end: each one of those allowed, short ones more often."""
    rng, state = np.random.default_rng(seed), made.start()
    end, text = tokenizer.special_id(EOS), []
    lengths = np.array([max(1, len(tokenizer.token_bytes(i))) for i in range(tokenizer.vocab_size)])
    while len(text) < 4000:
        row = state.rows([])
        assert row is not None
        allowed = np.flatnonzero(np.unpackbits(row[0].view(np.uint8), bitorder="little"))
        assert len(allowed) and allowed[-1] < tokenizer.vocab_size
        if end in allowed and rng.random() < 0.5:
            return text
        weight = 1.0 / lengths[allowed] ** 2
        token = int(rng.choice(allowed, p=weight / weight.sum()))
        state.advance(token)
        if token == end:
            return text
        text.append(token)
    raise AssertionError("no end")


@pytest.mark.parametrize("one", [False, True])
def test_forced_calls_are_read_back_and_keep_to_their_schemas(
    tokenizer: Tokenizer, compiler: Compiler, one: bool
) -> None:
    made = compiler.compile(tokenizer, calls=Calls(TOOLS, one=one))
    assert made is not None
    marker, seen = tokenizer.special_id(DSML), set()
    for seed in range(25):
        ids = walk(tokenizer, made, seed)
        parser = CallParser()
        raw = b"".join(M.encode("utf-8", "surrogatepass") if i == marker else tokenizer.token_bytes(i) for i in ids)
        events = [*parser.push(raw.decode("utf-8", "surrogatepass")), *parser.finish()]
        assert not parser.malformed and not any(isinstance(e, (Said, Broken)) for e in events), raw
        names = [e.name for e in events if isinstance(e, Begun)]
        assert len(names) == sum(isinstance(e, Ended) for e in events) >= 1 and (len(names) == 1 or not one)
        for i, name in enumerate(names):
            arguments = json.loads("".join(e.text for e in events if isinstance(e, Grown) and e.index == i))
            check_plan(arguments) if name == "plan" else check_ping(name, arguments)
            seen |= {name, *arguments}
    assert seen == {"plan", "ns::ping", "title", "steps", "when", "deep", "count"}


def check_ping(name: str, arguments: dict[str, Any]) -> None:
    assert name == "ns::ping" and arguments == {}


def check_plan(arguments: dict[str, Any]) -> None:
    assert {"title", "count"} <= set(arguments) <= {"title", "count", "steps", "when", "deep"}
    assert len(arguments["title"]) <= 6 and -3 <= arguments["count"] <= 12
    steps = arguments.get("steps", [])
    assert len(steps) <= 3 and all(s in ("go", "stop", 3, None) for s in steps)
    when = arguments.get("when")
    assert when is None or (len(when) == 10 and when[4] == when[7] == "-")
    assert arguments.get("deep", {}) in ({}, {"a": True}, {"a": False})


def test_values_of_a_schema(tokenizer: Tokenizer, compiler: Compiler) -> None:
    def check(value: Any) -> int:
        assert set(value) <= set(SCHEMA["properties"]) and {"name", "pairs", "next"} <= set(value)  # type: ignore[call-overload]
        assert len(value["name"]) <= 5 and value.get("kind", "a") in ("a", "b\n", "é")
        assert all(a <= 9 and isinstance(a, int) and b is None for a, b in value["pairs"])
        return 1 + (check(value["next"]) if value["next"] is not None else 0)

    content = read_format({"type": "json_schema", "schema": SCHEMA}, "f")
    made = compiler.compile(tokenizer, content=content)
    assert made is not None
    depths = {check(json.loads(tokenizer.decode(walk(tokenizer, made, seed)))) for seed in range(40)}
    assert max(depths) > 1


def test_any_object(tokenizer: Tokenizer, compiler: Compiler) -> None:
    made = compiler.compile(tokenizer, content=read_format({"type": "json_object"}, "f"))
    assert made is not None
    for seed in range(8):
        assert isinstance(json.loads(tokenizer.decode(walk(tokenizer, made, seed))), dict)
