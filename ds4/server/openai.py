"""OpenAI's chat and completions: bodies into a `Generation` (answer.py: events into the objects its clients parse).

Unknown fields are ignored, null means the default, wrong types and values are refused by name. What the API knows and
this server does not do yet is refused unless it asks for nothing.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ds4.engine import Sampling
from ds4.engine.sampling import MOST_TOP, Penalties
from ds4.errors import RequestError
from ds4.model.chat import attach_tools, other_turns, prepare, render, resolve_effort
from ds4.model.tokenizer import ASSISTANT, END_THINK, THINK, Segment, Special, Tokenizer
from ds4.server.fields import Fields, naming
from ds4.server.request import Generation, Limits, ServedModel
from ds4.server.tool_fields import check_results, declared_tools, read_tools

DEFAULT_COMPLETION_TOKENS = 16  # as the API says
ID = re.compile("0|[1-9][0-9]{0,9}")
SWITCHES = ("thinking", "enable_thinking", "reasoning_effort")  # what chat_template_kwargs may hold
LATER = "is not supported by this server"


def read_chat(fields: Fields, engine: ServedModel, limits: Limits) -> Generation:
    """A body of /v1/chat/completions.

    Raises:
        RequestError: names the field, or says that the context is too short (code context_length_exceeded).
    """
    _refuse_common(fields)
    messages = fields.items("messages")
    if not messages:
        raise RequestError("messages is missing or empty; a prompt needs at least one", "messages")
    for i, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("tools"):
            raise RequestError(f"messages[{i}].tools {LATER}", "messages", "unsupported_parameter")
    thinking, effort = thinking_of(fields)
    tools = read_tools(fields, engine.tokenizer)
    with naming("messages"):
        _, images = prepare(messages)
        if images:
            raise RequestError(
                "messages: images are not supported by this server", "messages", "unsupported_parameter"
            )
        _check_content(messages)
        check_results(messages)
        told = attach_tools(messages, None if tools is None else list(tools.declared))
        segments = render(told, thinking=thinking, effort=effort, tool_text=engine.tokenizer.tool_text)
        ids = engine.tokenizer.encode_segments(segments, spell_missing=True)
    in_reasoning = _ends_in_reasoning(segments)
    asked = _chat_logprobs(fields)
    generation = _generation(fields, engine, limits, ids, "messages", None, in_reasoning, asked)
    return replace(generation, ends=other_turns(engine.tokenizer), tools=tools)


def read_completion(fields: Fields, engine: ServedModel, limits: Limits) -> Generation:
    """A body of /v1/completions; see `read_chat`. Text gets the begin-of-sentence token in front, ids get nothing."""
    _refuse_common(fields)
    fields.refuse("best_of", [1], "may only be 1 on this server")
    fields.refuse("echo", [False], LATER)
    fields.refuse("suffix", [""], LATER)
    nothing: dict[str, Sequence[object]] = {
        "thinking": [False, {"type": "disabled"}], "reasoning_effort": ["none"], "chat_template_kwargs": [{}],
        "top_logprobs": [0], "tools": [[]], "tool_choice": ["auto", "none"], "parallel_tool_calls": [True, False],
    }  # fmt: skip
    for name, accepted in nothing.items():
        fields.refuse(name, accepted, "belongs to /v1/chat/completions")
    with naming("prompt"):
        ids = _prompt_ids(fields.raw.get("prompt"), engine)
    asked = None if fields.raw.get("logprobs") is False else fields.integer("logprobs", 0, MOST_TOP)
    generation = _generation(fields, engine, limits, ids, "prompt", DEFAULT_COMPLETION_TOKENS, False, asked)
    if asked is None:
        return generation
    text = ids[1:] if ids[0] == engine.config.bos_token_id else ids
    return replace(generation, prompt_chars=len(engine.tokenizer.decode(text)))


def asked_of(fields: Fields, *, chat: bool) -> dict[str, Any]:
    """Of a body that was read, what its prompt was made of: enough to make the same prompt again."""
    if not chat:
        return {"prompt": fields.raw["prompt"]}
    thinking, effort = thinking_of(fields)
    declared = declared_tools(fields)
    tools = {"tools": declared} if declared and fields.raw.get("tool_choice") != "none" else {}
    return {"messages": fields.raw["messages"], **tools, "thinking": thinking, "effort": resolve_effort(effort)}


def _refuse_common(fields: Fields) -> None:
    if fields.integer("n", 1, 128) not in (None, 1):
        raise RequestError("n must be 1: this server gives one answer a request", "n", "unsupported_parameter")
    fields.string("model")  # any name is answered: one server, one model
    fields.refuse("functions", [[]], f"{LATER}; it takes tools")
    fields.refuse("function_call", ["auto", "none"], f"{LATER}; it takes tool_choice")
    response_format = fields.nested("response_format")
    if response_format is not None:
        response_format.refuse("type", ["text"], 'may only be "text" on this server')


def _check_content(messages: Sequence[Mapping[str, Any]]) -> None:
    """Only an assistant's message may have no content; a user's has some text, and the prompt as a whole too.

    `messages` went through `prepare`: their types are right.
    """
    said = False
    for i, message in enumerate(messages):
        name, content, role = f"messages[{i}].content", message.get("content"), message["role"]
        if content is None and role != "assistant":
            raise RequestError(f"{name} is missing or null; only an assistant message may have none", name)
        blank = content is None or (
            not content
            if isinstance(content, str)
            else not any(b.get("type") != "text" or b.get("text") for b in content)
        )
        if blank and role == "user":
            raise RequestError(f"{name} is empty; a user message needs some text", name)
        said |= not blank or bool(message.get("tool_calls"))
    if not said:
        raise RequestError("messages have no text; a prompt needs some", "messages")


def _max_tokens(fields: Fields, context: int, prompt: int) -> int | None:
    """`max_completion_tokens`, or `max_tokens` by its older name; both if they say the same."""
    asked: dict[str, int] = {}
    for name in ("max_completion_tokens", "max_tokens"):
        wanted = fields.raw.get(name)
        if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > context:
            raise RequestError(
                f"this model's maximum context length is {context} tokens, {name} asks for {wanted} beside a prompt "
                f"of {prompt}", name, "context_length_exceeded",
            )  # fmt: skip
        value = fields.integer(name, 1, context)
        if value is not None:
            asked[name] = value
    if len(set(asked.values())) > 1:
        both = " and ".join(f"{name} is {value}" for name, value in asked.items())
        raise RequestError(f"{both}; they mean the same, so give one of them", "max_tokens")
    return next(iter(asked.values()), None)


def thinking_of(fields: Fields) -> tuple[bool, int | str | None]:
    """Whether to think, and how hard: off unless an effort or `thinking` asks for it.

    `thinking` is true, false, or {"type": "enabled" | "disabled"}; effort "none" is off. Both may stand in
    `chat_template_kwargs` instead, where other servers look for them, `thinking` as `enable_thinking` too.
    """
    thinking = fields.raw.get("thinking")
    if isinstance(thinking, dict):
        thinking = {"enabled": True, "disabled": False}.get(str(thinking.get("type")), thinking)
    if thinking is not None and not isinstance(thinking, bool):
        raise RequestError('thinking must be true, false, {"type": "enabled"} or {"type": "disabled"}', "thinking")
    kwargs = fields.nested("chat_template_kwargs") or Fields({})
    for name in kwargs.raw:
        if name not in SWITCHES:
            kwargs.refuse(name, [], LATER)
    thinking = _one([thinking, kwargs.boolean("thinking"), kwargs.boolean("enable_thinking")], "thinking")
    effort = _one([fields.raw.get("reasoning_effort"), kwargs.raw.get("reasoning_effort")], "reasoning_effort")
    if effort == "none":
        return False, None
    return (effort is not None) if thinking is None else bool(thinking), effort


def _one(said: Sequence[Any], name: str) -> Any:
    """What was said in one place or alike in several; None: nowhere."""
    said = [s for s in said if s is not None]
    if any(s != said[0] for s in said):
        raise RequestError(f"{name} and chat_template_kwargs say different things; give one of them", name)
    return said[0] if said else None


def _ends_in_reasoning(segments: Sequence[Segment]) -> bool:
    """Whether the model's turn begins inside a reasoning block."""
    marks = [s.name for s in segments if isinstance(s, Special) and s.name in (THINK, END_THINK, ASSISTANT)]
    return bool(marks) and marks[-1] == THINK


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
        return [engine.config.bos_token_id, *tokenizer.encode(prompt)]
    return [tokenizer.check_id(i) for i in prompt]


def _generation(
    fields: Fields, engine: ServedModel, limits: Limits, ids: Sequence[int], prompt: str,
    default_max: int | None, in_reasoning: bool, logprobs: int | None,
) -> Generation:  # fmt: skip
    """The fields that both APIs share, and what fits the context. `logprobs`: of how many likeliest tokens beside the
    drawn one; None: of none at all.
    """
    context = engine.config.max_position_embeddings
    room = context - len(ids)
    if room < 1:
        raise RequestError(
            f"this model's maximum context length is {context} tokens, the prompt has {len(ids)} and the answer "
            "needs at least 1", prompt, "context_length_exceeded",
        )  # fmt: skip
    most = _max_tokens(fields, context, len(ids)) or default_max or room
    stream = fields.boolean("stream") or False
    options = fields.nested("stream_options")
    if options is not None and not stream:
        raise RequestError("stream_options is only allowed with stream: true", "stream_options")
    return Generation(
        prompt_ids=ids,
        sampling=_sampling(fields, _penalties(fields, engine.tokenizer.vocab_size), logprobs or 0),
        max_tokens=min(most, room),
        stops=_stops(fields, limits),
        in_reasoning=in_reasoning,
        stream=stream,
        include_usage=options is not None and bool(options.boolean("include_usage")),
        logprobs=logprobs is not None,
    )


def _chat_logprobs(fields: Fields) -> int | None:
    """How many likeliest tokens are told beside each token; None: nothing is."""
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MOST_TOP) or 0
    if top and not wanted:
        raise RequestError("top_logprobs is only allowed with logprobs: true", "top_logprobs")
    return top if wanted else None


def _sampling(fields: Fields, penalties: Penalties, top: int) -> Sampling:
    top_k = fields.integer("top_k", -1, 2**31 - 1)
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    return Sampling(
        temperature=_number(fields, "temperature", 1.0),
        top_k=max(top_k or 0, 0),  # -1 is what other servers' clients say for "all"
        top_p=_number(fields, "top_p", 1.0),
        min_p=_number(fields, "min_p", 0.0),
        seed=secrets.randbits(63) if seed is None else seed,
        seeded=seed is not None,
        penalties=penalties,
        top=top,
    )


def _penalties(fields: Fields, vocab: int) -> Penalties:
    """Penalties and `logit_bias`, an object of token ids."""
    bias: dict[int, float] = {}
    given = fields.nested("logit_bias") or Fields({})
    for name in given.raw:
        if not ID.fullmatch(name):
            raise RequestError(f"logit_bias names {name!r:.40}; its names are token ids in digits", "logit_bias")
        value = given.raw[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RequestError(f"logit_bias of {name} is {value!r:.40}; it must be a number", "logit_bias")
        bias[int(name)] = value
    penalties = Penalties(
        presence=_number(fields, "presence_penalty", 0.0),
        frequency=_number(fields, "frequency_penalty", 0.0),
        repetition=_number(fields, "repetition_penalty", 1.0),
        logit_bias=tuple(bias.items()),
    )
    penalties.check_vocab(vocab)
    return penalties


def _number(fields: Fields, name: str, default: float) -> float:
    value = fields.number(name)
    return default if value is None else value


def _stops(fields: Fields, limits: Limits) -> tuple[str, ...]:
    stop = fields.raw.get("stop")
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise RequestError("stop must be a string or a list of strings", "stop")
    if len(stops) > limits.stops:
        raise RequestError(f"stop has {len(stops)} strings; at most {limits.stops} are allowed", "stop")
    for i, s in enumerate(stops):
        if not 1 <= len(s) <= limits.stop_chars:
            raise RequestError(f"stop[{i}] has {len(s)} characters; 1 to {limits.stop_chars} are allowed", "stop")
    return tuple(dict.fromkeys(stops))
