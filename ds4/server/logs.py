"""Lines of the server's log: text for people, or one JSON object a line; both say which request they are about."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

FORMATS = ("text", "json")
HEADER = "x-request-id"
SAFE = re.compile(r"[A-Za-z0-9._:-]{1,64}")  # of an id that a client may give: nothing that could break a line

request_id: ContextVar[str | None] = ContextVar("ds4_request_id", default=None)


def id_of(given: bytes | None) -> str:
    """The client's id of a request, if it is a safe one, else a new one."""
    text = "" if given is None else given.decode("latin-1")
    return text if SAFE.fullmatch(text) else f"req_{secrets.token_hex(12)}"


class TextFormat(logging.Formatter):
    """`time message`, and the request's id where there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line, mark = super().format(record), request_id.get()
        if mark is None:
            return line
        first, *rest = line.split("\n", 1)
        return "\n".join([f"{first} [{mark}]", *rest])


class JsonFormat(logging.Formatter):
    """`{"time", "level", "message", "request_id", "error"}`; the last two where there are any. UTC, milliseconds."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "message": record.getMessage()}
        if (mark := request_id.get()) is not None:
            line["request_id"] = mark
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


def log_to_stderr(form: str) -> None:
    """All of this process's logging, in one of `FORMATS`; from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormat() if form == "json" else TextFormat())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
