"""Events of a job as the objects that OpenAI's clients parse: whole answers, chunks of a stream, models.

`Writer` is what every API's answers are written by: the same events, each in its API's own words.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ds4.model.tokenizer import Tokenizer
from ds4.server.errors import error_body
from ds4.server.logprobs import chat_entries, completion_lists
from ds4.server.outbox import Finished, Reading
from ds4.server.request import Generation, ServedModel
from ds4.server.sse import DONE, read_so_far, sse
from ds4.server.stream import CONTENT, REASONING, CallDelta, Delta, Piece, Told


class Writer(Protocol):
    """One answer: whole, or as the events of a stream. Of a stream `reading` comes first, as often as there is
    progress, then `opening`, pieces, and `closing` or `failure`; `failure` may come at any time.
    """

    @property
    def id(self) -> str: ...

    def whole(self, pieces: Sequence[Piece], end: Finished) -> dict[str, object]: ...
    def reading(self, event: Reading) -> bytes: ...
    def opening(self) -> bytes: ...
    def piece(self, piece: Piece) -> bytes: ...
    def closing(self, end: Finished) -> bytes: ...
    def failure(self, error: Exception) -> bytes: ...


@dataclass
class Answer:
    """The objects of one answer. `chat`: chat.completion objects, else text_completion ones. `progress`: chunks tell
    how far the prompt is read.
    """

    chat: bool
    model: str
    generation: Generation
    tokenizer: Tokenizer
    progress: bool = False
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)

    def whole(self, pieces: Sequence[Piece], end: Finished) -> dict[str, object]:
        """The answer in one piece."""
        deltas = [p for p in pieces if isinstance(p, Delta)]
        texts = {c: "".join(d.text for d in deltas if d.channel == c) for c in (CONTENT, REASONING)}
        told = {c: [t for d in deltas if d.channel == c for t in d.told] for c in texts}
        choice: dict[str, object] = {"index": 0}
        if self.chat:
            message: dict[str, object] = {"role": "assistant", "content": texts[CONTENT], "refusal": None}
            if self.generation.in_reasoning:
                message["reasoning_content"] = texts[REASONING]
            if calls := complete_calls(pieces):
                message["content"] = texts[CONTENT] or None
                message["tool_calls"] = [self._call(c, True) for c in calls]
            choice["message"] = message
        else:
            choice["text"] = texts[CONTENT]
        choice |= {"logprobs": self._logprobs(told), "finish_reason": end.reason}
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": self.usage(end)}

    def reading(self, event: Reading) -> bytes:
        """`prompt_progress` is this server's own, as another server's clients know it."""
        if not self.progress:
            return read_so_far(event.done, event.total)
        told = {"total": event.total, "cache": event.cached, "processed": event.done}
        told["time_ms"] = round(1000 * (time.monotonic() - self._begun))
        return sse({**self._head(self._chunk_kind), "choices": [], "prompt_progress": told})

    def opening(self) -> bytes:
        return sse(self._chunk({"role": "assistant", "content": ""}, "", None)) if self.chat else b""

    def piece(self, piece: Piece) -> bytes:
        """A piece that only says how a call ended tells its reader nothing."""
        if isinstance(piece, Delta):
            key = "content" if piece.channel == CONTENT else "reasoning_content"
            told = self._logprobs({piece.channel: piece.told})
            return sse(self._chunk({key: piece.text}, piece.text, None, told))
        if piece.name is None and not piece.text:
            return b""
        shown = {"index": piece.index, **self._call(piece, piece.name is not None)}
        return sse(self._chunk({"tool_calls": [shown]}, "", None))

    def closing(self, end: Finished) -> bytes:
        """The chunk with the reason, and the one with the usage if it was asked for."""
        out = sse(self._chunk({}, "", end.reason))
        if self.generation.include_usage:
            out += sse({**self._head(self._chunk_kind), "choices": [], "usage": self.usage(end)})
        return out + DONE

    def failure(self, error: Exception) -> bytes:
        return sse(error_body(error)) + DONE

    def _call(self, piece: CallDelta, first: bool) -> dict[str, object]:
        """A call, or a piece of one; the first has its id and name. `namespace` is this server's own."""
        if not first:
            return {"function": {"arguments": piece.text}}
        name, space = declared_name(self.generation, piece.name or "")
        function = {"name": name, "arguments": piece.text} | ({} if space is None else {"namespace": space})
        call_id = f"call_{self.id.partition('-')[2]}_{piece.index}"
        return {"id": call_id, "type": "function", "function": function}

    def usage(self, end: Finished) -> dict[str, object]:
        """Tokens of the prompt, those that were not run again too, and of the answer without its end-of-sentence
        token. `decode` is this server's own: what passes and drafts yielded.
        """
        n = len(self.generation.prompt_ids)
        return {
            "prompt_tokens": n,
            "completion_tokens": end.tokens,
            "total_tokens": n + end.tokens,
            "prompt_tokens_details": {"cached_tokens": end.cached},
            "completion_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
            "decode": dict(end.decode),
        }

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _logprobs(self, told: Mapping[str, Sequence[Told]]) -> dict[str, object] | None:
        """Log-probabilities by channel, where they were asked for; `reasoning_content` is this server's own."""
        if not self.generation.logprobs:
            return None
        if not self.chat:
            return completion_lists(told.get(CONTENT, ()), self.tokenizer, self.generation.prompt_chars)
        entries = {c: None if c not in told else chat_entries(told[c], self.tokenizer) for c in (CONTENT, REASONING)}
        shown: dict[str, object] = {"content": entries[CONTENT], "refusal": None}
        return shown | {"reasoning_content": entries[REASONING]} if self.generation.in_reasoning else shown

    def _chunk(
        self, delta: dict[str, object], text: str, reason: str | None, logprobs: dict[str, object] | None = None
    ) -> dict[str, object]:
        piece: dict[str, object] = {"delta": delta} if self.chat else {"text": text}
        chunk = {
            **self._head(self._chunk_kind),
            "choices": [{"index": 0, **piece, "logprobs": logprobs, "finish_reason": reason}],
        }
        return chunk | {"usage": None} if self.generation.include_usage else chunk

    def _head(self, kind: str) -> dict[str, object]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": None
        }  # fmt: skip


def declared_name(generation: Generation, written: str) -> tuple[str, str | None]:
    """Name and namespace of a call as its client declared them; one that nobody declared as it was written."""
    tools = generation.tools
    return (written, None) if tools is None else tools.names.get(written, (written, None))


def complete_calls(pieces: Sequence[Piece]) -> list[CallDelta]:
    """Calls that were written to their end, each in one piece."""
    calls: dict[int, CallDelta] = {}
    for p in pieces:
        if isinstance(p, CallDelta):
            calls[p.index] = calls[p.index].joined(p) if p.index in calls else p
    return [c for c in calls.values() if c.state == "complete"]


def model_list(engine: ServedModel, created: int) -> dict[str, object]:
    return {"object": "list", "data": [model_card(engine, created)]}


def model_card(engine: ServedModel, created: int) -> dict[str, object]:
    return {
        "id": engine.name, "object": "model", "created": created, "owned_by": "ds4",
        "context_length": engine.config.max_position_embeddings, "sidecars": engine.sidecars,
    }  # fmt: skip
