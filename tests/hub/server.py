"""A hub on this machine: the few endpoints that fetching speaks, and everything that can go wrong on the way.

`faults` are taken one a request for bytes, in order; when they are used up, or at None, the request is served as it
should be. With `cdn`, bytes lie behind a redirect to another origin, at an address with a signature.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_of-a-test"
DEVELOPERS = (  # what the environment of whoever runs the tests may say, and no test may hear
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
    "HF_HUB_DISABLE_XET", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy",
)  # fmt: skip
CHUNK = 60_000  # bytes of a chunk in the storage
Fault = Callable[["Handler", bytes, int, int], bool]  # (request, file, first, last): whether it has answered


class HubServer:
    """Repositories by name, their revisions by commit; a commit holds files."""

    def __init__(self) -> None:
        self.revisions: dict[str, dict[str, str]] = {}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.small: set[str] = set()  # files that Git holds itself, listed with its blob's SHA-1
        self.wrong: dict[str, bytes] = {}  # file -> what is listed, though other bytes are sent
        self.gated: set[str] = set()
        self.faults: list[Fault | None] = []
        self.always: Fault | None = None
        self.api_faults: list[tuple[int, dict[str, str]]] = []
        self.asked: list[tuple[str, str | None]] = []  # requests for bytes: file, range
        self.tokens: list[tuple[str, str | None]] = []  # host and Authorization of every request
        self.page = 1000  # rows of a listing
        self.cdn = False
        self.xet: dict[str, str] = {}  # file -> its hash in the chunk storage
        self.storage_flips = False
        self.storage_waits = threading.Event()  # before it gives any bytes, while this is not set
        self.storage_waits.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *left: None  # type: ignore[method-assign]  # clients go as they please
        self._server.hub = self  # type: ignore[attr-defined]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage(self) -> str:
        """The chunk storage, on another host."""
        return f"http://localhost:{self.port}/storage"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def publish(self, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        """A commit with these files, which the revision names from now on."""
        h = hashlib.sha1(repo.encode())
        for name in sorted(files):
            h.update(name.encode() + hashlib.sha256(files[name]).digest())
        commit = h.hexdigest()
        self.commits[f"{repo}@{commit}"] = files
        self.revisions.setdefault(repo, {})[revision] = commit
        return commit

    def listing(self, files: dict[str, bytes]) -> list[dict[str, Any]]:
        rows = []
        for name, data in files.items():
            listed = self.wrong.get(name, data)
            blob = hashlib.sha1(b"blob %d\0" % len(listed) + listed).hexdigest()
            row: dict[str, Any] = {"type": "file", "path": name, "size": len(listed), "oid": blob}
            if name not in self.small:
                digest = hashlib.sha256(listed).hexdigest()
                row["lfs"] = {"oid": digest, "size": len(listed), "pointerSize": 130}
            if name in self.xet:
                row["xetHash"] = self.xet[name]
            rows.append(row)
        return rows


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubServer:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        hub, at = self.hub, urlsplit(self.path)
        path = unquote(at.path)
        hub.tokens.append((self.headers.get("Host", ""), self.headers.get("Authorization")))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
                self._api(match[1], match[2], match[3], parse_qs(at.query))
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path):
                self._resolve(match[1], match[2], match[3])
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/xet-read-token/[0-9a-f]{40}", path):
                told = {"accessToken": "of-the-storage", "exp": int(time.time()) + 3600, "casUrl": hub.storage}
                self.send(200, json.dumps(told).encode())
            elif match := re.fullmatch(r"/storage/v1/reconstructions/([0-9a-f]{64})", path):
                self._reconstruction(match[1])
            elif match := re.fullmatch(r"/xorb/([0-9a-f]{64})", path):
                self._xorb(match[1])
            elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+@[0-9a-f]{40})/(.+)", path):
                if parse_qs(at.query).get("Signature") != ["s"]:
                    self.fail(403)
                else:
                    self._bytes(match[2], hub.commits[match[1]][match[2]])
            else:
                self.fail(404)

    def _api(self, repo: str, what: str, revision: str, query: dict[str, list[str]]) -> None:
        hub = self.hub
        if hub.api_faults:
            status, headers = hub.api_faults.pop(0)
            self.fail(status, headers)
        elif repo not in hub.revisions:
            self.fail(401, {"X-Error-Code": "RepoNotFound"})  # the hub does not say which are private
        elif not self._let_in(repo):
            return
        elif what == "revision":
            commit = hub.revisions[repo].get(revision, revision)
            if f"{repo}@{commit}" not in hub.commits:
                self.fail(404, {"X-Error-Code": "RevisionNotFound"})
            else:
                self.send(200, json.dumps({"id": repo, "sha": commit}).encode())
        else:
            rows = hub.listing(hub.commits[f"{repo}@{revision}"])
            begin = int(query.get("cursor", ["0"])[0])
            end = begin + hub.page
            following = f'<{hub.url}{urlsplit(self.path).path}?recursive=true&cursor={end}>; rel="next"'
            self.send(200, json.dumps(rows[begin:end]).encode(), {"Link": following} if end < len(rows) else {})

    def _let_in(self, repo: str) -> bool:
        if repo in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            told = self.headers.get("Authorization") is not None
            self.fail(403 if told else 401, {"X-Error-Code": "GatedRepo"})
            return False
        return True

    def _resolve(self, repo: str, commit: str, name: str) -> None:
        hub = self.hub
        if not self._let_in(repo):
            return
        data = hub.commits.get(f"{repo}@{commit}", {}).get(name)
        if data is None:
            self.fail(404, {"X-Error-Code": "EntryNotFound"})
        elif hub.cdn:
            listed = hub.wrong.get(name, data)
            etag = hashlib.sha256(listed).hexdigest()
            address = f"http://localhost:{hub.port}/cdn/{repo}@{commit}/{name}?Signature=s"
            self.send(302, b"", {"Location": address, "X-Linked-Etag": f'"{etag}"', "X-Repo-Commit": commit})
        else:
            self._bytes(name, data)

    def _reconstruction(self, digest: str) -> None:
        """What a file is made of: one container of chunks here, of which the range asked for takes some."""
        data = self._stored(digest)
        first, last = self._range(len(data))
        if first >= len(data):
            self.fail(416)
            return
        begin, end = first // CHUNK, last // CHUNK + 1
        sizes = [min(CHUNK, len(data) - i) for i in range(0, len(data), CHUNK)]
        at = [sum(8 + n for n in sizes[:i]) for i in range(len(sizes) + 1)]
        chunks = {"start": begin, "end": end}
        told = {
            "offset_into_first_range": first - begin * CHUNK,
            "terms": [{"hash": digest, "unpacked_length": sum(sizes[begin:end]), "range": chunks}],
            "fetch_info": {digest: [{
                "range": chunks, "url": f"http://localhost:{self.hub.port}/xorb/{digest}",
                "url_range": {"start": at[begin], "end": at[end] - 1},
            }]},
        }  # fmt: skip
        self.send(200, json.dumps(told).encode())

    def _xorb(self, digest: str) -> None:
        data = self._stored(digest)
        self.hub.storage_waits.wait(60)
        if self.hub.storage_flips:
            data = bytes([data[0] ^ 1]) + data[1:]
        chunks = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]  # version, size, coding (none), size again
        body = b"".join(
            b"\0" + len(c).to_bytes(3, "little") + b"\0" + len(c).to_bytes(3, "little") + c for c in chunks
        )
        self.part(body, *self._range(len(body)))

    def _stored(self, digest: str) -> bytes:
        name = next(name for name, mark in self.hub.xet.items() if mark == digest)
        return next(files[name] for files in self.hub.commits.values() if name in files)

    def _range(self, size: int) -> tuple[int, int]:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "bytes=0-")
        assert match
        return int(match[1]), min(int(match[2]) if match[2] else size - 1, size - 1)

    def _bytes(self, name: str, data: bytes) -> None:
        hub, asked = self.hub, self.headers.get("Range")
        hub.asked.append((name, asked))
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "")
        first = int(match[1]) if match else 0
        last = min(int(match[2]) if match and match[2] else len(data) - 1, len(data) - 1)
        fault = hub.faults.pop(0) if hub.faults else hub.always
        if fault is not None and fault(self, data, first, last):
            return
        if match and first >= len(data):
            self.fail(416, {"Content-Range": f"bytes */{len(data)}"})
        else:
            self.part(data, first, last)

    def part(self, data: bytes, first: int, last: int, told: str | None = None, total: int | None = None) -> None:
        """A right answer; `told` and `total`: what it says instead of its range, and of its size."""
        size = len(data) if total is None else total
        headers = {"Content-Range": told or f"bytes {first}-{last}/{size}"}
        self.send(206, data[first : last + 1], headers)

    def send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def fail(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send(status, b"no", headers)


# -- faults


def status(code: int, **headers: str) -> Fault:
    def fault(request: Handler, data: bytes, first: int, last: int) -> bool:
        request.fail(code, {k.replace("_", "-"): v for k, v in headers.items()})
        return True

    return fault


def cut(after: int) -> Fault:
    """The line breaks after so many bytes of the body."""

    def fault(request: Handler, data: bytes, first: int, last: int) -> bool:
        body = data[first : last + 1]
        headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        request.send(206, body[:after], headers, length=len(body))
        request.close_connection = True
        return True

    return fault


def no_ranges(after: int | None = None) -> Fault:
    """The whole file with 200, whatever was asked; broken off after so many bytes."""

    def fault(request: Handler, data: bytes, first: int, last: int) -> bool:
        request.send(200, data[:after], length=len(data))
        request.close_connection = after is not None
        return True

    return fault


def wrong_range(shift: int) -> Fault:
    """Bytes from elsewhere, which it says."""

    def fault(request: Handler, data: bytes, first: int, last: int) -> bool:
        begin = (first + shift) % len(data)
        request.part(data, begin, min(last, len(data) - 1))
        return True

    return fault


def says(told: str) -> Fault:
    """Right bytes under a wrong name."""

    def fault(request: Handler, data: bytes, first: int, last: int) -> bool:
        request.part(data, first, last, told=told)
        return True

    return fault


def other_size(total: int) -> Fault:
    def fault(request: Handler, data: bytes, first: int, last: int) -> bool:
        request.part(data, first, last, total=total)
        return True

    return fault


def flipped(at: int) -> Fault:
    """One bit of the file is another on the way."""

    def fault(request: Handler, data: bytes, first: int, last: int) -> bool:
        bad = bytearray(data)
        bad[at] ^= 4
        request.part(bytes(bad), first, last)
        return True

    return fault


def zipped() -> Fault:
    def fault(request: Handler, data: bytes, first: int, last: int) -> bool:
        request.send(200, gzip.compress(data), {"Content-Encoding": "gzip"})
        return True

    return fault


def longer(more: int) -> Fault:
    """More bytes than it says, in a coding that does not give a length."""

    def fault(request: Handler, data: bytes, first: int, last: int) -> bool:
        request.send_response(206)
        request.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        body = data[first : last + 1] + b"?" * more
        request.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        return True

    return fault


def trickle(bytes_a_step: int, step_s: float, steps: int) -> Fault:
    """A few bytes at a time, then it breaks off."""

    def fault(request: Handler, data: bytes, first: int, last: int) -> bool:
        body = data[first : last + 1]
        headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        request.send(206, b"", headers, length=len(body))
        for i in range(steps):
            request.wfile.write(body[i * bytes_a_step : (i + 1) * bytes_a_step])
            request.wfile.flush()
            time.sleep(step_s)
        request.close_connection = True
        return True

    return fault


def silence(seconds: float) -> Fault:
    """It takes the request and says nothing."""

    def fault(request: Handler, data: bytes, first: int, last: int) -> bool:
        time.sleep(seconds)
        request.close_connection = True
        return True

    return fault


@contextlib.contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    try:
        yield server
    finally:
        server.close()
