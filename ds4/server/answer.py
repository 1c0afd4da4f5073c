"""Events of a job as the objects that OpenAI's clients parse: whole answers, chunks of a stream, models."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ds4.model.tokenizer import Tokenizer
from ds4.server.logprobs import chat_entries, completion_lists
from ds4.server.outbox import Finished
from ds4.server.request import Generation, ServedModel
from ds4.server.stream import CONTENT, REASONING, CallDelta, Delta, Piece, Told


@dataclass
class Answer:
    """The objects of one answer. `chat`: chat.completion objects, else text_completion ones."""

    chat: bool
    model: str
    generation: Generation
    tokenizer: Tokenizer
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

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

    def first(self) -> list[dict[str, object]]:
        """What a stream opens with."""
        return [self._chunk({"role": "assistant", "content": ""}, "", None)] if self.chat else []

    def delta(self, delta: Delta) -> dict[str, object]:
        key = "content" if delta.channel == CONTENT else "reasoning_content"
        return self._chunk({key: delta.text}, delta.text, None, self._logprobs({delta.channel: delta.told}))

    def call(self, piece: CallDelta) -> list[dict[str, object]]:
        """Of a chat. A piece that only says how a call ended tells its reader nothing."""
        if piece.name is None and not piece.text:
            return []
        shown = {"index": piece.index, **self._call(piece, piece.name is not None)}
        return [self._chunk({"tool_calls": [shown]}, "", None)]

    def _call(self, piece: CallDelta, first: bool) -> dict[str, object]:
        """A call, or a piece of one; the first has its id and name. `namespace` is this server's own."""
        if not first:
            return {"function": {"arguments": piece.text}}
        tools, written = self.generation.tools, piece.name or ""
        name, space = (written, None) if tools is None else tools.names.get(written, (written, None))
        function = {"name": name, "arguments": piece.text} | ({} if space is None else {"namespace": space})
        call_id = f"call_{self.id.partition('-')[2]}_{piece.index}"
        return {"id": call_id, "type": "function", "function": function}

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
