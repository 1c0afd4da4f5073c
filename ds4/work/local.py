"""Processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, TypeVar

import numpy as np  # noqa: F401  blas_kind asks for the BLAS that this loads

from ds4.errors import Ds4Error, UsageError
from ds4.work.tasks import AHEAD, blas_kind, in_order, perform

A = TypeVar("A")
R = TypeVar("R")
TRIES = 3  # of a task whose process died


class LocalCrew:
    """`count` processes, begun at the first task. A context manager.

    A process that dies, of a kill or for want of memory, takes the pool with it; another one is begun and does what
    was lost.
    """

    remote = False

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UsageError(f"--workers is {count}; expected at least 1")
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> LocalCrew:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._drop()

    def run(self, f: Callable[[A], R], tasks: Sequence[A]) -> Iterator[R]:
        """See `Crew.run`."""
        blas = blas_kind()

        def submit(i: int) -> Callable[[], Any]:
            first = self._begin(f, tasks[i], blas)

            def wait() -> Any:
                future = first
                for _ in range(TRIES):
                    try:
                        return future.result()
                    except BrokenProcessPool:
                        future = self._begin(f, tasks[i], blas)
                raise Ds4Error(
                    f"a worker process died {TRIES} times at one task ({tasks[i]!s:.80}); if memory is short, take "
                    "fewer --workers"
                )

            return wait

        return in_order(submit, len(tasks), AHEAD * self.count)

    def _begin(self, f: Callable[[Any], Any], task: Any, blas: str) -> Future[Any]:
        try:
            return self._open().submit(perform, f, task, blas)
        except BrokenProcessPool:
            self._drop()
            return self._open().submit(perform, f, task, blas)

    def _open(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # not forked: a fork of a process with threads may hang in a lock that one of them held
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.count, mp_context=spawn, initializer=_begin_process)
        return self._pool

    def _drop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _begin_process() -> None:
    """Die of Ctrl-C without a word, and with the asker, however that dies."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
