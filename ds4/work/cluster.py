"""A Dask cluster: `dask scheduler` somewhere, `dask worker` on machines that see the same files."""

from __future__ import annotations

import importlib
import re
import warnings
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError as Cancelled
from types import TracebackType
from typing import Any, TypeVar

from ds4.errors import Ds4Error, UsageError
from ds4.work.tasks import AHEAD, blas_kind, in_order, perform

A = TypeVar("A")
R = TypeVar("R")
TIMEOUT = 15.0  # seconds for the scheduler to answer, then for a first worker


class ClusterCrew:
    """All workers of the scheduler at `address`. A context manager.

    The scheduler gives a lost worker's tasks to others, and calls a task a failure when four workers died at it.

    Raises:
        UsageError: no distributed here, nobody answers, or there is no worker.
    """

    remote = True

    def __init__(self, address: str, timeout: float = TIMEOUT) -> None:
        try:
            distributed: Any = importlib.import_module("distributed")
        except ImportError as e:
            raise UsageError("--cluster needs Dask, which is not installed here: pip install 'ds4[cluster]'") from e
        if not re.fullmatch(r"(\w+://)?[^/\s]+:\d+", address):  # Dask would complain again at exit
            raise UsageError(
                f"--cluster {address!r}: is no address; give what `dask scheduler` prints, tcp://HOST:PORT"
            )
        self.address = address
        self._lost: type[Exception] = distributed.KilledWorker
        try:
            self._client: Any = distributed.Client(address, timeout=timeout, set_as_default=False)
        except (OSError, ValueError, TypeError) as e:  # refused, silent, no address, unknown protocol
            raise UsageError(
                f"--cluster {address}: no Dask scheduler answered within {timeout:g} s ({e!s:.120}); give the "
                "address that `dask scheduler` prints, tcp://HOST:PORT"
            ) from e
        try:
            self._client.wait_for_workers(1, timeout)
        except TimeoutError as e:
            self._client.close()
            raise UsageError(
                f"--cluster {address}: the scheduler has no worker; start some with `dask worker {address}`"
            ) from e

    def __enter__(self) -> ClusterCrew:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._client.close()  # what is under way is cancelled with it

    def run(self, f: Callable[[A], R], tasks: Sequence[A]) -> Iterator[R]:
        """See `Crew.run`."""
        blas = blas_kind()

        def submit(i: int) -> Callable[[], Any]:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Sending large graph")  # a slice of captures is tens of MB
                future = self._client.submit(perform, f, tasks[i], blas, pure=False)

            def wait() -> Any:
                try:
                    return future.result()
                except self._lost as e:
                    raise Ds4Error(
                        f"--cluster {self.address}: several workers died at one task ({tasks[i]!s:.80}); "
                        "see their logs, memory may be short"
                    ) from e
                except (OSError, CancelledError, Cancelled) as e:
                    raise Ds4Error(f"--cluster {self.address}: the scheduler was lost ({e!s:.120})") from e

            return wait

        n_threads = sum(w["nthreads"] for w in self._client.scheduler_info(n_workers=-1)["workers"].values())
        return in_order(submit, len(tasks), AHEAD * max(n_threads, 1))
