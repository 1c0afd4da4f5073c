"""Whether a refit carries over: gains solved on days of requests, read on the requests of a day after them.

    python bench/refit.py [--domain law] [--zchain sidecars/code] [--days 3] [--requests 32] [--judge 40]
                          [--tokens 12000] [--beside-tokens 2048] [--layers all] [--out DIR]

Requests are made by script from a fixed seed: a piece of a document to go on with, two thirds as chats, a third as
completions; answers are the embedded model's own with the sidecar mounted, at temperature 1. Days to solve on are of
the domain's fit slice, the day after them of its judge slice, so no document is in both. `ds4 posttrain refit`
solves; the day after, and judge text of the sidecar's domain and of `general`, are read with and without the folder.
What is there already is used, so an interrupted run goes on. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from ds4 import embedded
from ds4.cli import main as cli
from ds4.cli.embedded_base import embedded_base
from ds4.corpus.domain import Domain
from ds4.engine import Engine, Sampling
from ds4.model.chat import other_turns, render
from ds4.model.tokenizer import EOS
from ds4.posttrain.log import append, day_file, make_folder, read_day
from ds4.server.request import Card
from ds4.settings import device_settings
from rulers.compare import compare
from rulers.reading import Reading
from rulers.run import read_text, window_logits
from rulers.teacher_scores import teacher_scores
from rulers.text import Text
from solvers.day_text import day_text

AFTER = date(2026, 11, 30)
LENGTH, RULER_TOKENS = 512, 6000


def requests(engine: Engine, domain: str, split: str, n: int, seed: int) -> list[bytes]:
    """Rows of a log."""
    rng = np.random.default_rng(seed)
    documents = Domain.open(domain).documents(split)
    tokenizer = engine.tokenizer
    enders = {*other_turns(tokenizer), tokenizer.added.get(EOS, -1)}
    rows = []
    for k, at in enumerate(rng.permutation(len(documents) * -(-n // len(documents)))[:n]):
        lines = documents[at % len(documents)].text.splitlines()
        first = int(rng.integers(0, max(1, len(lines) - 6)))
        piece = "\n".join(lines[first : first + 6])[: int(rng.integers(120, 420))]
        if k % 3 == 2:
            asked: dict[str, Any] = {"prompt": piece}
            ids = [engine.config.bos_token_id, *tokenizer.encode(piece)]
        else:
            asked = {"messages": [{"role": "user", "content": f"Go on with this:\n\n{piece}"}], "thinking": False}
            ids = tokenizer.encode_segments(render(asked["messages"], thinking=False), spell_missing=True)
        session, drawn = engine.session(), list[int]()
        session.sync(ids)
        most = int(rng.integers(40, 110))
        while len(drawn) < most and not (drawn and drawn[-1] in enders):
            drawn.append(session.next(Sampling(temperature=1.0, seed=1000 * seed + k, seeded=True)))
        row = {
            "id": f"bench-{seed}-{k}",
            **asked,
            "answer": {"content": tokenizer.decode(drawn)},
            "answer_ids": drawn,
        }
        rows.append(json.dumps(row).encode() + b"\n")
    return rows


def make_log(engine: Engine, args: argparse.Namespace, folder: Path) -> None:
    make_folder(folder)
    for before in range(args.days, -1, -1):
        day = AFTER - timedelta(days=before)
        if not day_file(folder, day).exists():
            split, n = ("fit", args.requests) if before else ("judge", args.judge)
            append(folder, day, requests(engine, args.domain, split, n, 7 + before))


class Texts:
    """What is read, against the original."""

    def __init__(self, engine: Engine, log: Path, own: str, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        encode, bos = engine.tokenizer.encode, engine.config.bos_token_id
        self.texts = {"day after": day_text(read_day(log, AFTER)[0], Card.of(engine), length=LENGTH).text}
        for name in dict.fromkeys((own, "general")):
            documents = [d.text for d in Domain.open(name).documents("judge")]
            self.texts[name] = Text.cut(documents, encode, bos, length=LENGTH, tokens=RULER_TOKENS)

    def read(self, name: str) -> Reading:
        scores = teacher_scores(
            embedded.checkpoint(), self.texts[name], domain=name, split="bench", length=LENGTH, folder=self.folder
        )
        meta = replace(scores.meta, arithmetic="bf16 fp4", weights="embedded")
        return read_text(scores, meta, lambda ids: window_logits(self.engine, ids, "prefill", lambda _: None, None))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Read a refit on the requests of a day after.")
    p.add_argument("--domain", default="law")
    p.add_argument("--zchain", type=Path, default=Path("sidecars/code"))
    p.add_argument("--days", type=int, default=3)
    p.add_argument("--requests", type=int, default=32)
    p.add_argument("--judge", type=int, default=40)
    p.add_argument("--tokens", type=int, default=12000)
    p.add_argument("--beside-tokens", type=int, default=2048)
    p.add_argument("--layers", default="all")
    p.add_argument("--out", type=Path, default=device_settings().cache / "bench" / "refit")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    own = json.loads((args.zchain / "manifest.json").read_bytes())["domain"]
    log = args.out / f"log-{args.domain}-{own}-{args.days}-{args.requests}-{args.judge}"
    out = args.out / f"{log.name[4:]}-{args.tokens}-{args.beside_tokens}-{args.layers}"
    args.out.mkdir(parents=True, exist_ok=True)
    engine = Engine.open(embedded_base(), engram_dir=embedded.checkpoint(), prefill="replay", zchain=args.zchain)
    make_log(engine, args, log)
    command = [
        "posttrain", "refit", "--log", log, "--day", AFTER - timedelta(days=1), "--days", args.days,
        "--zchain", args.zchain, "--tokens", args.tokens, "--beside-tokens", args.beside_tokens,
        "--layers", args.layers, "-o", out,
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.run([str(a) for a in command])
    if code:
        return code
    print((out / "manifest.txt").read_text())
    texts = Texts(engine.with_prefill("full"), log, own, args.out / "original")
    before = {name: texts.read(name) for name in texts.texts}
    texts.engine.remount(args.zchain, out)
    figures: dict[str, Any] = {}
    for name, a in before.items():
        d = compare(a, texts.read(name)).difference
        figures[name] = {"sidecar": a.numbers.to_json(), "difference": d.to_json()}
        print(
            f"{name:10} {a.numbers.tokens:6,} tokens: Sigma-min {a.numbers.sigma_min.value:.4f} "
            f"{d.sigma_min.value:+.4f} +- {d.sigma_min.se:.4f}, KL {a.numbers.kl.value:.4f} {d.kl.value:+.4f} +- "
            f"{d.kl.se:.4f}"
        )
    engine.close()
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
