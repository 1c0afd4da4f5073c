"""The routing ruler against the teacher on the same weights, on other weights, and by both paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds4.base.reader import Base
from ds4.checkpoint.reader import Checkpoint
from ds4.engine import Engine
from ds4.errors import FileFormatError
from ds4.teacher.run import Teacher
from ds4.teacher.source import BaseSource, CheckpointSource
from ds4.teacher.walk import Walk
from rulers.identity import model_fingerprint
from rulers.journal import Journal
from rulers.reading import Reading
from rulers.routing import EnginePicks, original_picks, same_experts
from rulers.run import Ruler, window_logits
from rulers.scores import Meta, Scores
from rulers.text import Text
from tests.engine.conftest import DATA, bases, engines, fast_device  # noqa: F401 - fixtures


@pytest.fixture
def text() -> Text:
    rng = np.random.default_rng(6)
    return Text.of([rng.integers(0, 128, n).tolist() for n in (40, 25)], [0, 1])


def engine_picks(engine: Engine, text: Text, path: str) -> np.ndarray:
    parts = []
    for s in text.slices:
        tap = EnginePicks(engine, s.stop - s.start)
        window_logits(engine, text.ids[s].tolist(), path, tap=tap)
        parts.append(tap.picks)
    return np.concatenate(parts, axis=1)


def test_an_engine_chooses_what_the_teacher_chooses_on_the_same_weights(
    text: Text,
    engines: Callable[..., Engine],  # noqa: F811
    bases: Callable[[str], Path],  # noqa: F811
) -> None:
    engine = engines("oracle-a", activations="f32", kv="f32", chunk=16)  # several chunks a window
    walk = Walk(
        Teacher(BaseSource(Base.open(bases("oracle-a"), DATA / "oracle-a"))), [text.ids[s] for s in text.slices]
    )
    theirs = np.stack([walk.advance().picks_Tk for _ in range(engine.config.num_hidden_layers)]).astype(np.int32)
    for path in ("prefill", "decode"):
        ours = engine_picks(engine, text, path)
        assert ours.min() >= 0 and (np.diff(np.sort(ours, axis=2), axis=2) > 0).all()  # k experts, none twice
        same = same_experts(theirs, ours)
        assert same.mean(axis=1).min() >= 0.98  # float32 in two orders: a near tie may fall to the other side
    shifted = same_experts(theirs, np.roll(ours, 1, axis=0))  # of the layer before: the tap names the right one
    assert shifted.mean() < 0.3


def test_a_reading_tells_by_layer(text: Text, engines: Callable[..., Engine], tmp_path: Path) -> None:  # noqa: F811
    source = CheckpointSource(Checkpoint.open(DATA / "oracle-a"))
    picks = original_picks(DATA / "oracle-a", text, arith="none", folder=tmp_path / "cache")
    teacher = Teacher(source)
    rows = np.concatenate([teacher.run(text.ids[s])["logits_TV"] for s in text.slices])
    meta = Meta(model_fingerprint(source), "toy", "judge", 40, "f32 none", "prefill", "oracle-a")
    ruler, ours = Ruler(Scores(text, rows, meta), 30, picks), replace(meta, weights="base")
    engine = engines("oracle-a")
    with Journal(tmp_path / "j", ruler.job(ours)) as journal:
        got = ruler.read(engine, ours, journal)
    expected = same_experts(picks, engine_picks(engine, text, "prefill"))[:, text.scored]
    assert got.same_experts.tobytes() == expected.tobytes() and got.same_experts.shape[1] == 39 + 24
    assert 0.05 < got.same_experts.mean() < 1
    told = got.routing_json()
    assert told is not None and [row["layer"] for row in told] == list(range(len(picks)))
    got.save(tmp_path / "r.npz")
    assert Reading.load(tmp_path / "r.npz").to_json() == got.to_json()
    assert ruler.job(ours) != Ruler(ruler.teacher, 30).job(ours)


def test_the_originals_experts_are_kept(text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = original_picks(DATA / "oracle-a", text, arith="none", folder=tmp_path)
    monkeypatch.setattr(Walk, "advance", None)  # nothing is computed again
    assert original_picks(DATA / "oracle-a", text, arith="none", folder=tmp_path).tobytes() == first.tobytes()
    (path,) = tmp_path.glob("*.npz")
    np.savez(path, picks=first[:, 1:])
    with pytest.raises(FileFormatError, match=r"picks\.npz: picks are int32 .* remove it"):
        original_picks(DATA / "oracle-a", text, arith="none", folder=tmp_path)


def test_sets_are_compared_and_not_lists() -> None:
    a = np.array([[[1, 4, 7], [0, 2, 3]]], np.int32)
    assert same_experts(a, np.array([[[7, 1, 4], [3, 2, 1]]], np.int32)).tolist() == [[1, 0]]
    with pytest.raises(FileFormatError, match=r"\[1, 2, 3\] .* ours \[1, 2, 2\]"):
        same_experts(a, a[:, :, :2])
