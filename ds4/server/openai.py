"""OpenAI's chat and completions: bodies into a `Generation`, events into the objects its clients parse.

Unknown fields are ignored, null means the default, wrong types and values are refused by name. What the API knows and
this server does not do yet is refused unless it asks for nothing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ds4.engine import Sampling
from ds4.errors import RequestError
from ds4.model.chat import other_turns, prepare, render
from ds4.model.tokenizer import ASSISTANT, END_THINK, THINK, Segment, Special, Tokenizer
from ds4.server.fields import Fields, naming
from ds4.server.outbox import Finished
from ds4.server.request import Generation, Limits, ServedEngine
from ds4.server.stream import CONTENT, Delta

DEFAULT_COMPLETION_TOKENS = 16  # as the API says
LATER = "is not supported by this server"


def read_chat(fields: Fields, engine: ServedEngine, limits: Limits) -> Generation:
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
    thinking, effort = _thinking(fields)
    with naming("messages"):
        _, images = prepare(messages)
        if images:
            raise RequestError(
                "messages: images are not supported by this server", "messages", "unsupported_parameter"
            )
        _check_content(messages)
        segments = render(messages, thinking=thinking, effort=effort)
        ids = engine.tokenizer.encode_segments(segments, spell_missing=True)
    in_reasoning = _ends_in_reasoning(segments)
    generation = _generation(fields, engine, limits, ids, "messages", None, in_reasoning)
    return replace(generation, ends=other_turns(engine.tokenizer))


def read_completion(fields: Fields, engine: ServedEngine, limits: Limits) -> Generation:
    """A body of /v1/completions; see `read_chat`. Text gets the begin-of-sentence token in front, ids get nothing."""
    _refuse_common(fields)
    fields.refuse("best_of", [1], "may only be 1 on this server")
    fields.refuse("echo", [False], LATER)
    fields.refuse("suffix", [""], LATER)
    fields.refuse("thinking", [False, {"type": "disabled"}], "belongs to /v1/chat/completions")
    fields.refuse("reasoning_effort", ["none"], "belongs to /v1/chat/completions")
    with naming("prompt"):
        ids = _prompt_ids(fields.raw.get("prompt"), engine)
    return _generation(fields, engine, limits, ids, "prompt", DEFAULT_COMPLETION_TOKENS, False)


def _refuse_common(fields: Fields) -> None:
    if fields.integer("n", 1, 128) not in (None, 1):
        raise RequestError("n must be 1: this server gives one answer a request", "n", "unsupported_parameter")
    fields.string("model")  # any name is answered: one server, one model
    fields.refuse("logit_bias", [{}], LATER)
    for name in ("presence_penalty", "frequency_penalty"):
        fields.number(name)
        fields.refuse(name, [0, 0.0], "may only be 0 on this server")
    fields.refuse("logprobs", [False], LATER)  # completions: a number, and 0 asks for some too
    fields.refuse("top_logprobs", [0], LATER)
    for name in ("tools", "functions"):
        fields.refuse(name, [[]], LATER)
    for name in ("tool_choice", "function_call"):
        fields.refuse(name, ["auto", "none"], LATER)
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


def _thinking(fields: Fields) -> tuple[bool, int | str | None]:
    """Whether to think, and how hard: off unless an effort or `thinking` asks for it.

    `thinking` is true, false, or {"type": "enabled" | "disabled"}; effort "none" is off.
    """
    effort = fields.raw.get("reasoning_effort")
    thinking = fields.raw.get("thinking")
    if isinstance(thinking, dict):
        thinking = {"enabled": True, "disabled": False}.get(str(thinking.get("type")), thinking)
    if thinking is not None and not isinstance(thinking, bool):
        raise RequestError('thinking must be true, false, {"type": "enabled"} or {"type": "disabled"}', "thinking")
    if effort == "none":
        return False, None
    return (effort is not None) if thinking is None else thinking, effort


def _ends_in_reasoning(segments: Sequence[Segment]) -> bool:
    """Whether the model's turn begins inside a reasoning block."""
    marks = [s.name for s in segments if isinstance(s, Special) and s.name in (THINK, END_THINK, ASSISTANT)]
    return bool(marks) and marks[-1] == THINK


def _prompt_ids(prompt: Any, engine: ServedEngine) -> list[int]:
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
    fields: Fields, engine: ServedEngine, limits: Limits, ids: Sequence[int], prompt: str,
    default_max: int | None, in_reasoning: bool,
) -> Generation:  # fmt: skip
    """The fields that both APIs share, and what fits the context."""
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
        sampling=_sampling(fields),
        max_tokens=min(most, room),
        stops=_stops(fields, limits),
        in_reasoning=in_reasoning,
        stream=stream,
        include_usage=options is not None and bool(options.boolean("include_usage")),
    )


def _sampling(fields: Fields) -> Sampling:
    def number(name: str, default: float) -> float:
        value = fields.number(name)
        return default if value is None else value

    top_k = fields.integer("top_k", -1, 2**31 - 1)
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    return Sampling(
        temperature=number("temperature", 1.0),
        top_k=max(top_k or 0, 0),  # -1 is what other servers' clients say for "all"
        top_p=number("top_p", 1.0),
        min_p=number("min_p", 0.0),
        seed=secrets.randbits(63) if seed is None else seed,
        seeded=seed is not None,
    )


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


@dataclass
class Answer:
    """The objects of one answer. `chat`: chat.completion objects, else text_completion ones."""

    chat: bool
    model: str
    generation: Generation
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)

    def whole(self, texts: Mapping[str, str], end: Finished) -> dict[str, object]:
        """The answer in one piece; `texts` by channel."""
        content = texts.get(CONTENT, "")
        choice: dict[str, object] = {"index": 0}
        if self.chat:
            message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
            if self.generation.in_reasoning:
                message["reasoning_content"] = texts.get("reasoning", "")
            choice["message"] = message
        else:
            choice["text"] = content
        choice |= {"logprobs": None, "finish_reason": end.reason}
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": self.usage(end)}

    def first(self) -> list[dict[str, object]]:
        """What a stream opens with."""
        return [self._chunk({"role": "assistant", "content": ""}, "", None)] if self.chat else []

    def delta(self, delta: Delta) -> dict[str, object]:
        key = "content" if delta.channel == CONTENT else "reasoning_content"
        return self._chunk({key: delta.text}, delta.text, None)

    def last(self, end: Finished) -> list[dict[str, object]]:
        """The chunk with the reason, and the one with the usage if it was asked for."""
        chunks = [self._chunk({}, "", end.reason)]
        if self.generation.include_usage:
            chunks.append({**self._head(self._chunk_kind), "choices": [], "usage": self.usage(end)})
        return chunks

    def usage(self, end: Finished) -> dict[str, object]:
        """Tokens of the prompt as it was run, and of the answer without its end-of-sentence token. `decode` is this
        server's own: what passes and drafts yielded.
        """
        n = len(self.generation.prompt_ids)
        return {
            "prompt_tokens": n,
            "completion_tokens": end.tokens,
            "total_tokens": n + end.tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
            "decode": dict(end.decode),
        }

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, delta: dict[str, object], text: str, reason: str | None) -> dict[str, object]:
        piece: dict[str, object] = {"delta": delta} if self.chat else {"text": text}
        chunk = {
            **self._head(self._chunk_kind),
            "choices": [{"index": 0, **piece, "logprobs": None, "finish_reason": reason}],
        }
        return chunk | {"usage": None} if self.generation.include_usage else chunk

    def _head(self, kind: str) -> dict[str, object]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": None
        }  # fmt: skip


def model_list(engine: ServedEngine, created: int) -> dict[str, object]:
    return {"object": "list", "data": [model_card(engine, created)]}


def model_card(engine: ServedEngine, created: int) -> dict[str, object]:
    return {
        "id": engine.name, "object": "model", "created": created, "owned_by": "ds4",
        "context_length": engine.config.max_position_embeddings,
    }  # fmt: skip
