"""A piece of offline work, and who does it.

A task is a function of a module and one picklable argument that names files by path, or holds small arrays. What a
task is depends on the problem alone, never on who works: so the bytes do not either, on one kind of CPU. A task may
be done twice, when the first worker was lost: it returns what it made and writes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from ds4.errors import Ds4Error, UsageError

A = TypeVar("A")
R = TypeVar("R")
AHEAD = 2  # tasks a worker that are under way: one at work, one that waits


class Crew(Protocol):
    """Workers.

    Attributes:
        remote: whether they have memory of their own, so that tasks that need much of it may run side by side.
    """

    remote: bool

    def run(self, f: Callable[[A], R], tasks: Sequence[A]) -> Iterator[R]:
        """f of every task, in the order of tasks, each as soon as those before it are there.

        Raises:
            Ds4Error: what a task raised; or a task's workers were lost again and again.
        """


class Failed:
    """A task's own error on its way back: it is the user's to mend, no reason to try again."""

    def __init__(self, error: Ds4Error) -> None:
        self.error = error


def perform(f: Callable[[Any], Any], task: Any, kind: str) -> Any:
    """In a worker: one BLAS thread for good, the asker's kind of BLAS, errors as values."""
    threadpool_limits(1, user_api="blas")  # never lifted: another thread of the worker may be in a task
    mine = blas_kind()
    if mine != kind:
        return Failed(
            UsageError(
                f"a worker computes with {mine}, the asker with {kind}: the bytes would differ; take workers of one "
                "kind of CPU, with one numpy"
            )
        )
    try:
        return f(task)
    except Ds4Error as e:
        return Failed(e)


def in_order(submit: Callable[[int], Callable[[], Any]], n: int, ahead: int) -> Iterator[Any]:
    """Results 0..n-1, with at most `ahead` tasks under way: what waits for its turn is bounded, too.

    Args:
        submit: begins task i and returns what waits for its result.
    """
    waiting: deque[Callable[[], Any]] = deque()
    begun = 0
    while begun < n or waiting:
        while begun < n and len(waiting) < ahead:
            waiting.append(submit(begun))
            begun += 1
        got = waiting.popleft()()
        if isinstance(got, Failed):
            raise got.error
        yield got


def ranges(n: int, step: int) -> list[range]:
    """0..n in parts of `step`, the last one shorter."""
    return [range(i, min(i + step, n)) for i in range(0, n, step)]


def blas_kind() -> str:
    """Name, version and CPU kernel of numpy's BLAS: what the bits of a product depend on.

    A process may have others loaded beside it (scipy brings its own), in any order.
    """
    home = Path(np.__file__).parent
    found = [b for b in threadpool_info() if b.get("user_api") == "blas"]
    numpys = [b for b in found if Path(b["filepath"]).is_relative_to(home.parent / "numpy.libs")]
    numpys += [b for b in found if Path(b["filepath"]).is_relative_to(home)]
    for b in numpys or found:
        return f"{b['internal_api']} {b.get('version')} {b.get('architecture', '')}".strip()
    return "unknown"
