"""A parameter's value that is a string stands raw in a call: what its schema leaves of strings, as a Lark terminal.

Inside JSON the compiler holds strings to their schema itself; a raw one has no quotes and no escapes, so its keywords
(`enum`, `const`, `pattern`, `minLength`, `maxLength`, `format`, and those that combine schemas) are told apart here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from ds4.constrain.schema import MOST_CHARS, SchemaFault, resolve, without

ANY = "/(?s:.*)/"
MOST_REFERENCES = 32  # followed one after the other

_DATE = r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]{1,9})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_HEX = "[0-9A-Fa-f]{1,4}"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
# RFC 3339, 4122, 2673, 4291 (hexadecimal groups only), 1123, 5321 (without quoted names), 3986 (its characters)
RAW_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt ]{_TIME}",
    "duration": r"P(?:[0-9]+W|(?:[0-9]+Y)?(?:[0-9]+M)?(?:[0-9]+D)?T(?:[0-9]+H(?:[0-9]+M)?(?:[0-9]+S)?"
    r"|[0-9]+M(?:[0-9]+S)?|[0-9]+S)|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)",
    "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    "ipv4": _IPV4,
    "ipv6": "(?:"
    + "|".join(
        [rf"(?:{_HEX}:){{7}}{_HEX}", "::"]
        + [rf"(?:{_HEX}:){{{n}}}(?::{_HEX}){{1,{7 - n}}}" for n in range(1, 7)]
        + [rf"::(?:{_HEX}:){{0,6}}{_HEX}", rf"(?:{_HEX}:){{1,7}}:"]
    )
    + ")",
    "hostname": _HOST,
    "email": rf"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+)*@{_HOST}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+",
}


def texts(schema: Any, root: Any, where: str) -> str | None:
    """The raw strings that `schema` allows, as a Lark expression of terminals; None: it allows no string.

    Args:
        root: the schema that `$ref` points into.   where: what a fault names as the place.

    Raises:
        SchemaFault: a keyword that a raw string cannot be held to.
    """
    return _Reader(root).read(schema, where)


class _Reader:
    """Schemas of one root; what a reference stands for is worked out once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, str | None] = {}
        self._path: list[str] = []  # references that are being followed

    def read(self, schema: Any, where: str) -> str | None:
        if schema is True:
            return ANY
        if schema is False:
            return None
        if not isinstance(schema, Mapping):
            raise SchemaFault("type", where, "a schema is an object")
        kinds = schema.get("type")
        if kinds is not None and "string" not in ([kinds] if isinstance(kinds, str) else kinds):
            return None
        parts: list[str] = []
        for keyword, value in schema.items():
            one = self._held(keyword, value, f"{where}/{keyword}")
            if one is None:
                return None
            parts.append(one)
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if high is not None and high < low:
            return None
        if low or high is not None:
            parts.append(f"/(?s:.){{{int(low)},{'' if high is None else int(high)}}}/")
        return self._short(_both(parts), where)

    def _held(self, keyword: str, value: Any, at: str) -> str | None:
        """What one keyword leaves of strings."""
        if keyword == "$ref":
            return self._followed(value, at)
        if keyword in ("anyOf", "oneOf"):
            return self._short(_either([self.read(s, at) for s in value]), at)
        if keyword == "allOf":
            every = [self.read(s, at) for s in value]
            return None if None in every else _both([e for e in every if e is not None])
        if keyword in ("enum", "const"):
            values = value if keyword == "enum" else [value]
            return _either([json.dumps(v, ensure_ascii=False) for v in values if isinstance(v, str)])
        if keyword == "pattern":
            return searched(value, at)
        if keyword == "format" and value in RAW_FORMATS:
            return f"/{regex_to_lark(RAW_FORMATS[value], '')}/"
        return ANY

    def _followed(self, reference: str, at: str) -> str | None:
        if reference in self._path:
            raise SchemaFault("$ref", at, "it leads back to itself")
        if len(self._path) == MOST_REFERENCES:
            raise SchemaFault("$ref", at, f"more than {MOST_REFERENCES} of them lead to one value")
        if reference not in self._known:
            self._path.append(reference)
            self._known[reference] = self.read(resolve(self._root, reference), at)
            self._path.pop()
        return self._known[reference]

    def _short(self, expression: str | None, at: str) -> str | None:
        if expression is not None and len(expression) > MOST_CHARS:
            raise SchemaFault(at.rsplit("/", 1)[-1], at[:200], "what it says of strings is too much for a raw one")
        return expression


def others(schema: Any, root: Any) -> dict[str, Any] | None:
    """The same without strings, for the compiler, as a schema of its own; None: plainly nothing else is allowed."""
    kinds = ["object", "array", "number", "boolean", "null"]
    if isinstance(schema, Mapping) and schema.get("type") is not None:
        said = schema["type"]
        kinds = [k for k in ([said] if isinstance(said, str) else said) if k != "string"]
        if not kinds:
            return None
        schema = without(schema, ("type",))
    places: dict[str, str] = {}  # pointers into root, and their names in the new schema
    own = {"allOf": [_moved(schema, places), {"type": kinds}]}
    defs: dict[str, Any] = {}
    while missing := list(places.items())[len(defs) :]:
        for pointer, name in missing:
            defs[name] = _moved(resolve(root, pointer), places)
    return {"$defs": defs, **own} if defs else own


def _moved(schema: Any, places: dict[str, str]) -> Any:
    """`schema` with its pointers going to `places`, where new ones are entered."""
    if isinstance(schema, Mapping):
        out = {}
        for k, v in schema.items():
            if k == "$ref" and isinstance(v, str) and v.startswith("#"):
                out[k] = "#/$defs/" + places.setdefault(v, f"d{len(places)}")
            elif k != "$id":
                out[k] = v if k in ("enum", "const", "default", "examples") else _moved(v, places)
        return out
    return [_moved(v, places) for v in schema] if isinstance(schema, list) else schema


def searched(pattern: Any, where: str) -> str:
    """A `pattern`, which may match anywhere, as a terminal that is the whole text.

    Raises:
        SchemaFault: an anchor inside it.
    """
    if not isinstance(pattern, str):
        raise SchemaFault("pattern", where, "it must be a string")
    whole = []
    for alternative in _alternatives(pattern):
        before, after = "(?s:.*)", "(?s:.*)"
        if alternative.startswith("^"):
            alternative, before = alternative[1:], ""
        if alternative.endswith("$") and not _escaped_end(alternative):
            alternative, after = alternative[:-1], ""
        if any(c in "^$" for c in _bare(alternative)):
            raise SchemaFault("pattern", where, "^ and $ may only begin and end an alternative of it")
        whole.append(f"{before}(?:{alternative}){after}")
    try:
        return f"/{regex_to_lark('|'.join(whole), 'dw')}/"
    except ValueError as e:
        raise SchemaFault("pattern", where, str(e).split("\n")[0][:300]) from e


def _pieces(pattern: str) -> list[tuple[str, int, bool]]:
    """Its characters, escapes whole, each with the depth of groups that it stands in and whether in a class."""
    out, depth, in_class, i = [], 0, False, 0
    while i < len(pattern):
        n = 2 if pattern[i] == "\\" else 1
        c = pattern[i : i + n]
        depth += c == "(" and not in_class
        out.append((c, depth, in_class))
        depth -= c == ")" and not in_class
        if c == "[" and not in_class:
            in_class = True
            if pattern[i + 1 : i + 2] == "^":
                out.append(("^", depth, True))
                i += 1
        elif c == "]" and in_class:
            in_class = False
        i += n
    return out


def _alternatives(pattern: str) -> list[str]:
    out = [""]
    for c, depth, in_class in _pieces(pattern):
        if c == "|" and depth == 0 and not in_class:
            out.append("")
        else:
            out[-1] += c
    return out


def _bare(pattern: str) -> Sequence[str]:
    return [c for c, _, in_class in _pieces(pattern) if not in_class and len(c) == 1]


def _escaped_end(text: str) -> bool:
    return _pieces(text)[-1][0] != "$"


def _either(parts: Sequence[str | None]) -> str | None:
    some = list(dict.fromkeys(p for p in parts if p is not None))
    if not some:
        return None
    return ANY if ANY in some else f"({' | '.join(some)})"


def _both(parts: Sequence[str]) -> str:
    some = list(dict.fromkeys(p for p in parts if p != ANY))
    return f"({' & '.join(some)})" if len(some) > 1 else some[0] if some else ANY
