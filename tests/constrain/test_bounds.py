"""Schemas that grow without measure, or that no answer could ever end, are refused before they are compiled."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from ds4.constrain import Calls, Compiled, Compiler, read_format, read_grammar
from ds4.constrain.bounds import MOST_NESTED, MOST_SCHEMAS, bounded
from ds4.constrain.calls import MOST_GROWN
from ds4.constrain.schema import SchemaFault, fault_of
from ds4.errors import RequestError
from ds4.model.tokenizer import Tokenizer
from tests.constrain.conftest import block, function, invoke, parameter
from tests.constrain.test_compiler import Fits, asked


def levels(n: int, level: Any, leaf: Any = None) -> dict[str, Any]:
    """`$defs` a0 to a`n`, each made by `level` of a reference to the one before and its number."""
    defs = {f"a{i}": level({"$ref": f"#/$defs/a{i - 1}"}, i) for i in range(1, n + 1)}
    return {"$ref": f"#/$defs/a{n}", "$defs": {"a0": leaf or {"type": "integer"}, **defs}}


def pair(ref: Any, _: int) -> dict[str, Any]:
    return {"type": "array", "prefixItems": [ref, ref], "minItems": 2, "items": False}


def beside(ref: Any, _: int) -> dict[str, Any]:
    return pair({**ref, "minItems": 1}, 0)


def alternatives(ref: Any, i: int) -> dict[str, Any]:
    return {"anyOf": [ref, {"allOf": [ref, {"minimum": i}]}]}


def objects(ref: Any, i: int) -> dict[str, Any]:
    return {"anyOf": [ref, ref], "properties": {f"p{i}": {"type": "integer"}}}


def both(n: int) -> dict[str, Any]:
    """Two references to pairs, by different names, at once: what they contain is combined all the way down."""
    one = levels(n, pair)["$defs"]
    other = {f"b{k}": v for k, v in levels(n, lambda _, i: pair({"$ref": f"#/$defs/ba{i - 1}"}, i))["$defs"].items()}
    return {"allOf": [{"$ref": f"#/$defs/a{n}"}, {"$ref": f"#/$defs/ba{n}"}], "$defs": {**one, **other}}


def test_references_that_stand_alone_do_not_grow(tokenizer: Tokenizer, compiler: Compiler, fits: Fits) -> None:
    """2^39 leaves in 39 rules."""
    schema = levels(39, pair)
    assert bounded(schema) == schema
    assert compiler.compile(tokenizer, content=read_format(asked(schema), "rf")) is not None
    made = compiler.compile(tokenizer, content=read_format(asked(levels(2, pair)), "rf"))
    assert fits(made, "[[1, 2], [3, 4]]") and not fits(made, "[[1, 2], [3]]")


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        (levels(39, beside), "#/$defs/a12"),
        (levels(19, alternatives), "#/$defs/a13/anyOf/1"),
        (levels(39, objects), "#/$defs/a"),
        (both(39), "#"),
        (levels(19, lambda ref, _: {"allOf": [ref, ref]}, {"type": "string", "pattern": "a+b"}), "#/$defs/a13"),
    ],
)
def test_what_would_be_written_out_is_refused(
    tokenizer: Tokenizer, compiler: Compiler, schema: Any, where: str
) -> None:
    """Compiling these takes seconds to hours; saying so, a fraction of one."""
    began = time.monotonic()
    with pytest.raises(RequestError, match=f"are more than {MOST_SCHEMAS} schemas") as caught:
        read_format(asked(schema), "rf")
    assert f"rf.json_schema.schema: '$ref' at {where}" in str(caught.value) and caught.value.param
    with pytest.raises(RequestError, match=f"tools.*parameters: .* are more than {MOST_SCHEMAS} schemas"):
        tool = function("f", {"v": {"$ref": schema.get("$ref", "#/$defs/a39")}}, **{"$defs": schema["$defs"]})
        tool["function"]["parameters"]["properties"]["v"] = {k: v for k, v in schema.items() if k != "$defs"}  # type: ignore[index]
        compiler.compile(tokenizer, calls=Calls([tool]))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("schema", [levels(11, beside), levels(11, alternatives), both(12)])
def test_what_is_within_the_limit_compiles(tokenizer: Tokenizer, compiler: Compiler, schema: Any) -> None:
    assert compiler.compile(tokenizer, content=read_format(asked(schema), "rf")) is not None


def test_a_long_chain_of_combined_references(tokenizer: Tokenizer) -> None:
    def longer(ref: Any, i: int) -> dict[str, Any]:
        return {"allOf": [ref, {"minimum": i}]}

    assert bounded(levels(MOST_NESTED // 3, longer))
    chain = levels(5 * MOST_NESTED, longer)
    chain["$defs"] = dict(reversed(chain["$defs"].items()))
    with pytest.raises(SchemaFault, match=f"more than {MOST_NESTED} references"):
        bounded(chain)


A = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (
            {"$defs": {"a": {"type": "object", "properties": {"x": A}, "required": ["x"]}}, **A},
            "'required' at #/$defs/a",
        ),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "'minItems' at #"),
        ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2}, "'minItems' at #"),
        ({"type": ["array", "object"], "items": {"$ref": "#"}, "minItems": 1, "required": ["a"],
          "additionalProperties": {"$ref": "#"}}, "'minItems' at #"),
        ({"properties": {"b": A}, "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/c"}, "minItems": 1},
                                            "c": {"anyOf": [A, {"$ref": "#/$defs/c"}]}}}, "'minItems' at #/$defs/a"),
        ({**A, "$defs": {"a": {"$anchor": "n", "type": "array", "items": {"$ref": "#n"}, "minItems": 1}}},
         "'minItems' at #/"),
        ({**A, "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": A}}, "'$ref' at #: it leads to no value"),
    ],
)  # fmt: skip
def test_values_without_an_end_are_refused(schema: Any, says: str) -> None:
    with pytest.raises(RequestError, match="it leads to no value") as caught:
        read_format(asked(schema), "rf")
    assert f"rf.json_schema.schema: {says}" in str(caught.value)
    with pytest.raises(RequestError, match="it leads to no value"):
        read_grammar(f"start: %json {json.dumps(schema)}")


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]"),
        ({"$defs": {"a": {"type": "object", "properties": {"x": A}}}, **A}, '{"x": {"x": {}}}'),
        ({"$defs": {"a": {"type": "object", "properties": {"x": {"anyOf": [A, {"type": "null"}]}},
                       "required": ["x"]}},
          **A}, '{"x": {"x": null}}'),
        ({"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1}, "[[null]]"),
        ({"type": "integer", "$defs": {"a": A}}, "7"),  # nothing leads there
    ],
)  # fmt: skip
def test_values_that_may_end_are_not(
    tokenizer: Tokenizer, compiler: Compiler, fits: Fits, schema: Any, value: str
) -> None:
    assert fits(compiler.compile(tokenizer, content=read_format(asked(schema), "rf")), value)


def test_a_call_whose_parameter_never_ends(tokenizer: Tokenizer, compiler: Compiler, fits: Fits) -> None:
    endless = {"type": "array", "items": {"$ref": "#/properties/v"}, "minItems": 1}
    with pytest.raises(RequestError, match="parameters: 'minItems' at #/properties/v: it leads to no value"):
        compiler.compile(tokenizer, calls=Calls([function("f", {"v": endless})]))
    made: Compiled | None = compiler.compile(
        tokenizer, calls=Calls([function("f", {"v": {**endless, "minItems": 0}})])
    )
    assert fits(made, block(invoke("f", parameter("v", "[[]]", False))))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (
            {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
            "'minimum' at #: minimum and maximum are held",
        ),
        ({"items": {"type": "number", "maximum": 1e19}}, "'maximum' at #/items: minimum and maximum are held"),
        (
            {"type": "integer", "minimum": 10**19},
            "'minimum' at #: minimum and maximum are held between -2^63 and 2^63",
        ),
        (
            {"oneOf": [{"type": "string"}, {"type": "string"}]},
            "'oneOf' at #: its alternatives do not plainly exclude",
        ),
    ],
)
def test_words_are_about_the_request(tokenizer: Tokenizer, compiler: Compiler, schema: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(tokenizer, content=read_format(asked(schema), "rf"))
    assert f"schema: {says}" in str(caught.value)
    assert "coerce" not in str(caught.value) and "Some(" not in str(caught.value)


def test_a_compiler_that_gives_up_is_put_into_words() -> None:
    fault = fault_of(
        "panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10", {"items": {"anyOf": []}}
    )
    assert str(fault) == "'anyOf' at #/items: the grammar that the schema makes is too large to be compiled"


def test_tools_are_counted_together(tokenizer: Tokenizer, compiler: Compiler) -> None:
    """Each alone is within the limit; compiling all of them is not."""
    own = levels(10, beside)
    tools = [function(f"f{i}", {"v": {"$ref": own["$ref"]}}, **{"$defs": own["$defs"]}) for i in range(20)]
    assert compiler.compile(tokenizer, calls=Calls(tools[:2])) is not None
    with pytest.raises(RequestError, match=rf"tools\[\d+\].*: the tools so far, .* more than {MOST_GROWN} schemas"):
        compiler.compile(tokenizer, calls=Calls(tools))


def test_a_rule_without_an_end_is_called_that(tokenizer: Tokenizer, compiler: Compiler) -> None:
    with pytest.raises(RequestError, match=r'^grammar: a rule that "start" needs has no end'):
        compiler.compile(tokenizer, content=read_grammar("start: start"))


def test_the_reason_comes_before_a_long_place() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"name": schema}}
    with pytest.raises(RequestError) as caught:
        read_format(asked(schema), "rf")
    says = str(caught.value)
    assert says.startswith("rf.json_schema.schema: the schema is nested deeper than 100 levels: 'properties' at #/")
    assert "..." in says and len(says) < 200
