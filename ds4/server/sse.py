"""Server-sent events: one object a line, and comments that readers skip."""

from __future__ import annotations

from ds4.server.errors import json_bytes

DONE = b"data: [DONE]\n\n"
PING = b": waiting\n\n"


def sse(value: object, name: str | None = None) -> bytes:
    """One event, named where its API names events. JSON in one line has no line breaks of its own."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json_bytes(value) + b"\n\n"


def read_so_far(done: int, total: int) -> bytes:
    """How far a prompt is read, as a comment: every API's clients skip it."""
    return b": read %d of %d tokens\n\n" % (done, total)
