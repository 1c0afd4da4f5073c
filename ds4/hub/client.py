"""The hub: who may read, what a repository lists, and its bytes, whatever the line does meanwhile.

Names, addresses, tokens and errors are `huggingface_hub`'s. The bytes are not: its downloader begins a file again
from nothing in every run, compares no sum, takes any range for the one that it asked for, and without its chunk
storage refuses files over 50 GB, which both official n-gram shards are (docs/hub.md).
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

from ds4 import __version__
from ds4.errors import Ds4Error, FileFormatError, UsageError
from ds4.hub.chunks import Reader
from ds4.hub.names import Piece, Repository, Sum, check_name, check_size

SEGMENT = 4 << 30  # bytes a request: the hub's delivery network sends at most 50 GB at once
PROGRESS = 1 << 20  # bytes after which a line counts as working again
AGAIN = (408, 425, 429, 500, 502, 503, 504)
T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Patience:
    """How long a line is put up with. Times are seconds.

    Attributes:
        tries: failures one after the other, without `PROGRESS` between them.
        wait_s: before the second try, doubled at each further one, at most `longest_s`; a server that names a time
            (Retry-After) gets that, as far as `longest_s`.
        silence_s: without a byte.
        storage_s: without a byte of the chunk storage, whose library tries again by itself.
        slow_s, slow_bytes: fewer bytes than that in that time are as good as none.
    """

    tries: int = 6
    wait_s: float = 1.0
    longest_s: float = 300.0
    silence_s: float = 60.0
    storage_s: float = 300.0
    slow_s: float = 60.0
    slow_bytes: int = 64 << 10
    sleep: Callable[[float], None] = time.sleep

    def before(self, failures: int, named_s: float | None) -> float:
        """Seconds to wait after so many failures; `named_s`: what the server said."""
        return min(self.wait_s * 2 ** (failures - 1) if named_s is None else named_s, self.longest_s)


class Trouble(Exception):
    """A failure that another try may mend. `wait_s`: what the server asked for."""

    def __init__(self, what: str, wait_s: float | None = None) -> None:
        super().__init__(what)
        self.wait_s = wait_s


class Hub:
    """One hub.

    Args:
        endpoint: its address; None: HF_ENDPOINT, or the public one.
        xet: take large files from the chunk storage, where they are in it.
        say: gets a line about every failure that was put up with.
    """

    def __init__(
        self, endpoint: str | None = None, *, xet: bool = True, patience: Patience | None = None, say: Say = print
    ) -> None:
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        parts = urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"--endpoint {endpoint}: expected an address such as https://huggingface.co")
        clear = parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1")
        token: bool | None = False if clear else None  # None: HF_TOKEN, or what `hf auth login` left
        self._headers = build_hf_headers(token=token, library_name="ds4", library_version=__version__)
        self._named = "authorization" in {name.lower() for name in self._headers}
        self._api = HfApi(self.endpoint, token=token, library_name="ds4", library_version=__version__)
        self._xet = xet and not constants.HF_HUB_DISABLE_XET
        self._patience = patience or Patience()
        self._say = say
        if clear:
            say(f"{self.endpoint} is no https: no token is sent there")

    def listing(self, repository: Repository) -> tuple[str, dict[str, Piece]]:
        """The commit that a revision names now, and its files with their published sums.

        Raises:
            Ds4Error: the hub cannot be reached, does not know the repository, or does not let us in.
            FileFormatError: it lists what cannot be.
        """
        name, where = repository.name, str(repository)
        commit = self._asked(lambda: self._api.model_info(name, revision=repository.revision).sha, where)
        if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{40}", commit):
            raise FileFormatError(f"{where}: {self.endpoint} names {commit!r} as its commit; expected 40 hex digits")
        rows = self._asked(lambda: list(self._api.list_repo_tree(name, recursive=True, revision=commit)), where)
        found = {}
        for row in rows:
            if isinstance(row, RepoFile):
                check_size(row.size, f"{where}: {row.path}")
                lfs = row.lfs
                published = Sum.of(
                    *(("git-sha1", row.blob_id) if lfs is None else ("sha256", lfs.sha256)), f"{where}: {row.path}"
                )
                with contextlib.suppress(FileFormatError):  # a name that we would not write is none to fetch
                    check_name(row.path, where)
                    found[row.path] = Piece(name, commit, row.path, row.size, published, row.xet_hash)
        return commit, found

    def read(self, piece: Piece, most: int) -> bytes:
        """A small file whole, checked.

        Raises:
            FileFormatError: it is larger than `most`, or not what is listed.
        """
        if piece.size > most:
            raise FileFormatError(f"{piece.where}: has {piece.size} bytes; at most {most} are read of such a file")
        data = b"".join(self.stream(piece, 0))
        hasher = piece.sum.hasher(piece.size)
        hasher.update(data)
        if hasher.hexdigest() != piece.sum.digits:
            raise FileFormatError(f"{piece.where}: {self.endpoint} sends other bytes than it lists ({piece.sum})")
        return data

    def stream(self, piece: Piece, start: int) -> Iterator[bytes]:
        """The bytes of `piece` from `start` on to its end: never more, and fewer only with an error.

        Raises:
            Ds4Error: too many failures one after the other, or one that no other try would mend.
        """
        at = mark = start
        failures, patience = 0, self._patience
        while at < piece.size:
            source = self._from_xet if self._xet and piece.xet else self._from_http
            try:
                for block in source(piece, at):
                    at += len(block)
                    if at - mark >= PROGRESS:
                        failures, mark = 0, at
                    yield block
            except Trouble as e:
                failures += 1
                what = f"{piece.where}: {e} ({at:,} of {piece.size:,} bytes are here)"
                if failures >= patience.tries:
                    raise Ds4Error(
                        f"{what}, {failures} times in a row; what is here stays: run the same command again later"
                    ) from e
                wait_s = patience.before(failures, e.wait_s)
                self._say(f"{what}; trying again in {wait_s:g} s")
                patience.sleep(wait_s)

    def _from_http(self, piece: Piece, at: int) -> Iterator[bytes]:
        """One request's worth from `at` on.

        Raises:
            Trouble, Ds4Error: it ended before that.
        """
        end, patience = min(piece.size, at + SEGMENT), self._patience
        url = hf_hub_url(piece.repo, piece.path, revision=piece.commit, endpoint=self.endpoint)
        ask = self._headers | {"Range": f"bytes={at}-{end - 1}", "Accept-Encoding": "identity"}
        try:
            with get_session().stream("GET", url, headers=ask, timeout=patience.silence_s) as answer:
                self._refuse(answer, piece)
                begins, end = _extent(answer, piece, at, end)
                skip, begun, seen = at - begins, time.monotonic(), 0
                for block in answer.iter_raw():
                    seen += len(block)
                    if time.monotonic() - begun > patience.slow_s:
                        if seen < patience.slow_bytes:
                            raise Trouble(f"only {seen} bytes came in {patience.slow_s:g} s")
                        begun, seen = time.monotonic(), 0
                    kept = block[min(skip, len(block)) :][: end - at]
                    skip -= min(skip, len(block))
                    if kept:
                        at += len(kept)
                        yield kept
                    if at == end:
                        return
        except httpx2.TimeoutException as e:
            raise Trouble(f"nothing came for {patience.silence_s:g} s") from e
        except (httpx2.TransportError, httpx2.TooManyRedirects) as e:
            raise Trouble(f"the line failed ({_said(e)})") from e
        except OfflineModeIsEnabled as e:
            raise self._explained(e, piece.where) from e
        raise Trouble("the answer ended early")

    def _refuse(self, answer: httpx2.Response, piece: Piece) -> None:
        """Raise for everything that is not the file's bytes."""
        for step in (*answer.history, answer):  # where the file was found, before any delivery network
            etag = step.headers.get("x-linked-etag", "").strip('W/"')
            if piece.sum.kind == "sha256" and re.fullmatch("[0-9a-f]{64}", etag) and etag != piece.sum.digits:
                raise FileFormatError(
                    f"{piece.where}: {self.endpoint} now has a file of sha256:{etag} there, listed was {piece.sum}; "
                    "plan the fetch anew with --update"
                )
        status, ours = answer.status_code, _origin(str(answer.url)) == _origin(self.endpoint)
        if status in (200, 206):
            return
        if status in AGAIN:
            raise Trouble(f"the server answers {status}", _retry_after(answer.headers))
        if not ours and status in (401, 403):
            raise Trouble(f"the delivery network answers {status}")  # an address that ran out; the next one is new
        if status == 416:
            raise FileFormatError(f"{piece.where}: the file there is shorter than the {piece.size} bytes listed")
        raise self._denied(status, piece.where, answer.headers.get("x-error-code", ""))

    def _from_xet(self, piece: Piece, at: int) -> Iterator[bytes]:
        """From the chunk storage; after its first failure this run goes on without it."""
        url = f"{self.endpoint}/api/models/{piece.repo}/xet-read-token/{piece.commit}"
        open_to_all = {name: value for name, value in self._headers.items() if name.lower() != "authorization"}
        reader = Reader(piece.xet or "", piece.size, at, url, self._headers, open_to_all)
        failed = "its answer ended early"
        try:
            for block in reader.blocks(self._patience.storage_s):
                data = block[: piece.size - at]
                at += len(data)
                yield data
                if at == piece.size:
                    return
        except Exception as e:
            failed = _said(e)
        finally:
            reader.leave(whole=at == piece.size)
        self._xet = False
        raise Trouble(f"the chunk storage failed ({failed}), going on without it", 0.0)

    def _asked(self, call: Callable[[], T], where: str) -> T:
        """The answer to a question about a repository, asked again as often as it takes."""
        patience = self._patience
        for failures in range(1, patience.tries + 1):
            try:
                return call()
            except (HfHubHTTPError, httpx2.TransportError, OfflineModeIsEnabled) as e:
                answer = getattr(e, "response", None)
                status = answer.status_code if answer is not None else 0
                mends = status in AGAIN or isinstance(e, httpx2.TransportError)
                if not mends or failures == patience.tries:
                    raise self._explained(e, where) from e
                named = _retry_after(answer.headers) if answer is not None else None
                wait_s = patience.before(failures, named)
                self._say(f"{where}: {self.endpoint} {_short(e, status)}; trying again in {wait_s:g} s")
                patience.sleep(wait_s)
            except (KeyError, TypeError, ValueError) as e:
                raise FileFormatError(f"{where}: {self.endpoint} answers what no hub does ({_said(e)})") from e
        raise AssertionError("patience.tries is at least 1")

    def _explained(self, e: Exception, where: str) -> Ds4Error:
        if isinstance(e, OfflineModeIsEnabled):
            return Ds4Error(f"{where}: HF_HUB_OFFLINE forbids asking the hub, and not everything is here; unset it")
        answer = getattr(e, "response", None)
        status = answer.status_code if answer is not None else 0
        if isinstance(e, RevisionNotFoundError):
            return Ds4Error(f"{where}: {self.endpoint} has no such revision; name one with @REVISION")
        if isinstance(e, (GatedRepoError, RepositoryNotFoundError)) or status in (401, 403, 404):
            return self._denied(status, where, "GatedRepo" if isinstance(e, GatedRepoError) else "")
        return Ds4Error(
            f"{where}: {self.endpoint} {_short(e, status)}; check the network and --endpoint, and run the same "
            "command again: nothing that is here is lost"
        )

    def _denied(self, status: int, where: str, code: str) -> Ds4Error:
        if status in (401, 403):
            page = f"{self.endpoint}/{where.partition('@')[0]}"
            gated = f"accept its terms at {page}, then " if code == "GatedRepo" or status == 403 else ""
            token = "the token in HF_TOKEN may not read it" if self._named else "no token is set"
            return Ds4Error(
                f"{where}: the hub does not let us in ({status}; {token}). There is no such repository, or it is not "
                f"open to all: {gated}put a token that may read it into the environment variable HF_TOKEN"
            )
        if status == 404:
            return Ds4Error(f"{where}: is not there ({self.endpoint} answers 404{f', {code}' * bool(code)})")
        return Ds4Error(f"{where}: {self.endpoint} answers {status}")


def _extent(answer: httpx2.Response, piece: Piece, at: int, end: int) -> tuple[int, int]:
    """Where the body begins in the file and where it has to end; `at` and `end` are what was asked for.

    Raises:
        Trouble: it is not what was asked for.
    """
    coded = answer.headers.get("content-encoding", "identity")
    if coded != "identity":
        raise Trouble(f"the server sends the file in the coding {coded!r}, which was not asked for")
    length = answer.headers.get("content-length")
    if answer.status_code == 200:  # the server knows no ranges: what is here already comes again, and is skipped
        if length is not None and length != str(piece.size):
            raise Trouble(f"the server sends a file of {length} bytes")
        return 0, piece.size
    told = answer.headers.get("content-range", "")
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", told)
    if not match or int(match[1]) != at or not at <= int(match[2]) < end or match[3] not in ("*", str(piece.size)):
        raise Trouble(f"the server was asked for bytes {at}-{end - 1} and sends {told!r}")
    last = int(match[2])
    if length is not None and length != str(last + 1 - at):
        raise Trouble(f"the server sends {length} bytes as {told!r}")
    return at, last + 1


def _retry_after(headers: Any) -> float | None:
    """Seconds that a server asks to wait: Retry-After, a number or a date (RFC 9110 10.2.3), or `t=` of RateLimit."""
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}", text):
        return float(text)
    with contextlib.suppress(TypeError, ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    limit = re.search(r"\br=0\b.*\bt=(\d{1,9})", headers.get("ratelimit", ""))
    return float(limit[1]) if limit else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _short(e: Exception, status: int) -> str:
    return f"answers {status}" if status else f"cannot be reached ({_said(e)})"


def _said(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
