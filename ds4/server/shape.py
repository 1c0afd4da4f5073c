"""What an answer has to be: a format, a grammar, a forced call, a bound of its reasoning.

Reading says what is wrong with a field; compiling, which takes longer, what of it cannot be held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds4.constrain import Calls, Compiler, Content, read_format, read_grammar
from ds4.engine.constraint import Constrained
from ds4.errors import RequestError
from ds4.model.tokenizer import Tokenizer
from ds4.server.fields import Fields
from ds4.server.request import Tools

OWN_PARAMETERS = "function.parameters"  # what the chat form calls a tool's schema


@dataclass(frozen=True)
class Shape:
    """What is asked of an answer.

    Attributes:
        content: what its text is.
        calls: what it may call; with `forced` it is such a call, else that or `content`.
        budget: tokens of reasoning, after which the block is closed; None: no such bound.
        parameters: what the API calls a tool's schema.
    """

    content: Content | None = None
    calls: Calls | None = None
    forced: bool = False
    budget: int | None = None
    parameters: str = OWN_PARAMETERS

    def compiled(self, compiler: Compiler, tokenizer: Tokenizer, *, in_reasoning: bool) -> Constrained | None:
        """For the engine; None: the answer may be anything. It takes a while.

        Raises:
            RequestError: names the field, and what of it cannot be held.
        """
        try:
            return compiler.compile(
                tokenizer, content=self.content, calls=self.calls, forced=self.forced, in_reasoning=in_reasoning,
                budget=self.budget,
            )  # fmt: skip
        except RequestError as e:
            if self.parameters == OWN_PARAMETERS:
                raise
            param = None if e.param is None else e.param.replace(OWN_PARAMETERS, self.parameters)
            raise RequestError(str(e).replace(OWN_PARAMETERS, self.parameters), param, e.code) from e


def read_shape(
    fields: Fields,
    format_: object = None,
    field: str = "response_format",
    *,
    choice: object = None,
    tools: Tools | None = None,
    budget: int | None = None,
    parameters: str = OWN_PARAMETERS,
) -> Shape:
    """What a body asks of its answer.

    Args:
        format_: the response format, as `field` has it.
        choice: `tool_choice`, in the form of /v1/chat/completions.
        tools: that the model is told of.

    Raises:
        RequestError: names the field.
    """
    content, grammar = read_format(format_, field), read_grammar(fields.raw.get("grammar"))
    if content is not None and grammar is not None:
        raise RequestError(f"grammar and {field} both say what the answer is; give one of them", "grammar")
    content = grammar or content
    calls = forced_call(choice, tools)
    if content is not None and calls is not None:
        name = content.field.partition(".schema")[0] if grammar is None else "grammar"
        raise RequestError(f"{name} and a tool_choice that forces a call contradict each other; give one", name)
    if calls is None and content is not None and tools is not None:
        return Shape(content, Calls(tools.declared, None, tools.one), False, budget, parameters)
    return Shape(content, calls, calls is not None, budget, parameters)


def told_schema(format_: object) -> Mapping[str, Any] | None:
    """The schema of a response format that went through `read_shape`; the model is told of it."""
    if not isinstance(format_, Mapping) or format_.get("type") != "json_schema":
        return None
    inner = format_["json_schema"] if format_.get("json_schema") is not None else format_
    schema: Mapping[str, Any] = inner["schema"]
    return schema


def forced_call(choice: object, tools: Tools | None) -> Calls | None:
    """The call that a `tool_choice` forces; None: it forces none.

    Raises:
        RequestError: there is nothing to call, or not what it names.
    """
    if choice in (None, "auto", "none"):
        return None
    name = None if choice == "required" else _named(choice)
    if tools is None:
        raise RequestError("tool_choice forces a call, and there are no tools; send some, or leave it", "tool_choice")
    if name is None:
        return Calls(tools.declared, None, tools.one)
    found = [full for full, (bare, _) in tools.names.items() if name in (full, bare)]
    if name in tools.names:
        found = [name]
    if len(found) != 1:
        what = "is not among the tools" if not found else f"may be any of {', '.join(found)}"
        raise RequestError(f"tool_choice names {name!r:.80}, which {what}", "tool_choice")
    return Calls(tools.declared, found[0], True)


def _named(choice: object) -> str:
    """The tool that is named: {"type": "function", "function": {"name"}}, or the name beside the type."""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        space = function.get("namespace") if isinstance(function, Mapping) else None
        if isinstance(name, str) and name and (space is None or isinstance(space, str)):
            return f"{space}::{name}" if space else name
    raise RequestError(
        'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name"}}', "tool_choice"
    )
