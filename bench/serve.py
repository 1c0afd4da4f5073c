"""The server under 1, 2, 4 and 8 clients that stream, and beside an engine without one.

    python bench/serve.py [-m BASE] [--clients 1 2 4 8] [--requests 8] [--tokens 48] [--rounds 3] [--json]

Without `-m`, the embedded model, without drafts. Server, bare engine and clients are processes of their own; prompts
are places of the embedded model's judge text, of 8 to `--longest` tokens, the same in every run (`--seed`). Each
round takes every measurement once, in turns; figures are over all rounds.

    load      `--requests` answers by so many clients at once: time to the first token, time between two tokens (as
              they come over HTTP), tokens/s of all, and the slowest client's tokens/s over the fastest one's
    stall     answers under way when a long prompt comes: the most chunks of it between two tokens of an answer, and
              the longest time between two in chunks; more than two chunks is exit code 1 (one, and one whose end
              was told before the token was)
    overhead  the same requests by the server and by the bare engine: seconds of the processor a token of either
              process, and of the wall between two tokens; held on the CPU driver by the first, which other work on
              the machine stretches least, else by the second: more than `--most-overhead` (0.05) is exit code 1
    shared    1, 2, 4 and 8 sessions of the bare engine that draw in one pass, over a pass each: the same tokens, or
              exit code 1

The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from http_load import Client, Reply, body_of, gaps, percentile

from ds4 import embedded
from ds4.errors import Ds4Error

HERE = Path(__file__).resolve().parent
SHORTEST = 8  # tokens of a prompt
SHORT = 16  # of one whose answer alone is measured
ANSWERS = 3  # under way when the long prompt comes
API, PATH = "completions", "/v1/completions"
LISTENS = re.compile(r"listening on http://[^ ]*:(\d+)")


class Other:
    """A process beside this one."""

    def __init__(self, command: Sequence[str], **kw: Any) -> None:
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, *command], text=True, env=env, **kw)

    def cpu_s(self) -> float:
        """Seconds of the processor so far, of all its threads that live: those of a pool do until it ends."""
        spent = 0.0
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                spent += _cpu_s(thread)
        return spent

    def main_cpu_s(self) -> float:
        """Of its first thread: a server's event loop."""
        return _cpu_s(Path(f"/proc/{self.process.pid}/task/{self.process.pid}"))

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def _cpu_s(thread: Path) -> float:
    return int((thread / "schedstat").read_text().split()[0]) / 1e9


class Bare(Other):
    """bench/bare.py."""

    def __init__(self, flags: Sequence[str]) -> None:
        super().__init__([str(HERE / "bare.py"), *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.driver = str(self._told()["driver"])

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._told()

    def _told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Ds4Error("the bare engine has ended; what it said is above")
        told: dict[str, Any] = json.loads(line)
        return told


class Server(Other):
    """ds4-server on a free port, ready."""

    def __init__(self, flags: Sequence[str]) -> None:
        super().__init__(["-m", "ds4.cli.serve", "--port", "0", *flags], stderr=subprocess.PIPE)
        self.port, self.said, self._ready = 0, list[str](), threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        self._ready.wait()
        if self.process.poll() is not None or not self.port:
            raise Ds4Error("the server has ended:\n" + "".join(self.said[-5:]))

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if found := LISTENS.search(line):
                self.port = int(found[1])
            if "is loaded" in line:
                self._ready.set()
        self._ready.set()

    async def stream(self, prompt: Sequence[int], tokens: int, times: dict[str, Any] | None = None) -> Reply:
        """One streamed answer; `times` is told when chunks of its prompt were read."""
        body = {**body_of(API, "", tokens, stream=True), "prompt": list(prompt), "temperature": 0}
        client = Client(self.port)
        await client.open()
        try:
            if times is not None:
                body["return_progress"] = True
                client.heard = lambda event: _note(times, event)
            client.send(PATH, body)
            reply = await client.reply(API)
        finally:
            client.close()
        if not reply.whole:
            raise Ds4Error(f"an answer failed: {reply.status} {reply.error or reply.end}")
        return reply


def _note(times: dict[str, Any], event: dict[str, Any]) -> None:
    if progress := event.get("prompt_progress"):
        times["chunks"].append((time.monotonic(), progress["processed"]))
    elif event.get("choices"):
        times.setdefault("read", time.monotonic())


@dataclass
class Load:
    """What so many clients saw, over all rounds. Seconds; `rates`: tokens/s of all; `evenness`: the slowest client's
    over the fastest one's.
    """

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    evenness: list[float] = field(default_factory=list)

    def report(self) -> dict[str, float]:
        ms = {
            f"{name}_p{int(100 * share)}_ms": 1e3 * percentile(values, share)
            for name, values in (("first", self.first), ("between", self.between))
            for share in (0.5, 0.95)
        }
        spread = {"tokens_per_s": statistics.median(self.rates), "evenness": statistics.median(self.evenness)}
        return {name: round(value, 3) for name, value in (ms | spread).items()}


async def load(server: Server, prompts: Sequence[Sequence[int]], clients: int, tokens: int, found: Load) -> None:
    """So many clients at once, who take the prompts in turns."""
    begun = time.monotonic()

    async def client(own: Sequence[Sequence[int]]) -> tuple[int, float]:
        n, start = 0, time.monotonic()
        for prompt in own:
            asked = time.monotonic()
            reply = await server.stream(prompt, tokens)
            if reply.at:
                found.first.append(reply.at[0] - asked)
            found.between.extend(gaps(reply.at))
            n += reply.tokens
        return n, n / (time.monotonic() - start)

    shares = [prompts[i::clients] for i in range(clients)]
    done = await asyncio.gather(*[client(share) for share in shares if share])
    found.rates.append(sum(n for n, _ in done) / (time.monotonic() - begun))
    found.evenness.append(min(rate for _, rate in done) / max(rate for _, rate in done))


async def stall(server: Server, short: Sequence[Sequence[int]], long: Sequence[int], tokens: int) -> dict[str, float]:
    """Answers under way when a long prompt comes."""
    answers = [asyncio.create_task(server.stream(ids, tokens)) for ids in short]
    await asyncio.sleep(0.5)
    times: dict[str, Any] = {"chunks": []}
    await server.stream(long, 1, times)
    replies = await asyncio.gather(*answers)
    chunks = [at for at, _ in times["chunks"]]
    begun, over = chunks[0], times["read"]
    chunk_s = (over - begun) / len(chunks)
    most, longest = 0, 0.0
    for reply in replies:
        for a, b in zip(reply.at, reply.at[1:]):
            if b > begun and a < over:
                most = max(most, sum(a < at < b for at in chunks))
                longest = max(longest, b - a)
    inside = sum(begun < at < over for reply in replies for at in reply.at)
    return {
        "chunks": len(chunks), "chunk_ms": round(1e3 * chunk_s, 1), "most_chunks_between": most,
        "longest_gap_in_chunks": round(longest / chunk_s, 2), "tokens_meanwhile": inside,
    }  # fmt: skip


@dataclass
class Pair:
    """Server and bare engine on the same requests: seconds a token, by round; `loop`: of the server's event loop."""

    cpu: dict[str, list[float]] = field(default_factory=lambda: {"server": [], "bare": []})
    wall: dict[str, list[float]] = field(default_factory=lambda: {"server": [], "bare": []})

    loop: list[float] = field(default_factory=list)

    def report(self) -> dict[str, float]:
        cpu, wall = ({k: statistics.median(v) for k, v in d.items()} for d in (self.cpu, self.wall))
        ratios = [a / b for a, b in zip(self.cpu["server"], self.cpu["bare"])]
        found = {f"{k}_cpu_ms": 1e3 * v for k, v in cpu.items()} | {f"{k}_wall_ms": 1e3 * v for k, v in wall.items()}
        found |= {"cpu_overhead": statistics.median(ratios) - 1, "wall_overhead": wall["server"] / wall["bare"] - 1}
        found["loop_cpu_ms"] = 1e3 * statistics.median(self.loop)
        return {name: round(value, 4) for name, value in found.items()}


def overhead(server: Server, bare: Bare, prompts: Sequence[Sequence[int]], tokens: int, found: Pair) -> None:
    """One round, prompt by prompt in turns."""
    spent = {"server": 0.0, "bare": 0.0}
    between: dict[str, list[float]] = {"server": [], "bare": []}
    n, loop = {"server": 0, "bare": 0}, 0.0
    for i, prompt in enumerate(prompts):
        for who in ("server", "bare") if i % 2 else ("bare", "server"):
            process: Other = server if who == "server" else bare
            before, main = process.cpu_s(), process.main_cpu_s()
            if who == "server":
                reply = asyncio.run(server.stream(prompt, tokens))
                at, n[who] = reply.at, n[who] + reply.tokens
                loop += process.main_cpu_s() - main
            else:
                at = bare.ask(do="answer", prompt=list(prompt), tokens=tokens)["at"]
                n[who] += len(at)
            between[who] += gaps(at)
            spent[who] += process.cpu_s() - before
    found.loop.append(loop / n["server"])
    for who in spent:
        found.cpu[who].append(spent[who] / n[who])
        found.wall[who].append(statistics.median(between[who]))


def judge_ids(tokenizer: Any, n: int) -> list[int]:
    """The first n tokens of the embedded model's judge text, as often as it takes."""
    text = "\n".join(document for domain in embedded.domains() for document in embedded.slice(domain, "judge"))
    ids: list[int] = [int(i) for i in tokenizer.encode(text[: 8 * n])]
    while len(ids) < n:
        ids += ids
    return ids[:n]


def prompts_of(ids: Sequence[int], rng: random.Random, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Places of the text, their lengths spread evenly on a logarithmic scale."""
    found = []
    for _ in range(count):
        n = int(shortest * (longest / shortest) ** rng.random())
        start = rng.randrange(len(ids) - n)
        found.append(list(ids[start : start + n]))
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="a base, in place of the embedded model")
    parser.add_argument("--engram-dir", help="folder of its n-gram shards")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=8, help="of every number of clients, a round")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--long", type=int, default=4096, help="tokens of the prompt that comes in between")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-overhead", type=float, default=0.05)
    parser.add_argument("--only", choices=("load", "stall", "overhead", "shared"), nargs="+", help="of these alone")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args(argv)
    if args.longest < SHORT:
        parser.error(f"--longest is at least {SHORT}")
    if min(args.requests, args.tokens, args.rounds, args.long, *args.clients) < 1 or max(args.clients) > 8:
        parser.error("counts are at least 1, clients at most 8")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    from embedded import embedded_base

    from ds4.base.reader import Base
    from ds4.model.tokenizer import Tokenizer

    path, shards = (Path(args.model), args.engram_dir) if args.model else embedded_base()
    base = Base.open(path, shards)
    tokenizer = Tokenizer.from_base(base.tokenizer_data(), base.config, str(path), base.folders)
    ids, rng = judge_ids(tokenizer, args.long + args.longest), random.Random(args.seed)
    flags = ["-m", str(path), *(["--engram-dir", str(shards)] if shards else []), "--chunk", str(args.chunk)]
    server = Server([*flags, "--sessions", "8", "--no-dspark", "--prefix-reuse", "off"])
    try:
        bare = Bare(flags)
        try:
            report = measure(args, server, bare, ids, rng)
        finally:
            bare.end()
    finally:
        server.end()
    if not args.json:
        show(report)
    print(json.dumps(report))
    held = report["overhead"].get("cpu_overhead" if bare.driver == "simt" else "wall_overhead", 0.0)
    fine = held <= args.most_overhead and report["stall"].get("most_chunks_between", 0) <= 2
    return 0 if fine and all(row["same"] for row in report["shared"].values()) else 1


def measure(
    args: argparse.Namespace, server: Server, bare: Bare, ids: Sequence[int], rng: random.Random
) -> dict[str, Any]:
    """Every round."""
    what = args.only or ("load", "stall", "overhead", "shared")
    mixed = prompts_of(ids, rng, args.requests, SHORTEST, args.longest)
    short = prompts_of(ids, rng, 8, SHORT, SHORT)
    loads, pair = {n: Load() for n in args.clients}, Pair()
    stalls: list[dict[str, float]] = []
    passes: dict[int, list[dict[str, Any]]] = {n: [] for n in (1, 2, 4, 8)}
    asyncio.run(load(server, mixed, max(args.clients), args.tokens, Load()))  # captures graphs: not counted
    for _ in range(args.rounds):
        if "load" in what:
            for n, found in loads.items():
                asyncio.run(load(server, mixed, n, args.tokens, found))
        if "stall" in what:
            stalls.append(asyncio.run(stall(server, short[:ANSWERS], ids[: args.long], 4 * args.tokens)))
        if "overhead" in what:
            overhead(server, bare, short[:4], 2 * args.tokens, pair)
        if "shared" in what:
            for n, runs in passes.items():
                runs.append(bare.ask(do="shared", prompts=short[:n], tokens=max(1, args.tokens // 2)))
    report: dict[str, Any] = {"model": str(args.model or "embedded"), "driver": bare.driver, "rounds": args.rounds}
    report["load"] = {n: found.report() for n, found in loads.items() if found.rates}
    report["stall"] = {k: statistics.median(s[k] for s in stalls) for k in stalls[0]} if stalls else {}
    if stalls:
        report["stall"]["most_chunks_between"] = max(s["most_chunks_between"] for s in stalls)
    report["overhead"] = pair.report() if pair.cpu["bare"] else {}
    report["shared"] = {n: _ratios(runs) for n, runs in passes.items() if runs}
    return report


def _ratios(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shared passes over passes apart, and milliseconds of a shared one."""
    found: dict[str, Any] = {"same": all(run["same"] for run in runs)}
    for clock in ("wall_s", "cpu_s"):
        of = [run[clock]["together"] / run[clock]["apart"] for run in runs]
        found[clock.replace("_s", "_over_apart")] = round(statistics.median(of), 3)
    found["pass_ms"] = round(statistics.median(1e3 * run["wall_s"]["together"] for run in runs), 2)
    return found


def show(report: dict[str, Any]) -> None:
    """Tables."""
    if report["load"]:
        print("clients  first p50, p95 ms   between p50, p95 ms   tokens/s   slowest/fastest")
    for n, row in report["load"].items():
        first, between = (f"{row[f'{k}_p50_ms']:8.1f} {row[f'{k}_p95_ms']:8.1f}" for k in ("first", "between"))
        print(f"{n:7}  {first}   {between}     {row['tokens_per_s']:8.1f}   {row['evenness']:.2f}")
    if s := report["stall"]:
        print(
            f"a long prompt of {s['chunks']:.0f} chunks of {s['chunk_ms']} ms beside {ANSWERS} answers: at most "
            f"{s['most_chunks_between']:.0f} chunks between two tokens, the longest gap {s['longest_gap_in_chunks']} "
            f"chunks, {s['tokens_meanwhile']:.0f} tokens meanwhile"
        )
    if o := report["overhead"]:
        print(
            f"a token of the server over one of the bare engine: CPU {o['server_cpu_ms']:.2f} over "
            f"{o['bare_cpu_ms']:.2f} ms, {100 * o['cpu_overhead']:+.1f} %, {o['loop_cpu_ms']:.2f} ms of it the event "
            f"loop's; wall {o['server_wall_ms']:.2f} over {o['bare_wall_ms']:.2f} ms, "
            f"{100 * o['wall_overhead']:+.1f} %"
        )
    for n, row in report["shared"].items():
        print(
            f"{n} sessions in one pass over a pass each: wall {row['wall_over_apart']}, CPU {row['cpu_over_apart']}; "
            f"{row['pass_ms']} ms a pass; {'the same tokens' if row['same'] else 'OTHER TOKENS'}"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Ds4Error as e:
        sys.exit(f"error: {e}")
