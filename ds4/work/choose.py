"""From a command's flags to a crew."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ds4.errors import UsageError
from ds4.work.cluster import ClusterCrew
from ds4.work.local import LocalCrew
from ds4.work.tasks import Crew


def add_flags(p: argparse.ArgumentParser) -> None:
    """`--workers N` and `--cluster ADDRESS`."""
    p.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N",
        help="processes and threads here (default: as many as cores; same bytes)",
    )  # fmt: skip
    p.add_argument("--cluster", metavar="ADDRESS", help="a Dask scheduler, whose workers do the tasks (same bytes)")


@contextmanager
def crew_of(workers: int, cluster: str | None) -> Iterator[Crew | None]:
    """The cluster's workers, or processes; None: one worker, which needs nobody else.

    Raises:
        UsageError: fewer than one worker, or no cluster there.
    """
    if workers < 1:
        raise UsageError(f"--workers is {workers}; it must be at least 1")
    if cluster is not None:
        with ClusterCrew(cluster) as far:
            yield far
    elif workers == 1:
        yield None
    else:
        with LocalCrew(workers) as near:
            yield near
