"""The page at `/` and the one at `/reports`: plain files of `web/`, and what `--reports` has.

The files are read once, when the server starts: a path is looked up among them, never on the disk. They are open
without a key, since a browser sends none with an address that is typed, and hold nothing of the server's users. What
does, `/report-files`, asks for the key like everything else; the page fetches it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from ds4.server.errors import HttpError, json_response
from ds4.server.reports import Reports

HOME = Path(__file__).with_name("web")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
ENTRIES = {"/": "index.html", "/reports": "reports.html"}
REPORT_FILES = "/report-files"

# Scripts of this server only, nothing of another origin, no form that leaves, no frame around it. Trusted Types: the
# browser refuses to make elements of a text, whoever wrote the call.
_SAME = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
POLICY = f"{_SAME}; style-src 'self'; img-src 'self'"
# A report is shown in a frame without scripts and of no origin. It inherits this policy, and has its style in itself.
REPORTS_POLICY = f"{_SAME}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-src blob:"
# Of a report's own file, should somebody open its address: no scripts, no origin, nothing fetched.
FILE_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
GUARDS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


@dataclass(frozen=True)
class Asset:
    """A file of `web/` as it is sent."""

    body: bytes
    media_type: str
    etag: str

    @staticmethod
    def of(path: Path) -> Asset:
        body = path.read_bytes()
        return Asset(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')

    def answer(self, request: Request, policy: str) -> Response:
        """200, or 304 where the browser has it. It asks each time: a server of another version is told at once."""
        headers = {**GUARDS, "ETag": self.etag, "Cache-Control": "no-cache", "Content-Security-Policy": policy}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


def read_assets(home: Path = HOME) -> dict[str, Asset]:
    """The files of `web/`, by name."""
    return {path.name: Asset.of(path) for path in sorted(home.iterdir()) if path.suffix in TYPES}


class Pages:
    """The handlers, over the files and the reports."""

    def __init__(self, reports: Reports, assets: Mapping[str, Asset] | None = None) -> None:
        self._reports = reports
        self._assets = read_assets() if assets is None else assets

    def add_to(self, app: FastAPI) -> None:
        both = ["GET", "HEAD"]
        for path in ENTRIES:
            app.add_api_route(path, self.entry, methods=both, response_model=None)
        app.add_api_route("/web/{name}", self.asset, methods=both, response_model=None)
        app.add_api_route(REPORT_FILES, self.listed, methods=["GET"], response_model=None)
        app.add_api_route(REPORT_FILES + "/{name:path}", self.file, methods=["GET"], response_model=None)

    async def entry(self, request: Request) -> Response:
        name = ENTRIES[request.url.path]
        return self._assets[name].answer(request, POLICY if name == "index.html" else REPORTS_POLICY)

    async def asset(self, request: Request, name: str) -> Response:
        if name not in self._assets or name in ENTRIES.values():
            raise HttpError(404, f"there is no /web/{name} here", "not_found")
        return self._assets[name].answer(request, POLICY)

    async def listed(self) -> Response:
        listing = await asyncio.to_thread(self._reports.listing)
        return json_response(listing, headers={**GUARDS, "Cache-Control": "no-store"})

    async def file(self, name: str) -> Response:
        data, media_type = await asyncio.to_thread(self._reports.read, name)
        headers = {**GUARDS, "Cache-Control": "no-store", "Content-Security-Policy": FILE_POLICY}
        return Response(data, headers=headers, media_type=media_type)
