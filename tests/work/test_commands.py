"""--cluster as users give it: the same file by the command, and what is wrong with a cluster told by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds4.cli import main
from ds4.errors import UsageError
from ds4.work import cluster as dask
from ds4.work.tasks import blas_kind, in_order, perform
from tests.base.toys import toy_dir

ROOT = Path(__file__).parents[2]


def twice(task: int) -> int:
    return 2 * task


def test_the_command_gives_the_same_file(tmp_path: Path, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["quantize", str(toy_dir("oracle-a")), "--bits", "6"]
    assert main.run([*argv, "-o", str(tmp_path / "alone.gguf"), "--workers", "1"]) == 0
    assert main.run([*argv, "-o", str(tmp_path / "far.gguf"), "--cluster", cluster]) == 0
    assert (tmp_path / "alone.gguf").read_bytes() == (tmp_path / "far.gguf").read_bytes()


def test_a_cluster_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask.ClusterCrew.__init__, "__defaults__", (1.0,))
    argv = ["quantize", str(toy_dir("oracle-a")), "-o", str(tmp_path / "x.gguf"), "--cluster", "tcp://127.0.0.1:1"]
    assert main.run(argv) == 2
    assert "--cluster tcp://127.0.0.1:1: no Dask scheduler answered within 1 s" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["nonsense", "", "tcp://somewhere", "tcp://somewhere:port"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UsageError, match="is no address; give what `dask scheduler` prints"):
        dask.ClusterCrew(address)


def test_dask_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"not installed here: pip install 'ds4\[cluster\]'"):
        dask.ClusterCrew("tcp://127.0.0.1:1")


def test_the_kind_of_blas_is_numpys() -> None:
    """scipy loads a BLAS of its own, before numpy's or after: neither changes what numpy computes with."""
    show = "from ds4.work.tasks import blas_kind; print(blas_kind())"
    kinds = {
        subprocess.run(
            [sys.executable, "-c", first + show], check=True, capture_output=True, text=True, cwd=ROOT
        ).stdout
        for first in ("", "import scipy.linalg; ", "import numpy, scipy.sparse.linalg; ")
    }
    assert len(kinds) == 1 and kinds != {"unknown\n"}


def test_a_worker_of_another_kind_refuses() -> None:
    """Its bytes would differ; the message names both kinds."""
    assert perform(twice, 4, blas_kind()) == 8
    with pytest.raises(UsageError, match="the asker with openblas of another age: the bytes would differ"):
        list(in_order(lambda i: lambda: perform(twice, i, "openblas of another age"), 3, 2))
