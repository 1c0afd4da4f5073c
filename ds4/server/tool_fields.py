"""What a chat says of its tools: `tools`, `tool_choice`, `parallel_tool_calls`, and results among its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds4.errors import RequestError, kind_of
from ds4.model.tokenizer import DSML, Tokenizer, segments_text
from ds4.model.tools import declaration, render_tools
from ds4.server.fields import Fields, naming
from ds4.server.request import Tools


def read_tools(fields: Fields, tokenizer: Tokenizer) -> Tools | None:
    """The tools that the model is told of; None: of none, and nothing that it writes is a call.

    With `tool_choice` "none" those of the request are checked, and not told; what else it says is `shape.py`'s.

    Raises:
        RequestError: names the tool and what is wrong with it, or the field.
    """
    together = fields.boolean("parallel_tool_calls")
    declared = declared_tools(fields)
    names: dict[str, tuple[str, str | None]] = {}
    for i, tool in enumerate(declared):
        full = str(declaration(tool, i)["name"])
        if full in names:
            raise RequestError(f"tools[{i}]: {full!r} is declared twice", "tools")
        names[full] = _as_declared(tool)
    if not declared:
        return None
    with naming("tools"):
        text = segments_text(render_tools(declared, tokenizer.tool_text))
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise RequestError(f"tools hold a lone surrogate, U+{ord(text[e.start]):04X}, which no text has") from e
    if fields.raw.get("tool_choice") == "none":
        return None
    if not tokenizer.has_special(DSML):
        raise RequestError(
            f"tools: this model's vocabulary has no {DSML}, so it can call none", "tools", "unsupported_parameter"
        )
    return Tools(tuple(declared), names, one=together is False)


def declared_tools(fields: Fields) -> list[dict[str, Any]]:
    """`tools` as the prompt tells them: without what is null, and without `strict`, which asks for structured output.

    Raises:
        RequestError: names the tool, and what is wrong with it.
    """
    out = []
    for i, tool in enumerate(fields.items("tools") or []):
        with naming("tools"):
            declaration(tool, i)
        function = tool.get("function", tool)
        for name, kind, expected in (("description", str, "a string"), ("parameters", dict, "an object")):
            value = function.get(name)
            if value is not None and not isinstance(value, kind):
                raise RequestError(f"tools[{i}]: {name} must be {expected}, is {kind_of(value)}", "tools")
        kept = {k: v for k, v in function.items() if v is not None and k != "strict"}
        space = {} if tool.get("namespace") is None else {"namespace": tool["namespace"]}
        out.append(kept if function is tool else {"type": "function", **space, "function": kept})
    return out


def _as_declared(tool: Mapping[str, Any]) -> tuple[str, str | None]:
    function = tool.get("function", tool)
    spaces = [s for s in (tool.get("namespace"), function.get("namespace")) if s is not None]
    space = spaces[0] if spaces else None
    return str(function["name"]), space["name"] if isinstance(space, Mapping) else space


def check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Results say of which call they are. `messages` went through `prepare`."""
    for i, message in enumerate(messages):
        if message["role"] == "tool" and not message.get("tool_call_id"):
            name = f"messages[{i}].tool_call_id"
            raise RequestError(f"{name} is missing; a tool's message names the call that it is the result of", name)
