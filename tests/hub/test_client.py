"""Bytes of a file through everything that a line and a server do, and what is said of that which no try mends."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import time
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds4.errors import Ds4Error, FileFormatError, UsageError
from ds4.hub import client
from ds4.hub.client import Hub, Patience
from ds4.hub.names import Piece, Repository, Sum
from tests.hub.server import (
    TOKEN,
    Fault,
    HubServer,
    cut,
    flipped,
    longer,
    no_ranges,
    other_size,
    says,
    silence,
    status,
    trickle,
    wrong_range,
    zipped,
)

REPO = Repository("someone/base")
DATA = bytes(range(256)) * 1200  # 300 KB, no two neighbouring windows alike


class Heard:
    """What a hub said, and how long it would have waited."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.waits: list[float] = []

    def hub(self, server: HubServer, **patience: Any) -> Hub:
        given = {"tries": 4, "sleep": self.waits.append} | patience
        return Hub(server.url, patience=Patience(**given), say=self.lines.append)

    @property
    def said(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def heard() -> Heard:
    return Heard()


def piece(server: HubServer, hub: Hub, name: str = "a.gguf") -> Piece:
    if not server.revisions:
        server.publish(REPO.name, {"a.gguf": DATA})
    return hub.listing(REPO)[1][name]


@pytest.mark.parametrize(
    ("faults", "start", "said"),
    [
        ([cut(1000), cut(0)], 0, "the line failed"),
        ([cut(70_000)], 5000, "75,000 of 307,200 bytes are here"),
        ([no_ranges()], 0, ""),
        ([no_ranges()], 200_001, ""),
        ([no_ranges(100_000), no_ranges(100_500), cut(9)], 50_000, "100,500 of"),
        ([wrong_range(-7), wrong_range(4096)], 9000, "was asked for bytes 9000-307199 and sends 'bytes 8993-307199"),
        ([says("bytes 0-10/*"), says("nonsense"), says("bytes 5-307199/307200")], 0, "sends 'nonsense'"),
        ([other_size(99)], 0, "was asked for"),
        ([status(429, Retry_After="7")], 0, "answers 429"),
        ([status(503), status(500), status(502)], 0, "answers 502"),
        ([status(408)], 0, "answers 408"),
        ([longer(5000)], 0, ""),
        ([longer(1)], 307_000, ""),
        ([zipped()], 0, "in the coding 'gzip'"),
    ],
)
def test_every_byte_comes(server: HubServer, heard: Heard, faults: Sequence[Fault], start: int, said: str) -> None:
    hub = heard.hub(server)
    one = piece(server, hub)
    server.faults = list(faults)
    assert b"".join(hub.stream(one, start)) == DATA[start:]
    assert said in heard.said and server.faults == []
    assert len(heard.waits) == len(heard.lines) == (len(faults) if said else 0)


def test_it_waits_longer_each_time_and_as_long_as_it_is_told(server: HubServer, heard: Heard) -> None:
    hub = heard.hub(server, tries=8, longest_s=60)
    one = piece(server, hub)
    soon = formatdate(time.time() + 30, usegmt=True)
    limit = '"pages";r=0;t=17'
    server.faults = [
        status(503), status(503), status(429, Retry_After="5"), status(429, Retry_After=soon),
        status(429, RateLimit=limit), status(429, Retry_After="86400"), status(503, Retry_After="soon"),
    ]  # fmt: skip
    assert b"".join(hub.stream(one, 0)) == DATA
    assert heard.waits[:3] == [1, 2, 5] and 25 < heard.waits[3] <= 30 and heard.waits[4:] == [17, 60, 60]


def test_a_line_that_only_ever_breaks_ends_with_what_is_here(server: HubServer, heard: Heard) -> None:
    hub = heard.hub(server)
    one = piece(server, hub)
    server.always = cut(100)
    got = []
    with pytest.raises(Ds4Error, match=r"400 of 307,200 bytes are here\), 4 times in a row; what is here stays"):
        got.extend(hub.stream(one, 0))
    assert b"".join(got) == DATA[:400]


def test_progress_forgives(server: HubServer, heard: Heard) -> None:
    """A long file over a bad line: any number of failures, with work between them."""
    long = DATA * 20  # 6 MB
    server.publish(REPO.name, {"a.gguf": long})
    hub = heard.hub(server, tries=2)
    server.always = cut(1_200_000)
    assert b"".join(hub.stream(piece(server, hub), 0)) == long
    assert len(heard.lines) == 5 and set(heard.waits) == {1.0}


def test_a_line_that_trickles_is_dropped(server: HubServer, heard: Heard) -> None:
    hub = heard.hub(server, slow_s=0.1, slow_bytes=2000)
    one = piece(server, hub)
    server.faults = [trickle(10, 0.02, 50)]
    begun = time.monotonic()
    assert b"".join(hub.stream(one, 0)) == DATA
    assert "bytes came in 0.1 s" in heard.said and time.monotonic() - begun < 0.9


def test_silence_is_not_waited_out(server: HubServer, heard: Heard) -> None:
    hub = heard.hub(server, silence_s=0.2)
    one = piece(server, hub)
    server.faults = [silence(1.0)]
    assert b"".join(hub.stream(one, 0)) == DATA
    assert "nothing came for 0.2 s" in heard.said


def test_large_files_come_in_several_requests(
    server: HubServer, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delivery network sends 50 GB at most; a server that knows no ranges is asked once, not once a segment."""
    monkeypatch.setattr(client, "SEGMENT", 100_000)
    hub = heard.hub(server)
    one = piece(server, hub)
    assert b"".join(hub.stream(one, 7)) == DATA[7:]
    assert [r for _, r in server.asked] == [
        "bytes=7-100006", "bytes=100007-200006", "bytes=200007-300006", "bytes=300007-307199"
    ]  # fmt: skip
    server.asked.clear()
    server.always = no_ranges()
    assert b"".join(hub.stream(one, 7)) == DATA[7:]
    assert len(server.asked) == 1 and heard.lines == []


def test_the_token_stays_with_the_hub(server: HubServer, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.cdn = True
    hub = heard.hub(server)
    one = piece(server, hub)
    server.faults = [cut(1000), status(403)]  # then the signature ran out
    assert b"".join(hub.stream(one, 0)) == DATA
    there = {host.split(":")[0]: token for host, token in server.tokens}
    assert there == {"127.0.0.1": f"Bearer {TOKEN}", "localhost": None}
    assert "the delivery network answers 403" in heard.said and len(heard.lines) == 2


def test_no_token_goes_over_an_open_line(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub = Hub("http://hub.example", say=heard.lines.append)
    assert "authorization" not in {k.lower() for k in hub._headers} and "no token is sent" in heard.said
    assert "authorization" in {k.lower() for k in Hub("https://hub.example", say=heard.lines.append)._headers}


@pytest.mark.parametrize("given", ["huggingface.co", "ftp://a", "https://", "https://a/?b=c"])
def test_endpoints_that_are_none(given: str) -> None:
    with pytest.raises(UsageError, match="--endpoint"):
        Hub(given)


@pytest.mark.parametrize(
    ("token", "code"), [(None, "401; no token is set"), ("hf_other", "403; the token in HF_TOKEN")]
)
def test_a_gated_repository(
    server: HubServer, heard: Heard, monkeypatch: pytest.MonkeyPatch, token: str | None, code: str
) -> None:
    server.publish(REPO.name, {"a.gguf": DATA})
    server.gated.add(REPO.name)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(Ds4Error, match=rf"{code}.*accept its terms at {server.url}/someone/base.*variable HF_TOKEN"):
        heard.hub(server).listing(REPO)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub = heard.hub(server)
    assert b"".join(hub.stream(piece(server, hub), 0)) == DATA
    one = piece(server, hub)
    monkeypatch.setenv("HF_TOKEN", "hf_revoked-meanwhile")
    with pytest.raises(Ds4Error, match="environment variable HF_TOKEN"):
        list(heard.hub(server).stream(one, 0))
    assert heard.waits == []  # nothing that waiting would mend


def test_what_is_not_there(server: HubServer, heard: Heard) -> None:
    hub = heard.hub(server)
    with pytest.raises(Ds4Error, match="no such repository, or it is not open to all"):
        hub.listing(Repository("someone/nothing"))
    one = piece(server, hub)
    with pytest.raises(Ds4Error, match="has no such revision"):
        hub.listing(Repository(REPO.name, "v2"))
    del server.commits[f"{REPO.name}@{one.commit}"]["a.gguf"]
    with pytest.raises(Ds4Error, match=r"a.gguf: is not there .*404, EntryNotFound"):
        list(hub.stream(one, 0))
    assert heard.waits == []


def test_a_file_that_became_another(server: HubServer, heard: Heard) -> None:
    """At the same address: the hub's own word of it, before a byte is taken; or the server's, when it is shorter."""
    hub = heard.hub(server)
    one = piece(server, hub)
    server.cdn = True
    server.wrong["a.gguf"] = DATA[::-1]
    with pytest.raises(FileFormatError, match=r"now has a file of sha256:.*--update"):
        list(hub.stream(one, 0))
    server.cdn = False
    server.commits[f"{REPO.name}@{one.commit}"]["a.gguf"] = DATA[:1000]
    with pytest.raises(FileFormatError, match="shorter than the 307200 bytes listed"):
        list(hub.stream(one, 2000))


def test_listings(server: HubServer, heard: Heard) -> None:
    """Pages, both kinds of sums, faults on the way; names that lead out of a folder are not offered."""
    files = {f"sidecars/code/gr_L{i:02d}.bin": bytes([i]) for i in range(9)}
    files |= {"config.json": b"{}", "../out": b"x", "a/../b": b"x", "ds4-fetch.json": b"x", "x.part": b"x"}
    commit = server.publish(REPO.name, files)
    server.small.add("config.json")
    server.page = 4
    server.api_faults = [(503, {}), (429, {"Retry-After": "3"})]
    hub = heard.hub(server)
    at, found = hub.listing(REPO)
    assert at == commit and heard.waits == [1, 3]
    assert set(found) == {n for n in files if n.startswith("sidecars")} | {"config.json"}
    one = found["config.json"]
    assert one.sum == Sum("git-sha1", hashlib.sha1(b"blob 2\0{}").hexdigest())
    assert found["sidecars/code/gr_L03.bin"].sum == Sum("sha256", hashlib.sha256(b"\3").hexdigest())
    assert hub.read(one, 10) == b"{}"
    with pytest.raises(FileFormatError, match="at most 1 are read"):
        hub.read(one, 1)
    server.faults = [flipped(0)]
    with pytest.raises(FileFormatError, match="sends other bytes than it lists"):
        hub.read(one, 10)


def test_a_hub_that_is_none(server: HubServer, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    server.publish(REPO.name, {"a.gguf": DATA})
    hub = heard.hub(server)
    for rows in ([{"type": "file"}], [{"type": "file", "path": "a", "oid": "zz", "size": 1}], ["a"]):
        monkeypatch.setattr(server, "listing", lambda files, rows=rows: rows)
        with pytest.raises(FileFormatError, match=r"answers what no hub does|is no git-sha1"):
            hub.listing(REPO)
    server.revisions[REPO.name]["main"] = "main"
    server.commits[f"{REPO.name}@main"] = {}
    with pytest.raises(FileFormatError, match="names 'main' as its commit"):
        hub.listing(REPO)


def test_nobody_is_there(server: HubServer, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    one = piece(server, heard.hub(server))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # nobody listens
        hub = Hub(
            f"http://127.0.0.1:{s.getsockname()[1]}", patience=Patience(tries=4, sleep=heard.waits.append), say=print
        )
    with pytest.raises(Ds4Error, match=r"cannot be reached .*check the network and --endpoint"):
        hub.listing(REPO)
    assert heard.waits == [1, 2, 4]
    with pytest.raises(Ds4Error, match="the line failed"):
        list(hub.stream(one, 0))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for ask in (lambda: hub.listing(REPO), lambda: list(hub.stream(one, 0))):
        with pytest.raises(Ds4Error, match="HF_HUB_OFFLINE forbids"):
            ask()


class Chunks:
    """The chunk storage's library, as far as it is called."""

    def __init__(self, blocks: list[bytes], fails: bool) -> None:
        self.blocks, self.fails, self.calls, self.cancelled = blocks, fails, [], 0  # type: ignore[var-annotated]
        self.XetFileInfo = lambda digest, size: (digest, size)

    def XetConfig(self) -> Any:
        return SimpleNamespace(with_config=dict)

    def XetSession(self, config: dict[str, Any]) -> Any:
        assert config["telemetry.enabled"] is False

        def group(**how: Any) -> Any:
            return SimpleNamespace(
                download_stream=lambda info, start: self._stream(info, start, how), abort=self._abort
            )

        return SimpleNamespace(new_download_stream_group=group)

    def _abort(self) -> None:
        self.cancelled += 1

    def _stream(self, info: Any, start: int, how: Any) -> Any:
        self.calls.append((info, start, how))
        yield from self.blocks
        if self.fails:
            raise RuntimeError("CAS: 416")


@pytest.mark.parametrize(
    ("blocks", "fails", "said"),
    [
        ([DATA[10:1000], DATA[1000:]], False, ""),
        ([DATA[10:1000]], True, "the chunk storage failed (CAS: 416), going on without it"),
        ([DATA[10:1000]], False, "(its answer ended early), going on without it"),
        ([], True, "failed"),
        ([DATA[10:] + b"more"], False, ""),
    ],
)
def test_the_chunk_storage(
    server: HubServer, heard: Heard, monkeypatch: pytest.MonkeyPatch, blocks: list[bytes], fails: bool, said: str
) -> None:
    """From where we are on; what it does not give comes over plain HTTP. The hub's token is for the hub alone."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.xet["a.gguf"] = "ab" * 32
    stand_in = Chunks(blocks, fails)
    monkeypatch.setitem(__import__("sys").modules, "hf_xet", stand_in)
    hub = heard.hub(server)
    one = piece(server, hub)
    assert one.xet == "ab" * 32 and b"".join(hub.stream(one, 10)) == DATA[10:]
    ((info, start, how),) = stand_in.calls
    assert info == ("ab" * 32, len(DATA)) and start == 10
    assert how["token_refresh_url"] == f"{server.url}/api/models/{REPO.name}/xet-read-token/{one.commit}"
    assert TOKEN in json.dumps(how["token_refresh_headers"]) and TOKEN not in json.dumps(how["custom_headers"])
    assert said in heard.said and bool(server.asked) == bool(said) == bool(stand_in.cancelled)
    b"".join(Hub(server.url, xet=False, say=heard.lines.append).stream(one, 10))
    assert len(stand_in.calls) == 1


def test_the_real_chunk_storage_library(
    server: HubServer, heard: Heard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library itself, against a storage of one container; no byte over plain HTTP, and bytes as they come."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # where it logs
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.xet["a.gguf"] = "ab" * 32
    hub = heard.hub(server)
    one = piece(server, hub)
    for start in (0, 59_999, 250_001):
        assert b"".join(hub.stream(one, start)) == DATA[start:]
    assert server.asked == [] and heard.lines == []
    tokens = {(host.split(":")[0], token) for host, token in server.tokens}
    assert tokens == {
        ("127.0.0.1", f"Bearer {TOKEN}"), ("localhost", "Bearer of-the-storage"), ("localhost", None)
    }  # fmt: skip
    server.storage_flips = True
    assert b"".join(hub.stream(one, 0)) != DATA  # it compares nothing: the sum of the file does (test_part.py)


def test_a_chunk_storage_that_gives_nothing(
    server: HubServer, heard: Heard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library waits inside a call. Ctrl-C is heard all the same, and the fetch does not wait as long as it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    server.xet["a.gguf"] = "ab" * 32
    hub = heard.hub(server, storage_s=30.0)
    one = piece(server, hub)
    server.storage_waits.clear()
    begun = time.monotonic()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            list(hub.stream(one, 0))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begun < 10
    hub = heard.hub(server, storage_s=0.3)
    assert b"".join(hub.stream(one, 5)) == DATA[5:]
    assert "the chunk storage failed (nothing came for 0.3 s), going on without it" in heard.said
    server.storage_waits.set()
