"""Train a layer's codebook: Lloyd's algorithm on 8-vectors of RMS-normalised rows; and assign vectors to it.

    C <- argmin_C  sum_v min_k |x_v - C_k|^2

No random source: seeds are equidistant pool vectors, rounds are fixed in number, sums are float64 in pool
order, ties go to the lowest index, an empty cell takes the vector that is farthest from its codeword. Early
rounds run on an equidistant part of the pool. Work is cut into chunks whose shapes depend on nothing but the
problem, and every chunk runs on one BLAS thread: the same bytes for any number of workers on one kind of CPU.

Assignment is argmax_k (x . C_k - |C_k|^2 / 2), the second term riding along as a ninth component, so that the
work is one blocked sgemm and an argmax over its rows while they are in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ds4.checkpoint.codecs import e4m3_to_f32, f32_to_e4m3
from ds4.errors import UsageError
from ds4.work.tasks import Crew
from ds4.work.tasks import blas_kind as blas_kind

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

DIM = 8
CHUNK = 1 << 15  # vectors a task
SCORES = 1 << 20  # float32 scores of a block: 4 MB, so that argmax reads what sgemm just wrote
POOL_PER_CODEWORD = 1024
# (rounds, part of the pool): cheap rounds move the seeds apart, full ones settle them
SCHEDULE: tuple[tuple[int, int], ...] = ((12, 8), (6, 2), (6, 1))

T = TypeVar("T")


class Assigner(Protocol):
    """Where the arithmetic of Lloyd runs: BLAS here, a GPU elsewhere (same interface, own bits)."""

    name: str

    def load(self, codebook: F32) -> None:
        """Use this codebook, f32 [nc, 8]."""

    def assign(self, x: F32) -> U16:
        """f32 [n, 8] -> u16 [n], the nearest codeword, lowest index on a tie."""

    def update(self, x: F32, indices: U16) -> tuple[F64, NDArray[np.int64]]:
        """Sums f64 [nc, 8] and counts i64 [nc] of the vectors of each cell."""


class Workers:
    """Threads over fixed slices, one BLAS thread each. A context manager; the count changes time and nothing else.

    Attributes:
        crew: who else may do slices that can be sent away; None: nobody.
    """

    def __init__(self, count: int = 1, crew: Crew | None = None) -> None:
        if count < 1:
            raise UsageError(f"--workers is {count}; expected at least 1")
        self.count, self.crew = count, crew
        self._stack = ExitStack()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Workers:
        self._stack.enter_context(threadpool_limits(1, user_api="blas"))
        if self.count > 1:
            self._pool = self._stack.enter_context(ThreadPoolExecutor(self.count))
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._pool = None
        self._stack.close()

    def map(self, f: Callable[[slice], T], n: int, step: int) -> list[T]:
        """f over slices of 0..n, results in order."""
        parts = [slice(i, min(i + step, n)) for i in range(0, n, step)]
        if self._pool is None or len(parts) == 1:
            return [f(p) for p in parts]
        return list(self._pool.map(f, parts))


class BlasAssigner:
    """The CPU's assigner."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.name = blas_kind()
        self._book = np.zeros((DIM + 1, 1), np.float32)

    def load(self, codebook: F32) -> None:
        half = -0.5 * np.einsum("nd,nd->n", codebook, codebook, dtype=np.float64)
        self._book = np.ascontiguousarray(np.vstack([codebook.T, half.astype(np.float32)]), np.float32)

    def assign(self, x: F32) -> U16:
        out = np.empty(len(x), np.uint16)

        def run(part: slice) -> None:
            assign_chunk(x[part], self._book, out[part])

        self.workers.map(run, len(x), CHUNK)
        return out

    def update(self, x: F32, indices: U16) -> tuple[F64, NDArray[np.int64]]:
        nc = self._book.shape[1]

        def run(part: slice) -> tuple[F64, NDArray[np.int64]]:
            i = indices[part]
            sums = [np.bincount(i, x[part, d], nc) for d in range(DIM)]
            return np.stack(sums, axis=1), np.bincount(i, minlength=nc)

        total, counts = np.zeros((nc, DIM)), np.zeros(nc, np.int64)
        for s, c in self.workers.map(run, len(x), 8 * CHUNK):
            total += s
            counts += c
        return total, counts


def block_rows(nc: int) -> int:
    """Vectors of one sgemm."""
    return min(max(SCORES // nc, 64), 8192)


def assign_chunk(x: F32, book: F32, out: U16) -> None:
    """u16 [n] nearest columns of book f32 [9, nc] (codewords over minus half their squared length)."""
    rows, nc = block_rows(book.shape[1]), book.shape[1]
    block = np.ones((rows, DIM + 1), np.float32)
    scores = np.empty((rows, nc), np.float32)
    found = np.empty(rows, np.intp)
    for i in range(0, len(x), rows):
        n = min(rows, len(x) - i)
        block[:n, :DIM] = x[i : i + n]
        np.dot(block[:n], book, out=scores[:n])
        np.argmax(scores[:n], axis=1, out=found[:n])
        out[i : i + n] = found[:n]


def train(pool: F32, nc: int, assigner: Assigner, schedule: Sequence[tuple[int, int]] = SCHEDULE) -> U8:
    """The codebook of a pool of vectors, f32 [n, 8] -> E4M3 u8 [nc, 8].

    A pool with no more distinct vectors than codewords is its own codebook, the last one repeated.
    """
    if not len(pool):
        return np.zeros((nc, DIM), np.uint8)
    few = _distinct(pool, nc)
    if few is not None:
        codes = f32_to_e4m3(few)
        return np.concatenate([codes, np.repeat(codes[-1:], nc - len(codes), axis=0)])
    book = pool[_equidistant(len(pool), nc)].copy()
    for part in _rounds(pool, nc, schedule):
        assigner.load(book)
        indices = assigner.assign(part)
        sums, counts = assigner.update(part, indices)
        filled = counts > 0
        empty = np.flatnonzero(~filled)
        if len(empty):
            far = _farthest(part, book, indices, len(empty))
            book[empty[: len(far)]] = part[far]
        book[filled] = (sums[filled] / counts[filled, None]).astype(np.float32)
    return f32_to_e4m3(book)


def codewords(codebook: U8) -> F32:
    """E4M3 u8 [nc, 8] -> f32 [nc, 8]."""
    return e4m3_to_f32(codebook)


def _equidistant(n: int, count: int) -> NDArray[np.int64]:
    return (2 * np.arange(count, dtype=np.int64) + 1) * n // (2 * count)


def _rounds(pool: F32, nc: int, schedule: Sequence[tuple[int, int]]) -> Iterator[F32]:
    """The part of the pool for each round; phases that a small pool makes equal count once."""
    rounds_of: dict[int, int] = {}
    for rounds, divisor in schedule:
        n = max(len(pool) // divisor, min(len(pool), 64 * nc))
        rounds_of[n] = max(rounds_of.get(n, 0), rounds)
    for n, rounds in rounds_of.items():
        part = pool if n == len(pool) else pool[_equidistant(len(pool), n)]
        for _ in range(rounds):
            yield part


def _distinct(pool: F32, nc: int) -> F32 | None:
    """The distinct vectors in order of appearance if there are at most nc, else None."""
    if len(pool) > 4 * nc:
        return None
    _, first = np.unique(pool, axis=0, return_index=True)
    return pool[np.sort(first)] if len(first) <= nc else None


def _farthest(x: F32, book: F32, indices: U16, count: int) -> NDArray[np.int64]:
    """The `count` vectors farthest from their codewords, farthest first, lowest index on a tie."""
    distance = np.empty(len(x), np.float32)
    for i in range(0, len(x), CHUNK):
        r = x[i : i + CHUNK] - book[indices[i : i + CHUNK]]
        distance[i : i + CHUNK] = np.einsum("nd,nd->n", r, r)
    edge = np.partition(distance, len(x) - count)[len(x) - count]
    candidates = np.flatnonzero(distance >= edge)
    return candidates[np.argsort(-distance[candidates], kind="stable")][:count]
