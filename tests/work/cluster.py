"""What tests of offline work share: a real cluster of two workers, and a crew that loses one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds4.work.tasks import Crew


def echo_pid(task: int) -> int:
    return os.getpid()


class Killing:
    """A crew that loses one worker, by SIGKILL, when the first result of `work` is there and the rest is not."""

    def __init__(self, crew: Crew, work: Callable[[Any], Any]) -> None:
        self.crew, self.work, self.remote, self.killed = crew, work, crew.remote, 0

    def run(self, f: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        if f is not self.work or self.killed:
            yield from self.crew.run(f, tasks)
            return
        pid = next(self.crew.run(echo_pid, [0]))
        for number, result in enumerate(self.crew.run(f, tasks)):
            if number == 0:
                assert len(tasks) > 1  # some are not back yet
                os.kill(pid, signal.SIGKILL)
                self.killed = pid
            yield result


@contextmanager
def two_workers() -> Iterator[str]:
    """The address of a scheduler with two workers of one thread, each under a nanny that begins it anew."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{s.getsockname()[1]}"
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "OPENBLAS_NUM_THREADS": "1"}
    dask = [sys.executable, "-m", "dask"]
    port = address.rsplit(":", 1)[1]
    commands = [
        [*dask, "scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard"],
        *([[*dask, "worker", address, "--nthreads", "1", "--no-dashboard"]] * 2),
    ]
    running = [subprocess.Popen(c, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for c in commands]
    try:
        yield address
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(30)
