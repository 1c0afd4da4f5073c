"""Every mutant of the table is caught by the test that it names."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from ds4.device.build import default_cuda_dir
from tests.mutants.harness import Mutant, Outcome, Runner, complaint, mutate
from tests.mutants.long_table import LONG_MUTANTS
from tests.mutants.table import MUTANTS


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """The selected mutants' runs, in two processes at a time."""
    names = {item.callspec.id for item in request.session.items if hasattr(item, "callspec")}
    runners: SimpleQueue[Runner] = SimpleQueue()
    made = [Runner(), Runner()]
    for runner in made:
        runners.put(runner)

    def run(mutant: Mutant, where: Path) -> Outcome:
        runner = runners.get()
        try:
            return runner.run(mutant, where)
        finally:
            runners.put(runner)

    with ThreadPoolExecutor(len(made)) as pool:
        yield {m.name: pool.submit(run, m, tmp_path_factory.mktemp("mutant")) for m in ALL if m.name in names}
        pool.shutdown(cancel_futures=True)
    for runner in made:
        runner.close()


ALL = (*MUTANTS, *LONG_MUTANTS)
PARAMETERS = [
    *(pytest.param(m, id=m.name) for m in MUTANTS),
    *(pytest.param(m, id=m.name, marks=pytest.mark.long) for m in LONG_MUTANTS),
]


@pytest.mark.parametrize("mutant", PARAMETERS)
def test_is_caught_by_name(mutant: Mutant, outcomes: dict[str, Future[Outcome]]) -> None:
    outcome = outcomes[mutant.name].result()
    assert complaint(mutant, outcome) is None, outcome.output[-3000:]


def test_there_are_at_least_twenty_of_product_kernels() -> None:
    assert len({m.name for m in ALL}) == len(ALL) and len(MUTANTS) >= 20
    assert all((default_cuda_dir() / m.file).is_file() and not m.file.startswith("simt") for m in ALL)
    assert len({m.file for m in MUTANTS}) >= 12


def test_every_line_is_where_the_table_says() -> None:
    """Cheap, and first to fail when a kernel is edited: the table has to follow."""
    wrong = []
    for m in ALL:
        try:
            mutate((default_cuda_dir() / m.file).read_text(), m)
        except ValueError as e:
            wrong.append(str(e))
    assert wrong == []


ODD = Mutant("odd", "x.cu", "a", "b", "tests/x.py")


def test_the_harness_tells_caught_from_not() -> None:
    assert complaint(ODD, Outcome(1, "E  AssertionError: no")) is None
    assert "survives" in (complaint(ODD, Outcome(0, "1 passed")) or "")
    assert "could not run" in (complaint(ODD, Outcome(4, "file not found")) or "")
    assert "does not compile" in (complaint(ODD, Outcome(1, "ds4.errors.BuildError: DeviceError")) or "")
    assert "does not say" in (complaint(ODD, Outcome(1, "E  KeyError: 'x'")) or "")


def test_a_line_must_be_unique_or_counted() -> None:
    assert mutate("one a.", ODD) == "one b."
    for text in ("none", "a and a"):
        with pytest.raises(ValueError, match="places"):
            mutate(text, ODD)
    assert mutate("a + a", Mutant("second", "x.cu", "a", "b", "t", at=1)) == "a + b"
