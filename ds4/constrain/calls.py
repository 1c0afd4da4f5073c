"""A forced tool call as a grammar: the CALLS block of encoding.md 5 and 6, its names and parameters from the schemas.

Parameters come in the order in which they were declared, each at most once: a second one of a name would break the
call. Those that are strings stand raw, others as JSON with the prompt's own spaces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4.constrain.bounds import MOST_SCHEMAS, bounded, check_growth
from ds4.constrain.content import json_rule
from ds4.constrain.schema import SchemaFault, fault_of, refusal, resolve, without
from ds4.constrain.texts import others, texts
from ds4.errors import RequestError
from ds4.model.tools import declaration

MOST_TOOLS = 256
MOST_GROWN = 2 * MOST_SCHEMAS  # of all tools' schemas together
MOST_GRAMMAR = 1 << 20  # characters of the whole
_NO_KEY = re.compile('["\x00-\x1f\x7f]')
# of a tool's parameters as a whole: each parameter is held on its own, so what ties them together cannot be
_TIES = ("anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties", "enum", "const")

Faults = Callable[[Any], str]  # a schema to the compiler's complaint about it, "" for none


@dataclass(frozen=True)
class Calls:
    """A forced call.

    Attributes:
        declared: tools, as the prompt has them.
        name: the only one that may be called, once, in full (NAMESPACE::NAME); None: any of them.
        one: a single call.
        field: what a complaint names.
    """

    declared: Sequence[Mapping[str, Any]]
    name: str | None = None
    one: bool = False
    field: str = "tools"


def calls_grammar(calls: Calls, marker: int, complaint: Faults, *, lenient: bool = False) -> tuple[str, str]:
    """Lark for the block, two newlines in front: the body of its first rule, and the other rules.

    Args:
        marker: the id of the marker token.
        complaint: what the compiler has against a JSON schema; "" where it compiles.
        lenient: a tool whose schema cannot be held is held to the names of its parameters.

    Raises:
        RequestError: names the tool, the place in its `parameters` and the keyword.
    """
    mark = f"<[{marker}]>"
    rules: list[str] = []
    names: list[str] = []
    grown = 0
    for i, tool in enumerate(calls.declared):
        told = declaration(tool, i)
        name = str(told["name"])
        if calls.name is not None and name != calls.name:
            continue
        if len(names) == MOST_TOOLS:
            raise RequestError(
                f"{calls.field}: a call can be forced among {MOST_TOOLS} tools at most; name one of them", calls.field
            )
        parameters = "parameters" if "function" not in tool else "function.parameters"
        field = f"{calls.field}[{i}].{parameters}"
        try:
            before = len(rules)
            if grown > MOST_GROWN:
                raise SchemaFault("$ref", "#", f"the tools so far, written out, are more than {MOST_GROWN} schemas")
            body = _body(told.get("parameters"), i, mark, rules, complaint)
            grown += check_growth(told.get("parameters"))
        except SchemaFault as e:
            if not lenient:
                raise refusal(e, field) from e
            del rules[before:]
            body = _body(_names_only(told.get("parameters")), i, mark, rules, complaint)
        head = json.dumps(f' invoke name="{name}">\n', ensure_ascii=False)
        rules.append(f'invoke_{i}: "<" {mark} {head} {body} "</" {mark} " invoke>\\n"')
        names.append(f"invoke_{i}")
    if not names:
        raise RequestError(f"{calls.field}: {calls.name!r:.80} is not among them", calls.field)
    many = "" if calls.one or calls.name is not None else "+"
    rules.append(f"invoke: {' | '.join(names)}")
    return f'"\\n\\n<" {mark} " calls>\\n" invoke{many} "</" {mark} " calls>"', "\n".join(rules)


def _names_only(schema: Any) -> dict[str, Any]:
    """A schema of parameters without what it says of their values."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    names = [n for n in found if 0 < len(n) <= 256 and not _NO_KEY.search(n)] if isinstance(found, Mapping) else []
    wanted = schema.get("required") if names else None
    required = [n for n in names if isinstance(wanted, list) and n in wanted]
    named = {"properties": {n: {} for n in names}, "required": required} if names else {}
    return {"type": "object", **named}


def _body(schema: Any, tool: int, mark: str, rules: list[str], complaint: Faults) -> str:
    """The parameters of tool number `tool`; their rules are added."""
    schema = bounded({} if schema is None else schema)
    root = schema
    if fault := complaint(schema):
        raise _of_compiler(fault, schema)
    at, passed = "#", {"#"}
    while isinstance(schema, Mapping) and "$ref" in schema:
        at, more = f"{schema['$ref']}", without(schema, ("$ref", "$defs", "definitions", "title", "description"))
        if more:
            raise SchemaFault("$ref", at, f"{next(iter(more))!r} beside it says more about the parameters")
        if at in passed:
            raise SchemaFault("$ref", at, "it leads back to itself")
        passed.add(at)
        schema = resolve(root, at)
    if not isinstance(schema, Mapping):
        schema = {}
    for keyword in _TIES:
        if keyword in schema:
            raise SchemaFault(keyword, at, "parameters of a forced call are held one by one, not together")
    kinds = schema.get("type", "object")
    if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        raise SchemaFault("type", at, f"parameters are an object, not {kinds!r}")
    more = schema.get("additionalProperties", True)
    wanted = list(schema.get("required", ()))
    known = {**schema.get("properties", {}), **{k: more for k in wanted if k not in schema.get("properties", {})}}
    if not known:
        if more is False or "properties" in schema or "type" not in schema:
            return '"\\n"'
        # an object without names of its own: one parameter of any name, as a second could have the same
        name = _parameter(None, more, root, f"{at}/additionalProperties", f"{tool}_0", mark, rules, complaint)
        return f'("\\n" | {name})' if name else '"\\n"'
    body = []
    for i, (key, value) in enumerate(known.items()):
        where = f"{at}/properties/{key}"
        name = _parameter(key, value, root, where, f"{tool}_{i}", mark, rules, complaint)
        if name is None and key in wanted:
            raise SchemaFault("required", at, f"no value is left for {key!r}")
        if name is not None:
            body.append(name if key in wanted else f"{name}?")
    none = "" if any(not b.endswith("?") for b in body) else '"\\n" | '
    return f"({none}{' '.join(body)})" if body else '"\\n"'


def _parameter(
    key: str | None, schema: Any, root: Any, where: str, suffix: str, mark: str, rules: list[str], complaint: Faults
) -> str | None:
    """The name of a rule for one parameter, which is added with what it needs; None: its schema allows nothing."""
    if key is not None and (not key or len(key) > 256 or _NO_KEY.search(key)):
        raise SchemaFault(
            "properties", where[:200], "a parameter's name has 1 to 256 characters, and no quotes or line breaks"
        )
    if sum(map(len, rules)) > MOST_GRAMMAR:
        raise SchemaFault("properties", where[:200], f"the tools make a grammar of over {MOST_GRAMMAR} characters")
    values = []
    raw = texts(schema, root, where)
    if raw is not None:  # a lexeme of its own: it may hold "</", and ends at the one before the marker
        rules.append(f'TEXT_{suffix}: {raw} "</"')
        values.append(f'"true\\">" TEXT_{suffix}')
    rest = others(schema, root)
    try:
        check_growth(rest)  # with what was put beside its references
    except SchemaFault as e:
        raise SchemaFault(e.keyword, where[:200], e.why) from e
    fault = complaint(rest) if rest is not None and not _plain(schema) else ""
    if fault and "Unsatisfiable" not in fault:
        raise _of_compiler(fault, schema, where)
    if rest is not None and not fault:
        rules.append(f"json_{suffix}: {json_rule(rest, canonical=True)}")
        values.append(f'"false\\">" json_{suffix} "</"')
    if not values:
        return None
    head = json.dumps(f' parameter name="{key}" string="', ensure_ascii=False)
    if key is None:
        rules.append(f'KEY_{suffix}: /[^"\\x00-\\x1f\\x7f]{{1,64}}/')
        head = f'" parameter name=\\"" KEY_{suffix} "\\" string=\\""'
    rules.append(f'parameter_{suffix}: "<" {mark} {head} ({" | ".join(values)}) {mark} " parameter>\\n"')
    return f"parameter_{suffix}"


def _plain(schema: Any) -> bool:
    """Whether it says no more than types, which allow something."""
    return isinstance(schema, Mapping) and set(schema) <= {"type", "title", "description", "default", "examples"}


def _of_compiler(message: str, schema: Any, where: str = "#") -> SchemaFault:
    found = fault_of(message, schema)
    if where != "#":
        return SchemaFault(found.keyword, found.where.replace("#", where, 1), found.why)
    return found
