"""Text to tokens, tokens to text, messages to a prompt: what the model would be given, without asking it.

Text stays text here too, whatever it spells, unless its sender says `parse_special`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from ds4.errors import RequestError
from ds4.model.tokenizer import Tokenizer, segments_text
from ds4.server.edge import read_body
from ds4.server.errors import json_response
from ds4.server.fields import Fields, naming, parse_object
from ds4.server.messages import count_tokens
from ds4.server.openai import chat_of
from ds4.server.request import Limits, ServedModel
from ds4.server.worker import Worker

Told = Callable[[Fields, ServedModel, Limits], dict[str, object]]


class TextRoutes:
    """The handlers. They ask no device, so they wait for no request."""

    def __init__(self, worker: Worker, limits: Limits) -> None:
        self._worker, self._limits = worker, limits

    def add_to(self, app: FastAPI) -> None:
        told: dict[str, Told] = {
            "/tokenize": tokenize, "/detokenize": detokenize, "/apply-template": apply_template,
            "/v1/messages/count_tokens": count_tokens,
        }  # fmt: skip
        for path, tell in told.items():
            app.add_api_route(path, self._route(tell), methods=["POST"], response_model=None)

    def _route(self, tell: Told) -> Callable[[Request], object]:
        async def handler(request: Request) -> Response:
            card = self._worker.served()
            body = await read_body(request, self._limits)
            fields = await asyncio.to_thread(parse_object, body)
            # a long text takes a while: not on the loop that serves everybody
            return json_response(await asyncio.to_thread(tell, fields, card, self._limits))

        return handler


def tokenize(fields: Fields, engine: ServedModel, limits: Limits) -> dict[str, object]:
    """`{"tokens": ids}` of `content`; with `with_pieces` each as `{"id", "piece"}`, a piece being text, or a list of
    bytes where it is none. `add_special`: the begin-of-sentence token goes in front.

    Raises:
        RequestError: names the field.
    """
    content = fields.string("content")
    if content is None:
        raise RequestError("content is missing or null; it must be a string", "content")
    tokenizer = engine.tokenizer
    with naming("content"):
        if fields.boolean("parse_special"):
            ids = tokenizer.encode_segments(tokenizer.split_added(content))
        else:
            ids = tokenizer.encode(content)
    if fields.boolean("add_special"):
        ids = [engine.config.bos_token_id, *ids]
    if not fields.boolean("with_pieces"):
        return {"tokens": ids}
    return {"tokens": [{"id": i, "piece": _piece(tokenizer, i)} for i in ids]}


def _piece(tokenizer: Tokenizer, i: int) -> str | list[int]:
    piece = tokenizer.token_bytes(i)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def detokenize(fields: Fields, engine: ServedModel, limits: Limits) -> dict[str, object]:
    """`{"content": text}` of `tokens`; bytes that are no text become U+FFFD.

    Raises:
        RequestError: names the field.
    """
    tokens = fields.items("tokens")
    if tokens is None:
        raise RequestError("tokens is missing or null; it must be a list of token ids", "tokens")
    with naming("tokens"):
        return {"content": engine.tokenizer.decode(tokens)}


def apply_template(fields: Fields, engine: ServedModel, limits: Limits) -> dict[str, object]:
    """`{"prompt": text}` that /v1/chat/completions would make of `messages`, `tools` and what is said of thinking.

    With `tokens: true` its ids too, which the text alone does not tell: what spells a control token may be text.

    Raises:
        RequestError: names the field.
    """
    form = chat_of(fields, engine)
    prompt: dict[str, object] = {"prompt": segments_text(form.segments(engine))}
    return prompt | ({"tokens": form.prompt(engine)[0]} if fields.boolean("tokens") else {})
