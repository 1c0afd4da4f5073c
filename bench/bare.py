"""An engine in a process of its own, without a server: what bench/serve.py compares a server with.

Reads a JSON object a line and writes one: for `{"do": "answer", "prompt", "tokens"}` when each token came, in seconds
of the system's monotonic clock; for `{"do": "shared", "prompts", "tokens"}` the seconds of the processor and of the
wall that a token of every session took, all together and one after the other: medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from ds4.engine import Ask, Engine, Sampling, Session
from ds4.errors import Ds4Error
from ds4.server.request import ServedEngine
from ds4.server.warm import warm_up

GREEDY = Sampling()
WARM = 3  # passes of a new set of sessions before the clock runs: they capture its graphs


def answer(engine: Engine, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """As a server runs one request: a session, its prompt a chunk at a time, then token by token."""
    session = engine.session()
    for _ in session.reading(prompt):
        pass
    at = []
    for i in range(tokens):
        session.next(GREEDY, left=tokens - i)
        at.append(time.monotonic())
    return {"at": at}


def shared(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
    """Every session a token, `tokens` times: in one pass, and in a pass of its own each, in turns."""
    sets = {name: [_read(engine, ids) for ids in prompts] for name in ("together", "apart")}
    ways: dict[str, Callable[[Sequence[Session]], None]] = {
        "together": lambda s: _together(engine, s),
        "apart": _apart,
    }
    wall_s, cpu_s = ({name: list[float]() for name in ways} for _ in range(2))
    for i in range(WARM + tokens):
        for name, way in list(ways.items())[:: 1 if i % 2 else -1]:
            engine.device.sync()  # what a pass left for later is not the next one's
            wall_0, cpu_0 = time.perf_counter(), time.process_time()
            way(sets[name])
            if i >= WARM:
                wall_s[name].append(time.perf_counter() - wall_0)
                cpu_s[name].append(time.process_time() - cpu_0)
    same = all(a.tokens == b.tokens for a, b in zip(sets["together"], sets["apart"]))
    wall, cpu = ({name: statistics.median(times) for name, times in s.items()} for s in (wall_s, cpu_s))
    return {"wall_s": wall, "cpu_s": cpu, "same": same}


def _read(engine: Engine, ids: Sequence[int]) -> Session:
    session = engine.session()
    session.sync(list(ids))
    session.next(GREEDY)  # the first token needs no pass
    return session


def _together(engine: Engine, sessions: Sequence[Session]) -> None:
    for error in engine.draw([Ask(s, GREEDY) for s in sessions]):
        if error is not None:
            raise error
    _apart(sessions)


def _apart(sessions: Sequence[Session]) -> None:
    for s in sessions:
        s.next(GREEDY)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--engram-dir")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=512)
    args = parser.parse_args()
    engine = Engine.open(
        Path(args.model), engram_dir=args.engram_dir, prefill="replay", sessions=args.sessions, chunk=args.chunk,
        dspark=False,
    )  # fmt: skip
    warm_up(cast(ServedEngine, engine))
    print(json.dumps({"ready": True, "driver": engine.device.info.driver}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "answer":
            told = answer(engine, asked["prompt"], asked["tokens"])
        else:
            told = shared(engine, asked["prompts"], asked["tokens"])
        print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Ds4Error as e:
        sys.exit(f"error: {e}")
