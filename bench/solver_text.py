"""What each choice of a gain rule is worth on the embedded model: every layer solved on a domain's fitting text and
judged on its judge text, which no rule saw.

    python bench/solver_text.py [--domains code,law,chinese] [--fit 12000] [--judge 8000] [--rows 1024,4096]

Rows come from the teacher in float32, once on the checkpoint and once on the base, so that the weights are all that
differs; layers are taken one by one with nothing mounted before them. They stand in for captures of the engine, which
a sidecar is made of: they rank rules, and promise no ruler's figure. A layer is solved on --rows of them, windows
evenly spread over the text: of 1,024 an expert has 128 in the mean, as one of the released model has of 8,192.
Printed by rule: the share of squared error that goes, held-out and judge rows, mean over layers and domains.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from embedded import embedded_base
from threadpoolctl import threadpool_limits

from ds4 import embedded
from ds4.base.reader import Base
from ds4.checkpoint.reader import Checkpoint
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer
from ds4.teacher import layers
from ds4.teacher.moe import Expert, MoeWeights, expert, route
from ds4.teacher.numerics import Numerics
from ds4.teacher.run import Teacher
from ds4.teacher.source import BaseSource, CheckpointSource
from solvers.gains import BEST, RECIPE, THIRDS, Rule, solve_gains
from solvers.rows import BlockRows
from solvers.windows import WINDOW, held_out

LONGEST = 1023  # tokens of a call after its BOS
RULES = {
    "recipe": RECIPE,
    "rounded afterwards": Rule(free_sweeps=3, lattice_sweeps=0),
    "own energy": Rule(ridge="own"),
    "cheapest scale": Rule(scale="cheapest"),
    "thirds of a decade": Rule(THIRDS),
    "thirds, refit": Rule(THIRDS, refit=True),
    "thirds, own level": Rule(THIRDS, own_level=True),
    "best": BEST,
}


@contextmanager
def noted(seen: list[dict[str, np.ndarray]]) -> Iterator[None]:
    """While this is open, every MoE block that a teacher computes leaves its parts in `seen`."""

    def moe(
        nm: Numerics, config: ModelConfig, w: MoeWeights, load: Callable[[int], Expert], x_RD: Any, image: Any, k: int
    ) -> Any:
        picks, mix = route(nm, config, w, x_RD, image, k)
        y = np.zeros((len(x_RD), k, x_RD.shape[1]), np.float32)
        for e in np.unique(picks).tolist():
            rows, slots = np.nonzero(picks == e)
            y[rows, slots] = expert(nm, load(e), x_RD[rows], config.swiglu_limit, mix[rows, slots])
        shared = expert(nm, w.shared, x_RD, config.swiglu_limit, None)
        out = nm.bf16(y.sum(axis=1) + shared)
        seen.append({"y": y, "picks": picks, "shared": shared, "out": out})
        return out

    with patch.object(layers, "moe", moe):
        yield


def parts_of(
    teachers: Sequence[Teacher], tokenizer: Tokenizer, texts: Sequence[str], most: int
) -> list[dict[str, Any]]:
    """One entry a layer: rows of the base beside the original's output, of about `most` tokens of text."""
    config = teachers[0].config
    found: list[list[dict[str, np.ndarray]]] = [[] for _ in range(config.num_hidden_layers)]
    n = 0
    for number, text in enumerate(texts):
        if n >= most:
            break
        ids = np.array([config.bos_token_id, *tokenizer.encode(text)[:LONGEST]], np.int64)
        seen: list[dict[str, np.ndarray]] = []
        with noted(seen):
            for teacher in teachers:
                teacher.run(ids)
        for layer, at in enumerate(found):
            original, ours = seen[layer], seen[len(found) + layer]
            at.append({**ours, "target": original["out"], "document": np.full(len(ids), number)})
        n += len(ids)
    return [{key: np.concatenate([part[key] for part in at]) for key in at[0]} for at in found]


def left(rows: dict[str, Any], s_ED: np.ndarray) -> float:
    out = (rows["y"] * s_ED[rows["picks"]]).sum(axis=1) + rows["shared"]
    return float(np.square(out - rows["target"], dtype=np.float64).sum())


def spread(n: int, wanted: int) -> np.ndarray:
    """bool [n]: about `wanted` rows, whole windows evenly over all."""
    n_windows = -(-n // WINDOW)
    count = min(n_windows, max(4, round(wanted / WINDOW)))
    taken = (2 * np.arange(count) + 1) * n_windows // (2 * count)
    return np.asarray(np.isin(np.arange(n) // WINDOW, taken))


def measure(domain: str, teachers: Sequence[Teacher], tokenizer: Tokenizer, args: Any) -> dict[tuple[int, str], Any]:
    """(rows, rule) -> [held-out, judge] shares of each layer."""
    n_experts = teachers[0].config.n_routed_experts
    fit = parts_of(teachers, tokenizer, embedded.slice(domain, "fit"), args.fit)
    judge = parts_of(teachers, tokenizer, embedded.slice(domain, "judge"), args.judge)
    out: dict[tuple[int, str], Any] = {(n, name): [] for n in args.rows for name in RULES}
    for layer, (seen, unseen) in enumerate(zip(fit, judge, strict=True)):
        before = left(unseen, np.ones((n_experts, seen["y"].shape[2]), np.float32))
        for n in args.rows:
            chosen = spread(len(seen["picks"]), n)
            some = {key: value[chosen] for key, value in seen.items()}
            rows = BlockRows(some["y"], some["picks"], some["shared"], some["target"], n_experts)
            held = held_out(some["document"], np.zeros(len(some["document"]), np.int64))
            for name, rule in RULES.items():
                found = solve_gains(rows, held, rule)
                out[n, name].append([found.held_out_gain, 1 - left(unseen, found.s_ED) / before])
        print(f"{domain}, layer {layer}", file=sys.stderr, flush=True)
    return out


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Rank gain rules on the embedded model's text.")
    p.add_argument("--domains", default="code,law,chinese", metavar="D,..")
    p.add_argument("--fit", type=int, default=12000, metavar="N", help="tokens to solve on, about (12000)")
    p.add_argument("--judge", type=int, default=8000, metavar="N", help="tokens to judge on, about (8000)")
    p.add_argument("--rows", default="1024,4096", metavar="N,..", help="rows that a layer is solved on (1024,4096)")
    args = p.parse_args(argv)
    args.rows = [int(n) for n in args.rows.split(",")]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    base, shards = embedded_base()
    source = CheckpointSource(Checkpoint.open(embedded.checkpoint()))
    teachers = [Teacher(source), Teacher(BaseSource(Base.open(base, shards)))]
    tokenizer = Tokenizer.from_file(embedded.checkpoint() / "tokenizer.json", source.config)
    shares: dict[tuple[int, str], Any] = {(n, name): [] for n in args.rows for name in RULES}
    with threadpool_limits(1, user_api="blas"):  # products are small here: more threads would wait for each other
        for domain in args.domains.split(","):
            for key, found in measure(domain, teachers, tokenizer, args).items():
                shares[key] += found
    means = [
        {"rows": n, "rule": name, "held_out": held, "judge": judged}
        for (n, name), found in shares.items()
        for held, judged in [np.mean(found, axis=0).tolist()]
    ]
    for at in means:
        print(f"{at['rows']:6} rows  {at['rule']:20} held-out {at['held_out']:7.3%}   judge {at['judge']:7.3%}")
    print(json.dumps({"bench": "solver_text", **vars(args), "means": means}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
