"""Every failure has one shape, whatever went wrong where: {"error": {"message", "type", "param", "code"}}.

Below /v1/messages it is that API's: {"type": "error", "error": {"type", "message"}, "request_id"}; `param` and `code`
are this server's own there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

from ds4.errors import CapacityError, Ds4Error, RequestError
from ds4.server.logs import request_id

MESSAGES = "/v1/messages"  # it and what is below it
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
         503: "overloaded_error"}  # fmt: skip


class HttpError(Ds4Error):
    """A failure with a status of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})


def overloaded(message: str, code: str, retry_s: int = 1) -> HttpError:
    """503, and when to come again."""
    return HttpError(503, message, code, headers={"Retry-After": str(retry_s)})


def stopping() -> HttpError:
    """What a request is told that the server's end cuts short."""
    return overloaded("the server is stopping", "shutting_down", 5)


def status_of(error: BaseException) -> int:
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, RequestError):
        return 400
    return 503 if isinstance(error, CapacityError) else 500


def message_of(error: BaseException) -> str:
    """What may be told of it: what is not meant for users says only that it happened."""
    return str(error) if isinstance(error, Ds4Error) else "internal error; the server's log says more"


def in_messages(path: str) -> bool:
    """Whether a path belongs to the API of /v1/messages."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def error_body(error: BaseException, path: str = "") -> dict[str, object]:
    """The JSON object of an error, in the shape of the path's API. What is not meant for users says only that it
    happened.
    """
    status, message = status_of(error), message_of(error)
    code = getattr(error, "code", None)
    if code is None and status >= 500:
        code = "insufficient_memory" if isinstance(error, CapacityError) else "internal_error"
    about = {"param": getattr(error, "param", None), "code": code}
    if in_messages(path):
        kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message, **about}, "request_id": request_id.get()}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, **about}}


def json_bytes(value: object) -> bytes:
    """JSON in UTF-8; a lone surrogate (an error may quote one) becomes '?'."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, media_type="application/json")


def error_response(error: BaseException, path: str = "") -> Response:
    headers = error.headers if isinstance(error, HttpError) else {}
    return json_response(error_body(error, path), status_of(error), headers)
