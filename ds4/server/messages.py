"""Anthropic's messages: a body into the chat form (messages_answer.py: events into the objects its clients parse).

Its content blocks become the messages that the chat format has: text, earlier thinking, calls, and results as
messages of their own, in their order. What a block has beside (cache_control, citations) asks for nothing here and is
ignored; images, documents and tools that a server would run are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ds4.errors import RequestError
from ds4.model.tools import json_text
from ds4.server.chat_form import ChatForm
from ds4.server.fields import Fields, naming
from ds4.server.request import Limits, ServedModel
from ds4.server.shape import read_shape, told_schema
from ds4.server.shared_fields import LATER, Asked, Names
from ds4.server.thinking import Thinking, known_effort, thinking_of
from ds4.server.tool_fields import read_tools

NAMES = Names(
    "messages", ("max_tokens",), stop="stop_sequences",
    too_long="prompt is too long: {n} tokens > {most} maximum, of a context of {context}; send shorter messages",
)  # fmt: skip
ROLES = ("user", "assistant", "system")
CHOICES = {"auto": "auto", "none": "none", "any": "required"}


class _Chat:
    """Messages as they are collected, each with its place in the body."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []

    def add(self, place: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.places.append(place)


def ask_messages(fields: Fields, engine: ServedModel, limits: Limits) -> Asked:
    """A body of /v1/messages.

    Raises:
        RequestError: names the field, or says that the context is too short.
    """
    fields.refuse("container", [], LATER)
    fields.refuse("mcp_servers", [[]], LATER)
    fields.nested("metadata")
    return messages_form(fields, engine).asked(fields, engine, limits, None)


def count_tokens(fields: Fields, engine: ServedModel, limits: Limits) -> dict[str, object]:
    """A body of /v1/messages/count_tokens: the length of the prompt that /v1/messages would make of it.

    Raises:
        RequestError: names the field.
    """
    return {"input_tokens": len(messages_form(fields, engine).prompt(engine)[0])}


def messages_form(fields: Fields, engine: ServedModel) -> ChatForm:
    """System, messages, tools and thinking of a body.

    Raises:
        RequestError: names the field.
    """
    fields.string("model")  # any name is answered: one server, one model
    chat = _Chat()
    if fields.has("system"):
        chat.add("system", {"role": "system", "content": _text(fields, "system")})
    given = fields.objects("messages")
    if not given:
        raise RequestError("messages is missing or empty; a prompt needs at least one", "messages")
    for message in given:
        _read(message, chat)
    last = chat.messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        last["wo_eos"] = True  # the beginning of the answer: the model goes on with it
    tools = Fields({"tools": _tools(fields), **_choice(fields)})
    with naming("tools"):
        told = read_tools(tools, engine.tokenizer)
    thinking, (wanted, field) = _thinking(fields), _format(fields)
    shape = read_shape(
        fields, wanted, field, choice=tools.raw.get("tool_choice"), tools=told, budget=thinking.budget,
        parameters="input_schema",
    )  # fmt: skip
    return ChatForm(chat.messages, told, thinking, NAMES, shape, chat.places).told(told_schema(wanted), field)


def _format(fields: Fields) -> tuple[object, str]:
    """What the answer has to be, and where that stands: `output_config.format`, or `output_format` by its older name.

    Raises:
        RequestError: both say something.
    """
    config = fields.nested("output_config")
    name = "output_config.format"
    if config is None or not config.has("format"):
        return fields.raw.get("output_format"), "output_format"
    if fields.has("output_format"):
        raise RequestError(f"{name} and output_format are one thing; give one of them", name)
    return config.raw["format"], name


def _read(message: Fields, chat: _Chat) -> None:
    role = message.raw.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{message.place}.role is {role!r:.40}; known are {', '.join(ROLES)}", f"{message.place}.role"
        )
    content = message.raw.get("content")
    if isinstance(content, str):
        chat.add(message.place, {"role": role, "content": content})
        return
    blocks = message.objects("content")
    if blocks is None:
        name = f"{message.place}.content"
        raise RequestError(f"{name} is missing or null; it must be a string or a list of blocks", name)
    if role == "assistant":
        chat.add(message.place, _assistant(blocks))
    elif role == "system":
        chat.add(message.place, {"role": role, "content": [_text_block(b) for b in blocks]})
    else:
        _user(message.place, blocks, chat)


def _user(place: str, blocks: Sequence[Fields], chat: _Chat) -> None:
    """Text and results, in their order; the chat format puts both into one turn."""
    texts: list[dict[str, Any]] = []
    for block in blocks:
        if block.raw.get("type") != "tool_result":
            texts.append(_text_block(block))
            continue
        if texts:
            chat.add(place, {"role": "user", "content": texts})
            texts = []
        call = block.needed("tool_use_id")
        content = _text(block, "content") if block.has("content") else ""
        failed = block.boolean("is_error") or False
        if failed and not content:
            content = "error"
        chat.add(block.place, {"role": "tool", "tool_call_id": call, "content": content})
    if texts or not blocks:
        chat.add(place, {"role": "user", "content": texts})


def _assistant(blocks: Sequence[Fields]) -> dict[str, Any]:
    """One message of what it thought, said and called. Texts are joined as they stood: they were one text."""
    thought: list[str] = []
    said: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.raw.get("type")
        if kind == "thinking":
            thought.append(block.string("thinking") or "")
        elif kind == "redacted_thinking":
            continue  # nobody here can read it
        elif kind == "tool_use":
            given = block.nested("input")
            with naming(f"{block.place}.input"):
                arguments = json_text({} if given is None else given.raw)
            function = {"name": block.needed("name"), "arguments": arguments}
            calls.append({"id": block.needed("id"), "type": "function", "function": function})
        else:
            said.append(_text_block(block)["text"])
    message: dict[str, Any] = {"role": "assistant", "content": "".join(said)}
    message |= {"reasoning_content": "".join(thought)} if thought else {}
    return message | ({"tool_calls": calls} if calls else {})


def _text(fields: Fields, name: str) -> Any:
    """A text, or a list of text blocks."""
    if isinstance(fields.raw[name], str):
        return fields.raw[name]
    if not isinstance(fields.raw[name], list):
        raise fields.wrong(name, "a string or a list of text blocks")
    return [_text_block(b) for b in fields.objects(name) or []]


def _text_block(block: Fields) -> dict[str, Any]:
    kind = block.raw.get("type")
    if kind != "text":
        what = "images are" if kind == "image" else f"blocks of type {kind!r:.40} are"
        raise RequestError(f"{block.place}: {what} not supported here", block.place, "unsupported_parameter")
    return {"type": "text", "text": block.string("text") or ""}


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    """Tools in the form of /v1/chat/completions."""
    given = fields.objects("tools")
    if given is None:
        return None
    out = []
    for tool in given:
        tool.refuse("type", ["custom"], 'may only be "custom": this server runs no tools of its own')
        schema = tool.nested("input_schema")
        function: dict[str, Any] = {"name": tool.needed("name"), "description": tool.string("description")}
        function |= {"parameters": None if schema is None else schema.raw, "strict": tool.boolean("strict")}
        out.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    return out


def _choice(fields: Fields) -> dict[str, Any]:
    """`tool_choice` in the form of /v1/chat/completions."""
    choice = fields.nested("tool_choice")
    if choice is None:
        return {}
    alone = choice.boolean("disable_parallel_tool_use")
    together = {} if alone is None else {"parallel_tool_calls": not alone}
    kind = choice.raw.get("type")
    if kind == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.needed("name")}}, **together}
    if not isinstance(kind, str) or kind not in CHOICES:
        known = ", ".join(["tool", *CHOICES])
        raise RequestError(f"tool_choice.type is {kind!r:.40}; known are {known}", "tool_choice.type")
    return {"tool_choice": CHOICES[kind], **together}


def _thinking(fields: Fields) -> Thinking:
    """`thinking`, and how hard: `output_config.effort`, where this API says it."""
    thinking = thinking_of(fields)
    config = fields.nested("output_config")
    if config is None or not config.has("effort"):
        return thinking
    effort = known_effort(config.raw["effort"], "output_config.effort")
    return (
        replace(thinking, effort=effort) if thinking.on and thinking.effort is None and effort != "none" else thinking
    )
