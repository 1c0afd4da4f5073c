"""Why decisions are read on the path of requests: a margin solve on prefill alone, judged by what requests get.

    python bench/score_split.py [--points 24] [--answers 64] [--domains code,law] [--tau 0.5] [--seed 0]

Text of the embedded model's domains stands for chats: 60 tokens by prefill, then up to `--answers` tokens as an
answer by the decode kernels. Each turn has one decision that is to come out otherwise, at its end: the second to the
fourth choice there; all its other decisions are to stay. Both solves are judged by the same reading on the path of
requests, prompt by bounded prefill and answer by decode:

    deployed     everything is read there, as `ds4 nightly` does
    prefilled    everything is read by one full prefill, rounds of the solve too

Printed of both: points flipped and others kept, as the solve says and as requests have them, and how far the points'
margins are apart between the two. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ds4 import embedded
from ds4.cli.embedded_base import embedded_base
from ds4.corpus.domain import Domain
from ds4.engine import Engine
from ds4.engine.mount import Mounted, mount
from solvers.margin_capture import MarginReader, Turn
from solvers.margins import MarginRule
from solvers.posttrain import NightRule, solve_night

PROMPT = 60
WHOLE = 1 << 30  # a border beyond everything


def made_turns(engine: Engine, domains: Sequence[str], n: int, most: int, seed: int) -> list[Turn]:
    """Turns without a wanted token, of answers from 8 to `most` tokens."""
    rng, texts = np.random.default_rng(seed), []
    for name in domains:
        for document in Domain.open(name).documents("fit"):
            ids = engine.tokenizer.encode(document.text)
            if len(ids) > PROMPT + most:
                texts.append(ids)
    turns = []
    for i in rng.permutation(len(texts))[:n]:
        ids = texts[int(i)]
        start = int(rng.integers(0, len(ids) - PROMPT - most))
        length = int(rng.integers(8, most + 1))
        prompt = (engine.config.bos_token_id, *ids[start : start + PROMPT - 1])
        turns.append(Turn(prompt, tuple(ids[start + PROMPT - 1 : start + PROMPT - 1 + length])))
    return turns


def with_wants(engine: Engine, turns: Sequence[Turn]) -> list[Turn]:
    """The second, third or fourth choice is wanted at the end of each turn."""
    out = []
    for i, turn in enumerate(turns):
        session = engine.session()
        session.sync(list(turn.prompt))
        session.step(list(turn.answer), logits=False)
        wanted = int(np.argsort(-session.logits(), kind="stable")[1 + i % 3])
        out.append(Turn(turn.prompt, turn.answer, wanted))
    return out


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description="Compare a margin solve on the path of requests with one on prefill alone."
    )
    p.add_argument("--points", type=int, default=24)
    p.add_argument("--answers", type=int, default=64, metavar="N", help="tokens of an answer at most")
    p.add_argument("--domains", default="code,law")
    p.add_argument("--tau", type=float, default=0.5)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    engine = Engine.open(embedded_base(None), engram_dir=embedded.checkpoint(), prefill="replay")
    assert engine.bare is not None
    chosen = made_turns(engine, args.domains.split(","), args.points, args.answers, args.seed)
    turns = with_wants(engine, chosen)
    served = MarginReader(engine, turns)
    before = served.decisions(engine.bare)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="ds4-split-") as folder:
        for name, split in (("deployed", None), ("prefilled", WHOLE)):
            out = Path(folder) / name
            rule = NightRule(MarginRule(tau=args.tau, lam=1.0), split=split)
            told = solve_night(engine, turns, out, {}, rule=rule)["figures"]
            weights = mount(engine.bare, Mounted.open(engine.config, None, out), engine.device)
            b_M = before.b_M.copy()
            b_M[before.point_N[before.at_M]] = [p["b"] for p in told["points"]]
            after = served.decisions(weights, replace(before, b_M=b_M))
            point_N = before.point_N
            says = np.array([p["real"] for p in told["points"]])  # by the path that it was read on
            has = after.margin_M[after.point_N[after.at_M]]
            found[name] = {
                "says": {"flipped": told["flipped"], "kept": told["kept"]},
                "flipped": float((after.lead_N[point_N] > 0).mean()),
                "kept": float((after.lead_N[~point_N] > 0).mean()),
                "lost": int((after.lead_N[~point_N] <= 0).sum()),
                "mean_difference": float(np.abs(says - has).mean()),
                "largest_difference": float(np.abs(says - has).max()),
                "rounds": len(told["rounds"]),
            }
    n_others = int((~before.point_N).sum())
    print(f"{len(turns)} points, {n_others} other decisions; judged on the path of requests")
    for name, f in found.items():
        print(
            f"{name:10s} flipped {f['flipped']:.1%} (said {f['says']['flipped']:.1%}), others kept {f['kept']:.2%} "
            f"(said {f['says']['kept']:.2%}); points' margins are {f['mean_difference']:.3f} in the mean, "
            f"{f['largest_difference']:.3f} at most, from what it read"
        )
    print(json.dumps({"bench": "score_split", **vars(args), "others": n_others, "found": found}))
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
