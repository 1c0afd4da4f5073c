"""Tool declarations and calls as the prompt spells them: the TOOLS block and the CALLS block (encoding.md 5).

Only the marker `｜DSML｜` is an added token; angle brackets, tag names and values around it are text. Nothing
is escaped, so this file never builds markup that is read back by spelling: what a user's value contains stays
text, because only `Special` segments become tokens.

The released wording of the TOOLS block is the vendor's and is read from the checkpoint's own files, checked
by hash. Without it `OWN_TOOL_TEXT` has the same structure in our words: it works, and is off the training
distribution, so callers warn.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4.errors import RequestError
from ds4.model.tokenizer import DSML, END_THINK, THINK, Segment, Special, segments_text

PREFIX_SHA256 = "2ae2ff83edf990187ed419c4e2901bb9ea6ce2129eb503ac543b258e7de8231d"
SUFFIX_SHA256 = "690702850fe256512cb1ee67c4e436ecb3e735c71ebee77ca45ff357a75fb5a7"
_MARKERS = re.compile("|".join(map(re.escape, (DSML, THINK, END_THINK))))
_NO_NAME = re.compile('["\x00-\x1f\x7f]')
MOST_NAME = 256  # characters
_LONG_INT = 4000  # digits; beyond about this many Python refuses to turn text into an int


@dataclass(frozen=True)
class ToolText:
    """The fixed text around the tool schemas; `released` if it is the vendor's own wording."""

    prefix: str
    suffix: str
    released: bool


OWN_TOOL_TEXT = ToolText(
    prefix=f"""## Tools

This conversation comes with tools. Use them by writing a "<{DSML} calls>" block in this form:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

A value that is a string stands as it is, with `string="true"`. Any other value (number, boolean, array, object) \
stands as JSON, with `string="false"`.

When thinking is on (your turn opens with {THINK}), write all of your reasoning inside {THINK}...{END_THINK} \
before any call and before the answer.

When it is off, write the calls or the answer directly after {END_THINK}.

### Available Tool Schemas

""",
    suffix="\n\nCall only the tools listed above, with parameters that follow their schemas.\n",
    released=False,
)


@dataclass(frozen=True)
class RawNumber:
    """An integer of a JSON text with more digits than Python converts: kept as written."""

    text: str


def load_tool_text(folder: str | Path) -> ToolText | None:
    """The released wording from a checkpoint's `encoding/encoding.py` or `chat_template.jinja`, never executed.

    Every string literal of the file is a candidate; the one whose parts have the released hashes is taken.

    Returns:
        The text, or None if no file there has it: use `OWN_TOOL_TEXT` and warn.
    """
    root = Path(folder)
    for name in ("encoding/encoding.py", "encoding.py", "chat_template.jinja"):
        try:
            source = (root / name).read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        for literal in _literals(source, python=name.endswith(".py")):
            found = _released_parts(literal)
            if found:
                return found
    return None


def _literals(source: str, python: bool) -> Iterator[str]:
    """String literals that can hold the block; an f-string's holes come out as `{}`."""
    if not python:
        for quoted in re.findall(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", source, re.DOTALL):
            yield quoted[1:-1].replace("\\n", "\n").replace("\\'", "'").replace('\\"', '"')
        yield source
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "{" + _hole(v) + "}" for v in node.values)


def _hole(node: ast.AST) -> str:
    return ast.unparse(node.value) if isinstance(node, ast.FormattedValue) else ""


def _released_parts(literal: str) -> ToolText | None:
    """Split a template literal at its schema hole, fill the marker holes, compare hashes."""
    begin = literal.find("## Tools")
    if begin < 0:
        return None
    holes = {"dsml_token": DSML, "thinking_start_token": THINK, "thinking_end_token": END_THINK}
    text = literal[begin:]
    for name, value in holes.items():
        text = text.replace("{" + name + "}", value).replace("{{ " + name + " }}", value)
    for hole in re.finditer(r"\{\{?[^{}]*\}\}?", text):
        prefix, rest = text[: hole.start()], text[hole.end() :]
        if _sha256(prefix) != PREFIX_SHA256:
            continue
        for end in range(len(rest) + 1):  # in a Jinja template the text runs on after the block
            if _sha256(rest[:end]) == SUFFIX_SHA256:
                return ToolText(prefix, rest[:end], released=True)
    return None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def marked(text: str) -> list[Segment]:
    """Text of our own or of the release to segments: its markers are real tokens."""
    out: list[Segment] = []
    end = 0
    for match in _MARKERS.finditer(text):
        out += [text[end : match.start()], Special(match.group())]
        end = match.end()
    return [*out, text[end:]]


def render_tools(tools: Sequence[Any], text: ToolText = OWN_TOOL_TEXT) -> list[Segment]:
    """The TOOLS block: fixed text around one JSON line a tool, its `function` object.

    Raises:
        RequestError: a tool without a function object or name, a bad namespace.
    """
    lines = [json_text(declaration(tool, i)) for i, tool in enumerate(tools)]
    return [*marked(text.prefix), "\n".join(lines), *marked(text.suffix)]


def declaration(tool: Any, i: int) -> dict[str, Any]:
    """What the prompt says of tool `i`: its `function` object, NAMESPACE::NAME as its name if it has a namespace.

    Raises:
        RequestError: as `render_tools`; or its name could not be read back from a call of it.
    """
    where = f"tools[{i}]"
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} must be an object, is {type(tool).__name__}", "tools")
    if tool.get("type", "function") != "function":
        raise RequestError(f"{where}: type is {tool.get('type')!r}; only 'function' tools exist", "tools")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function must be an object, is {type(function).__name__}", "tools")
    name, described = _full_name(tool, function, where, "tools")
    if len(name) > MOST_NAME or _NO_NAME.search(name):
        raise RequestError(
            f"{where}: name {name!r:.60} must have at most {MOST_NAME} characters, and no quotes or line breaks",
            "tools",
        )
    out = {k: v for k, v in function.items() if k != "namespace" and not (function is tool and k == "type")}
    out["name"] = name
    if described:
        own = out.get("description")
        out["description"] = f"{described}\n{own}" if own else described
    return out


def _full_name(outer: Mapping[str, Any], inner: Mapping[str, Any], where: str, param: str) -> tuple[str, str]:
    """`name` or `ns::name`, and the namespace's description."""
    name = inner.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}: name must be a non-empty string, is {name!r}", param)
    head, sep, tail = name.partition("::")
    if sep and (not head or not tail or "::" in tail):
        raise RequestError(f"{where}: name {name!r} must be NAME or NAMESPACE::NAME", param)
    spaces = {head} if sep else set()
    described = ""
    for space in (outer.get("namespace"), inner.get("namespace")):
        if space is None:
            continue
        if isinstance(space, Mapping):
            described = described or str(space.get("description") or "")
            space = space.get("name")
        if not isinstance(space, str) or not space or "::" in space:
            raise RequestError(f"{where}: namespace must be a name without '::', is {space!r}", param)
        spaces.add(space)
    if len(spaces) > 1:
        raise RequestError(f"{where}: namespaces {sorted(spaces)} contradict each other", param)
    bare = tail if sep else name
    return (f"{spaces.pop()}::{bare}" if spaces else bare), described


def render_calls(calls: Sequence[Any], where: str = "tool_calls") -> list[Segment]:
    """The CALLS block of an assistant turn, without the two newlines before it.

    Raises:
        RequestError: a call that is no object or has no name, a bad namespace.
    """
    out: list[Segment] = ["<", Special(DSML), " calls>\n"]
    for i, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise RequestError(f"{where}[{i}] must be an object, is {type(call).__name__}", "messages")
        function = call.get("function", call)
        if not isinstance(function, Mapping):
            raise RequestError(f"{where}[{i}].function must be an object", "messages")
        name, _ = _full_name(call, function, f"{where}[{i}]", "messages")
        out += ["<", Special(DSML), f' invoke name="{name}">\n']
        arguments = _arguments(function.get("arguments"))
        for j, (key, value) in enumerate(arguments.items()):
            is_text = isinstance(value, str)
            out += [
                "\n" if j else "",
                "<",
                Special(DSML),
                f' parameter name="{key}" string="{str(is_text).lower()}">',
            ]
            out += [value if is_text else json_text(value), "</", Special(DSML), " parameter>"]
        out += ["\n</", Special(DSML), " invoke>\n"]
    return [*out, "</", Special(DSML), " calls>"]


def _arguments(value: Any) -> Mapping[str, Any]:
    """An object, or a JSON text of one (decoded up to twice); anything else is one parameter `arguments`."""
    decoded = {} if value is None else value
    for _ in range(2):
        if isinstance(decoded, str):
            try:
                decoded = json_value(decoded)
            except ValueError:
                break
    return decoded if isinstance(decoded, Mapping) else {"arguments": value}


def json_value(text: str, strict: bool = False) -> Any:
    """Parse JSON as Python does; integers of any length stay exact.

    Args:
        strict: refuse NaN and Infinity, which Python takes and JSON has not.

    Raises:
        ValueError: not JSON, or nested too deep.
    """

    def integer(digits: str) -> int | RawNumber:
        return int(digits) if len(digits) <= _LONG_INT else RawNumber(digits)

    def constant(name: str) -> float:
        if strict:
            raise ValueError(f"{name} is not JSON")
        return float(name)

    try:
        return json.loads(text, parse_int=integer, parse_constant=constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def json_text(value: Any) -> str:
    """JSON as Python's default prints it, non-ASCII unescaped, keys in their order.

    Raises:
        RequestError: a value that JSON has not, or nested too deep.
    """
    try:
        return _json_text(value)
    except RecursionError:
        raise RequestError("a JSON value is nested too deep") from None


def _json_text(value: Any) -> str:
    if isinstance(value, RawNumber):
        return value.text
    if isinstance(value, Mapping):
        if not all(isinstance(k, str) for k in value):
            raise RequestError("JSON object keys must be strings")
        pairs = (f"{json.dumps(k, ensure_ascii=False)}: {_json_text(v)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_json_text, value)) + "]"
    if value is None or isinstance(value, (str, bool, int, float)):
        return json.dumps(value, ensure_ascii=False)
    raise RequestError(f"{type(value).__name__} is not a JSON value")


def calls_text(calls: Sequence[Any]) -> str:
    """`render_calls` spelled out."""
    return segments_text(render_calls(calls))
