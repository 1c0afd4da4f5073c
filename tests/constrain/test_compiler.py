"""Fields of a request into what is compiled, within limits; what is refused names field and keyword."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4.constrain import Calls, Compiled, Compiler, matcher, read_format, read_grammar
from ds4.constrain import compiler as module
from ds4.constrain.schema import MOST_CHARS, MOST_DEPTH
from ds4.errors import CapacityError, RequestError
from ds4.model.tokenizer import EOS, Tokenizer
from tests.constrain.conftest import block, function, invoke, parameter

Fits = Callable[[Compiled | None, str], bool]


def asked(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}


def test_formats(tokenizer: Tokenizer, compiler: Compiler, fits: Fits) -> None:
    assert read_format(None, "f") is None and read_format({"type": "text"}, "f") is None
    anything = compiler.compile(tokenizer, content=read_format({"type": "json_object"}, "f"))
    assert fits(anything, '{"a": [1, "é\\n", null]}') and fits(anything, '{\n  "a": {\n    "b": 1\n  }\n}')
    assert not fits(anything, "[1]") and not fits(anything, '{"a": 1') and not fits(anything, '{"a": 1} ')
    assert not fits(anything, '{"a":' + " " * 9 + "1}")  # no answer of nothing but spaces
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    nested, flat = read_format(asked(schema), "f"), read_format({"type": "json_schema", "schema": schema}, "f")
    assert nested is not None and flat is not None and nested.schema == flat.schema == schema
    for content in (nested, flat):
        made = compiler.compile(tokenizer, content=content)
        assert fits(made, '{"n": -3}') and not fits(made, '{"n": "3"}') and not fits(made, "{}")
    grammar = compiler.compile(tokenizer, content=read_grammar('start: "yes" | "no"\n'))
    assert fits(grammar, "yes") and not fits(grammar, "maybe") and read_grammar(None) is None
    mixed = compiler.compile(tokenizer, content=read_grammar('start: "N=" %json {"type": "integer"}'))
    assert fits(mixed, "N=12") and not fits(mixed, "N=x")


@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        ("json_object", "rf", "must be an object, is a string"),
        ({}, "rf.type", "rf.type is None; it may be"),
        ({"type": "xml"}, "rf.type", "'xml'"),
        ({"type": "json_schema"}, "rf.schema", "is missing"),
        ({"type": "json_schema", "json_schema": {}}, "rf.json_schema.schema", "is missing"),
        ({"type": "json_schema", "json_schema": []}, "rf.json_schema", "must be an object, is a list"),
        ({"type": "json_schema", "schema": "x"}, "rf.schema", "must be an object, is a string"),
        ({"type": "json_schema", "schema": {}, "strict": 1}, "rf.strict", "must be true or false, is a number"),
        (asked({"properties": {"a": {"not": {}}}}), "rf.json_schema.schema", "'not' at #/properties/a: "),
        (asked({"items": {"oneOf": [{}, {}]}}), "rf.json_schema.schema", "'oneOf' at #/items: "),
        (asked({"pattern": "(?<=a)b"}), "rf.json_schema.schema", "'pattern' at #: look-around"),
        (
            asked({"type": "string", "minLength": 3, "maxLength": 2}),
            "rf.json_schema.schema",
            "'minLength' at #: Unsatisfiable",
        ),
        (asked({"type": "text"}), "rf.json_schema.schema", "'type' at #: Invalid type: text"),
        (asked({"$ref": "http://example.com/s"}), "rf.json_schema.schema", "'$ref' at #: nothing outside"),
        (asked({"$ref": "#"}), "rf.json_schema.schema", "'$ref' at #: it leads to no value"),
        (asked({"$dynamicRef": "#a"}), "rf.json_schema.schema", "'$dynamicRef' at #: "),
        (
            asked({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}),
            "rf.json_schema.schema",
            "'multipleOf' at #",
        ),
        (asked({"multipleOf": 123456789}), "rf.json_schema.schema", "'multipleOf' at #: "),
        (asked({"multipleOf": 0}), "rf.json_schema.schema", "'multipleOf' at #: "),
        (asked({"$ref": "file:///etc/passwd"}), "rf.json_schema.schema", "'$ref' at #: nothing outside"),
        (asked({"enum": ["\ud800"]}), "rf.json_schema.schema", "a lone surrogate, U+D800"),
        (asked({"multipleOf": 0.0000001234567}), "rf.json_schema.schema", "'multipleOf' at #: "),
        (asked({"enum": ["x" * MOST_CHARS]}), "rf.json_schema.schema", "characters of JSON; at most"),
    ],
)
def test_formats_that_are_refused(
    tokenizer: Tokenizer, compiler: Compiler, value: Any, param: str, says: str
) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(tokenizer, content=read_format(value, "rf"))
    assert caught.value.param == param and param in str(caught.value) and says in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (7, "must be a string, is a number"),
        (" \n", "is empty"),
        ("x" * (MOST_CHARS + 1), "characters; at most"),
        ('{"type": "object"}', "goes into response_format"),
        ('start: "\ud800"', "a lone surrogate, U+D800"),
        ("start: word", 'at 1(8): unknown name: "word"'),
        ("root ::= x", "1(7): Expected token"),
        ('start: "a"\nstart: "b"', "2("),
        ('start: %json {"not": {}}', "not"),
        ('start: %json {"items": {"multipleOf": 123456789}}', "'multipleOf' at #/items"),
        ("start: /(?=a)/", "look-around"),
        ("start: " + "(" * 500 + '"a"' + ")" * 500, "too deeply nested"),
    ],
)
def test_grammars_that_are_refused(tokenizer: Tokenizer, compiler: Compiler, value: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(tokenizer, content=read_grammar(value))
    assert caught.value.param == "grammar" and says in str(caught.value), caught.value


def deep(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


def test_depth_is_bounded_and_what_is_allowed_works(tokenizer: Tokenizer, compiler: Compiler, fits: Fits) -> None:
    n = MOST_DEPTH - 1
    made = compiler.compile(tokenizer, content=read_format(asked(deep(n)), "rf"))
    assert fits(made, "[" * n + '"x"' + "]" * n)
    with pytest.raises(
        RequestError, match=r": the schema is nested deeper than 100 levels: 'items' at #/items/items"
    ):
        read_format(asked(deep(n + 1)), "rf")
    with pytest.raises(RequestError, match="nested deeper"):
        read_format(asked(deep(100_000)), "rf")


@pytest.mark.parametrize("n", [3500, pytest.param(5500, marks=pytest.mark.long)])
def test_long_chains_of_rules_do_not_end_the_process(
    tokenizer: Tokenizer, compiler: Compiler, fits: Fits, n: int
) -> None:
    """The library walks them by recursion: an ordinary stack overflows. The longer ones fill what is allowed."""
    rules = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(n)) + f'\nr{n}: "c"\n'
    assert len(rules) < MOST_CHARS < 2 * len(rules)
    assert fits(compiler.compile(tokenizer, content=read_grammar(rules)), "aaab")
    defs: dict[str, Any] = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(n // 2)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{n // 2}": {"type": "integer"}}}
    assert fits(compiler.compile(tokenizer, content=read_format(asked(schema), "rf")), "[[[1]]]")
    tool = function("f", {"a": {"$ref": "#/$defs/d0"}}, **{"$defs": schema["$defs"]})
    assert compiler.compile(tokenizer, calls=Calls([tool])) is not None


def test_what_was_compiled_is_kept(tokenizer: Tokenizer, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = Compiler._made

    def counting(self: Compiler, text: str) -> Any:
        made.append(text)
        return real(self, text)

    monkeypatch.setattr(Compiler, "_made", counting)
    monkeypatch.setattr(module, "KEPT", 3)

    def compiled(n: int) -> Compiled | None:
        return compiler.compile(tokenizer, content=read_grammar(f'start: "{n}"'))

    for n in (0, 1, 2, 0, 1, 2):
        compiled(n)
    assert len(made) == 3
    compiled(3)  # 0 is the oldest
    compiled(2)
    assert len(made) == 4
    compiled(0)
    assert len(made) == 5
    tools = [function("f", {"a": {"type": "integer"}})]
    compiler.compile(tokenizer, calls=Calls(tools))
    before = len(made)
    compiler.compile(tokenizer, calls=Calls(tools))
    assert len(made) == before
    first, second = compiled(2), compiled(2)
    assert first is not None and second is not None and first.grammar is second.grammar is not None
    used = compiled(2)
    assert used is not None and used.grammar is not None and used.grammar.matcher is first.grammar.matcher
    state = used.start()
    state.advance(tokenizer.encode("2")[0])
    assert used.grammar.tokens == 1
    monkeypatch.setattr(matcher, "MOST_TOKENS", 0)  # what has grown is compiled anew
    before = len(made)
    fresh = compiled(2)
    assert fresh is not None and fresh.grammar is not used.grammar and len(made) == before + 1
    assert state.valid([tokenizer.special_id(EOS)]) == 1  # who has the old one keeps it
    monkeypatch.setattr(module, "KEPT_CHARS", 12)
    compiled(7)
    assert list(compiler._kept) == ['start: "7"']


def test_a_failure_is_not_kept_and_spoils_nothing(tokenizer: Tokenizer, compiler: Compiler, fits: Fits) -> None:
    bad, good = read_grammar("start: nobody"), read_grammar('start: "ok"')
    for _ in range(2):
        with pytest.raises(RequestError):
            compiler.compile(tokenizer, content=bad)
        assert fits(compiler.compile(tokenizer, content=good), "ok")


def test_several_threads(tokenizer: Tokenizer, compiler: Compiler, fits: Fits) -> None:
    before = threading.stack_size()
    failed: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for i in range(6):
                made = compiler.compile(tokenizer, content=read_grammar(f'start: "{n}x{i}"'))
                assert fits(made, f"{n}x{i}") and not fits(made, f"{n}x{i + 1}")
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and threading.stack_size() == before


def test_a_stack_that_cannot_be_had_is_no_fault_of_the_request(
    tokenizer: Tokenizer, compiler: Compiler, fits: Fits, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, content = threading.stack_size(), read_grammar('start: "a"')
    monkeypatch.setattr(module, "STACK_BYTES", 1 << 46)
    with pytest.raises(CapacityError, match="of addresses that compiling a grammar reserves"):
        compiler.compile(tokenizer, content=content)
    assert threading.stack_size() == before
    monkeypatch.undo()
    assert fits(compiler.compile(tokenizer, content=content), "a")


def test_another_vocabulary_is_another_grammar(tokenizer: Tokenizer, compiler: Compiler) -> None:
    from tests.server.standin import EOS, FIRST_BYTE, TOKENIZER

    content = read_grammar('start: "ab"')
    own = compiler.compile(tokenizer, content=content)
    other = compiler.compile(TOKENIZER, content=content)
    assert own is not None and other is not None and own.marks.size != other.marks.size
    text = [FIRST_BYTE + b for b in b"ab"] + [EOS]
    assert other.start().valid(text) == 3 and own.start().valid(tokenizer.encode("ab")) == len(tokenizer.encode("ab"))


def test_hundreds_of_tools(tokenizer: Tokenizer, compiler: Compiler) -> None:
    """Every parameter is looked at alone; twice is not slower than once. Time is bounded where a machine is busy."""
    tools = [function(f"f{i}", {f"p{j}": {"type": ["string", "null"]} for j in range(6)}) for i in range(60)]
    began = time.monotonic()
    assert compiler.compile(tokenizer, calls=Calls(tools)) is not None
    assert time.monotonic() - began < 20
    with pytest.raises(RequestError, match="among 256 tools at most; name one"):
        compiler.compile(tokenizer, calls=Calls([function(f"f{i}") for i in range(257)]))
    assert compiler.compile(tokenizer, calls=Calls([function(f"f{i}") for i in range(257)], name="f256")) is not None
    wide = [function("f", {f"p{i}": {"const": "x" * 1000} for i in range(130)}) for _ in range(1)]
    with pytest.raises(RequestError, match=r"'schema' at #: it has .* characters"):
        compiler.compile(tokenizer, calls=Calls(wide))
    assert len(json.dumps(wide)) > MOST_CHARS


def test_what_gave_up_is_not_used_again(
    tokenizer: Tokenizer, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of a lexer are shared by the answers of a grammar: full once, it is full for all."""
    monkeypatch.setattr(module, "MOST_STATES", 3000)
    content = read_format(asked({"type": "string", "maxLength": 2000}), "rf")
    text = tokenizer.encode('"' + "ab 1" * 400)
    for _ in range(2):
        made = compiler.compile(tokenizer, content=content)
        assert made is not None and made.grammar is not None
        state = made.start()
        with pytest.raises(RequestError, match="too many states") as caught:
            for token in text:
                state.rows([])
                state.advance(token)
        assert caught.value.code == "grammar_too_complex" and made.grammar.worn
    assert state.rows([]) is not None


def test_defs_go_with_the_parameters_that_use_them(tokenizer: Tokenizer, compiler: Compiler, fits: Fits) -> None:
    """A parameter's grammar has what it refers to, and not all of the schema: many parameters, long definitions."""
    long = {"type": "object", "properties": {"v": {"const": "x" * 20_000}, "next": {"$ref": "#/$defs/long"}}}
    at = {"type": "object", "properties": {"lat": {"$ref": "#/$defs/deg"}}, "required": ["lat"]}
    defs = {"long": long, "at": at, "deg": {"type": "number"}}
    many: dict[str, Any] = {f"p{i}": {"$ref": "#/$defs/at"} for i in range(40)}
    tool = function(
        "f", {**many, "one": {"$ref": "#/$defs/long"}, "all": {"$ref": "#/properties/p3"}}, **{"$defs": defs}
    )
    made = compiler.compile(tokenizer, calls=Calls([tool]))
    for name in ("p0", "p39", "all"):
        assert fits(made, block(invoke("f", parameter(name, '{"lat": 1.5}', False))))
        assert not fits(made, block(invoke("f", parameter(name, '{"lat": "1"}', False))))
    wide = {f"p{i}": {"$ref": "#/$defs/long"} for i in range(80)}
    with pytest.raises(RequestError, match="make a grammar of over"):
        compiler.compile(tokenizer, calls=Calls([function("f", wide, **{"$defs": defs})]))


PIECES = st.sampled_from([
    None, True, False, 0, -1, 1.5, 1e300, 10**30, "", "x", "#", "#/", "#/$defs/a", "$", "[", "string", "object", [],
    {}, ["a"], {"a": 1}, {"type": "string"}, {"$ref": "#/$defs/a"}, {"type": ["string", "null"]}, {"minLength": 2},
    {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}, {"pattern": "^a|b$"}, [{"$ref": "#"}],
    {"properties": {"a": {}}},
])  # fmt: skip
KEYWORDS = st.sampled_from([
    "type", "$ref", "properties", "items", "anyOf", "allOf", "oneOf", "enum", "const", "pattern", "minLength",
    "maxLength", "minimum", "maximum", "multipleOf", "required", "additionalProperties", "patternProperties",
    "format", "prefixItems", "minItems", "$defs", "not", "$id", "$anchor", "x-guidance", "exclusiveMinimum",
])  # fmt: skip
NAMED = st.sampled_from(["a", "b"])
SCHEMAS = st.recursive(
    PIECES, lambda inner: st.dictionaries(KEYWORDS, inner | st.dictionaries(NAMED, inner)), max_leaves=8
)


@given(schema=st.dictionaries(KEYWORDS, SCHEMAS, min_size=1, max_size=4), whole=st.booleans())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
def test_whatever_is_sent_is_compiled_or_a_400(
    tokenizer: Tokenizer, compiler: Compiler, schema: dict[str, Any], whole: bool
) -> None:
    parameters = schema if whole else {"type": "object", "properties": {"a": schema}, "$defs": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for content, calls in ((True, None), (False, Calls([tool]))):
        try:
            own = read_format(asked(schema), "rf") if content else None
            made = compiler.compile(tokenizer, content=own, calls=calls)
        except RequestError as e:
            assert "'" in str(e) and e.param in ("rf.json_schema.schema", "tools[0].function.parameters")
        else:
            assert made is not None and made.start().rows([]) is not None


def test_references_in_a_circle_and_texts_without_end(tokenizer: Tokenizer, compiler: Compiler) -> None:
    """Each level says the one below twice: as text that would be 2^20 times as long."""
    circle = {"a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}}
    either = {f"a{i}": {"anyOf": [
        {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"pattern": f"{c}{i}"}]} for c in "pq"
    ]} for i in range(20)}  # fmt: skip
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(40)}
    for defs, first in ((circle, "a"), ({**either, "a20": {}}, "a0"), ({**chain, "a40": {"type": "string"}}, "a0")):
        tool = function("f", {"v": {"$ref": f"#/$defs/{first}"}}, **{"$defs": defs})
        with pytest.raises(RequestError, match=r"'(\$ref|allOf|anyOf)' at #/"):
            compiler.compile(tokenizer, calls=Calls([tool]))
