"""Train the trunk: `python -m train.train [--work DIR] [--run NAME] [--tokens N] ...`.

Three stages. `dense`: short windows, every compressed row seen; most of the tokens. `index`: the trunk stands still,
the indexer learns where its attention goes. `sparse`: long windows, attention sees the indexer's choice only, both
learn; the falling end of the rate's schedule lies here. Interrupt it any time; the same command goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from train import ops
from train.config import DIALOGUES, DOMAINS, UNSEEN, WORK
from train.data import bytes_per_token, held_out
from train.loop import Run, Stage, train, training_command
from train.model import Model, index_loss, load_model
from train.optim import Rates

MIX = {
    "code": 0.18, "law": 0.12, "medicine": 0.18, "general": 0.295, "science": 0.11, "finance": 0.035, "chinese": 0.02,
    "dialogues": 0.06,
}  # fmt: skip
LONG_MIX = MIX | {"dialogues": 0.15}
SPARSE_SHARE = 0.12  # of the trunk's tokens
INDEX_TOKENS = 600_000
JUDGED = (*DOMAINS, DIALOGUES, UNSEEN)
INDEXER = ".attn.indexer."


class Trunk:
    """The trunk as the loop sees it."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.model: Model = load_model(work, fused=ops.pieces(compiled=True))
        self.bytes_per_token = bytes_per_token(work)

    def weights(self) -> dict[str, nn.Parameter]:
        return self.model.weights()

    def trained(self, stage: Stage) -> set[str]:
        names = {n for n in self.model.weights() if not n.endswith("gate.bias")}
        indexer = {n for n in names if INDEXER in n}
        return {"dense": names - indexer, "index": indexer, "sparse": names}[stage.name]

    def losses(self, ids: Tensor, stage: Stage) -> tuple[Tensor, dict[str, float], dict[str, Tensor]]:
        learn = stage.name != "dense"
        hidden, run = self.model.trunk(ids[:, :-1], sparse=stage.name == "sparse", learn_index=learn)
        figures = {}
        if learn:
            index = index_loss(run)
            figures["index"] = index.item()
        loads = {f"layers.{i}.ffn.gate.bias": load for i, load in enumerate(run.loads)}
        if stage.name == "index":
            return index, figures, {}
        loss = self.model.loss(hidden, ids[:, 1:])
        return (loss + index if learn else loss), figures, loads

    def figures(self) -> list[str]:
        return list(JUDGED)

    def measure(self, figure: str, stage: Stage) -> float:
        """Bits per byte on evenly spaced windows of the judge text, as the stage runs the model."""
        n = max(1, 4096 // stage.length)
        ids = torch.from_numpy(held_out(self.work, figure, "judge", n, stage.length))
        hidden, _ = self.model.trunk(ids[:, :-1], sparse=stage.name == "sparse")
        nats = float(self.model.loss(hidden, ids[:, 1:]))
        return nats / math.log(2) / self.bytes_per_token[f"{figure}.judge"]


def stages(tokens: int, batch_tokens: int) -> list[Stage]:
    """The plan for a trunk of `tokens`; index tokens come on top."""
    sparse = int(tokens * SPARSE_SHARE)
    bend = 1 - SPARSE_SHARE
    index = min(INDEX_TOKENS, tokens // 8)
    return [
        Stage("dense", tokens - sparse, batch_tokens // 256, 256, MIX, 0.0, bend),
        Stage("index", index, batch_tokens // 1024, 1024, LONG_MIX, 0.0, 1.0, hold=0.5, least=0.1),
        Stage("sparse", sparse, batch_tokens // 1024, 1024, LONG_MIX, bend, 1.0),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="train.train", description=__doc__.split("\n\n")[0])
    parser.add_argument("--work", type=Path, default=WORK, help=f"working folder (default {WORK})")
    parser.add_argument("--run", default="embedded", help="name of the run, a folder in WORK/runs")
    parser.add_argument("--tokens", type=float, default=26e6, help="tokens of the trunk (default 26e6)")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens a step and process (default 4096)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    if args.tokens < 10 * args.batch_tokens or args.batch_tokens % 1024:
        parser.error("--batch-tokens must be a multiple of 1024 and --tokens at least ten times that")
    return training_command("train", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    first = {n: p.data for n, p in load_model(args.work, seed=args.seed).weights().items()}
    config = json.loads((args.work / "config.json").read_text())
    plan = Run(
        folder=args.work / "runs" / args.run,
        config=config,
        make=functools.partial(Trunk, args.work),
        stages=stages(int(args.tokens), args.batch_tokens),
        work=args.work,
        seed=args.seed,
        rates=Rates(),
        groups={"attn.wo_a.weight": config["text_config"]["o_groups"]},
    )
    train(plan, first)
    return 0


if __name__ == "__main__":
    sys.exit(main())
