"""Forced calls: which answers the grammar lets through, and which schemas are refused by their keyword."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ds4.constrain import Calls, Compiled, Compiler, read_format
from ds4.errors import RequestError
from ds4.model.tokenizer import DSML, Tokenizer
from ds4.model.tools import render_calls
from tests.constrain.conftest import M, block, function, invoke, parameter

Fits = Callable[[Compiled | None, str], bool]
WEATHER = function(
    "wx",
    {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F", 7]},
        "place": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^a"}, {"$ref": "#/$defs/at"}]},
    },
    ["city"],
    **{"$defs": {"at": {"type": "object", "properties": {"lat": {"type": "number"}}, "additionalProperties": False}}},
)
PING: dict[str, Any] = {"type": "function", "function": {"name": "ping"}}
FREE = {"type": "function", "namespace": "ns", "function": {"name": "any", "parameters": {"type": "object"}}}
ROME = parameter("city", "Rome")


@pytest.mark.parametrize(
    "text",
    [
        block(invoke("wx", parameter("city", '</x> \n"é" a </'))),
        block(invoke("wx", parameter("city", ""), parameter("days", "3", False), parameter("unit", "C"))),
        block(invoke("wx", ROME, parameter("unit", "7", False), parameter("place", '{"lat": 1.5}', False))),
        block(invoke("wx", ROME, parameter("place", "abc"))),
        block(invoke("wx", ROME, parameter("place", "null", False))),
        block(invoke("ping")),
        block(invoke("ns::any")),
        block(invoke("ns::any", parameter("it is", "[1, 2]", False))),
        block(invoke("ping"), invoke("wx", ROME), invoke("ping")),
    ],
)
def test_calls_that_keep_to_their_schemas(tokenizer: Tokenizer, compiler: Compiler, fits: Fits, text: str) -> None:
    assert fits(compiler.compile(tokenizer, calls=Calls([WEATHER, PING, FREE])), text)


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        block(),
        block(invoke("pong")),
        block(invoke("wx")),  # city is required
        block(invoke("wx", parameter("city", "1", False))),
        block(invoke("wx", parameter("days", "3", False), ROME)),  # not in the declared order
        block(invoke("wx", ROME, ROME)),
        block(invoke("wx", ROME, parameter("days", "0", False))),
        block(invoke("wx", ROME, parameter("days", "3"))),
        block(invoke("wx", ROME, parameter("unit", "K"))),
        block(invoke("wx", ROME, parameter("place", "bcd"))),
        block(invoke("wx", ROME, parameter("place", '{"lat":1.5}', False))),  # not the prompt's spaces
        block(invoke("wx", ROME, parameter("when", "now"))),
        block(invoke("ns::any", parameter("a", "1"), parameter("b", "2"))),
        block(invoke("ping")) + "\nmore",
        block(invoke("ping"))[2:],
        block(invoke("ping")).replace(M, DSML),  # the marker's spelling
        block(invoke("ping")) + block(invoke("ping")),
    ],
)
def test_calls_that_do_not(tokenizer: Tokenizer, compiler: Compiler, fits: Fits, text: str) -> None:
    assert not fits(compiler.compile(tokenizer, calls=Calls([WEATHER, PING, FREE])), text)


def test_how_many_and_which(tokenizer: Tokenizer, compiler: Compiler, fits: Fits) -> None:
    twice, once = block(invoke("ping"), invoke("ping")), block(invoke("ping"))
    other = block(invoke("wx", ROME))
    one = compiler.compile(tokenizer, calls=Calls([WEATHER, PING], one=True))
    assert fits(one, once) and fits(one, other) and not fits(one, twice)
    named = compiler.compile(tokenizer, calls=Calls([WEATHER, PING], name="ping"))
    assert fits(named, once) and not fits(named, other) and not fits(named, twice)
    spaced = compiler.compile(tokenizer, calls=Calls([FREE, PING], name="ns::any"))
    assert fits(spaced, block(invoke("ns::any"))) and not fits(spaced, once)
    with pytest.raises(RequestError, match="'pong' is not among them"):
        compiler.compile(tokenizer, calls=Calls([PING], name="pong"))


def test_a_call_or_content(tokenizer: Tokenizer, compiler: Compiler, fits: Fits) -> None:
    content = read_format({"type": "json_object"}, "response_format")
    either = compiler.compile(tokenizer, content=content, calls=Calls([PING]), forced=False)
    call = block(invoke("ping"))
    assert fits(either, '{"a": 1}') and fits(either, call) and not fits(either, "Hello")
    assert not fits(either, '{"a": 1}' + call)
    forced = compiler.compile(tokenizer, content=content, calls=Calls([PING]))
    assert fits(forced, call) and not fits(forced, '{"a": 1}')


def test_a_tool_that_need_not_be_called_may_have_any_schema(
    tokenizer: Tokenizer, compiler: Compiler, fits: Fits
) -> None:
    """Beside a format: what cannot be held of it is not, but for its parameters' names, each once."""
    odd = function("odd", {"a": {"not": {"type": "string"}}, "b": {}}, ["a"], anyOf=[{"required": ["b"]}])
    worse: dict[str, Any] = {"type": "function", "function": {"name": "worse", "parameters": {"properties": 7}}}
    content = read_format({"type": "json_object"}, "response_format")
    with pytest.raises(RequestError, match="'not' at #/properties/a"):
        compiler.compile(tokenizer, calls=Calls([odd]))
    made = compiler.compile(tokenizer, content=content, calls=Calls([odd, WEATHER, worse]), forced=False)
    assert fits(made, block(invoke("odd", parameter("a", "x"), parameter("b", "[1]", False)))) and fits(made, "{}")
    assert fits(made, block(invoke("odd", parameter("a", "1", False)))) and not fits(made, block(invoke("odd")))
    assert not fits(made, block(invoke("odd", parameter("a", "1"), parameter("a", "2"))))
    assert not fits(made, block(invoke("wx", parameter("city", "1", False))))  # the others are held as ever
    assert fits(made, block(invoke("worse", parameter("any", "1"))))


STRINGS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é\n", "a</"], ["a", "abcd", "", "ab</"]),
    ({"type": "string", "pattern": "b+$"}, ["b", "x\nabb"], ["ba", ""]),
    ({"type": "string", "pattern": r"^\d{2}|^x/y$"}, ["12", "12 and more", "x/y"], ["1", "x/yz", "ax/y"]),
    ({"type": "string", "pattern": "[|^$]"}, ["a|b", "$"], ["ab"]),
    ({"const": "a b"}, ["a b"], ["a", "a b "]),
    ({"enum": ['"', "</", "ab", "abc"]}, ['"', "</", "ab", "abc"], ["", "abcd"]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-2-29", "2024-02-32"]),
    ({"type": "string", "format": "uuid"}, ["12345678-1234-1234-1234-123456789abc"], ["12345678"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T01:02:03Z"], ["2024-02-29"]),
    ({"type": "string", "format": "email"}, ["a.b@c.de"], ["a@", "@b"]),
    ({"type": "string", "format": "ipv6"}, ["::1", "1::", "a:b::c", "1:2:3:4:5:6:7:8"], [":1", "1::2::3"]),
    ({"type": "string", "format": "duration"}, ["P1D", "PT1H30M", "P2W"], ["P", "1D"]),
    ({"type": "string", "format": "telephone"}, ["anything"], []),
    ({"allOf": [{"type": "string", "minLength": 2}, {"pattern": "^a"}]}, ["ab"], ["a", "bb"]),
    ({"anyOf": [{"const": "x"}, {"type": "string", "minLength": 4}]}, ["x", "long"], ["y"]),
    ({"$ref": "#/$defs/short"}, ["ab"], ["abc"]),
    ({"$ref": "#/properties/other", "minLength": 1}, ["z"], ["", "zz"]),
    ({"type": ["string", "integer"], "maxLength": 1}, ["a"], ["ab"]),
    ({}, ["anything at all"], []),
]


@pytest.mark.parametrize(("schema", "good", "bad"), STRINGS, ids=[json.dumps(s)[:50] for s, _, _ in STRINGS])
def test_raw_strings_are_held_to_their_schema(
    tokenizer: Tokenizer, compiler: Compiler, fits: Fits, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    shared: dict[str, Any] = {"$defs": {"short": {"type": "string", "maxLength": 2}}}
    tool = function("f", {"v": schema, "other": {"type": "string", "maxLength": 1}}, ["v"], **shared)
    made = compiler.compile(tokenizer, calls=Calls([tool]))
    for value in good:
        assert fits(made, block(invoke("f", parameter("v", value)))), value
    for value in bad:
        assert not fits(made, block(invoke("f", parameter("v", value)))), value


@pytest.mark.parametrize(
    ("parameters", "keyword", "place"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "not", "#/properties/a"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems", "#/prop"),
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "anyOf", "#"),
        ({"type": "object", "minProperties": 1}, "minProperties", "#"),
        ({"type": "string"}, "type", "#"),
        ({"type": "object", "properties": {'a"b': {}}}, "properties", "#/properties/a"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required", "#"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "a$b"}}}, "pattern", "#/properties/a"),
        (
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}},
            "pattern",
            "#/properties/a",
        ),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}}, "$ref", "#/properties/a"),
        ({"$ref": "#"}, "$ref", "#"),
        ({"type": "object", "properties": {"a": {"multipleOf": 123457}}}, "multipleOf", "#/properties/a"),
    ],
)
def test_what_cannot_be_held_is_named(
    tokenizer: Tokenizer, compiler: Compiler, parameters: dict[str, Any], keyword: str, place: str
) -> None:
    tools = [PING, {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(RequestError) as caught:
        compiler.compile(tokenizer, calls=Calls(tools))
    assert caught.value.param == "tools[1].function.parameters"
    assert str(caught.value).startswith(f"tools[1].function.parameters: {keyword!r} at {place}"), caught.value
    compiler.compile(tokenizer, calls=Calls(tools, name="ping"))  # what is not called is not looked at


def test_calls_as_the_prompt_has_them_are_let_through(
    tokenizer: Tokenizer, compiler: Compiler, ids: Callable[[str], list[int]]
) -> None:
    """The grammar and the renderer of earlier calls agree on every space."""
    arguments = {"city": 'L\'Aquila "x"', "days": 2, "unit": "F", "place": {"lat": -0.5}}
    made = compiler.compile(tokenizer, calls=Calls([WEATHER, PING]))
    assert made is not None
    calls = [{"function": {"name": "wx", "arguments": arguments}}, {"function": {"name": "ping", "arguments": "{}"}}]
    answer = tokenizer.encode_segments(["\n\n", *render_calls(calls)])
    assert made.start().valid(answer) == len(answer) and answer[:1] == ids("\n\n")[:1]


def test_a_vocabulary_without_the_marker_can_call_nothing(compiler: Compiler) -> None:
    from tests.server.standin import tokenizer_of

    toy = tokenizer_of([bytes([i]) for i in range(256)])
    toy.added.pop(DSML)
    with pytest.raises(RequestError, match="so no call can be forced"):
        compiler.compile(toy, calls=Calls([PING]))
