"""Events of a job as Anthropic's clients parse them: a message of blocks, or the events of its stream.

A block is opened by its first piece and closed by the first of another; reasoning is a `thinking` block, a call a
`tool_use` block. A signature says nothing of who thought: it is a digest of the text, for clients that want one.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ds4.server.answer import complete_calls
from ds4.server.errors import error_body
from ds4.server.fields import deep
from ds4.server.outbox import Finished, Reading
from ds4.server.request import Generation, ServedModel
from ds4.server.sse import read_so_far, sse
from ds4.server.stream import CONTENT, REASONING, CallDelta, Delta, Piece

PATH = "/v1/messages"
LONG_INT = 4000  # digits; beyond about this many Python refuses to turn text into an int


def signature(thought: str) -> str:
    """A digest of a reasoning block's text."""
    return hashlib.sha256(thought.encode("utf-8", "replace")).hexdigest()


def parsed(arguments: str) -> Any:
    """A call's arguments as values. A number that no reader of ours could hold stays the text that it is; so do
    arguments that are nested too deep.
    """

    def whole_number(digits: str) -> int | str:
        return int(digits) if len(digits) <= LONG_INT else digits

    def number(text: str) -> float | str:
        return float(text) if math.isfinite(float(text)) else text

    try:
        value = json.loads(arguments, parse_int=whole_number, parse_float=number)
    except RecursionError:
        value = None
    return {"arguments": arguments} if value is None or deep(value) else value


@dataclass
class MessagesAnswer:
    """The objects of one answer."""

    model: str
    generation: Generation
    id: str = field(default_factory=lambda: "msg_" + secrets.token_hex(12))
    _index: int = -1  # of the block that is open, or was
    _open: object = None  # what it holds: a channel, or a call by its number; None: none is open
    _thought: str = ""
    _cached: int = 0

    def whole(self, pieces: Sequence[Piece], end: Finished) -> dict[str, object]:
        """The answer in one piece: what was thought, said and called, calls last."""
        texts = {
            c: "".join(p.text for p in pieces if isinstance(p, Delta) and p.channel == c)
            for c in (CONTENT, REASONING)
        }
        content: list[dict[str, Any]] = []
        if texts[REASONING]:
            content.append(
                {"type": "thinking", "thinking": texts[REASONING], "signature": signature(texts[REASONING])}
            )
        if texts[CONTENT]:
            content.append({"type": "text", "text": texts[CONTENT]})
        for call in complete_calls(pieces):
            content.append({**self._call(call), "input": parsed(call.text)})
        return {**self._message(content), **self._stop(end), "usage": self._usage(end)}

    def reading(self, event: Reading) -> bytes:
        self._cached = event.cached
        return read_so_far(event.done, event.total)

    def opening(self) -> bytes:
        n = len(self.generation.prompt_ids)
        usage = {**self._input(n, self._cached), "output_tokens": 0}
        message = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message) + _event("ping")

    def piece(self, piece: Piece) -> bytes:
        if isinstance(piece, CallDelta):
            return self._call_piece(piece)
        if not piece.text:
            return b""
        key, kind = ("text", "text") if piece.channel == CONTENT else ("thinking", "thinking")
        empty = {"type": kind, key: ""} | ({} if piece.channel == CONTENT else {"signature": ""})
        out = self._opened(piece.channel, empty)
        if piece.channel == REASONING:
            self._thought += piece.text
        return out + self._delta({"type": f"{kind}_delta", key: piece.text})

    def closing(self, end: Finished) -> bytes:
        usage = self._usage(end)
        return self._closed() + _event("message_delta", delta=self._stop(end), usage=usage) + _event("message_stop")

    def failure(self, error: Exception) -> bytes:
        return sse(error_body(error, PATH), "error")

    def _call_piece(self, piece: CallDelta) -> bytes:
        out = b""
        if piece.name is not None:
            out = self._opened(piece.index, {**self._call(piece), "input": {}})
        if piece.text:
            out += self._delta({"type": "input_json_delta", "partial_json": piece.text})
        return out + (self._closed() if piece.state else b"")

    def _call(self, call: CallDelta) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"toolu_{self.id.partition('_')[2]}_{call.index}", "name": call.name or ""}

    def _opened(self, what: object, block: Mapping[str, object]) -> bytes:
        """The block of `what`, which is open already or begins now."""
        if self._open == what:
            return b""
        out = self._closed()
        self._index, self._open = self._index + 1, what
        return out + _event("content_block_start", index=self._index, content_block=block)

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        out = b""
        if self._open == REASONING:
            out = self._delta({"type": "signature_delta", "signature": signature(self._thought)})
        self._open = None
        return out + _event("content_block_stop", index=self._index)

    def _delta(self, delta: Mapping[str, object]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, object]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content
        }  # fmt: skip

    def _stop(self, end: Finished) -> dict[str, object]:
        """`end_turn` also for a call that was begun and is none."""
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(end.reason, "end_turn")
        if reason == "end_turn" and end.stop is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": end.stop if reason == "stop_sequence" else None}

    def _input(self, n: int, cached: int) -> dict[str, object]:
        """This API counts what was read from a cache apart."""
        return {"input_tokens": n - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}

    def _usage(self, end: Finished) -> dict[str, object]:
        """`decode` is this server's own, as in /v1/chat/completions."""
        return {
            **self._input(len(self.generation.prompt_ids), end.cached),
            "output_tokens": end.tokens,
            "output_tokens_details": {"thinking_tokens": end.reasoning_tokens},
            "decode": dict(end.decode),
        }


def _event(kind: str, **fields: object) -> bytes:
    return sse({"type": kind, **fields}, kind)


def messages_models(engine: ServedModel, created: int) -> dict[str, object]:
    """The list of models as this API's clients parse it."""
    model = messages_model(engine, created)
    return {"data": [model], "first_id": engine.name, "last_id": engine.name, "has_more": False}


def messages_model(engine: ServedModel, created: int) -> dict[str, object]:
    context = engine.config.max_position_embeddings
    return {
        "type": "model", "id": engine.name, "display_name": engine.name, "lifecycle": "active",
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "max_input_tokens": context, "max_tokens": context,
    }  # fmt: skip
