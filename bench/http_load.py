"""Requests of the server's four APIs over bare sockets, for benches that load it: bodies, answers read, and clients
that leave, dawdle or never finish what they say.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PATHS = {
    "chat": "/v1/chat/completions", "completions": "/v1/completions", "messages": "/v1/messages",
    "responses": "/v1/responses",
}  # fmt: skip
MAX_TOKENS = {"responses": "max_output_tokens"}  # elsewhere max_tokens
SMALL_BUFFER = 4096  # bytes of a reader that is slow
SCHEMA = {
    "type": "object", "properties": {"n": {"type": "integer"}, "word": {"type": "string"}},
    "required": ["n", "word"], "additionalProperties": False,
}  # fmt: skip
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOL, ABOUT = "say", "Says a text."


def body_of(api: str, prompt: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    """A request that asks one thing."""
    messages = [{"role": "user", "content": prompt}]
    asked = {"completions": {"prompt": prompt}, "responses": {"input": prompt}}.get(api, {"messages": messages})
    body = {"model": "any", **asked, MAX_TOKENS.get(api, "max_tokens"): max_tokens, "stream": stream}
    if stream and api in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
    return body


def with_schema(api: str) -> dict[str, Any]:
    """Fields that hold an answer to SCHEMA."""
    if api == "messages":
        return {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    if api == "responses":
        return {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}


def with_tools(api: str) -> dict[str, Any]:
    """Fields that declare TOOL. There are no tools in completions."""
    if api == "messages":
        return {"tools": [{"name": TOOL, "description": ABOUT, "input_schema": PARAMETERS}]}
    about = {"name": TOOL, "description": ABOUT, "parameters": PARAMETERS}
    return {
        "tools": [{"type": "function", **about} if api == "responses" else {"type": "function", "function": about}]
    }


@dataclass
class Reply:
    """What came back.

    Attributes:
        status: 0: nothing came, or no whole head.
        text: of the answer.   called: names and arguments of its calls, one after the other.
        end: how it ended, in its API's words; "": it did not end.
        tokens: of the answer, as its usage says.
        at: when each event of a stream with text came, seconds of a monotonic clock.
        error: what an error says.
    """

    status: int = 0
    text: str = ""
    called: str = ""
    end: str = ""
    tokens: int = 0
    at: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def whole(self) -> bool:
        """A complete answer."""
        return self.status == 200 and bool(self.end) and not self.error


def hear(api: str, reply: Reply, event: dict[str, Any]) -> None:
    """An event of a stream, or a whole answer, into the reply."""
    if event.get("error"):
        reply.error = json.dumps(event["error"])
        return
    {"messages": _message, "responses": _response}.get(api, _choice)(reply, event)


def _choice(reply: Reply, event: dict[str, Any]) -> None:
    for choice in event.get("choices", ()):
        piece = choice.get("delta") or choice.get("message") or choice
        reply.text += piece.get("content") or piece.get("text") or ""
        for call in piece.get("tool_calls") or ():
            reply.called += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        reply.end = choice.get("finish_reason") or reply.end
    reply.tokens = (event.get("usage") or {}).get("completion_tokens", reply.tokens)


def _message(reply: Reply, event: dict[str, Any]) -> None:
    kind = event["type"]
    if kind == "message":
        for block in event["content"]:
            _block(reply, block)
    elif kind == "content_block_start":
        _block(reply, {**event["content_block"], "input": None})
    elif kind == "content_block_delta":
        reply.text += event["delta"].get("text", "")
        reply.called += event["delta"].get("partial_json", "")
    told = event.get("delta", event) if kind in ("message", "message_delta") else {}
    reply.end = told.get("stop_reason") or reply.end
    reply.tokens = (event.get("usage") or {}).get("output_tokens", reply.tokens)


def _block(reply: Reply, block: dict[str, Any]) -> None:
    reply.text += block.get("text", "")
    reply.called += block.get("name", "") + ("" if block.get("input") is None else json.dumps(block["input"]))


def _response(reply: Reply, event: dict[str, Any]) -> None:
    kind = event.get("type", "")
    if kind == "response.output_text.delta":
        reply.text += event["delta"]
    elif kind == "response.function_call_arguments.delta":
        reply.called += event["delta"]
    elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
        reply.called += event["item"]["name"]
    whole = event if event.get("object") == "response" else None
    ended = event.get("response", {}) if kind in ("response.completed", "response.incomplete") else whole
    if ended is None:
        return
    if whole is not None:
        for item in whole["output"]:
            reply.text += "".join(part.get("text", "") for part in item.get("content") or ())
            reply.called += item.get("name", "") + item.get("arguments", "")
    reply.end = ended.get("status", reply.end)
    reply.tokens = (ended.get("usage") or {}).get("output_tokens", reply.tokens)


class Client:
    """One request on a connection of its own.

    Args:
        buffer: bytes of its receive buffer; 0: as the system has it.

    Attributes:
        heard: told of every event of a stream.
    """

    def __init__(self, port: int, buffer: int = 0) -> None:
        self._port, self._buffer = port, buffer
        self.heard: Callable[[dict[str, Any]], object] = lambda event: None

    async def open(self) -> None:
        sock = socket.socket()
        if self._buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=1 << 22)

    def close(self, *, hard: bool = False) -> None:
        """`hard`: with a reset, as a client that is killed."""
        if hard:
            sock = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort() if hard else self._writer.close()

    def send(self, path: str, body: dict[str, Any], share: float = 1.0) -> None:
        """A request, or the first `share` of its bytes."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        all_ = head.encode() + data
        self._writer.write(all_[: max(1, int(share * len(all_)))])

    async def some(self, n: int) -> bytes:
        """Up to n bytes that came; none: the other side is done."""
        return await self._reader.read(n)

    async def reply(self, api: str, pause: Callable[[], float] = lambda: 0.0) -> Reply:
        """The whole answer. `pause`: seconds before each further read."""
        reply = Reply()
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            reply.status = int(head.split(b" ", 2)[1])
            stream = b"text/event-stream" in head.lower()
            parts = self._chunks() if b"transfer-encoding: chunked" in head.lower() else self._rest()
            data = b""
            async for part in parts:
                data += part
                while stream and b"\n\n" in data:
                    event, _, data = data.partition(b"\n\n")
                    self._event(api, reply, event)
                if wait := pause():
                    await asyncio.sleep(wait)
            if not stream:
                hear(api, reply, json.loads(data))
        except (ConnectionError, asyncio.IncompleteReadError):
            reply.end = ""
        return reply

    def _event(self, api: str, reply: Reply, event: bytes) -> None:
        for line in event.split(b"\n"):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                before = len(reply.text) + len(reply.called)
                told = json.loads(line[6:])
                self.heard(told)
                hear(api, reply, told)
                if len(reply.text) + len(reply.called) > before:
                    reply.at.append(time.monotonic())

    async def _chunks(self) -> Any:
        while True:
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            data = await self._reader.readexactly(size + 2)
            if not size:
                return
            yield data[:-2]

    async def _rest(self) -> Any:
        while data := await self._reader.read(1 << 16):
            yield data


def percentile(values: list[float], share: float) -> float:
    """The value below which that share of all lie; of an empty list 0."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def gaps(times: list[float]) -> Iterator[float]:
    """Seconds between neighbours."""
    return (b - a for a, b in pairwise(times))
