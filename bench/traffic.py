"""Device memory traffic of the kernels at the released shapes, counted by the CPU driver's count build.

    python bench/traffic.py [--quick] [--json]

No time is measured: bytes asked for, bytes of the 32-byte sectors that hold them, and the formula of each kernel's
header. Four reaches are held, and the exit code is 1 when one is missed:

    streams     useful over sector bytes, per warp instruction, of stored matrices, expert streams and gains in the
                step: at least 0.95 (norm weights and biases, a few KB a layer, are shown and not held; nor is the
                draft head, whose FP8 rows of 1,280 columns have 40 scales, which 32 rows share)
    staging     bytes of the codebook's copies over bytes of the experts that a token reads: at most 10 %
    formula     counted bytes equal to the header's formula, read and written, for every kernel that reads weights
    once        a pass of 2, 3, 4, 5, 6 or 8 rows asks for as many bytes of a dense matrix as one row does, and of
                experts for as many as one row does of each distinct one

For kernels whose traffic depends on values (selection, sampling) the formula is a bound; it is printed beside.
The last line of output is JSON. `--quick` takes slices of everything (a few seconds); it misses no kind of kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
from released import (
    SLICE,
    Matrix,
    Rest,
    constants,
    draft_matrices,
    expert_launches,
    linear_prefills,
    linear_steps,
    matrices,
    released_config,
    some_experts,
)
from watched import Seen, Watched

from ds4.device import Device
from ds4.device.launch import signature
from ds4.errors import Ds4Error
from ds4.model.config import ModelConfig

LEAST_USEFUL = 0.95
MOST_STAGING = 0.10
HELD = ("codes+scales", "codebook", "codes", "plane", "gains", "fn")  # streams that a token reads from memory
WEIGHTS = (*HELD, "scales", "w", "norm_w", "qw", "kw", "bias")  # arguments that are weights
STREAMS = {"linear": (("codes", "scales"),), "embed": (("codes", "scales"),)}  # counted together: one stored block
PASSES = (1, 2, 3, 4, 5, 6, 8)
BY_VALUE = ("topk_", "sample", "route", "index_scores")  # what is read depends on the numbers


@dataclass(frozen=True)
class Row:
    """A line of the table: one launch, or launches of one kind."""

    case: str
    kernel: str
    counted: tuple[int, int]
    formula: tuple[int, int] | None
    streams: dict[str, float]  # weight stream -> useful over sector bytes
    by_value: bool
    drafts: bool = False

    @property
    def exact(self) -> bool | None:
        """Whether counted bytes equal the formula; None without one."""
        return None if self.formula is None else self.counted == self.formula

    @property
    def within(self) -> bool:
        """Whether counted bytes stay below the formula."""
        return self.formula is not None and all(a <= b for a, b in zip(self.counted, self.formula))


def row(case: str, seen: Seen) -> Row:
    """The figures of one launch."""
    names = [a.name for a in signature(seen.kernel).arguments if a.name in WEIGHTS]
    family = seen.kernel.name.split("_")[0]
    groups = STREAMS.get(family, tuple((name,) for name in names))
    streams = {}
    for group in groups:
        sectors = sum(seen.bytes_of(name, field="sector_bytes") for name in group)
        if sectors:
            streams["+".join(group)] = sum(seen.bytes_of(name) for name in group) / sectors
    return Row(
        case=case,
        kernel=seen.kernel.name,
        counted=(seen.bytes_of(), seen.bytes_of(kind="store")),
        formula=seen.formula,
        streams=streams,
        by_value=seen.kernel.name.startswith(BY_VALUE),
    )


@dataclass(frozen=True)
class Staging:
    """What the codebook's copies cost beside the experts that one row reads."""

    bits: int
    rows: int
    book: int
    experts: int

    @property
    def share(self) -> float:
        return self.book / self.experts


def staging(bits: int, rows: int, launches: list[Seen]) -> Staging:
    """Copies of the codebook over codes, planes and gains, gate and up and down together."""
    book = sum(s.bytes_of("codebook") for s in launches)
    read = sum(s.bytes_of(name) for s in launches for name in ("codes", "plane", "gains"))
    return Staging(bits, rows, book, read)


def once(case: str, read: dict[int, int], distinct: dict[int, int] | None = None) -> list[str]:
    """What does not hold of `read`, bytes of weights by row count: that it is one row's, for `distinct` experts of
    one row's many.
    """
    out = []
    for R, n_bytes in read.items():
        share = 1 if distinct is None else distinct[R] / distinct[1]
        if n_bytes != read[1] * share:
            out.append(f"once: {case}: {R} rows ask for {n_bytes:,} bytes of weights, one row for {read[1]:,}")
    return out


def dense_once(dev: Watched, m: Matrix, quick: bool) -> list[str]:
    """A matrix, by all passes."""
    read = {}
    for R in (1, 2, 8) if quick else PASSES:
        seen = linear_steps(dev, m, R, 32)
        read[R] = seen.bytes_of("codes") + seen.bytes_of("scales")
    return once(f"{m.format} {m.N}x{m.K} {m.names}", read)


def experts_once(dev: Watched, fast: Device, config: ModelConfig, bits: int) -> list[str]:
    """Neighbouring rows share a third of their picks, which is about what they do on real text."""
    k = config.num_experts_per_tok
    weights = some_experts(fast, config, bits, 256, k + 7 * (k - k // 3))
    read, distinct = {}, {}
    for R in PASSES:
        picks = (np.arange(k) + (k - k // 3) * np.arange(R)[:, None]).astype(np.int32)
        launches = expert_launches(dev, config, weights, "step", R, picks)
        read[R] = sum(s.bytes_of(name) for s in launches for name in ("codes", "plane", "gains"))
        distinct[R] = len(np.unique(picks))
    return once(f"experts, {bits} bits", read, distinct)


def count(quick: bool) -> tuple[list[Row], list[Staging], list[str]]:
    """Every launch that the table shows; what is read more than once."""
    config = released_config()
    slow, fast = Device.open(simt="count", workers=1), Device.open(simt="fast", workers=1)
    dev = constants(slow)
    if slow.variant != "count":
        raise Ds4Error("only the CPU driver counts traffic: run with DS4_DRIVER=simt")
    rows: list[Row] = []
    twice: list[str] = []
    for drafts, found in ((False, matrices(config)), (True, draft_matrices(config))):
        for m in found:
            rows += [replace(r, drafts=drafts) for r in _linear(dev, m, 64 if quick else SLICE)]
            twice += dense_once(dev, m, quick)
    books = []
    for bits in (12, 13):
        weights = some_experts(fast, config, bits, 256 if quick else None)
        if not quick:  # tests/cuda/test_reads_once.py has small ones
            twice += experts_once(dev, fast, config, bits)
        for family, R in (("step", 1),) if quick else (("step", 1), ("step", 2), ("prefill", 64)):
            launches = expert_launches(dev, config, weights, family, R)
            rows += [row(f"experts, {bits} bits, {R} rows", s) for s in launches]
            if not quick and R == 1:
                books.append(staging(bits, R, launches))
    at, vocabulary = (2047, 4096) if quick else (16383, config.vocab_size)
    for R in (1,) if quick else (1, 8):
        rest = Rest(dev, config, R, at, vocabulary)
        rows += [row(f"{R} rows at {at}", s) for s in rest.run()]
    return rows, books, twice


def _linear(dev: Watched, m: Matrix, n: int) -> list[Row]:
    found = [row(f"{m.format} {m.N}x{m.K} {m.names}", linear_steps(dev, m, R, n)) for R in (1, 8)]
    if m.x != "bf16":  # never in a prefill
        return found
    return [*found, row(f"{m.format} {m.N}x{m.K} {m.names}", linear_prefills(dev, m, 128, min(n, 128)))]


def misses(rows: list[Row], books: list[Staging], twice: list[str]) -> list[str]:
    """The reaches that were not reached, one line each."""
    out = list(twice)
    for r in rows:
        where = f"{r.kernel} ({r.case})"
        out += [
            f"streams: {where}: {name} {useful:.3f} of its sectors' bytes"
            for name, useful in r.streams.items()
            if name in HELD and useful < LEAST_USEFUL and not (r.drafts or r.kernel.startswith("linear_prefill"))
        ]
        if r.streams and r.exact is None:
            out.append(f"formula: {where}: the row has no `traffic`")
        elif r.streams and not r.exact and not r.by_value:
            out.append(f"formula: {where}: counted {r.counted}, formula {r.formula}")
    out += [
        f"staging: {b.bits} bits: {100 * b.share:.1f} % of the experts' bytes"
        for b in books
        if b.share > MOST_STAGING
    ]
    return out


def verdict(r: Row) -> str:
    """The formula column in a word."""
    if r.exact is None:
        return "none"
    return "exact" if r.exact else "within" if r.within else "DIFFERS"


def main() -> int:
    parser = argparse.ArgumentParser(description="Count device memory traffic at the released shapes.")
    parser.add_argument("--quick", action="store_true", help="small slices: seconds, for the tests")
    parser.add_argument("--json", action="store_true", help="no table, only the last line")
    args = parser.parse_args()
    started = time.monotonic()
    try:
        rows, books, twice = count(args.quick)
    except Ds4Error as e:
        print(f"traffic: {e}", file=sys.stderr)
        return 1
    missed = misses(rows, books, twice)
    if not args.json:
        print(f"{'kernel':36} {'read':>12} {'written':>10} {'formula':>8}  useful over sector bytes; case")
        for r in rows:
            useful = " ".join(f"{name} {value:.3f}" for name, value in r.streams.items())
            print(f"{r.kernel:36} {r.counted[0]:12,} {r.counted[1]:10,} {verdict(r):>8}  {useful}; {r.case}")
        for b in books:
            print(f"codebook staging, {b.bits} bits: {b.book:,} / {b.experts:,} bytes = {100 * b.share:.1f} %")
        for text in missed:
            print(f"MISSED {text}")
    weights = [r for r in rows if r.streams]
    steps = [r for r in weights if not (r.drafts or r.kernel.startswith("linear_prefill"))]
    print(
        json.dumps(
            {
                "bench": "traffic",
                "quick": args.quick,
                "launches": len(rows),
                "weight_launches": len(weights),
                "exact": sum(r.exact is True for r in weights),
                "least_useful": round(min(v for r in steps for name, v in r.streams.items() if name in HELD), 4),
                "staging": {str(b.bits): round(b.share, 4) for b in books},
                "missed": len(missed),
                "seconds": round(time.monotonic() - started, 1),
            }
        )
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
