"""Events of a job as OpenAI's clients parse a response: one object, or the events of its stream, each with a number.

What the model thinks, says and calls are items, in the order of their writing. An item is opened by its first piece
and closed by the first of another; one that the answer's end cuts off, and a call that turned out to be none, is
`incomplete`. Streamed or not, the response at the end has the items that were told.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds4.model.tokenizer import Tokenizer
from ds4.server.answer import complete_calls, declared_name
from ds4.server.errors import error_body
from ds4.server.logprobs import chat_entries
from ds4.server.outbox import Finished, Reading
from ds4.server.request import Generation
from ds4.server.responses import ResponseAsked
from ds4.server.responses_store import Kept, ResponseStore
from ds4.server.sse import read_so_far, sse
from ds4.server.stream import CONTENT, REASONING, CallDelta, Delta, Piece, Told


@dataclass
class ResponsesAnswer:
    """The objects of one answer. `store`: where it is kept, if its request did not say otherwise."""

    model: str
    request: ResponseAsked
    tokenizer: Tokenizer
    store: ResponseStore
    id: str = field(default_factory=lambda: "resp_" + secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    _sequence: int = 0
    _output: list[dict[str, Any]] = field(default_factory=list)
    _open: object = None  # what the last item holds: a channel, or a call by its number; None: it is closed
    _text: list[str] = field(default_factory=list)  # of the open item
    _told: list[dict[str, object]] = field(default_factory=list)

    @property
    def generation(self) -> Generation:
        return self.request.asked.generation

    def whole(self, pieces: Sequence[Piece], end: Finished) -> dict[str, object]:
        """The answer in one piece; of calls those that were written to their end."""
        complete = {c.index for c in complete_calls(pieces)}
        for piece in pieces:
            if isinstance(piece, Delta) or piece.index in complete:
                self.piece(piece)
        return self._ended(end)[1]

    def reading(self, event: Reading) -> bytes:
        return read_so_far(event.done, event.total)

    def opening(self) -> bytes:
        begun = self._response("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def piece(self, piece: Piece) -> bytes:
        if isinstance(piece, CallDelta):
            return self._call_piece(piece)
        if not piece.text and not piece.told:
            return b""
        thought = piece.channel == REASONING
        out = b"" if self._open == piece.channel else self._opened_text(piece.channel)
        self._text.append(piece.text)
        if thought:
            return out + self._event("response.reasoning_text.delta", **self._place(0), delta=piece.text)
        told = self._entries(piece.told)
        self._told += told
        return out + self._event("response.output_text.delta", **self._place(0), delta=piece.text, logprobs=told)

    def closing(self, end: Finished) -> bytes:
        return self._ended(end)[0]

    def failure(self, error: Exception) -> bytes:
        told: Any = error_body(error)["error"]
        out = b"" if self._sequence else self.opening()
        response = self._response("failed") | {"error": {"code": "server_error", "message": told["message"]}}
        return out + self._event("response.failed", response=response)

    def _ended(self, end: Finished) -> tuple[bytes, dict[str, Any]]:
        """The last events, and the response, which is kept from now on."""
        out = b"" if self._output else self._opened_text(CONTENT)  # an empty answer is a message too
        cut = end.reason == "length"
        out += self._closed("incomplete" if cut else "completed")
        response = self._response("incomplete" if cut else "completed") | {"usage": self._usage(end)}
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        if self.request.store:
            self.store.put(Kept.of(response, self.request.items, self.request.previous))
        return out + self._event(f"response.{response['status']}", response=response), response

    # ---- items ----

    def _opened_text(self, channel: str) -> bytes:
        if channel == REASONING:
            item: dict[str, Any] = {"type": "reasoning", "id": self._item_id("rs"), "summary": [], "content": []}
        else:
            item = {"type": "message", "id": self._item_id("msg"), "role": "assistant", "content": []}
        return self._opened(channel, item) + self._event(
            "response.content_part.added", **self._place(0), part=self._part(channel)
        )

    def _call_piece(self, piece: CallDelta) -> bytes:
        out = b""
        if piece.name is not None:
            name, space = declared_name(self.generation, piece.name)
            number = f"{self.id.partition('_')[2]}_{piece.index}"
            item = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": name,
                    "arguments": ""}  # fmt: skip
            out = self._opened(piece.index, item if space is None else {**item, "namespace": space})
        if piece.text:
            self._text.append(piece.text)
            out += self._event("response.function_call_arguments.delta", **self._place(), delta=piece.text)
        if piece.state:
            out += self._closed("completed" if piece.state == "complete" else "incomplete")
        return out

    def _opened(self, what: object, item: dict[str, Any]) -> bytes:
        out = self._closed("completed")
        self._open, self._text, self._told = what, [], []
        self._output.append({**item, "status": "in_progress"})
        return out + self._event("response.output_item.added", **self._index(), item=self._output[-1])

    def _closed(self, status: str) -> bytes:
        if self._open is None:
            return b""
        text, item = "".join(self._text), self._output[-1]
        if item["type"] == "function_call":
            item["arguments"] = text
            out = self._event("response.function_call_arguments.done", **self._place(), arguments=text)
        else:
            part = self._part(str(self._open), text)
            item["content"] = [part]
            told = {} if self._open == REASONING else {"logprobs": self._told}
            kind = "reasoning_text" if self._open == REASONING else "output_text"
            out = self._event(f"response.{kind}.done", **self._place(0), text=text, **told)
            out += self._event("response.content_part.done", **self._place(0), part=part)
        item["status"] = status
        self._open = None
        return out + self._event("response.output_item.done", **self._index(), item=item)

    def _part(self, channel: str, text: str = "") -> dict[str, Any]:
        if channel == REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._told if text else []}

    def _entries(self, told: Sequence[Told]) -> list[dict[str, object]]:
        """Tokens as this API's clients parse them: bytes are a list, also where there are none."""

        def filled(entry: Mapping[str, Any]) -> dict[str, object]:
            return {**entry, "bytes": entry["bytes"] or []}

        return [
            {**filled(e), "top_logprobs": [filled(t) for t in e["top_logprobs"]]}  # type: ignore[attr-defined]
            for e in chat_entries(told, self.tokenizer)
        ]

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self.id.partition('_')[2]}_{len(self._output)}"

    def _index(self) -> dict[str, object]:
        return {"output_index": len(self._output) - 1}

    def _place(self, part: int | None = None) -> dict[str, object]:
        place = {"item_id": self._output[-1]["id"], **self._index()}
        return place if part is None else {**place, "content_index": part}

    # ---- the response ----

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "background": False,
            "error": None, "incomplete_details": None, "max_tool_calls": None, "model": self.model,
            "output": [dict(item) for item in self._output], "service_tier": "default", "truncation": "disabled",
            "usage": None, **self.request.echo,
        }  # fmt: skip

    def _usage(self, end: Finished) -> dict[str, object]:
        """`decode` is this server's own, as in /v1/chat/completions."""
        n = len(self.generation.prompt_ids)
        return {
            "input_tokens": n,
            "input_tokens_details": {"cached_tokens": end.cached, "cache_write_tokens": 0},
            "output_tokens": end.tokens,
            "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
            "total_tokens": n + end.tokens,
            "decode": dict(end.decode),
        }

    def _event(self, kind: str, **fields: object) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return sse({"type": kind, "sequence_number": number, **fields}, kind)
