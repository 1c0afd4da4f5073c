"""Conversations with and without reuse of what earlier turns left: time to the first token, and whose answers differ.

    python bench/prefixes.py [-m BASE] [--conversations 4] [--turns 4] [--system 600] [--answer 32] [--prefill full]

Without `-m`, the embedded model. Every conversation has a system prompt of its own, from the model's judge text, and
a question a turn; its next prompt holds what was answered, rendered anew from its text, as a client sends it. Each
turn is answered greedily three times, in a changing order: without reuse, exactly (`--prefix-reuse exact`) and from
what decode left too (`decoded`). All three get the prompts of the first, so that answers can be compared. Under
`exact` every answer must be the first one's, or the exit code is 1.

Ratios are of times of this run: turns after the first, each against the same turn without reuse; on the CPU driver
seconds of the processor, else of the wall. At the end what is kept is measured: bytes, and the times to copy it to
the host and back and to write and read its file. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from embedded import embedded_base

from ds4 import embedded
from ds4.engine import Engine, Sampling, Session
from ds4.engine.keep import common_prefix, save
from ds4.engine.keep_file import read, write
from ds4.errors import Ds4Error
from ds4.model.chat import render
from ds4.server.prefixes import Prefixes
from ds4.server.request import ServedEngine, ServedSession

GREEDY = Sampling()
QUESTION = 40  # tokens of text in a question
ARMS = ("none", "exact", "decoded")


def clock_of(engine: Engine) -> Callable[[], float]:
    """Seconds of the wall, or, on the CPU driver, of the processor, which other work does not stretch."""
    return time.process_time if engine.device.info.driver == "simt" else time.perf_counter


@dataclass
class Arm:
    """One way to answer: `first_s` to the first token and `ran` positions of every turn, and the answers."""

    prefixes: Prefixes | None
    first_s: list[float] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def ask(self, engine: Engine, ids: list[int], n: int) -> list[int]:
        """The answer's tokens, the end of sentence among them."""
        clock = clock_of(engine)
        began = clock()
        if self.prefixes is None:
            session, cached = engine.session(), 0
            reading: Any = session.reading(ids)
        else:
            served, cached = self.prefixes.begin(cast(ServedEngine, engine), ids)
            session, reading = cast(Session, served), self.prefixes.reading(served, ids)
        for _ in reading:
            pass
        out = [session.next(GREEDY, left=n)]
        self.first_s.append(clock() - began)
        while len(out) < n and out[-1] != engine.config.eos_token_id:
            out.append(session.next(GREEDY, left=n - len(out)))
        if self.prefixes is not None:
            self.prefixes.ended(cast(ServedSession, session))
        self.ran.append(len(ids) - cached)
        self.answers.append(out)
        return out


def texts(engine: Engine, which: int, system: int, turns: int) -> tuple[str, list[str]]:
    """A system prompt of so many tokens, and questions, from a domain's judge text."""
    names = embedded.domains()
    ids: list[int] = []
    documents = embedded.slice(names[which % len(names)], "judge")
    i = which // len(names)
    while len(ids) < system + turns * QUESTION:
        ids += engine.tokenizer.encode(documents[i % len(documents)])
        i += 1
    parts = [ids[system + k * QUESTION : system + (k + 1) * QUESTION] for k in range(turns)]
    return engine.tokenizer.decode(ids[:system]), [engine.tokenizer.decode(p) for p in parts]


def conversation(engine: Engine, arms: dict[str, Arm], which: int, args: argparse.Namespace) -> None:
    system, questions = texts(engine, which, args.system, args.turns)
    messages: list[dict[str, str]] = [{"role": "system", "content": system}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = engine.tokenizer.encode_segments(render(messages, thinking=False), spell_missing=True)
        answer: list[int] = []
        first = len(arms["none"].ran) % len(arms)  # nobody always finds what another has warmed up
        for name in (*ARMS[first:], *ARMS[:first]):
            got = arms[name].ask(engine, prompt, args.answer)
            answer = got if name == "none" else answer
        said = [t for t in answer if t != engine.config.eos_token_id]
        messages.append({"role": "assistant", "content": engine.tokenizer.decode(said)})


def shared_by_turns(engine: Engine) -> dict[str, list[int]]:
    """Of a chat of two turns, in each mode: tokens of the first prompt, of it with its answer, and how many of these
    the second prompt begins with.
    """
    out = {}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    encode = engine.tokenizer.encode_segments
    for name, thinking, with_tools in (("plain", False, False), ("thinking", True, False), ("tools", True, True)):
        first: dict[str, Any] = {"role": "system", "content": "Answer in one word."}
        if with_tools:
            first["tools"] = tools
        asked = [first, {"role": "user", "content": "What is the capital of Italy?"}]
        said: dict[str, Any] = {"role": "assistant", "content": "Rome"}
        if thinking:
            said["reasoning_content"] = "Easy."
        prompt = encode(render(asked, thinking=thinking), spell_missing=True)
        written = encode(["Easy."]) + [engine.tokenizer.added["</think>"]] if thinking else []
        whole = [*prompt, *written, *encode(["Rome"]), engine.config.eos_token_id]
        after = encode(render([*asked, said, asked[1]], thinking=thinking), spell_missing=True)
        out[name] = [len(prompt), len(whole), common_prefix(np.asarray(whole, np.int32), after)]
    return out


def costs(engine: Engine, tokens: int) -> dict[str, float]:
    """What is kept of a text of so many tokens: bytes, and milliseconds of each way that it goes."""
    session = engine.session()
    ids = [(7 * i) % (engine.config.vocab_size - 300) + 20 for i in range(tokens)]
    for _ in session.reading(ids):
        pass
    timed: dict[str, float] = {}

    def clock(name: str, work: Any) -> Any:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            out = work()
            times.append(time.perf_counter() - began)
        timed[f"{name}_ms"] = round(1e3 * statistics.median(times), 2)
        return out

    snapshot = clock("to_host", session.snapshot)
    kept = save(snapshot, tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        size = clock("write", lambda: write(path, kept, "bench", b""))
        clock("read", lambda: read(path))
    clock("to_device", lambda: engine.session().restore(kept.snapshot(0)))
    point = kept.points[0].nbytes
    return {"tokens": tokens, "file_bytes": size, "point_bytes": point,
            "bytes_a_token": round((kept.nbytes - point) / tokens, 1), **timed}  # fmt: skip


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    base, shards = (args.model, args.engram_dir) if args.model else embedded_base()
    engine = Engine.open(base, engram_dir=shards, prefill=args.prefill, dspark=not args.no_dspark)
    memory = 4 << 30
    warm = Arm(None)
    warm.ask(engine, engine.tokenizer.encode("A few words to build kernels by. " * 4), 8)
    arms = {"none": Arm(None), "exact": Arm(Prefixes(memory)), "decoded": Arm(Prefixes(memory, decoded=True))}
    for which in range(args.conversations):
        conversation(engine, arms, which, args)
    later = [i for i in range(len(arms["none"].ran)) if i % args.turns]
    out: dict[str, Any] = {"prefill": args.prefill, "turns": len(later), "device": engine.device.info.name}
    print(f"{len(later)} turns after the first; prefill {args.prefill}, {engine.device.info.name}")
    print(f"{'':8} {'tokens run':>10} {'first token':>12} {'of none':>8}  answers that differ")
    for name, arm in arms.items():
        ratios = [arm.first_s[i] / arms["none"].first_s[i] for i in later]
        differ = sum(a != b for a, b in zip(arm.answers, arms["none"].answers))
        out[name] = {
            "ran": round(statistics.mean(arm.ran[i] for i in later), 1),
            "first_s": round(statistics.median(arm.first_s[i] for i in later), 4),
            "ratio": round(statistics.median(ratios), 4), "differ": differ, "answers": len(arm.answers),
        }  # fmt: skip
        o = out[name]
        print(f"{name:8} {o['ran']:10} {o['first_s']:10.3f} s {o['ratio']:8.3f}  {differ} of {len(arm.answers)}")
    firsts = [i for i in range(len(arms["none"].ran)) if not i % args.turns]
    whole = statistics.median(arms["exact"].first_s[i] / arms["none"].first_s[i] for i in firsts)
    out["first_turns_ratio"] = round(whole, 4)
    print(f"first turns, where nothing can be reused and all is kept: {whole:.3f} of none")
    out["shared"] = shared_by_turns(engine)
    for mode, (prompt, both, shared) in out["shared"].items():
        print(f"{mode}: prompt {prompt} tokens, with its answer {both}; the next prompt begins with {shared} of them")
    out["costs"] = costs(engine, args.system)
    print("kept: " + ", ".join(f"{k} {v}" for k, v in out["costs"].items()))
    return out, out["exact"]["differ"] == 0


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("-m", "--model", metavar="BASE")
    p.add_argument("--engram-dir", metavar="D")
    p.add_argument("--prefill", choices=("full", "replay"), default="replay")
    p.add_argument("--no-dspark", action="store_true")
    p.add_argument("--conversations", type=int, default=4, metavar="N")
    p.add_argument("--turns", type=int, default=4, metavar="N")
    p.add_argument("--system", type=int, default=600, metavar="TOKENS")
    p.add_argument("--answer", type=int, default=32, metavar="TOKENS")
    args = p.parse_args(argv)
    if min(args.conversations, args.turns - 1, args.system, args.answer) < 1:
        p.error("at least one conversation of two turns, one token of text and one of an answer")
    try:
        out, same = measured(args)
    except Ds4Error as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(json.dumps(out))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
