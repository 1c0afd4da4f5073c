"""OpenAI's responses: a body into the chat form (responses_answer.py: events into the objects its clients parse).

A conversation is a list of items: what is said, reasoned, called and returned are items of their own. Those that
belong to one turn of the model become one message of the chat format; a reasoning item begins a turn. What a response
goes on with (`previous_response_id`) is read like what is sent, so that both make the same prompt.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds4.engine.sampling import MOST_TOP
from ds4.errors import RequestError, kind_of
from ds4.server.chat_form import ChatForm
from ds4.server.fields import MOST_DEEP, Fields, deep, naming
from ds4.server.request import Limits, ServedModel
from ds4.server.responses_store import Item, ResponseStore
from ds4.server.shape import read_shape, told_schema
from ds4.server.shared_fields import LATER, Asked, Names
from ds4.server.thinking import Thinking, known_effort, thinking_of
from ds4.server.tool_fields import read_tools

NAMES = Names("input", ("max_output_tokens",))
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXTS = ("input_text", "output_text", "text")
NOTHING: dict[str, list[object]] = {
    "background": [False], "truncation": ["disabled"], "conversation": [], "prompt": [],
}  # fmt: skip
LOGPROBS = "message.output_text.logprobs"
FORMAT = "text.format"
ECHOED = ("user", "safety_identifier", "prompt_cache_key")


@dataclass(frozen=True)
class ResponseAsked:
    """A body of /v1/responses.

    Attributes:
        echo: fields that a response repeats of its request.
        items: what is new in it, each item with an id.
        previous: the response that it goes on with.
        store: it may be gone on with.
    """

    asked: Asked
    echo: Mapping[str, Any]
    items: Sequence[Item]
    previous: str | None
    store: bool


def ask_response(fields: Fields, engine: ServedModel, limits: Limits, store: ResponseStore) -> ResponseAsked:
    """A body of /v1/responses.

    Raises:
        RequestError: names the field, or says that the context is too short.
        HttpError: 404, `previous_response_id` is not kept.
    """
    for name, accepted in NOTHING.items():
        fields.refuse(name, accepted, LATER)
    fields.string("model")  # any name is answered: one server, one model
    keep = fields.boolean("store")
    for name in ("input", "tools", "tool_choice", "text"):  # the response, or what is kept of it, has them again
        if deep(fields.raw.get(name)):
            raise RequestError(f"{name} is nested deeper than {MOST_DEEP} levels", name)
    wanted = _format(fields)
    logprobs = _logprobs(fields)
    tools = _tools(fields)
    choice = _choice(fields)
    with naming("tools"):
        told = read_tools(Fields({"tools": tools, **choice}), engine.tokenizer)
    previous = fields.string("previous_response_id")
    items = _input_items(fields, store)
    before, size = ([], 0) if previous is None else store.before(previous)
    turns = _Turns()
    if (instructions := fields.string("instructions")) is not None:
        turns.add("instructions", {"role": "system", "content": instructions})
    for i, item in enumerate([*before, *items]):
        turns.take(Fields(item, f"input[{i - len(before)}]." if i >= len(before) else "previous_response_id."))
    thinking, reasoning = _thinking(fields)
    shape = read_shape(
        fields, wanted, FORMAT, choice=choice["tool_choice"], tools=told, budget=thinking.budget,
        parameters="parameters",
    )  # fmt: skip
    form = ChatForm(turns.messages, told, thinking, NAMES, shape, turns.places).told(told_schema(wanted), FORMAT)
    asked = replace(form.asked(fields, engine, limits, logprobs), size=size)
    sampling = asked.generation.sampling
    echo: dict[str, Any] = {name: fields.string(name) for name in ECHOED}
    echo |= {
        "max_output_tokens": fields.raw.get("max_output_tokens"),
        "instructions": instructions, "previous_response_id": previous, "reasoning": reasoning,
        "metadata": _metadata(fields), "parallel_tool_calls": fields.raw.get("parallel_tool_calls") is not False,
        "store": keep is not False, "temperature": sampling.temperature, "top_p": sampling.top_p,
        "text": {"format": wanted}, "tool_choice": fields.raw.get("tool_choice") or "auto",
        "tools": fields.raw.get("tools") or [], "top_logprobs": logprobs or 0,
    }  # fmt: skip
    return ResponseAsked(asked, echo, items, previous, keep is not False)


# ---- items ----


def _input_items(fields: Fields, store: ResponseStore) -> list[dict[str, Any]]:
    """`input` as items with ids; a text is a user's message. References are followed."""
    given = fields.raw.get("input")
    if given is None and fields.has("previous_response_id"):
        return []
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        what = "is empty" if isinstance(given, list) else f"must be a string or a list of items, is {kind_of(given)}"
        raise RequestError(f"input {what}; a prompt needs some text", "input")
    out = []
    for item in Fields({"input": given}).objects("input") or []:
        kind = item.string("type") or ("message" if item.has("role") else None)
        raw = item.raw
        item.string("id")
        item.string("status")
        if kind == "item_reference":
            found = store.item(item.needed("id"))
            if found is None:
                raise RequestError(f"{item.place}: there is no item {raw['id']!r:.80} here", item.place)
            out.append(dict(found))
            continue
        if kind == "message" and isinstance(raw.get("content"), str):
            part = "output_text" if raw.get("role") == "assistant" else "input_text"
            raw = {**raw, "content": [{"type": part, "text": raw["content"]}]}
        prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
        if kind not in prefix:
            known = ", ".join([*prefix, "item_reference"])
            raise RequestError(f"{item.place}.type is {kind!r:.40}; known are {known}", f"{item.place}.type")
        made = {"id": f"{prefix[kind]}_{secrets.token_hex(12)}", "status": "completed"}
        out.append({**made, **{k: v for k, v in raw.items() if v is not None}, "type": kind})
    return out


class _Turns:
    """Items as they are taken, messages as they become."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._turn: dict[str, Any] | None = None  # the model's, as long as items may belong to it

    def add(self, place: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.places.append(place)
        self._turn = None

    def take(self, item: Fields) -> None:
        """
        Raises:
            RequestError: names the item, and what is wrong with it.
        """
        kind = item.raw["type"]
        if kind == "reasoning":
            turn = self._begun(item, fresh=True)
            turn["reasoning_content"] = _parts(item, "content", ("reasoning_text",)) if item.has("content") else ""
        elif kind == "function_call":
            self._call(item)
        elif kind == "function_call_output":
            output = _parts(item, "output", TEXTS)
            self.add(item.place, {"role": "tool", "tool_call_id": item.needed("call_id"), "content": output})
        else:
            self._message(item)

    def _message(self, item: Fields) -> None:
        role = item.raw.get("role")
        if not isinstance(role, str) or role not in ROLES:
            name = f"{item.place}.role"
            raise RequestError(f"{name} is {role!r:.40}; known are {', '.join(ROLES)}", name)
        if role != "assistant":
            content = [{"type": "text", "text": t} for t in _texts(item, "content", TEXTS)]
            self.add(item.place, {"role": ROLES[role], "content": content})
            return
        said = _parts(item, "content", (*TEXTS, "refusal"))
        has = self._turn or {}
        turn = self._begun(item, fresh=bool(has.get("content")) and "tool_calls" not in has)
        turn["content"] += said

    def _call(self, item: Fields) -> None:
        if item.raw.get("status") == "incomplete":
            return  # it was begun and is none
        function = {"name": item.needed("name"), "arguments": item.string("arguments") or ""}
        space = item.string("namespace")
        call = {"id": item.needed("call_id"), "type": "function", "function": function}
        turn = self._begun(item, fresh=False)
        turn.setdefault("tool_calls", []).append(call if space is None else {**call, "namespace": space})

    def _begun(self, item: Fields, *, fresh: bool) -> dict[str, Any]:
        """The model's turn that an item belongs to."""
        if self._turn is None or fresh:
            turn: dict[str, Any] = {"role": "assistant", "content": ""}
            self.add(item.place, turn)
            self._turn = turn
        return self._turn


def _texts(item: Fields, name: str, kinds: Sequence[str]) -> list[str]:
    """The texts of a content: itself, or its parts'."""
    value = item.raw.get(name)
    if isinstance(value, str):
        return [value]
    parts = item.objects(name)
    if parts is None:
        full = f"{item.place}.{name}"
        raise RequestError(f"{full} is missing or null; it must be a string or a list of parts", full)
    out = []
    for part in parts:
        kind = part.raw.get("type")
        if kind not in kinds:
            what = "images are" if kind == "input_image" else f"parts of type {kind!r:.40} are"
            raise RequestError(f"{part.place}: {what} not supported here", part.place, "unsupported_parameter")
        out.append(part.string("refusal" if kind == "refusal" else "text") or "")
    return out


def _parts(item: Fields, name: str, kinds: Sequence[str]) -> str:
    return "".join(_texts(item, name, kinds))


# ---- the other fields ----


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    """Tools in the form of /v1/chat/completions; those of a namespace one by one."""
    given = fields.objects("tools")
    if given is None:
        return None
    out: list[dict[str, Any]] = []
    for tool in given:
        kind = tool.raw.get("type")
        if kind == "namespace":
            space = {"name": tool.needed("name"), "description": tool.string("description")}
            for inner in tool.objects("tools") or []:
                inner.refuse("type", ["function"], 'may only be "function": this server runs no tools of its own')
                out.append({"type": "function", "namespace": space, "function": _function(inner)})
            continue
        if kind != "function":
            name = f"{tool.place}.type"
            why = "this server runs no tools of its own"
            raise RequestError(f'{name} may only be "function" or "namespace": {why}', name, "unsupported_parameter")
        out.append({"type": "function", "function": _function(tool)})
    return out


def _function(tool: Fields) -> dict[str, Any]:
    schema = tool.nested("parameters")
    function = {"name": tool.needed("name"), "description": tool.string("description"),
                "parameters": None if schema is None else schema.raw, "strict": tool.boolean("strict")}  # fmt: skip
    return {k: v for k, v in function.items() if v is not None}


def _choice(fields: Fields) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls` in the form of /v1/chat/completions."""
    choice, together = fields.raw.get("tool_choice"), fields.boolean("parallel_tool_calls")
    if isinstance(choice, dict) and choice.get("type") == "function":
        named = fields.nested("tool_choice") or Fields({})
        choice = {"type": "function", "function": {"name": named.needed("name")}}
    return {"tool_choice": choice, "parallel_tool_calls": together}


def _thinking(fields: Fields) -> tuple[Thinking, dict[str, Any]]:
    """Whether and how hard, and `reasoning` as the response repeats it. A summary is not made."""
    reasoning = fields.nested("reasoning") or Fields({})
    effort = known_effort(reasoning.raw.get("effort"), "reasoning.effort")
    said = fields.raw if effort is None else {"reasoning_effort": effort, **fields.raw}
    thinking = thinking_of(Fields(said))
    return thinking, {"effort": reasoning.raw.get("effort") or (None if thinking.on else "none"), "summary": None}


def _logprobs(fields: Fields) -> int | None:
    """How many likeliest tokens are told beside each token; None: nothing is."""
    include = fields.items("include") or []
    for i, name in enumerate(include):
        if not isinstance(name, str):
            raise RequestError(f"include[{i}] must be a string, is {kind_of(name)}", "include")
    top = fields.integer("top_logprobs", 0, MOST_TOP)
    return (top or 0) if LOGPROBS in include or top else None


def _metadata(fields: Fields) -> dict[str, Any]:
    given = fields.nested("metadata") or Fields({})
    return {name: given.string(name) for name in given.raw}


def _format(fields: Fields) -> dict[str, Any]:
    """`text.format`; its default is what it says then."""
    text = fields.nested("text")
    given = None if text is None else text.nested("format")
    return {"type": "text"} if given is None else dict(given.raw)
