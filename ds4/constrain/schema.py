"""A JSON schema as a client sends it: what of it is too much, what says nothing, and which keyword is to blame.

The compiler behind this (llguidance) refuses what it cannot hold an answer to, and we say so with the keyword and its
place. What would pass it by in silence, or take it for ever, is refused here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from ds4.errors import RequestError

MOST_CHARS = 1 << 17  # of a schema or grammar as text
MOST_DEPTH = 100  # nested objects and lists of a schema: the compiler's reader stops at 128
MOST_PLACE = 80  # characters of a place in a complaint
MOST_MULTIPLE = 100_000  # the compiler counts remainders, one by one

# Formats that text is held to; others say nothing, as the specification has it.
FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # fmt: skip

_ONE = (
    "additionalProperties", "additionalItems", "items", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items", "extends", "type", "disallow")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
# what the compiler does not know and therefore would not hold an answer to
_UNSEEN = (
    "extends", "disallow", "divisibleBy", "propertyDependencies", "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
)  # fmt: skip
_KEYWORDS = (
    "$ref", "type", "enum", "const", "anyOf", "allOf", "oneOf", "properties", "required", "additionalProperties",
    "patternProperties", "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems",
    "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "$id", "$schema", "$anchor", "id",
)  # fmt: skip
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_GROWS = ("$ref", "allOf", "anyOf", "oneOf", "properties", "prefixItems", "items")
_HELD_RANGE = (
    "minimum and maximum are held between -2^63 and 2^63 (9.2e18), both left out; leave out one that is beyond"
)
# what a complaint that does not name its keyword is about
_ABOUT = (
    ("oneOf constraints", "oneOf"), ("patternProperty", "patternProperties"), ("regex parse error", "pattern"),
    ("Unknown format", "format"), ("Invalid type", "type"), ("Pointer ", "$ref"), ("NoExtension", "$ref"),
    ("multiple of", "multipleOf"), ("schema too large", "allOf"), ("float range", "minimum"), ("regex", "pattern"),
)  # fmt: skip


class SchemaFault(Exception):
    """`keyword` at `where`, a JSON pointer, cannot be compiled: `why`."""

    def __init__(self, keyword: str, where: str, why: str) -> None:
        if len(where) > MOST_PLACE:  # its ends say where, and the reason is not to be looked for behind it
            where = f"{where[: MOST_PLACE // 2]}...{where[-MOST_PLACE // 2 :]}"
            super().__init__(f"{why}: {keyword!r} at {where}")
        else:
            super().__init__(f"{keyword!r} at {where}: {why}")
        self.keyword, self.where, self.why = keyword, where, why


def subschemas(schema: Any, where: str = "#") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every schema that is an object, outermost first, with its JSON pointer; property names are no keywords."""
    stack = [(where, schema)]
    while stack:
        at, s = stack.pop()
        if not isinstance(s, Mapping):
            continue
        yield at, s
        inner: list[tuple[str, Any]] = [(f"{at}/{k}", s[k]) for k in _ONE if k in s]
        for k in _MANY:
            if isinstance(s.get(k), list):
                inner += [(f"{at}/{k}/{i}", x) for i, x in enumerate(s[k])]
        for k in _NAMED:
            if isinstance(s.get(k), Mapping):
                inner += [(f"{at}/{k}/{_escaped(n)}", x) for n, x in s[k].items()]
        stack += reversed(inner)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def resolve(root: Any, reference: str) -> Any:
    """What `reference`, a pointer into `root` ("#/..."), points to.

    Raises:
        SchemaFault: elsewhere, or nowhere.
    """
    at = root
    if reference != "#" and not reference.startswith("#/"):
        raise SchemaFault("$ref", reference, "only pointers into the schema itself can be followed")
    for part in reference[2:].split("/") if reference != "#" else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, Mapping) and name in at:
            at = at[name]
        elif isinstance(at, list) and name.isdigit() and int(name) < len(at):
            at = at[int(name)]
        else:
            raise SchemaFault("$ref", reference, "it points to nothing")
    return at


def checked(schema: Any) -> Any:
    """A copy for the compiler: without formats that say nothing, and without orders to the compiler itself.

    Raises:
        SchemaFault: too large, nested too deep, or a keyword that would not be held.
    """
    if not isinstance(schema, (Mapping, bool)):
        raise SchemaFault("type", "#", "a schema is an object")
    _check_depth(schema)
    copy = json.loads(_text(schema))
    scales, merged = [], False
    for at, s in subschemas(copy):
        for keyword in _UNSEEN:
            if keyword in s:
                raise SchemaFault(keyword, at, "this server cannot hold an answer to it")
        if not isinstance(s.get("format"), str) or s["format"] not in FORMATS:
            s.pop("format", None)  # type: ignore[attr-defined]
        s.pop("x-guidance", None)  # type: ignore[attr-defined]
        merged |= "allOf" in s or "$ref" in s
        for keyword in ("minimum", "exclusiveMinimum"):  # the compiler would take the largest integer it knows
            if _number(s.get(keyword)) and s[keyword] >= 2**63:
                raise SchemaFault(keyword, at, _HELD_RANGE)
        multiple = s.get("multipleOf")
        if multiple is not None and _number(multiple) and multiple > 0:
            scales.append(_coefficient(multiple))
            if scales[-1] > MOST_MULTIPLE:
                raise SchemaFault("multipleOf", at, f"its digits make more than {MOST_MULTIPLE}, without the point")
    if merged and math.lcm(*scales) > MOST_MULTIPLE:
        raise SchemaFault("multipleOf", "#", f"the least common multiple of all is above {MOST_MULTIPLE}")
    return copy


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _coefficient(value: float) -> int:
    """The digits of a number without its point, trailing zeros of whole numbers kept."""
    digits = Decimal(repr(value)).as_tuple()
    assert isinstance(digits.exponent, int)
    number = int("".join(map(str, digits.digits)))
    scale: int = 10 ** min(max(digits.exponent, 0), 400)
    return number * scale


def _check_depth(value: Any) -> None:
    stack = [(value, "#", 1)]
    while stack:
        v, at, depth = stack.pop()
        if not isinstance(v, (Mapping, list)):
            continue
        if depth > MOST_DEPTH:
            keyword = next((p for p in reversed(at.split("/")) if p in _KEYWORDS), "properties")
            raise SchemaFault(keyword, at, f"the schema is nested deeper than {MOST_DEPTH} levels")
        if isinstance(v, Mapping):
            stack += [(x, f"{at}/{_escaped(str(k))}", depth + 1) for k, x in v.items()]
        else:
            stack += [(x, f"{at}/{i}", depth + 1) for i, x in enumerate(v)]


def _text(schema: Any) -> str:
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > MOST_CHARS:
        raise SchemaFault("schema", "#", f"it has {len(text)} characters of JSON; at most {MOST_CHARS} are allowed")
    if lone := lone_surrogate(text):
        raise SchemaFault("schema", "#", f"it holds a lone surrogate, {lone}, which no text has")
    return text


def lone_surrogate(text: str) -> str | None:
    """The first one, as U+D800; None: there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        return f"U+{ord(text[e.start]):04X}"
    return None


def fault_of(message: str, schema: Any) -> SchemaFault:
    """The compiler's complaint about `schema`, as a keyword, a place and words for the client."""
    keyword: str | None
    if "panic: " in message:  # more parts than the compiler has numbers for
        keyword, at = next(((k, _place(schema, k)) for k in _GROWS if _has(schema, k)), ("schema", "#"))
        return SchemaFault(keyword, at, "the grammar that the schema makes is too large to be compiled")
    if "coerce_one_of" in message:
        why = "its alternatives do not plainly exclude each other; use anyOf, or give each a type or const of its own"
        return SchemaFault("oneOf", _place(schema, "oneOf"), why)
    if re.search(r"Failed to generate regex for (integer|float) range", message):
        bounds = ((k, _place(schema, k)) for k in _RANGE if _has(schema, k))
        return SchemaFault(*(_beyond(schema) or next(bounds, ("type", "#"))), _HELD_RANGE)
    message = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", message)
    message = re.sub(r"(?m)^ *(\d+ \| .*|\^+ *)$", "", message)  # without the grammar's own lines
    first = message.strip().split("\n")[0][:300]
    unknown = re.match(r"Unimplemented keys: \[(.*?)\]", message)
    if unknown:
        names = re.findall(r'"([^"]+)"', unknown.group(1))
        for at, s in subschemas(schema):
            for name in names:
                if name in s:
                    return SchemaFault(name, at, "this server cannot hold an answer to it")
        why = f"it leads to {names[0] if names else message!r}, which this server cannot hold an answer to"
        return SchemaFault("$ref", _place(schema, "$ref"), why)  # into a meta-schema, which the compiler knows
    if "schema is false" in message:
        return SchemaFault("false", _place(schema, None), "no value is left that the schema allows")
    if first.startswith("Resource "):
        keyword = "$ref" if _has(schema, "$ref") else "$schema"
        return SchemaFault(keyword, _place(schema, keyword), "nothing outside of the schema itself is looked up")
    if first.startswith("NoExtension"):  # what its first mask says of references in a circle
        first = "it leads to no value"
    words = re.findall(r"[$A-Za-z]+", message)
    keyword = next((k for begin, k in _ABOUT if begin in message), None)
    keyword = keyword or next((w for w in words if w in _KEYWORDS and _has(schema, w)), None)
    if keyword == "pattern" and not _has(schema, "pattern") and _has(schema, "patternProperties"):
        keyword = "patternProperties"
    if keyword is None or (keyword != "$ref" and not _has(schema, keyword)):
        keyword = next((k for k in _KEYWORDS if _has(schema, k)), "schema")
    if "regex parse error" in message:
        first = message.strip().split("\n")[-1].removeprefix("error: ")[:300]
    return SchemaFault(keyword, _place(schema, keyword), first)


def _beyond(schema: Any) -> tuple[str, str] | None:
    """The first bound of a number that is too large to be held, and its place."""
    for at, s in subschemas(schema):
        for k in _RANGE:
            if _number(s.get(k)) and abs(s[k]) >= 2**63:
                return k, at
    return None


def _has(schema: Any, keyword: str) -> bool:
    return any(keyword in s for _, s in subschemas(schema))


def _place(schema: Any, keyword: str | None) -> str:
    """The first schema that has `keyword`; None: the first that is `false`."""
    for at, s in subschemas(schema):
        if keyword is None:
            for k, v in s.items():
                if v is False:
                    return f"{at}/{k}"
        elif keyword in s:
            return at
    return "#"


def refusal(fault: SchemaFault, field: str) -> RequestError:
    """400, naming field and keyword."""
    return RequestError(f"{field}: {fault}", field, "unsupported_schema")


def without(schema: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {k: v for k, v in schema.items() if k not in names}
