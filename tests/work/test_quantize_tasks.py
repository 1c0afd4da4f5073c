"""Quantizing by others: the same bytes as alone, also when a worker is killed in the middle of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4.base.expert_tasks import run_experts
from ds4.base.quantize import quantize
from ds4.errors import UsageError
from ds4.work.cluster import ClusterCrew
from ds4.work.local import LocalCrew
from ds4.work.tasks import Crew
from tests.base.toys import tables, toy_dir
from tests.work.cluster import Killing

NAME = "oracle-a"


def made(out: Path, crew: Crew | None = None) -> bytes:
    quantize(toy_dir(NAME), out, tables(NAME), bits=6, crew=crew)
    return out.read_bytes() + out.with_name(out.name + ".report.json").read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return made(tmp_path_factory.mktemp("alone") / "x.gguf")


def refuse(task: int) -> int:
    if task == 1:
        raise UsageError("task 1 is refused")
    return task


def test_local_processes_one_killed(tmp_path: Path, alone: bytes) -> None:
    with LocalCrew(2) as crew:
        assert made(tmp_path / "two.gguf", crew) == alone
        killing = Killing(crew, run_experts)
        assert made(tmp_path / "killed.gguf", killing) == alone
        assert killing.killed


def test_two_dask_workers_one_killed(tmp_path: Path, alone: bytes, cluster: str) -> None:
    with ClusterCrew(cluster, 60) as crew:
        assert made(tmp_path / "two.gguf", crew) == alone
        killing = Killing(crew, run_experts)
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
