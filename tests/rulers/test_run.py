"""An engine read against its checkpoint: the door, the two paths, resumption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds4.checkpoint.reader import Checkpoint
from ds4.engine import Engine
from ds4.engine.score import score
from ds4.errors import UsageError
from ds4.teacher.run import Teacher
from ds4.teacher.source import CheckpointSource
from rulers import run
from rulers.compare import compare
from rulers.identity import model_fingerprint
from rulers.journal import Journal
from rulers.numbers import Mean, position_figures
from rulers.run import Ruler, read_text, window_logits
from rulers.scores import Meta, Scores
from rulers.text import Text
from tests.engine.conftest import DATA, bases, engines, fast_device  # noqa: F401 - fixtures


@pytest.fixture(scope="module")
def teacher() -> Scores:
    source = CheckpointSource(Checkpoint.open(DATA / "oracle-a"))
    rng = np.random.default_rng(2)
    parts = [rng.integers(0, source.config.vocab_size, n).tolist() for n in (23, 18, 30, 19, 21)]
    text = Text.of(parts, [0, 0, 1, 2, 2])
    original = Teacher(source)
    rows = np.concatenate([original.run(text.ids[s])["logits_TV"] for s in text.slices])
    return Scores(text, rows, Meta(model_fingerprint(source), "toy", "judge", 30, "f32 none", "prefill", "oracle-a"))


@pytest.fixture
def engine(engines: Callable[..., Engine]) -> Engine:  # noqa: F811
    return engines("oracle-a")


@pytest.fixture
def ours(teacher: Scores) -> Meta:
    return replace(teacher.meta, arithmetic="bf16 fp4", weights="oracle-a.gguf")


def test_a_reading_is_the_engines_logits_against_the_teachers(
    teacher: Scores, engine: Engine, ours: Meta, tmp_path: Path
) -> None:
    ruler, told = Ruler(teacher, floor_tokens=0), []
    with Journal(tmp_path / "j", ruler.job(ours)) as journal:
        got = ruler.read(engine, ours, journal, lambda done, total: told.append((done, total)))
    parts = []
    for s in teacher.text.slices:
        ids = teacher.text.ids[s]
        logits = score(engine, ids.tolist())["logits_TV"]
        parts.append(position_figures(teacher.logits[s][:-1], np.asarray(logits, np.float32)[:-1], ids[1:]))
    assert got.figures.tobytes() == np.concatenate(parts, axis=1).tobytes()
    assert got.floor is None and got.ours == ours and got.teacher == teacher.meta
    assert 0.1 < got.numbers.sigma_min.value < 1 and got.numbers.tokens == 111 - 5 and got.numbers.documents == 3
    assert told[-1] == (111, 111) and told == sorted(told)


def test_decode_gives_the_bits_of_one_token_at_a_time(engine: Engine) -> None:
    ids = list(range(5, 30))
    one_by_one = score(engine, ids, split=1)["logits_TV"]
    assert window_logits(engine, ids, "decode").tobytes() == one_by_one.tobytes()
    assert window_logits(engine, ids, "prefill").tobytes() == score(engine, ids)["logits_TV"].tobytes()


def test_the_floor_is_the_other_path(teacher: Scores, engine: Engine, ours: Meta, tmp_path: Path) -> None:
    everything = Ruler(teacher, floor_tokens=10_000)
    by = {}
    for path in run.PATHS:
        meta = replace(ours, path=path)
        with Journal(tmp_path / path, everything.job(meta)) as journal:
            by[path] = everything.read(engine, meta, journal)
    floor, found = by["prefill"].floor, compare(by["prefill"], by["decode"])
    assert floor is not None and floor.numbers == found.difference
    assert by["prefill"].floor_figures.tobytes() == by["decode"].figures.tobytes()
    assert 0 < abs(floor.numbers.sigma_min.value) < 0.1 * (1 - by["prefill"].numbers.sigma_min.value)
    assert Ruler(teacher, 45).floor_windows() == [1, 3]  # of documents 0 and 2


def test_an_interrupted_run_goes_on(
    teacher: Scores, engine: Engine, ours: Meta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ruler, read = Ruler(teacher, 45), window_logits
    seen: list[int] = []

    def interrupted(engine: Engine, ids: list[int], path: str, passed: object = None, tap: object = None) -> object:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(len(ids))
        return read(engine, ids, path)

    monkeypatch.setattr(run, "window_logits", interrupted)
    path = tmp_path / "deep" / "j"
    with pytest.raises(KeyboardInterrupt), Journal(path, ruler.job(ours)) as journal:
        ruler.read(engine, ours, journal)
    with open(path, "ab") as f:
        f.write(b'{"unit": "2", "rec')  # a kill in mid-write
    assert seen == [23, 18]

    def noted(engine: Engine, ids: list[int], path: str, passed: object = None, tap: object = None) -> object:
        seen.append(len(ids))
        return read(engine, ids, path)

    monkeypatch.setattr(run, "window_logits", noted)
    with Journal(path, ruler.job(ours)) as journal:
        assert sorted(journal.done) == ["0", "1"]
        with pytest.raises(UsageError, match="another process is at the same work"), Journal(path, "x"):
            pass
        resumed = ruler.read(engine, ours, journal)
        journal.discard()
    assert seen == [23, 18, 30, 19, 21, 18, 19] and not path.exists()
    with Journal(path, ruler.job(ours)) as journal:
        whole = ruler.read(engine, ours, journal)
    assert whole.figures.tobytes() == resumed.figures.tobytes()
    assert whole.floor_figures.tobytes() == resumed.floor_figures.tobytes()
    with Journal(path, ruler.job(replace(ours, weights="another"))) as journal:
        assert journal.done == {}


def test_a_journal_outlives_kills_in_mid_line(tmp_path: Path) -> None:
    path, numbers = tmp_path / "j", [0.1, 1e-300, -2.5]
    for n, torn in enumerate((b'{"unit": "x", "rec', b"{}\n", b"\xff\xfe", b"")):
        with Journal(path, "job") as journal:
            assert journal.done == {str(i): numbers for i in range(n)}
            journal.add(str(n), numbers)
        with open(path, "ab") as f:
            f.write(torn)
    with Journal(path, "another job") as journal:
        assert journal.done == {}


def test_another_model_is_refused_by_name(teacher: Scores, engine: Engine, ours: Meta, tmp_path: Path) -> None:
    other = replace(ours, model="f" * 16)
    with Journal(tmp_path / "j", "x") as journal, pytest.raises(UsageError, match=r"oracle-a\.gguf is of model ffff"):
        Ruler(teacher).read(engine, other, journal)


def test_the_teacher_against_itself(teacher: Scores) -> None:
    source = CheckpointSource(Checkpoint.open(DATA / "oracle-a"))
    original = Teacher(source)
    n = read_text(teacher, teacher.meta, lambda ids: original.run(np.array(ids))["logits_TV"]).numbers
    assert (n.same_top1, n.sigma_min, n.kl, n.ppl_ratio) == (Mean(1, 0), Mean(1, 0), Mean(0, 0), Mean(1, 0))
    assert (n.sigma_min_median, n.sigma_min_p5) == (1, 1)
