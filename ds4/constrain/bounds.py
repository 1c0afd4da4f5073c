"""What a JSON schema grows to when it is compiled, and whether its values come to an end; both before compiling.

The compiler keeps a `$ref` that stands alone as a rule, which is made once. One that is combined with something
(keywords beside it, `allOf`) it writes out, in copies of copies: some lines of schema become 2^40 of them. And it
takes a schema whose every value contains another one of it, to which an answer never ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ds4.constrain.schema import SchemaFault, checked, resolve, subschemas, without

MOST_SCHEMAS = 16_000  # that a schema may grow to: about half a second of compiling
MOST_NESTED = 200  # references that are combined, and levels, one leading to the next: they are followed by recursion

_SAYS_NOTHING = (
    "$defs", "definitions", "$anchor", "$schema", "$id", "id", "$comment", "title", "description", "default",
    "examples", "readOnly", "writeOnly", "deprecated", "x-guidance",
)  # fmt: skip
_TEXTS = ("pattern", "enum", "const", "format")
_INSIDE = ("items", "additionalItems", "additionalProperties")


@dataclass(frozen=True)
class _Node:
    """A schema as the compiler would have it: `size` counts it with all that is in it, as often as it is there.

    Attributes:
        texts: patterns and literals that one string has to match at once, each counted in `size`, too.
        ref: a reference that stands alone.   inner: members and items.   options: alternatives, instead of these.
    """

    size: int = 1
    texts: int = 0
    ref: str | None = None
    inner: Mapping[str, _Node] = field(default_factory=dict)
    options: tuple[_Node, ...] = ()


class _Growth:
    """The sizes of one schema's parts."""

    def __init__(self, root: Any) -> None:
        self._root, self._known, self._merges = root, dict[str, _Node](), 0
        self._anchors = anchors(root)

    def node(self, schema: Any, at: str, depth: int = 0) -> _Node:
        if not isinstance(schema, Mapping):
            return _Node()
        if depth > MOST_NESTED:
            raise SchemaFault(
                "$ref", at, f"more than {MOST_NESTED} references that are combined lead from one to the next"
            )
        said = without(schema, _SAYS_NOTHING)
        if set(said) == {"$ref"} and isinstance(said["$ref"], str):
            return _Node(ref=said["$ref"])
        inner = {
            f"/{k}": self.node(said[k], f"{at}/{k}", depth + 1) for k in _INSIDE if isinstance(said.get(k), Mapping)
        }
        for k in ("properties", "patternProperties"):
            for name, s in _named(said.get(k)):
                inner[f"{k}/{name}"] = self.node(s, f"{at}/{k}/{name}", depth + 1)
        for k in ("prefixItems", "items"):
            for i, s in enumerate(said[k] if isinstance(said.get(k), list) else ()):
                inner[f"items/{i}"] = self.node(s, f"{at}/{k}/{i}", depth + 1)
        texts = sum(k in said for k in _TEXTS)
        made = self._fits(_Node(1 + texts + sum(n.size for n in inner.values()), texts, inner=inner), at)
        others = without(said, ("$ref", "allOf", "anyOf", "oneOf"))
        parts = [made] if others else []
        if isinstance(said.get("$ref"), str):
            parts.append(_Node(ref=said["$ref"]))
        for i, s in enumerate(said["allOf"] if isinstance(said.get("allOf"), list) else ()):
            parts.append(self.node(s, f"{at}/allOf/{i}", depth + 1))
        for k in ("anyOf", "oneOf"):
            if isinstance(said.get(k), list):
                options = [self.node(s, f"{at}/{k}/{i}", depth + 1) for i, s in enumerate(said[k])]
                parts.append(self._fits(_either(options), at))
        if not parts:
            return made
        whole = parts[0]
        for part in parts[1:]:
            whole = self._merged(whole, part, at, depth)
        return whole

    def _merged(self, a: _Node, b: _Node, at: str, depth: int) -> _Node:
        """What both say."""
        self._merges += 1
        if self._merges > MOST_SCHEMAS:
            raise _too_much(at)
        if depth > MOST_NESTED:
            raise SchemaFault(
                "$ref", at, f"more than {MOST_NESTED} references that are combined lead from one to the next"
            )
        a, b = self._followed(a, depth), self._followed(b, depth)
        if a.options or b.options:
            if not a.options:
                a, b = b, a
            return self._fits(_either([self._merged(o, b, at, depth + 1) for o in a.options]), at)
        inner = {**a.inner, **b.inner}
        for name in a.inner.keys() & b.inner.keys():
            inner[name] = self._merged(a.inner[name], b.inner[name], at, depth + 1)
        texts = a.texts + b.texts
        return self._fits(_Node(1 + texts + sum(n.size for n in inner.values()), texts, inner=inner), at)

    def _followed(self, node: _Node, depth: int) -> _Node:
        """What stands where a reference, or a chain of them, leads; one in a circle the compiler refuses."""
        if node.ref is None:
            return node
        if node.ref not in self._known:
            self._known[node.ref] = _Node()
            target = lookup(self._root, node.ref, self._anchors)
            self._known[node.ref] = self._followed(self.node(target, node.ref, depth + 1), depth + 1)
        return self._known[node.ref]

    def _fits(self, node: _Node, at: str) -> _Node:
        if node.size > MOST_SCHEMAS:
            raise _too_much(at)
        return node


def bounded(schema: Any) -> Any:
    """`checked`, and both checks of this file.

    Raises:
        SchemaFault: as they do.
    """
    own = checked(schema)
    check_ends(own)
    check_growth(own)
    return own


def check_growth(schema: Any) -> int:
    """How many schemas it grows to; what would be compiled for seconds is refused.

    Raises:
        SchemaFault: names the place where references and alternatives, written out, are more than MOST_SCHEMAS.
    """
    if not isinstance(schema, Mapping):
        return 1
    growth, total = _Growth(schema), 0
    places = [("#", schema)]
    places += [(f"#/{k}/{n}", s) for k in ("$defs", "definitions") for n, s in _named(schema.get(k))]
    for at, s in places:
        total += growth.node(s, at).size
        if total > MOST_SCHEMAS:
            raise _too_much(at)
    return total


def _too_much(at: str) -> SchemaFault:
    why = f"references and alternatives that are combined here, written out, are more than {MOST_SCHEMAS} schemas"
    return SchemaFault("$ref", at, why)


def _either(options: list[_Node]) -> _Node:
    flat = [o for node in options for o in (node.options or (node,))]
    return _Node(1 + sum(o.size for o in flat), options=tuple(flat))


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    yield from value.items() if isinstance(value, Mapping) else ()


def anchors(schema: Any) -> dict[str, Any]:
    """References by name, "#NAME", to what they stand for."""
    return {f"#{s['$anchor']}": s for _, s in subschemas(schema) if isinstance(s.get("$anchor"), str)}


def lookup(root: Any, reference: str, named: Mapping[str, Any]) -> Any:
    """What a reference points to; true, which allows anything, if that is for the compiler to say."""
    if reference in named:
        return named[reference]
    try:
        return resolve(root, reference)
    except SchemaFault:
        return True


def check_ends(schema: Any) -> None:
    """Refuse what an answer could begin and never end: the least set of schemas that have a finite value, grown until
    nothing is added, has to hold every one that can be reached.

    Raises:
        SchemaFault: names the first that is not in it.
    """
    named = anchors(schema)
    reached: dict[int, tuple[str, Mapping[str, Any]]] = {}
    stack: list[tuple[str, Any]] = [("#", schema)]
    after: dict[int, list[int]] = {}  # a schema to those that have it in them
    while stack:
        at, s = stack.pop()
        if not isinstance(s, Mapping) or id(s) in reached:
            continue
        reached[id(s)] = (at, s)
        inner = list(_inside(s, at))
        if isinstance(s.get("$ref"), str):
            inner.append((s["$ref"], lookup(schema, s["$ref"], named)))
        for _, x in inner:
            after.setdefault(id(x), []).append(id(s))
        stack += reversed(inner)
    ends: set[int] = set()

    def finite(s: Any) -> bool:
        return not isinstance(s, Mapping) or id(s) in ends  # false is the compiler's to refuse

    todo = list(reversed(reached))
    while todo:
        one = todo.pop()
        if one in ends:
            continue
        s = reached[one][1]
        to = lookup(schema, s["$ref"], named) if isinstance(s.get("$ref"), str) else True
        if finite(to) and _endless_keyword(s, finite) is None:
            ends.add(one)
            todo += [i for i in after.get(one, ()) if i not in ends]
    endless = [(at, s) for i, (at, s) in reached.items() if i not in ends]
    if not endless:
        return
    for at, s in endless:  # rather the place that asks for more than a reference to it
        keyword = _endless_keyword(s, finite)
        if keyword in ("required", "minItems"):
            raise SchemaFault(keyword, at, "it leads to no value with an end: each one has to hold another like it")
    at, s = endless[0]
    keyword = _endless_keyword(s, finite) or "$ref"
    raise SchemaFault(keyword, at, "it leads to no value: what it stands for is itself")


def _inside(s: Mapping[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    """Schemas that a value of `s`, or a part of it, may have to follow."""
    for k in _INSIDE:
        if isinstance(s.get(k), Mapping):
            yield f"{at}/{k}", s[k]
    for k in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
        if isinstance(s.get(k), list):
            yield from ((f"{at}/{k}/{i}", x) for i, x in enumerate(s[k]))
    for k in ("properties", "patternProperties"):
        yield from ((f"{at}/{k}/{n}", x) for n, x in _named(s.get(k)))


def _endless_keyword(s: Mapping[str, Any], finite: Any) -> str | None:
    """The keyword by which `s` has no finite value, as far as `finite` knows of others; None: it has one, or nothing
    is seen against it."""
    if isinstance(s.get("allOf"), list) and not all(map(finite, s["allOf"])):
        return "allOf"
    for k in ("anyOf", "oneOf"):
        if isinstance(s.get(k), list) and s[k] and not any(map(finite, s[k])):
            return k
    if "enum" in s or "const" in s:
        return None
    kinds = s.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not kinds or not all(k in ("object", "array") for k in kinds):
        return None
    against = [_endless_object(s, finite) if k == "object" else _endless_array(s, finite) for k in kinds]
    return None if None in against else against[0]


def _endless_object(s: Mapping[str, Any], finite: Any) -> str | None:
    own = s["properties"] if isinstance(s.get("properties"), Mapping) else {}
    rest = True if "patternProperties" in s else s.get("additionalProperties", True)
    wanted = s["required"] if isinstance(s.get("required"), list) else []
    fine = all(finite(own.get(n, rest)) for n in wanted if isinstance(n, str))
    return None if fine else "required"


def _endless_array(s: Mapping[str, Any], finite: Any) -> str | None:
    least = s.get("minItems")
    least = least if isinstance(least, (int, float)) and not isinstance(least, bool) else 0
    first: list[Any] = next((s[k] for k in ("prefixItems", "items") if isinstance(s.get(k), list)), [])
    rest = next((s[k] for k in ("items", "additionalItems") if isinstance(s.get(k), Mapping)), True)
    fine = all(finite(x) for i, x in enumerate(first) if i < least) and (least <= len(first) or finite(rest))
    return None if fine else "minItems"
