"""The original's scores: computed once, found again under all that they depend on, taken up after a kill."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ds4.errors import CapacityError, FileFormatError, UsageError
from ds4.teacher.run import Teacher
from ds4.teacher.source import open_source
from ds4.teacher.walk import Walk
from rulers import teacher_scores as module
from rulers.scores import Scores
from rulers.teacher_scores import teacher_scores, weights_mark
from rulers.text import Text

TOY = Path(__file__).parent.parent / "data" / "oracle-a"


@pytest.fixture
def text() -> Text:
    rng = np.random.default_rng(11)
    return Text.of([rng.integers(0, 320, n).tolist() for n in (40, 17, 64)], [0, 0, 3])


def scores_of(folder: Path, text: Text, **kwargs: object) -> Scores:
    about = {"domain": "made", "split": "judge", "length": 64, **kwargs}
    return teacher_scores(about.pop("checkpoint", TOY), text, folder=folder, **about)  # type: ignore[arg-type]


def test_they_are_the_teachers_and_are_computed_once(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    steps: list[tuple[int, int]] = []
    scores = scores_of(tmp_path, text, say=said.append, progress=lambda *a: steps.append(a))
    teacher = Teacher(open_source(TOY))
    for part in scores.text.slices:  # 1e-5: another order of float32 sums
        expected = teacher.run(text.ids[part])["logits_TV"]
        assert np.linalg.norm(scores.rows(part) - expected) < 1e-5 * np.linalg.norm(expected)
    assert scores.meta.arithmetic == "f32 none" and scores.meta.weights == f"oracle-a {weights_mark(TOY)}"
    assert "154,880 bytes, 121 tokens in 3 windows" in said[0]  # 121 rows of 320 float32
    layers = teacher.config.num_hidden_layers
    assert steps == [(i + 1, layers + 3) for i in range(layers + 3)]
    (path,) = tmp_path.iterdir()
    monkeypatch.setattr(Walk, "advance", lambda self: pytest.fail("computed again"))
    again = scores_of(tmp_path, text, say=said.append, domain="other")
    assert again.logits.tobytes() == scores.logits.tobytes() and len(said) == 1
    assert again.meta == replace(scores.meta, domain="other")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_each_thing_that_they_depend_on_has_its_own_file(text: Text, tmp_path: Path) -> None:
    first = scores_of(tmp_path, text)
    scores_of(tmp_path, text, arith="vendor")
    scores_of(tmp_path, text, length=65)
    scores_of(tmp_path, Text(text.ids[::-1].copy(), text.documents, text.windows))
    other = tmp_path / "model"  # one expert's weights differ: the same norms, the same fingerprint
    shutil.copytree(TOY, other)
    shard = max(other.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert weights_mark(other) != weights_mark(TOY)
    changed = scores_of(tmp_path, text, checkpoint=other)
    assert changed.meta.model == first.meta.model
    assert len(list(tmp_path.glob("*.npz"))) == 5


def test_a_cached_file_that_is_broken_or_another_is_refused_by_name(text: Text, tmp_path: Path) -> None:
    scores_of(tmp_path, text)
    (path,) = tmp_path.iterdir()
    replaced = Scores.load(path)
    Scores(replaced.text, np.array(replaced.logits), replace(replaced.meta, arithmetic="f32 kv")).save(path)
    with pytest.raises(FileFormatError, match=rf"{path.name}: holds other scores than its name says"):
        scores_of(tmp_path, text)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(FileFormatError, match=rf"{path.name}: not a readable \.npz"):
        scores_of(tmp_path, text)


KILLED = """
import os, signal, sys
import numpy as np
from ds4.teacher.walk import Walk
from rulers.scores import ScoresWriter
from rulers.teacher_scores import teacher_scores
from rulers.text import Text

rng = np.random.default_rng(11)
text = Text.of([rng.integers(0, 320, n).tolist() for n in (40, 17, 64)], [0, 0, 3])
where, count = {"layer": (Walk, "advance"), "window": (ScoresWriter, "put")}[sys.argv[3]], [int(sys.argv[4])]
work = getattr(*where)

def dies(*args):
    if count[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    count[0] -= 1
    return work(*args)

setattr(*where, dies)
teacher_scores(sys.argv[2], text, domain="made", split="judge", length=64, folder=sys.argv[1])
"""


@pytest.mark.parametrize("where, count", [("layer", 2), ("window", 1)])
def test_a_killed_run_goes_on_with_the_same_bytes(
    text: Text, tmp_path: Path, where: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = scores_of(tmp_path / "whole", text)
    folder = tmp_path / "killed"
    argv = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(TOY), where, str(count)]
    assert subprocess.run(argv, check=False).returncode == -9
    assert not list(folder.glob("*.npz"))
    layers: list[int] = []
    advance = Walk.advance
    monkeypatch.setattr(Walk, "advance", lambda self: (layers.append(self.layer), advance(self))[1])
    again = scores_of(folder, text)
    n = open_source(TOY).config.num_hidden_layers
    assert layers == (list(range(2, n)) if where == "layer" else [])
    assert again.logits.tobytes() == whole.logits.tobytes() and again.meta == whole.meta
    assert [p.suffix for p in folder.iterdir()] == [".npz"]


def test_a_disk_that_is_too_small_is_found_before_the_work(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=200_000))
    monkeypatch.setattr(Walk, "advance", lambda self: pytest.fail("work began"))
    with pytest.raises(CapacityError, match=r"needs [\d,]+ bytes while it is made, 200,000 are free"):
        scores_of(tmp_path, text)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="no folder for the original's scores"):
        scores_of(tmp_path / "file", text)
