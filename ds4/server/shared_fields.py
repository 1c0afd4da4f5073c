"""The fields that every API has, under whichever names: sampling, length, stop strings, and what fits the context."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ds4.constrain import Compiler
from ds4.engine import Sampling
from ds4.engine.sampling import MOST_TOP, Penalties
from ds4.errors import RequestError
from ds4.model.tokenizer import Tokenizer
from ds4.server.fields import Fields
from ds4.server.request import Generation, Limits, ServedModel
from ds4.server.shape import Shape

ID = re.compile("0|[1-9][0-9]{0,9}")
LATER = "is not supported by this server"
TOO_LONG = "context_length_exceeded"
FAR = 2  # contexts: a prompt that is longer is not counted to its end


@dataclass(frozen=True)
class Asked:
    """A body that was read.

    Attributes:
        generation: what it asks for.
        logged: of it what its prompt was made of, as a chat or a prompt: enough to make the same prompt again.
        progress: a stream tells how far its prompt is read.
        shape: what is asked of the answer, still to be compiled.
        size: bytes of what it is about beside its body.
    """

    generation: Generation
    logged: Mapping[str, Any]
    progress: bool = False
    shape: Shape = field(default_factory=Shape)
    size: int = 0

    def constrained(self, compiler: Compiler, tokenizer: Tokenizer) -> Generation:
        """`generation`, whose answer obeys `shape`. It takes a while.

        Raises:
            RequestError: names the field, and what of it cannot be held.
        """
        g = self.generation
        return replace(g, constraint=self.shape.compiled(compiler, tokenizer, in_reasoning=g.in_reasoning))


@dataclass(frozen=True)
class Names:
    """What an API calls the fields. `most`: names of one thing, the first being the newest. `too_long`: what its
    clients look for when they make a prompt shorter.
    """

    prompt: str
    most: tuple[str, ...]
    stop: str = "stop"
    too_long: str = (
        "this model's maximum context length is {context} tokens, the prompt has {n} and the answer needs at least 1"
    )


def generation_of(
    fields: Fields,
    engine: ServedModel,
    limits: Limits,
    ids: Sequence[int],
    names: Names,
    *,
    default_max: int | None = None,
    in_reasoning: bool = False,
    logprobs: int | None = None,
) -> Generation:
    """What a body asks for.

    Args:
        ids: of its prompt.
        default_max: tokens of the answer, if it does not say; None: the rest of the context.
        logprobs: of how many likeliest tokens beside the drawn one; None: of none at all.

    Raises:
        RequestError: names the field, or says with both numbers that the context is too short.
    """
    context = engine.config.max_position_embeddings
    room = context - len(ids)
    if room < 1:
        n = len(ids) if len(ids) <= FAR * context else f"more than {FAR * context}"
        told = names.too_long.format(context=context, n=n, most=context - 1)
        raise RequestError(told, names.prompt, TOO_LONG)
    most = _max_tokens(fields, context, len(ids), names.most) or default_max or room
    return Generation(
        prompt_ids=ids,
        sampling=_sampling(fields, _penalties(fields, engine.tokenizer.vocab_size), logprobs or 0),
        max_tokens=min(most, room),
        stops=_stops(fields, limits, names.stop),
        in_reasoning=in_reasoning,
        stream=fields.boolean("stream") or False,
        logprobs=logprobs is not None,
    )


def with_usage(fields: Fields) -> bool:
    """Whether a stream ends with its usage: `stream_options`, which belongs to a stream.

    Raises:
        RequestError: names the field.
    """
    options = fields.nested("stream_options")
    if options is not None and not fields.boolean("stream"):
        raise RequestError("stream_options is only allowed with stream: true", "stream_options")
    return options is not None and bool(options.boolean("include_usage"))


def chat_logprobs(fields: Fields) -> int | None:
    """How many likeliest tokens are told beside each token; None: nothing is."""
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MOST_TOP) or 0
    if top and not wanted:
        raise RequestError("top_logprobs is only allowed with logprobs: true", "top_logprobs")
    return top if wanted else None


def _max_tokens(fields: Fields, context: int, prompt: int, names: Sequence[str]) -> int | None:
    """Any one of `names`; several if they say the same."""
    asked: dict[str, int] = {}
    for name in names:
        wanted = fields.raw.get(name)
        if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > context:
            raise RequestError(
                f"this model's maximum context length is {context} tokens, {name} asks for {wanted} beside a prompt "
                f"of {prompt}", name, TOO_LONG,
            )  # fmt: skip
        value = fields.integer(name, 1, context)
        if value is not None:
            asked[name] = value
    if len(set(asked.values())) > 1:
        both = " and ".join(f"{name} is {value}" for name, value in asked.items())
        raise RequestError(f"{both}; they mean the same, so give one of them", names[-1])
    return next(iter(asked.values()), None)


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


def _stops(fields: Fields, limits: Limits, name: str) -> tuple[str, ...]:
    stop = fields.raw.get(name)
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise RequestError(f"{name} must be a string or a list of strings", name)
    if len(stops) > limits.stops:
        raise RequestError(f"{name} has {len(stops)} strings; at most {limits.stops} are allowed", name)
    for i, s in enumerate(stops):
        if not 1 <= len(s) <= limits.stop_chars:
            raise RequestError(f"{name}[{i}] has {len(s)} characters; 1 to {limits.stop_chars} are allowed", name)
    return tuple(dict.fromkeys(stops))
