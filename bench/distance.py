"""How far the engine's arithmetic is from the teacher's on the same base, position by position.

    python bench/distance.py [-m BASE] [--text FILE] [--tokens 384]

Compared are logits of a whole prefill: relative L2 over all of them, its median and most over positions, the mean
probability mass that both agree on (Sigma-min), and how often the first choice is the same. Without `-m` the embedded
model, without `--text` the source of Python's statistics module. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
from pathlib import Path

import numpy as np
from embedded import embedded_base
from numpy.typing import NDArray

from ds4.base.reader import Base
from ds4.engine import Engine
from ds4.engine.score import score
from ds4.errors import Ds4Error
from ds4.teacher.run import Teacher
from ds4.teacher.source import BaseSource

F64 = NDArray[np.float64]
# (engine's activations, its kv, the teacher's arithmetic)
PAIRS = (("bf16", "fp4", "none"), ("bf16", "fp4", "kv"), ("f32", "fp4", "kv"), ("f32", "f32", "none"))


def probabilities(logits_TV: F64) -> F64:
    e = np.exp(logits_TV - logits_TV.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


def compare(got_TV: F64, want_TV: F64) -> dict[str, float]:
    """The figures of one pair of f64 [T, V] logits."""
    rows = np.linalg.norm(got_TV - want_TV, axis=1) / np.linalg.norm(want_TV, axis=1)
    shared = np.minimum(probabilities(got_TV), probabilities(want_TV)).sum(axis=1)
    return {
        "relative_l2": float(np.linalg.norm(got_TV - want_TV) / np.linalg.norm(want_TV)),
        "median": float(np.median(rows)),
        "most": float(rows.max()),
        "sigma_min": float(shared.mean()),
        "same_first": float((got_TV.argmax(axis=1) == want_TV.argmax(axis=1)).mean()),
    }


def measure(base: Path, shards: Path | None, text: str, n: int) -> list[dict[str, object]]:
    """Every pair, printed as it comes."""
    teachers: dict[str, F64] = {}
    out: list[dict[str, object]] = []
    for activations, kv, arith in PAIRS:
        engine = Engine.open(base, engram_dir=shards, activations=activations, kv=kv)
        ids = [engine.config.bos_token_id, *engine.tokenizer.encode(text)][:n]
        if arith not in teachers:
            source = BaseSource(Base.open(base, shards))
            teachers[arith] = Teacher(source, arith, "owner").run(np.asarray(ids))["logits_TV"].astype(np.float64)
        got = score(engine, ids)["logits_TV"].astype(np.float64)
        engine.close()
        figures = compare(got, teachers[arith])
        name = f"activations {activations}, kv {kv} against teacher `{arith}`"
        print(f"{name:46} {len(ids)} positions: " + ", ".join(f"{k} {v:.3g}" for k, v in figures.items()))
        out.append({"activations": activations, "kv": kv, "arith": arith, "positions": len(ids), **figures})
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Measure the distance of the engine's arithmetic from the teacher's."
    )
    parser.add_argument("-m", "--model", metavar="BASE", type=Path, help="a base file; default: the embedded model's")
    parser.add_argument("--engram-dir", metavar="D", type=Path, help="folder of its n-gram shards")
    parser.add_argument("--text", metavar="FILE", type=Path, help="text to read; default: a module of Python's")
    parser.add_argument("--tokens", type=int, default=384, metavar="N", help="positions (384)")
    args = parser.parse_args()
    try:
        base, shards = (args.model, args.engram_dir) if args.model else embedded_base()
        text = args.text.read_text() if args.text else inspect.getsource(statistics)
        pairs = measure(base, shards, text, args.tokens)
    except (Ds4Error, OSError) as e:
        print(f"distance: {e}", file=sys.stderr)
        return 1
    print(json.dumps({"bench": "distance", "base": base.name, "pairs": pairs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
