"""The original by others: scores for the ruler and the solver's fixture are the same bytes, a worker lost or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ds4.errors import Ds4Error
from ds4.teacher.run import Teacher
from ds4.teacher.source import open_source
from ds4.teacher.tasks import Helpers, run_logits, run_mix, worth
from ds4.work.cluster import ClusterCrew
from ds4.work.local import LocalCrew
from ds4.work.tasks import Crew
from rulers.teacher_scores import teacher_scores
from solvers.fixture import make_fixture
from tests.solvers.test_fixture import planned, some_text
from tests.work.cluster import Killing

TOY = Path(__file__).parent.parent / "data" / "oracle-a"


def scores(folder: Path, crew: Crew | None = None, arith: str = "none") -> bytes:
    got = teacher_scores(
        TOY, some_text(), domain="made", split="judge", length=64, arith=arith, folder=folder, crew=crew
    )  # fmt: skip
    return np.asarray(got.logits).tobytes()


def fixture(folder: Path, crew: Crew | None = None) -> bytes:
    teacher = Teacher(open_source(TOY))
    helpers = None if crew is None else Helpers(crew, str(TOY), "none")
    folder.mkdir(exist_ok=True)
    return make_fixture(planned(folder / "f.fixture", teacher), teacher, helpers=helpers).path.read_bytes()


@pytest.mark.parametrize("made", [pytest.param(scores, marks=pytest.mark.long), fixture])
def test_local_processes_one_killed(made: Callable[..., bytes], tmp_path: Path) -> None:
    with LocalCrew(2) as crew:
        killing = Killing(crew, run_mix)
        assert made(tmp_path / "two", killing) == made(tmp_path / "alone")
        assert killing.killed


@pytest.mark.parametrize(
    ("made", "work"),
    [pytest.param(scores, run_mix, marks=pytest.mark.long), (scores, run_logits), (fixture, run_mix)],
)
def test_two_dask_workers_one_killed(
    made: Callable[..., bytes], work: Callable[..., object], tmp_path: Path, cluster: str
) -> None:
    with ClusterCrew(cluster, 60) as crew:
        killing = Killing(crew, work)
        assert made(tmp_path / "two", killing) == made(tmp_path / "alone")
        assert killing.killed


def test_an_original_that_workers_do_not_see_is_named(tmp_path: Path) -> None:
    teacher, away = Teacher(open_source(TOY)), str(tmp_path / "elsewhere")
    with LocalCrew(1) as crew, pytest.raises(Ds4Error, match="elsewhere"):
        make_fixture(planned(tmp_path / "f.fixture", teacher), teacher, helpers=Helpers(crew, away, "none"))


def test_a_small_model_is_not_sent_to_processes_of_the_same_machine() -> None:
    small = open_source(TOY).config
    large = replace(small, hidden_size=5120, moe_intermediate_size=2048)
    near, far = SimpleNamespace(remote=False), SimpleNamespace(remote=True)
    assert worth(near, small) is None and worth(near, large) is near  # type: ignore[arg-type]
    assert worth(far, small) is far and worth(None, large) is None  # type: ignore[arg-type]
