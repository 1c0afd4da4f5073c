"""OpenAI's chat and completions: bodies into what they ask for (answer.py: events into what its clients parse).

Unknown fields are ignored, null means the default, wrong types and values are refused by name. What the API knows and
this server does not do yet is refused unless it asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ds4.engine.sampling import MOST_TOP
from ds4.errors import RequestError
from ds4.model.tokenizer import Tokenizer
from ds4.server.chat_form import ChatForm
from ds4.server.fields import Fields, naming
from ds4.server.request import Generation, Limits, ServedModel
from ds4.server.shape import read_shape, told_schema
from ds4.server.shared_fields import FAR, LATER, Asked, Names, chat_logprobs, generation_of, with_usage
from ds4.server.thinking import thinking_of
from ds4.server.tool_fields import read_tools

DEFAULT_COMPLETION_TOKENS = 16  # as the API says
MOST = ("max_completion_tokens", "max_tokens")
CHAT, COMPLETION = Names("messages", MOST), Names("prompt", MOST)


def read_chat(fields: Fields, engine: ServedModel, limits: Limits) -> Generation:
    """What a body of /v1/chat/completions asks for; see `ask_chat`."""
    return ask_chat(fields, engine, limits).generation


def read_completion(fields: Fields, engine: ServedModel, limits: Limits) -> Generation:
    """What a body of /v1/completions asks for; see `ask_completion`."""
    return ask_completion(fields, engine, limits).generation


def ask_chat(fields: Fields, engine: ServedModel, limits: Limits) -> Asked:
    """A body of /v1/chat/completions.

    Raises:
        RequestError: names the field, or says that the context is too short (code context_length_exceeded).
    """
    _refuse_common(fields)
    usage = with_usage(fields)
    asked = chat_of(fields, engine).asked(fields, engine, limits, chat_logprobs(fields))
    return replace(asked, generation=replace(asked.generation, include_usage=usage))


def chat_of(fields: Fields, engine: ServedModel) -> ChatForm:
    """The chat of a body: messages, tools, thinking.

    Raises:
        RequestError: names the field.
    """
    messages = fields.items("messages")
    if not messages:
        raise RequestError("messages is missing or empty; a prompt needs at least one", "messages")
    for i, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("tools"):
            raise RequestError(f"messages[{i}].tools {LATER}", "messages", "unsupported_parameter")
    tools, thinking = read_tools(fields, engine.tokenizer), thinking_of(fields)
    wanted = fields.raw.get("response_format")
    shape = read_shape(fields, wanted, choice=fields.raw.get("tool_choice"), tools=tools, budget=thinking.budget)
    form = ChatForm([_renamed(m) for m in messages], tools, thinking, CHAT, shape)
    return form.told(told_schema(wanted), "response_format")


def _renamed(message: Any) -> Any:
    """A developer's message is a system's by its newer name."""
    if isinstance(message, Mapping) and message.get("role") == "developer":
        return {**message, "role": "system"}
    return message


def ask_completion(fields: Fields, engine: ServedModel, limits: Limits) -> Asked:
    """A body of /v1/completions; see `ask_chat`. Text gets the begin-of-sentence token in front, ids get nothing."""
    _refuse_common(fields)
    fields.refuse("best_of", [1], "may only be 1 on this server")
    fields.refuse("echo", [False], LATER)
    fields.refuse("suffix", [""], LATER)
    nothing: dict[str, Sequence[object]] = {
        "thinking": [False, {"type": "disabled"}], "enable_thinking": [False], "think": [False, "none"],
        "reasoning_effort": ["none"], "chat_template_kwargs": [{}], "top_logprobs": [0], "tools": [[]],
        "tool_choice": ["auto", "none"], "parallel_tool_calls": [True, False],
    }  # fmt: skip
    for name, accepted in nothing.items():
        fields.refuse(name, accepted, "belongs to /v1/chat/completions")
    with naming("prompt"):
        ids = _prompt_ids(fields.raw.get("prompt"), engine)
    usage = with_usage(fields)
    asked = None if fields.raw.get("logprobs") is False else fields.integer("logprobs", 0, MOST_TOP)
    generation = generation_of(
        fields, engine, limits, ids, COMPLETION, default_max=DEFAULT_COMPLETION_TOKENS, logprobs=asked
    )
    generation = replace(generation, include_usage=usage)
    if asked is not None:
        text = ids[1:] if ids[0] == engine.config.bos_token_id else ids
        generation = replace(generation, prompt_chars=len(engine.tokenizer.decode(text)))
    shape = read_shape(fields, fields.raw.get("response_format"))
    return Asked(generation, {"prompt": fields.raw["prompt"]}, fields.boolean("return_progress") or False, shape)


def _refuse_common(fields: Fields) -> None:
    if fields.integer("n", 1, 128) not in (None, 1):
        raise RequestError("n must be 1: this server gives one answer a request", "n", "unsupported_parameter")
    fields.string("model")  # any name is answered: one server, one model
    fields.refuse("functions", [[]], f"{LATER}; it takes tools")
    fields.refuse("function_call", ["auto", "none"], f"{LATER}; it takes tool_choice")


def _prompt_ids(prompt: Any, engine: ServedModel) -> list[int]:
    """A string, a list of ids, or a list with one of these."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise RequestError(f"{len(prompt)} prompts; this server takes one a request")
        prompt = prompt[0]
    if not isinstance(prompt, (str, list)):
        raise RequestError("prompt must be a string or a list of token ids")
    if not prompt:
        raise RequestError("the prompt is empty; it needs at least one token")
    tokenizer: Tokenizer = engine.tokenizer
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, FAR * engine.config.max_position_embeddings)
        return [engine.config.bos_token_id, *ids]
    return [tokenizer.check_id(i) for i in prompt]
