"""Gains by others: the same as by threads, a worker lost or not; what is wrong with rows is said as it is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ds4.base.codebook import Workers
from ds4.errors import UsageError
from ds4.work.cluster import ClusterCrew
from ds4.work.local import LocalCrew
from ds4.work.tasks import Crew
from solvers.gains import BEST, CHANNELS, RECIPE, GainSolution, Rule, run_again, run_search, solve_gains
from tests.solvers.synthetic import made
from tests.work.cluster import Killing

M = made(n=256, width=2 * CHANNELS + 64)


def solved(rule: Rule, crew: Crew | None = None) -> GainSolution:
    return solve_gains(M.rows, M.held_out_T, rule, Workers(1, crew))


def same(a: GainSolution, b: GainSolution) -> bool:
    equal = np.array_equal(a.s_ED, b.s_ED) and np.array_equal(a.first_ED, b.first_ED)
    return equal and replace(a, s_ED=b.s_ED, first_ED=b.first_ED) == b


@pytest.mark.parametrize(
    ("rule", "work"), [pytest.param(RECIPE, run_search, marks=pytest.mark.long), (BEST, run_again)]
)
def test_two_dask_workers_one_killed(rule: Rule, work: Callable[..., object], cluster: str) -> None:
    with ClusterCrew(cluster, 60) as crew:
        killing = Killing(crew, work)
        assert same(solved(rule), solved(rule, killing))
        assert killing.killed


def test_local_processes_and_what_they_refuse() -> None:
    with LocalCrew(2) as crew:
        assert same(solved(BEST), solved(BEST, crew))
        broken = replace(M.rows, ysh_TD=M.rows.ysh_TD.copy())
        broken.ysh_TD[5, CHANNELS + 7] = np.nan
        with pytest.raises(UsageError, match=f"row 5, channel {CHANNELS + 7}: "):
            solve_gains(broken, M.held_out_T, RECIPE, Workers(1, crew))
