"""What quantization costs the embedded model: bases of several widths and gain rules against the teacher, by domain.

    python bench/damage.py [--bits 10,11,12] [--gain ls,rms,norm] [--domains code,law] [--tokens N] [--engine]

Without --bits and --gain, base.toml's. Judge text is read in windows of at most 512 tokens; every position but a
window's last one counts:

    Sigma-min    sum_v min(p_v, q_v), p the teacher's next-token distribution, q the base's
    same first   how often both have the same likeliest token
    KL           sum_v p_v ln(p_v / q_v)
    PPL ratio    exp(mean of ln p(next) - ln q(next)) over the tokens that do follow

Standard errors are those of the mean over blocks of 64 positions, within which positions are not independent. The
teacher computes in float32 on the checkpoint and on the base's weights, so that the weights are all that differs;
with --engine the engine computes the base as it serves it. Bases and the teacher's logits stay in the build cache.
The last line of output is JSON; --json prints nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from embedded import ROOT, cache_key, embedded_base
from numpy.typing import NDArray

from ds4 import embedded
from ds4.base.experts import GAINS
from ds4.base.reader import Base
from ds4.checkpoint.reader import Checkpoint
from ds4.engine import Engine
from ds4.engine.score import score
from ds4.errors import Ds4Error, UsageError
from ds4.model.tokenizer import Tokenizer
from ds4.settings import device_settings
from ds4.teacher.run import Teacher
from ds4.teacher.source import BaseSource, CheckpointSource

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Logits = Callable[[I64], F32]  # ids [T] -> [T, V]
WINDOW, SHORTEST, BLOCK = 512, 64, 64
FIGURES = ("sigma_min", "same_first", "kl", "ppl_ratio")


def windows(tokenizer: Tokenizer, bos: int, documents: Sequence[str], n_tokens: int) -> list[I64]:
    """Pieces of documents, each after a BOS, evenly over all that there are, about n_tokens in all."""
    pieces: list[I64] = []
    for document in documents:
        ids = tokenizer.encode(document)
        parts = [ids[i : i + WINDOW - 1] for i in range(0, len(ids), WINDOW - 1)]
        pieces += [np.array([bos, *part], np.int64) for part in parts if len(part) >= SHORTEST]
    n = len(pieces)
    count = min(n, max(1, round(n * n_tokens / max(1, sum(map(len, pieces))))))
    return [pieces[(2 * i + 1) * n // (2 * count)] for i in range(count)]


def log_probabilities(logits_TV: F32) -> F64:
    x = logits_TV.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))


def compare(p_TV: F32, q_TV: F32, ids_T: I64) -> dict[str, F64]:
    """Every position's figures but the last one's: teacher's logits p, base's q; `nll_p` and `nll_q` in nats."""
    p, q, rows = log_probabilities(p_TV[:-1]), log_probabilities(q_TV[:-1]), np.arange(len(ids_T) - 1)
    return {
        "sigma_min": np.exp(np.minimum(p, q)).sum(axis=1),
        "same_first": (p.argmax(axis=1) == q.argmax(axis=1)).astype(np.float64),
        "kl": (np.exp(p) * (p - q)).sum(axis=1),
        "nll_p": -p[rows, ids_T[1:]],
        "nll_q": -q[rows, ids_T[1:]],
    }


def summary(windows: Sequence[dict[str, F64]], n_bytes: int) -> dict[str, float]:
    """Means over positions with their standard errors (`..._se`), and both sides' bits per byte."""
    out: dict[str, float] = {"positions": sum(len(w["kl"]) for w in windows)}
    for name in FIGURES:
        rows = [w["nll_q"] - w["nll_p"] if name == "ppl_ratio" else w[name] for w in windows]
        mean, se = _mean(rows)
        if name == "ppl_ratio":
            mean, se = float(np.exp(mean)), float(np.exp(mean)) * se
        out |= {name: mean, f"{name}_se": se}
    for name, side in (("teacher_bits_per_byte", "nll_p"), ("base_bits_per_byte", "nll_q")):
        out[name] = float(sum(w[side].sum() for w in windows) / np.log(2) / n_bytes)
    return out


def _mean(rows: Sequence[F64]) -> tuple[float, float]:
    """Mean over all positions and its standard error from blocks of neighbours."""
    blocks = [row[i : i + BLOCK] for row in rows for i in range(0, len(row), BLOCK)]
    sizes = np.array([len(b) for b in blocks], np.float64)
    mean = sum(float(b.sum()) for b in blocks) / sizes.sum()
    if len(blocks) < 2:
        return mean, float("nan")
    apart = np.array([float((b - mean).sum()) for b in blocks])
    return mean, float(np.sqrt(np.square(apart).sum() * len(blocks) / (len(blocks) - 1)) / sizes.sum())


def kept(ids_T: I64, compute: Logits) -> F32:
    """The teacher's logits [T, V], from the build cache if they are there."""
    rooms = [p for room in ("teacher", "checkpoint", "engram") for p in sorted((ROOT / "ds4" / room).glob("*.py"))]
    path = device_settings().cache / "bench" / f"logits-{cache_key(repr(ids_T.tolist()), *rooms)}.npy"
    try:
        found: F32 = np.load(path)
    except (OSError, ValueError, EOFError):
        found = compute(ids_T)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}.npy")
        np.save(beside, found)
        beside.replace(path)
    return found


def logits_of_base(recipe: embedded.Recipe, engine: bool) -> tuple[Logits, Callable[[], None]]:
    """How the base of a recipe computes, and what closes it."""
    base, shards = embedded_base(recipe)
    if engine:
        opened = Engine.open(base, engram_dir=shards)
        return lambda ids: np.asarray(score(opened, ids.tolist())["logits_TV"], np.float32), opened.close
    teacher = Teacher(BaseSource(Base.open(base, shards)))
    return lambda ids: teacher.run(ids)["logits_TV"], lambda: None


def measure(
    recipes: Sequence[embedded.Recipe], domains: Sequence[str], n_tokens: int, engine: bool, quiet: bool
) -> list[dict[str, Any]]:
    """One row a recipe and domain, and one over all of them; printed as they come."""
    source = CheckpointSource(Checkpoint.open(embedded.checkpoint()))
    config, teacher = source.config, Teacher(source)
    tokenizer = Tokenizer.from_file(embedded.checkpoint() / "tokenizer.json", config)
    texts = {d: windows(tokenizer, config.bos_token_id, embedded.slice(d, "judge"), n_tokens) for d in domains}
    out: list[dict[str, Any]] = []
    for recipe in recipes:
        logits, close = logits_of_base(recipe, engine)
        seen: list[dict[str, F64]] = []
        seen_bytes = 0
        for domain in [*domains, "all"]:
            if domain == "all":
                figures = summary(seen, seen_bytes)
            else:
                found = [
                    compare(kept(ids, lambda ids: teacher.run(ids)["logits_TV"]), logits(ids), ids)
                    for ids in texts[domain]
                ]
                n_bytes = sum(len(tokenizer.token_bytes(int(i))) for ids in texts[domain] for i in ids[1:])
                figures = summary(found, n_bytes)
                seen, seen_bytes = seen + found, seen_bytes + n_bytes
            out.append({"bits": recipe.bits, "gain": recipe.gain, "domain": domain, **figures})
            if not quiet:
                print(line(out[-1]), flush=True)
        close()
    return out


def line(row: dict[str, Any]) -> str:
    figures = "  ".join(f"{name} {row[name]:.4f} +- {row[name + '_se']:.4f}" for name in FIGURES)
    sides = f"bits/byte {row['teacher_bits_per_byte']:.3f} -> {row['base_bits_per_byte']:.3f}"
    return (
        f"{row['bits']:2} bits {row['gain']:4} {row['domain']:9} {row['positions']:6} positions  {figures}  {sides}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    own = embedded.recipe()
    parser = argparse.ArgumentParser(description="Measure what quantization costs the embedded model.")
    parser.add_argument("--bits", default=str(own.bits), metavar="N,..", help="index widths (default: base.toml's)")
    parser.add_argument("--gain", default=own.gain, metavar="G,..", help="gain rules (default: base.toml's)")
    parser.add_argument("--domains", metavar="D,..", help="domains (default: all that are there)")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="tokens a domain (2048)")
    parser.add_argument("--engine", action="store_true", help="compute the bases with the engine, as they are served")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    args = parser.parse_args(argv)
    try:
        args.bits = [int(part) for part in args.bits.split(",")]
    except ValueError:
        parser.error(f"--bits is {args.bits!r}; expected whole numbers, separated by commas")
    args.gain = args.gain.split(",")
    if set(args.gain) - set(GAINS):
        parser.error(f"--gain is {','.join(args.gain)!r}; expected some of {', '.join(GAINS)}")
    if args.tokens < 2 * SHORTEST:
        parser.error(f"--tokens is {args.tokens}; expected at least {2 * SHORTEST}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parse(argv)
        domains = args.domains.split(",") if args.domains else embedded.domains()
        recipes = [embedded.Recipe(bits, gain) for bits in args.bits for gain in args.gain]
        rows = measure(recipes, domains, args.tokens, args.engine, args.json)
    except UsageError as e:
        print(f"damage: {e}", file=sys.stderr)
        return 2
    except (Ds4Error, OSError) as e:
        print(f"damage: {e}", file=sys.stderr)
        return 1
    print(json.dumps({"bench": "damage", "engine": args.engine, "tokens": args.tokens, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
