"""A server under everything that clients do, for long: nothing may break that was not broken, and nothing may stay.

    python bench/soak.py [--requests 2000] [--clients 24] [--engine stand-in|embedded] [-m BASE] [--seed 1] [--json]

Requests of all four APIs, streamed and not, of one token to thousands, with tools and with a schema. Of ten clients
about six stay to the end; the others leave at a random moment (closing, or by a reset), read slowly, read nothing at
all, send half of a request, or send nonsense. Held, or the exit code is 1:

    answers   whoever stayed has its whole answer; on the stand-in, whose answers are known, the right one
    errors    none but those that were asked for: statuses, events of streams, lines of the log
    freed     four times, when a quarter of the requests is over, nothing runs or waits, no session is left, no
              connection, no file descriptor and no thread more than after the first quarter; when what is kept for
              later requests was dropped, no device memory either
    memory    the process is no larger after the last quarter than after the first but for `--growth-mb`

The stand-in is the tests' engine of forced outputs: all of it is the server. `--engine embedded` takes the embedded
model, or a base, and then far fewer requests: 60.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from http_load import MAX_TOKENS, PATHS, SMALL_BUFFER, TOOL, Client, Reply, body_of, with_schema, with_tools

from ds4.engine import Engine, Sampling, Session
from ds4.errors import Ds4Error
from ds4.server.app import make_app
from ds4.server.edge import Connections
from ds4.server.listen import listen, make_server
from ds4.server.memory_watch import MemoryWatch
from ds4.server.prefixes import Prefixes
from ds4.server.request import Limits, ServedEngine
from ds4.server.warm import warm_up
from ds4.server.worker import Worker

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the stand-in is the tests'

from tests.server.standin import BOS, EOS, TOKENIZER, StandIn, StandInConfig, StandInSession, ids_of  # noqa: E402

LIMITS = Limits(queue=256, body_s=1.0, outbox_chars=50_000, stall_s=0.5, ping_s=0.05)
WAYS = {"stay": 12, "slow": 2, "leave": 4, "silent": 1, "half": 1, "nonsense": 1}  # how clients behave, of 21
PARTS = 4
SETTLE_S = 30.0  # that the server gets to be idle again
WORDS = ("alpha", "\u00e9t\u00e9", "\u4e2d\u6587", "\U0001f600", "beta", "\u0416\u0443\u043a", "x" * 30, "\n")
TOLD = re.compile(r"#(\d+)(\w)#")  # in a prompt of the stand-in's: the answer that it gets


def answer_of(number: int, kind: str) -> str:
    """The text that the stand-in answers with."""
    rng = random.Random(number)
    if kind == "j":
        return json.dumps({"n": number, "word": rng.choice(WORDS).strip()}, ensure_ascii=False)
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 120)))


class Told(StandInSession):
    """A session whose answer is the one that its prompt asks for."""

    script: Sequence[int] = ()
    endless = False

    def reading(self, tokens: Sequence[int]) -> Generator[tuple[int, int], None, None]:
        yield from super().reading(tokens)
        self.engine.prompts.clear()  # or the stand-in itself would grow
        number, kind = TOLD.findall(TOKENIZER.decode(list(tokens)))[-1]
        text = answer_of(int(number), kind)
        self.endless = kind == "e"
        self.script = call_script(text) if kind == "c" else ids_of(text)

    def next(self, sampling: Sampling, *, left: int | None = None) -> int:
        i = self.drawn
        self.drawn += 1
        token = self.script[i % len(self.script)] if self.endless else [*self.script, EOS][i]
        self.last = self.engine.told(i, token, sampling.top)
        if self.constraint is not None:
            self.constraint.advance(token)
        return token


class TellsBack(StandIn):
    """The stand-in of a soak."""

    def session(self) -> StandInSession:
        made = Told(self)
        self.sessions.add(made)
        return made

    def draw(self, asks: Sequence[Any]) -> list[Exception | None]:
        return [None] * len(asks)


def call_script(text: str) -> list[int]:
    """A call of TOOL with that text."""
    from ds4.model.tools import render_calls

    markup = render_calls([{"name": TOOL, "arguments": {"text": text}}])
    return TOKENIZER.encode_segments(["\n\n", *markup])


@dataclass
class Plan:
    """A request: what is asked for, and how its client behaves."""

    number: int
    api: str
    way: str
    kind: str  # "t" text, "j" schema, "c" call, "e" endless
    body: dict[str, Any]


def plan(number: int, rng: random.Random, longest: int, most: int) -> Plan:
    """Request `number`. Longest prompt in words, most tokens of an answer."""
    api = rng.choice(list(PATHS))
    way = rng.choices(list(WAYS), list(WAYS.values()))[0]
    kind = "e" if way == "silent" else rng.choices("tjc", (14, 3, 3))[0]
    if kind == "c" and api == "completions":
        kind = "t"
    words = int(longest ** rng.random())
    prompt = f"#{number}{kind}# " + " ".join(rng.choice(WORDS) for _ in range(words))
    stream = way in ("silent", "slow") or rng.random() < 0.6
    tokens = 20 * most if way == "silent" else max(1, int(most ** rng.random())) if rng.random() < 0.3 else most
    body = body_of(api, prompt, tokens, stream=stream)
    body |= with_schema(api) if kind == "j" else with_tools(api) if kind == "c" else {}
    body |= {"temperature": rng.choice((0, 0.8))} | ({"store": rng.random() < 0.5} if api == "responses" else {})
    if way == "nonsense":
        body[MAX_TOKENS.get(api, "max_tokens")] = "many"
    return Plan(number, api, way, kind, body)


@dataclass
class State:
    """What a process holds when nothing runs."""

    rss_mb: float
    files: int
    threads: int
    sessions: int
    state_bytes: int


@dataclass
class Soak:
    """A soak under way.

    Attributes:
        ends: how requests ended, by way.   wrong: what should not have been, in words.
    """

    port: int
    worker: Worker
    connections: Connections
    engine: StandIn | None
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    async def one(self, p: Plan, rng: random.Random) -> None:
        client = Client(self.port, SMALL_BUFFER if p.way in ("slow", "silent") else 0)
        try:
            await client.open()
            await self._as_it_does(client, p, rng)
        except OSError as e:
            if p.way not in ("leave", "silent", "half"):
                self.wrong.append(f"{p.number} {p.api} {p.way}: {e!r}")
        finally:
            client.close(hard=p.way in ("silent", "half") or (p.way == "leave" and rng.random() < 0.5))

    async def _as_it_does(self, client: Client, p: Plan, rng: random.Random) -> None:
        client.send(PATHS[p.api], p.body, rng.random() if p.way == "half" else 1.0)
        if p.way == "leave":
            await asyncio.sleep(rng.expovariate(1 / 0.03))
        elif p.way == "half":
            await asyncio.sleep(rng.random() * 1.5 * LIMITS.body_s)
        elif p.way == "silent":
            await asyncio.sleep(rng.random() * 3 * LIMITS.stall_s)
        else:
            pause = (lambda: rng.random() * 0.004) if p.way == "slow" else (lambda: 0.0)
            reply = await client.reply(p.api, pause)
            self.ends[f"{p.way}: {reply.status} {reply.end}".strip()] += 1
            self._judge(p, reply)
            return
        self.ends[p.way] += 1

    def _judge(self, p: Plan, reply: Reply) -> None:
        name = f"{p.number} {p.api} {p.way}, {'streamed' if p.body['stream'] else 'whole'}"
        if p.way == "nonsense":
            if reply.status != 400 or MAX_TOKENS.get(p.api, "max_tokens") not in reply.error:
                self.wrong.append(f"{name}: {reply.status} {reply.error} for a wrong type")
            return
        if not reply.whole:
            self.wrong.append(f"{name}: {reply.status}, {reply.end or 'no end'}, {reply.error or 'no error'}")
        elif self.engine is not None:
            self._compare(name, p, reply)

    def _compare(self, name: str, p: Plan, reply: Reply) -> None:
        """With the answer that the stand-in gives: whole, or its beginning where the tokens were used up."""
        text, got = answer_of(p.number, p.kind), reply.text
        asked = int(p.body[MAX_TOKENS.get(p.api, "max_tokens")])
        script = call_script(text) if p.kind == "c" else ids_of(text)
        ended = len(script) < asked
        if p.kind == "c":
            if ended and (
                not reply.called.startswith(TOOL) or json.loads(reply.called[len(TOOL) :]) != {"text": text}
            ):
                self.wrong.append(f"{name}: called {reply.called!r}")
        elif got != text if ended else not text.startswith(got.rstrip("\ufffd")):
            self.wrong.append(f"{name}: {got!r} is not {text!r}")
        if ended and reply.tokens not in (len(script), len(script) + 1):
            self.wrong.append(f"{name}: {reply.tokens} tokens, not {len(script)}")

    async def settled(self) -> None:
        """Wait until nothing runs, and note what is held then."""
        end = time.monotonic() + SETTLE_S
        while why := self._busy():
            if time.monotonic() > end:
                self.wrong.append(f"after part {len(self.states) + 1}, {SETTLE_S:g} s later: {why}")
                break
            await asyncio.sleep(0.02)
            if not self.worker.running and not self.worker.relieving:
                self.worker.relieve(None)  # lanes that are kept for the next sequences hold memory too
        self.states.append(self._state())

    def _busy(self) -> str:
        """What is still there of requests that are over; "": nothing."""
        left = {
            "requests run": self.worker.running, "requests wait": self.worker.waiting,
            "connections": len(self.connections), "sessions": _sessions(self.engine),
            "bytes of states": self.worker.states[0],
        }  # fmt: skip
        if self.states and not any(left.values()):
            now, first = self._state(), self.states[0]
            left["more files"] = max(0, now.files - first.files)
            left["more threads"] = max(0, now.threads - first.threads)
        return ", ".join(f"{n} {what}" for what, n in left.items() if n)

    def _state(self) -> State:
        gc.collect()
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        return State(rss_mb(), files, threads, _sessions(self.engine), self.worker.states[0])

    def held(self, growth_mb: float) -> None:
        """Compare the size of the process after the first quarter with that at the end."""
        first, last = self.states[0], self.states[-1]
        if last.rss_mb - first.rss_mb > growth_mb:
            self.wrong.append(f"the process grew by {last.rss_mb - first.rss_mb:.1f} MB after the first quarter")


def _sessions(engine: StandIn | None) -> int:
    """Sessions that are alive."""
    if engine is not None:
        return len(engine.sessions)
    gc.collect()
    return sum(isinstance(o, Session) for o in gc.get_objects())


def rss_mb() -> float:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)


class Complaints(logging.Handler):
    """Lines of the log that should not be."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        why = "" if record.exc_info is None else f": {record.exc_info[1]!r}"
        self.lines.append(f"{record.name}: {record.getMessage()}{why}")


@contextmanager
def served(engine: ServedEngine, prefixes: Prefixes | None, sessions: int = 4) -> Iterator[Soak]:
    """The real server on a free port, in a thread of its own."""
    connections: Connections = {}
    worker = Worker(lambda progress: engine, LIMITS.queue, sessions=sessions, prefixes=prefixes)
    app = make_app(worker, LIMITS, connections=connections, memory=MemoryWatch(worker, 1, every_s=0.1))
    server = make_server(app, connections, LIMITS, worker.interrupt)
    sock = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        while worker.state == "loading":
            time.sleep(0.01)
        stand_in = engine if isinstance(engine, StandIn) else None
        yield Soak(sock.getsockname()[1], worker, connections, stand_in)
    finally:
        server.should_exit = True
        thread.join(60)


def soak(
    engine: ServedEngine, requests: int, clients: int, seed: int, *, growth_mb: float, longest: int, most: int,
    prefixes: Prefixes | None = None, parts: int = PARTS,
) -> Soak:  # fmt: skip
    """Everything, and what was wrong."""
    complaints = Complaints()
    for name in ("ds4.server", "asyncio", "uvicorn.error"):
        logging.getLogger(name).addHandler(complaints)
    try:
        with served(engine, prefixes) as run:
            asyncio.run(_all(run, requests, clients, seed, longest, most, parts))
    finally:
        for name in ("ds4.server", "asyncio", "uvicorn.error"):
            logging.getLogger(name).removeHandler(complaints)
    run.wrong += complaints.lines
    run.held(growth_mb)
    return run


async def _all(run: Soak, requests: int, clients: int, seed: int, longest: int, most: int, parts: int) -> None:
    rng, room = random.Random(seed), asyncio.Semaphore(clients)

    async def one(p: Plan, own: random.Random) -> None:
        async with room:
            await run.one(p, own)

    for part in range(parts):
        numbers = range(requests * part // parts, requests * (part + 1) // parts)
        await asyncio.gather(*[one(plan(n, rng, longest, most), random.Random(seed + n)) for n in numbers])
        await run.settled()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, help="2000; with --engine embedded 60")
    parser.add_argument("--clients", type=int, default=24, help="at a time")
    parser.add_argument("--engine", choices=("stand-in", "embedded"), default="stand-in")
    parser.add_argument("-m", "--model", help="a base, in place of the embedded model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--growth-mb", type=float, default=8.0, help="that the process may grow after the first quarter"
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args(argv)
    logging.getLogger("ds4.server").setLevel(logging.WARNING)
    begun = time.monotonic()
    if args.engine == "stand-in" and args.model is None:
        requests = args.requests or 2000
        config = StandInConfig(1_000_000, BOS, EOS)
        run = soak(
            TellsBack(config=config), requests, args.clients, args.seed, growth_mb=args.growth_mb, longest=1500,
            most=1500,
        )  # fmt: skip
    else:
        requests = args.requests or 60
        engine = cast(ServedEngine, _embedded(args.model))
        run = soak(
            engine, requests, args.clients, args.seed, growth_mb=args.growth_mb, longest=200, most=40,
            prefixes=Prefixes(64 << 20),
        )  # fmt: skip
    report = {
        "engine": args.engine, "requests": requests, "seconds": round(time.monotonic() - begun, 1),
        "ends": dict(sorted(run.ends.items())), "states": [vars(s) for s in run.states], "wrong": run.wrong,
    }  # fmt: skip
    if not args.json:
        for end, count in sorted(run.ends.items()):
            print(f"{count:6d}  {end}")
        for i, s in enumerate(run.states, 1):
            print(
                f"after part {i}: {s.rss_mb:.1f} MB, {s.files} files, {s.threads} threads, {s.sessions} sessions, "
                f"{s.state_bytes} bytes of states"
            )
        print(f"wrong: {len(run.wrong)}")
        for line in run.wrong[:20]:
            print("   ", line)
    print(json.dumps(report))
    return 1 if run.wrong else 0


def _embedded(model: str | None) -> Engine:
    from embedded import embedded_base

    base, shards = (Path(model), None) if model else embedded_base()
    engine = Engine.open(base, engram_dir=shards, prefill="replay", sessions=4)
    warm_up(cast(ServedEngine, engine))
    return engine


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Ds4Error as e:
        sys.exit(f"error: {e}")
