"""Pages of another origin: off, unless the server was given the one origin that may call it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ds4.errors import UsageError

Headers = Sequence[tuple[bytes, bytes]]
ORIGIN = re.compile(r"\*|https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")
PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    # the star is for what official clients send beside; it stands for all but the first
    (b"access-control-allow-headers", b"authorization, content-type, x-api-key, x-request-id, *"),
    (b"access-control-max-age", b"600"),
)


def check_origin(text: str) -> str:
    """An origin as browsers send it, or `*`.

    Raises:
        UsageError: it is neither.
    """
    if not ORIGIN.fullmatch(text):
        raise UsageError(f"--cors {text}: expected an origin such as https://chat.example.org (no path), or *")
    return text


def allowed(cors: str | None, origin: bytes | None) -> list[tuple[bytes, bytes]]:
    """Headers that let a page of `origin` read an answer; none where it may not, or did not ask."""
    if cors is None or origin is None:
        return []
    if cors == "*":
        return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"x-request-id")]
    vary = [(b"vary", b"origin")]
    if origin.decode("latin-1").lower() != cors.lower():
        return vary
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", b"x-request-id, retry-after"),
        *vary,
    ]


def is_preflight(method: str, headers: dict[bytes, bytes]) -> bool:
    """Whether a browser asks what it may send, before it does."""
    return method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers
