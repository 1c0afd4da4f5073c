"""A model of forced outputs behind the real server: real sockets, real event loop, no device."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from ds4.engine import Ask, Sampling
from ds4.engine.constraint import TokenConstraint
from ds4.model import tokenizer as names
from ds4.model.tokenizer import CONTROL, NORMAL, UNUSED, Tokenizer
from ds4.server.app import make_app
from ds4.server.edge import Connections
from ds4.server.listen import listen, make_server
from ds4.server.memory_watch import MemoryWatch
from ds4.server.reports import Reports
from ds4.server.request import Limits, Progress, ServedEngine
from ds4.server.requests_log import RequestLog
from ds4.server.run import Prefixes
from ds4.server.worker import Worker

ADDED = (names.BOS, names.EOS, names.PAD, names.SYSTEM, names.USER, names.ASSISTANT, names.THINK, names.END_THINK,
         names.DSML, names.IMAGE)  # fmt: skip
FIRST_BYTE = len(ADDED)
BOS, EOS = 0, 1
PLAIN: Any = {"verify": False}  # certificates take 25 ms to read, and nothing here has one
ADMIN_KEY = "an-admin-key-of-tests"


def tokenizer_of(pieces: Sequence[bytes]) -> Tokenizer:
    """A token a piece, from FIRST_BYTE on; none is made of others."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    alphabet = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}
    types = [CONTROL] * FIRST_BYTE + [NORMAL if piece else UNUSED for piece in pieces]
    return Tokenizer.from_parts([*ADDED, *("".join(alphabet[b] for b in p) or "[none]" for p in pieces)], [], types)


TOKENIZER = tokenizer_of([bytes([b]) for b in range(256)])  # every character outside ASCII is cut in the middle


def ids_of(text: str) -> list[int]:
    """Text as tokens; `</think>` and the end of sentence as the tokens that they are."""
    return TOKENIZER.encode_segments(TOKENIZER.split_added(text))


@dataclass(frozen=True)
class StandInConfig:
    max_position_embeddings: int = 4096
    bos_token_id: int = BOS
    eos_token_id: int = EOS


@dataclass(frozen=True)
class StandInToken:
    """A drawn token's log-probability, and those of the likeliest."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def told(index: int, token: int, top: int) -> StandInToken:
    """What the model says of token `index` of its script: the likeliest are it and the ids after it."""
    likeliest = [(token + j) % TOKENIZER.vocab_size for j in range(top)]
    return StandInToken(-0.25 * (index + 1), tuple((t, -0.25 * (index + 1) - j) for j, t in enumerate(likeliest)))


@dataclass
class StandIn:
    """An engine whose answer is `script`, for ever repeated if `endless`.

    `before_chunk` and `before_token` are called in the device thread with the number of the chunk or token: tests
    block there, or fail. `told(i, token, top)` says what is told of the token.
    """

    script: Sequence[int] = ()
    endless: bool = False
    config: StandInConfig = StandInConfig()
    before_chunk: Callable[[int], None] = lambda i: None
    before_token: Callable[[int], None] = lambda i: None
    told: Callable[[int, int, int], StandInToken] = told
    name: str = "stand-in"
    tokenizer: Tokenizer = TOKENIZER
    sidecars: dict[str, dict[str, str] | None] = field(default_factory=lambda: {"zchain": None, "posttrain": None})
    closed: bool = False
    prompts: list[list[int]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)  # rows of those that several shared
    sessions: weakref.WeakSet[StandInSession] = field(default_factory=weakref.WeakSet)

    def session(self) -> StandInSession:
        made = StandInSession(self)
        self.sessions.add(made)
        return made

    def draw(self, asks: Sequence[Ask]) -> list[Exception | None]:
        self.passes.append(len(asks))
        return [None] * len(asks)

    def drop_idle(self) -> None:
        pass

    def device_memory(self) -> tuple[int, int] | None:
        return (3 << 20, 8 << 20)

    def states(self) -> tuple[int, int | None]:
        return (len(self.sessions) << 10, 1 << 20)

    def close(self) -> None:
        self.closed = True


class StandInSession:
    def __init__(self, engine: StandIn) -> None:
        self.engine, self.drawn = engine, 0
        self.last: StandInToken | None = None
        self.constraint: TokenConstraint | None = None

    @property
    def waiting(self) -> int:
        return 0

    def reading(self, tokens: Sequence[int]) -> Generator[tuple[int, int], None, None]:
        for at in range(0, len(tokens), 64):
            yield at, len(tokens)
            self.engine.before_chunk(at // 64)
        self.engine.prompts.append(list(tokens))

    def constrain(self, constraint: TokenConstraint | None) -> None:
        self.constraint = constraint

    def next(self, sampling: Sampling, *, left: int | None = None) -> int:
        self.engine.before_token(self.drawn)
        self.engine.samplings.append(sampling)
        self.drawn += 1
        script = self.engine.script
        i = self.drawn - 1
        token = script[i % len(script)] if self.engine.endless else [*script, EOS][i]
        self.last = self.engine.told(i, token, sampling.top)
        if self.constraint is not None:
            self.constraint.advance(token)
        return token

    def report(self) -> dict[str, object]:
        return {"rounds": self.drawn}


@dataclass
class Served:
    """A running server."""

    engine: StandIn
    worker: Worker
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **kw: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **PLAIN, **kw)

    def post(self, path: str, body: object, **kw: Any) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=data, timeout=30, **PLAIN, **kw)

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def admin(self, path: str, body: object = b"", key: str | None = None) -> httpx.Response:
        """A POST with the admin key."""
        return self.post("/admin/" + path, body, headers={"Authorization": f"Bearer {key or ADMIN_KEY}"})

    def client(self, key: str = "none") -> Any:
        """The official client. Any: its overloads do not cover fields that are ours."""
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=30)

    def raw(
        self, path: str, fields: dict[str, Any], receive_buffer: int | None = None, key: str = "none"
    ) -> socket.socket:
        """A request on a bare socket, its answer not read yet."""
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.connect(("127.0.0.1", self.port))
        sock.settimeout(30)
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n"
        sock.sendall(head.encode() + b"\r\n" + body)
        return sock


@contextmanager
def serve(
    engine: StandIn,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    open_engine: Callable[[Progress], ServedEngine] | None = None,
    wait: bool = True,
    requests: RequestLog | None = None,
    admin_key: str | None = ADMIN_KEY,
    remount: Callable[[ServedEngine], None] = lambda engine: None,
    settle: Callable[[], object] = gc.collect,
    step_s: float = 120.0,
    cors: str | None = None,
    reports: Reports | None = None,
    sessions: int = 1,
    prefixes: Prefixes | None = None,
    watch: Callable[[Worker], MemoryWatch | None] = lambda worker: None,
    send_buffer: int | None = None,
) -> Iterator[Served]:
    """A server on a free port, until the block ends."""
    limits = limits or Limits()
    connections: Connections = {}
    worker = Worker(
        open_engine or (lambda progress: engine), limits.queue, remount=remount, settle=settle, step_s=step_s,
        sessions=sessions, prefixes=prefixes,
    )  # fmt: skip
    app = make_app(worker, limits, api_key, connections, requests, admin_key, cors, reports, watch(worker))
    server = make_server(app, connections, limits, worker.interrupt)
    sock = listen("127.0.0.1", 0)
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections have it too
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    served = Served(engine, worker, sock.getsockname()[1])
    try:
        if wait:
            until(lambda: worker.state != "loading")
        yield served
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Wait for another thread; fails if it does not happen."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def events(response: httpx.Response) -> list[Any]:
    """The objects of a finished event stream, which must end with [DONE]."""
    data = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(d) for d in data[:-1]]


def joined(chunks: Sequence[Any], key: str = "content") -> str:
    """The text of a channel of a chat stream."""
    return "".join(c["choices"][0]["delta"].get(key) or "" for c in chunks if c["choices"])
