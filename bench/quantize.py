"""Quantizer speed as ratios from one run: vector assignment against the same blocked sgemm alone.

    python bench/quantize.py [--experts 8] [--bits 12,13] [--workers N] [--rows R --cols C]

Chunk by chunk the same vectors go through sgemm alone and through the assignment (sgemm and argmax), so that
noise of the machine meets both. Expert shapes are the released ones; what a whole model would take is
extrapolated from the experts measured and printed as such. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np

from ds4.base import q4k
from ds4.base.codebook import CHUNK, DIM, BlasAssigner, Workers, assign_chunk, block_rows, codewords
from ds4.base.experts import quantize_matrix
from ds4.checkpoint.codecs import f32_to_e4m3

REACH = 1.6
RELEASED_EXPERTS = {13: 14 * 384, 12: 26 * 384 + 3 * 128}


def sgemm_chunk(x: np.ndarray, book: np.ndarray) -> None:
    """The products of an assignment in its blocks, and nothing else."""
    rows, nc = block_rows(book.shape[1]), book.shape[1]
    block = np.ones((rows, DIM + 1), np.float32)
    scores = np.empty((rows, nc), np.float32)
    for i in range(0, len(x), rows):
        n = min(rows, len(x) - i)
        block[:n, :DIM] = x[i : i + n]
        np.dot(block[:n], book, out=scores[:n])


def measure(bits: int, n_vectors: int, n_experts: int, workers: Workers) -> dict[str, float]:
    """Seconds of sgemm and of assignment over n_experts x n_vectors vectors of standard normal values."""
    rng = np.random.default_rng(bits)
    nc = 1 << bits
    words = rng.standard_normal((nc, DIM)).astype(np.float32)
    half = -0.5 * np.einsum("nd,nd->n", words, words)
    book = np.ascontiguousarray(np.vstack([words.T, half[None]]), np.float32)
    pool = rng.standard_normal((64 * CHUNK, DIM), np.float32)
    seconds = {"sgemm": 0.0, "assign": 0.0}
    ratios = []
    for _ in range(n_experts):
        spent = {"sgemm": 0.0, "assign": 0.0}
        done = 0
        while done < n_vectors:
            part = pool[: min(len(pool), n_vectors - done)]
            out = np.empty(len(part), np.uint16)
            for what in ("sgemm", "assign"):

                def run(s: slice, what: str = what, part: np.ndarray = part, out: np.ndarray = out) -> None:
                    if what == "sgemm":
                        sgemm_chunk(part[s], book)
                    else:
                        assign_chunk(part[s], book, out[s])

                start = time.perf_counter()
                workers.map(run, len(part), CHUNK)
                spent[what] += time.perf_counter() - start
            done += len(part)
        ratios.append(spent["assign"] / spent["sgemm"])
        for what, s in spent.items():
            seconds[what] += s
    return {**seconds, "ratio": float(np.median(ratios)), "lowest": min(ratios), "highest": max(ratios)}


def whole_experts(bits: int, rows: int, cols: int, n_experts: int, workers: Workers) -> float:
    """Seconds an expert from float32 to indices: normalise, assign, least-squares gain, assign."""
    rng = np.random.default_rng(1)
    codebook = f32_to_e4m3(rng.standard_normal((1 << bits, DIM)).astype(np.float32))
    assigner = BlasAssigner(workers)
    assigner.load(codewords(codebook))
    spent = 0.0
    for shape in ((rows, cols), (rows, cols), (cols, rows)) * n_experts:
        w = rng.standard_normal(shape, np.float32)
        start = time.perf_counter()
        quantize_matrix(w, codebook, assigner, "ls")
        spent += time.perf_counter() - start
    return spent / n_experts


def q4k_rate(workers: Workers) -> float:
    """MB of float32 a second through the q4_K encoder."""
    x = np.random.default_rng(2).standard_normal((4096 * workers.count, 256), np.float32)
    start = time.perf_counter()
    workers.map(lambda s: q4k.encode(x[s]), len(x), 1024)
    return x.nbytes / 1e6 / (time.perf_counter() - start)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--experts", type=int, default=8)
    p.add_argument("--bits", default="12,13")
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    p.add_argument("--rows", type=int, default=2304)
    p.add_argument("--cols", type=int, default=5120)
    args = p.parse_args()
    n_vectors = 3 * args.rows * args.cols // DIM
    result: dict[str, object] = {
        "workers": args.workers,
        "experts": args.experts,
        "rows": args.rows,
        "cols": args.cols,
    }
    with Workers(args.workers) as workers:
        result["blas"] = BlasAssigner(workers).name
        print(
            f"{result['blas']}, {args.workers} workers; {args.experts} experts of {args.rows} x {args.cols}, measured"
        )
        whole_hours = 0.0
        for bits in (int(b) for b in args.bits.split(",")):
            m = measure(bits, n_vectors, args.experts, workers)
            one = whole_experts(bits, args.rows, args.cols, args.experts, workers)
            rate = args.experts * n_vectors * (1 << bits) * 2 * (DIM + 1) / m["sgemm"] / 1e9
            print(
                f"{bits} bits: sgemm {m['sgemm']:.2f} s ({rate:.0f} GFLOP/s), assignment {m['assign']:.2f} s: ratio "
                f"{m['ratio']:.3f} (median; {m['lowest']:.3f} to {m['highest']:.3f}; reach {REACH}); "
                f"an expert with gains {one:.2f} s"
            )
            result[f"bits{bits}"] = {**m, "gflops": rate, "expert_s": one}
            hours = RELEASED_EXPERTS.get(bits, 0) * one / 3600
            if (args.rows, args.cols) == (2304, 5120) and hours:
                print(f"         extrapolated, not measured: {RELEASED_EXPERTS[bits]} experts take {hours:.1f} hours")
                whole_hours += hours
        if whole_hours:
            print(f"extrapolated, not measured: all experts of the released model, {whole_hours:.1f} hours")
            result["extrapolated_hours"] = whole_hours
        result["q4_k_mb_s"] = q4k_rate(workers)
        print(f"q4_K encoder: {result['q4_k_mb_s']:.1f} MB of float32 a second")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
