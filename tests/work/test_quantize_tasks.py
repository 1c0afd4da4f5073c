"""Quantizing by others: the same bytes as alone, also when a worker is killed in the middle of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ds4.base.expert_tasks import run_experts
from ds4.base.quantize import quantize
from ds4.errors import UsageError
from ds4.work.cluster import ClusterCrew
from ds4.work.local import LocalCrew
from ds4.work.tasks import Crew
from tests.base.toys import tables, toy_dir

NAME = "oracle-a"


def made(out: Path, crew: Crew | None = None) -> bytes:
    quantize(toy_dir(NAME), out, tables(NAME), bits=6, crew=crew)
    return out.read_bytes() + out.with_name(out.name + ".report.json").read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return made(tmp_path_factory.mktemp("alone") / "x.gguf")


def echo_pid(task: int) -> int:
    return os.getpid()


def refuse(task: int) -> int:
    if task == 1:
        raise UsageError("task 1 is refused")
    return task


class Killing:
    """A crew that loses one worker, by SIGKILL, when the first result of its work is there and the rest is not."""

    def __init__(self, crew: Crew) -> None:
        self.crew, self.remote, self.killed = crew, crew.remote, 0

    def run(self, f: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        pid = next(self.crew.run(echo_pid, [0]))
        for number, result in enumerate(self.crew.run(f, tasks)):
            if f is run_experts and number == 0:
                assert len(tasks) > 4  # more than were given out so far: some are begun after the loss
                os.kill(pid, signal.SIGKILL)
                self.killed = pid
            yield result


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A scheduler and two workers of one thread, each under a nanny that begins it anew."""
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


def test_local_processes_one_killed(tmp_path: Path, alone: bytes) -> None:
    with LocalCrew(2) as crew:
        assert made(tmp_path / "two.gguf", crew) == alone
        killing = Killing(crew)
        assert made(tmp_path / "killed.gguf", killing) == alone
        assert killing.killed


def test_two_dask_workers_one_killed(tmp_path: Path, alone: bytes, cluster: str) -> None:
    with ClusterCrew(cluster, 60) as crew:
        assert made(tmp_path / "two.gguf", crew) == alone
        killing = Killing(crew)
        assert made(tmp_path / "killed.gguf", killing) == alone
        assert killing.killed
        with pytest.raises(UsageError, match="task 1 is refused"):
            list(crew.run(refuse, [0, 1, 2]))


def test_a_tasks_own_error_comes_back_as_it_is() -> None:
    with LocalCrew(2) as crew, pytest.raises(UsageError, match="task 1 is refused"):
        list(crew.run(refuse, [0, 1, 2]))


def test_an_address_where_nobody_is() -> None:
    with pytest.raises(UsageError, match=r"--cluster tcp://127\.0\.0\.1:1: no Dask scheduler answered"):
        ClusterCrew("tcp://127.0.0.1:1", 1.0)


def test_no_workers_at_all() -> None:
    with pytest.raises(UsageError, match="--workers is 0"):
        LocalCrew(0)
