"""What an answer's text has to be: fields of a request into a grammar in Lark, not compiled yet."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds4.constrain.bounds import bounded
from ds4.constrain.schema import MOST_CHARS, SchemaFault, lone_surrogate, refusal
from ds4.errors import RequestError, kind_of

# Between tokens of JSON in an answer's text: enough to indent, and nothing that could go on for ever.
SPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,64}"


@dataclass(frozen=True)
class Content:
    """`grammar`: Lark, beginning at `start`. `schema`: the JSON schema as it was sent, if it came from one; the model
    may be told of it. `json`: that schema as it is compiled. `field`: what a complaint names.
    """

    grammar: str
    field: str
    schema: Mapping[str, Any] | None = None
    json: Any = None


def read_format(value: object, field: str) -> Content | None:
    """`response_format`, or what other APIs call it; None: any text.

    {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"} with the schema in "json_schema" or beside it.

    Raises:
        RequestError: names the field, and the schema's keyword that cannot be held.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"{field} must be an object, is {kind_of(value)}", field)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _from_schema({"type": "object"}, field)
    if kind != "json_schema":
        raise RequestError(
            f'{field}.type is {kind!r:.40}; it may be "text", "json_object" or "json_schema"', f"{field}.type"
        )
    inner, where = value, field
    if value.get("json_schema") is not None:
        inner, where = value["json_schema"], f"{field}.json_schema"
        if not isinstance(inner, Mapping):
            raise RequestError(f"{where} must be an object, is {kind_of(inner)}", where)
    schema = inner.get("schema")
    if not isinstance(schema, Mapping):
        where = f"{where}.schema"
        raise RequestError(
            f"{where} is missing" if schema is None else f"{where} must be an object, is {kind_of(schema)}", where
        )
    for name, kinds, expected in (("strict", bool, "true or false"), ("name", str, "a string")):
        if inner.get(name) is not None and not isinstance(inner[name], kinds):
            raise RequestError(f"{where}.{name} must be {expected}, is {kind_of(inner[name])}", f"{where}.{name}")
    return _from_schema(schema, f"{where}.schema")


def read_grammar(value: object, field: str = "grammar") -> Content | None:
    """A grammar in Lark; None: any text. It is compiled, and so refused for its faults, by `Compiler`.

    Raises:
        RequestError: no string, empty or too long.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise RequestError(f"{field} must be a string, is {kind_of(value)}", field)
    if not value.strip():
        raise RequestError(f'{field} is empty; it needs at least a rule "start"', field)
    if len(value) > MOST_CHARS:
        raise RequestError(f"{field} has {len(value)} characters; at most {MOST_CHARS} are allowed", field)
    if lone := lone_surrogate(value):
        raise RequestError(f"{field} holds a lone surrogate, {lone}, which no text has", field)
    if value.lstrip().startswith("{"):
        raise RequestError(f"{field} must be a grammar in Lark; a JSON schema goes into response_format", field)
    for part in re.finditer(r"%json\s*(?=[{\[])", value):
        try:
            schema, _ = json.JSONDecoder().raw_decode(value, part.end())
        except (ValueError, RecursionError):
            continue  # the compiler says better what is wrong with it
        try:
            bounded(schema)
        except SchemaFault as e:
            raise refusal(e, field) from e
    return Content(value, field)


def json_rule(schema: Any, *, canonical: bool) -> str:
    """A schema that went through `bounded`, as the body of a Lark rule.

    `canonical`: with the spaces of the prompt's own JSON (`, ` and `: `) and no others.
    """
    said = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    own = said if canonical else {"whitespace_pattern": SPACE}
    if schema is True:
        schema = {}
    elif schema is False:
        schema = {"allOf": [False]}
    return "%json " + json.dumps({**schema, "x-guidance": own}, ensure_ascii=False)


def _from_schema(schema: Mapping[str, Any], field: str) -> Content:
    try:
        own = bounded(schema)
    except SchemaFault as e:
        raise refusal(e, field) from e
    return Content("start: " + json_rule(own, canonical=False), field, schema, own)
