"""Scores files: what is written comes back, mapped; a killed writer goes on; a wrong file is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds4 import embedded
from ds4.base.reader import Base
from ds4.checkpoint.reader import Checkpoint
from ds4.errors import CapacityError, FileFormatError, UsageError
from ds4.teacher.source import BaseSource, CheckpointSource
from rulers.identity import file_mark, folder_mark, model_fingerprint
from rulers.scores import Meta, Scores, ScoresWriter
from rulers.text import Text
from tests.base.toys import toy_base, toy_dir

META = Meta("0123456789abcdef", "code", "judge", 512, "f32 none", "prefill", "toy é")


@pytest.fixture
def text() -> Text:
    return Text.of([[1, 5, 6], [1, 7], [1, 2, 3, 4]], [0, 0, 2])


@pytest.fixture
def scores(text: Text) -> Scores:
    return Scores(text, np.random.default_rng(3).standard_normal((9, 11)).astype(np.float32), META)


def test_a_text_knows_its_windows(text: Text) -> None:
    assert text.slices == (slice(0, 3), slice(3, 5), slice(5, 9))
    assert text.scored.tolist() == [0, 1, 3, 5, 6, 7] and text.n_documents == 2
    assert text.digest != Text.of([[1, 5, 6, 1, 7], [1, 2, 3, 4]], [0, 2]).digest
    assert text.digest != Text.of([[1, 5, 6], [1, 7], [1, 2, 3, 4]], [0, 1, 2]).digest
    with pytest.raises(FileFormatError, match="within one document"):
        Text(text.ids, np.arange(9, dtype=np.int32), text.windows)
    with pytest.raises(FileFormatError, match="windows must be numbered"):
        Text(text.ids, text.documents, text.windows[::-1].copy())


def test_text_is_cut_evenly() -> None:
    documents = ["a" * 100, "b" * 5, "c" * 40]
    whole = Text.cut(documents, lambda s: [ord(c) for c in s], 1, length=31)
    assert [s.stop - s.start for s in whole.slices] == [31, 31, 31, 31]  # 10 characters and 5 are too few
    assert whole.documents[[s.start for s in whole.slices]].tolist() == [0, 0, 0, 2]
    assert (whole.ids[[s.start for s in whole.slices]] == 1).all()
    few = Text.cut(documents, lambda s: [ord(c) for c in s], 1, length=31, tokens=62)
    assert len(few.slices) == 2 and few.documents[[0, 31]].tolist() == [0, 2]
    with pytest.raises(UsageError, match="none of at least 16 tokens"):
        Text.cut(["short"], lambda s: [ord(c) for c in s], 1, length=31)
    with pytest.raises(UsageError, match="too short to judge"):
        Text.cut(documents, lambda s: [ord(c) for c in s], 1, length=4)


def test_round_trip_is_mapped(scores: Scores, tmp_path: Path) -> None:
    scores.save(tmp_path / "s.npz")
    got = Scores.load(tmp_path / "s.npz")
    assert isinstance(got.logits, np.memmap) and got.meta == META and got.text.digest == scores.text.digest
    assert got.rows(slice(2, 7)).tobytes() == scores.logits[2:7].tobytes()
    with np.load(tmp_path / "s.npz") as plain:  # anybody can read it
        assert plain["logits"].tobytes() == scores.logits.tobytes()


def test_a_killed_writer_goes_on_with_the_same_bytes(scores: Scores, tmp_path: Path) -> None:
    rows = [scores.logits[s] for s in scores.text.slices]
    with ScoresWriter(tmp_path / "a.npz", scores.text, META, 11) as writer:
        for w in writer.missing():
            writer.put(w, rows[w])
        writer.publish()
    with ScoresWriter(tmp_path / "b.npz", scores.text, META, 11) as writer:
        writer.put(1, rows[1])
        with pytest.raises(UsageError, match="2 windows are missing"):
            writer.publish()
    assert not (tmp_path / "b.npz").exists()
    with ScoresWriter(tmp_path / "b.npz", scores.text, META, 11) as writer:
        assert writer.resumed == 1 and writer.missing() == [0, 2]
        for w in writer.missing():
            writer.put(w, rows[w])
        assert writer.publish().logits.tobytes() == scores.logits.tobytes()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["a.npz", "b.npz"]
    a, b = Scores.load(tmp_path / "a.npz"), Scores.load(tmp_path / "b.npz")
    assert a.logits.tobytes() == b.logits.tobytes() and a.meta == b.meta


def test_another_job_starts_anew(scores: Scores, tmp_path: Path) -> None:
    with ScoresWriter(tmp_path / "s.npz", scores.text, META, 11) as writer:
        writer.put(0, scores.logits[scores.text.slices[0]])
    with ScoresWriter(tmp_path / "s.npz", scores.text, replace(META, arithmetic="f32 kv"), 11) as writer:
        assert writer.resumed == 0 and writer.missing() == [0, 1, 2]
        with pytest.raises(FileFormatError, match=r"window 1: logits are float32 \[3, 11\]"):
            writer.put(1, scores.logits[:3])
        bad = scores.logits[:3].copy()
        bad[1, 4] = np.nan
        with pytest.raises(FileFormatError, match="window 0: logits of position 1 are not finite"):
            writer.put(0, bad)


def test_a_disk_that_is_too_small_is_found_before_the_work(
    scores: Scores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = type("Usage", (), {"free": 100})
    monkeypatch.setattr("ds4.base.output.shutil.disk_usage", lambda _: free)
    with pytest.raises(CapacityError, match="needs 396 bytes, 100 are free"):
        ScoresWriter(tmp_path / "s.npz", scores.text, META, 11).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_wrong_files_are_refused_by_name(scores: Scores, tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    scores.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(FileFormatError, match=r"s\.npz: not a readable"):
        Scores.load(path)
    text = {"ids": scores.text.ids, "documents": scores.text.documents, "windows": scores.text.windows}
    meta = np.frombuffer(META.to_json().encode(), np.uint8)
    np.savez(path, **text, meta=meta)
    with pytest.raises(FileFormatError, match="expected ids, documents, windows, logits, meta"):
        Scores.load(path)
    np.savez(path, **text, meta=meta, logits=scores.logits[:8])
    with pytest.raises(FileFormatError, match=r"expected float32 \[9, vocabulary\]"):
        Scores.load(path)
    np.savez(path, **text, meta=meta, logits=scores.logits[:, :5])
    with pytest.raises(FileFormatError, match="ids outside the vocabulary of 5"):
        Scores.load(path)
    np.savez(path, **text, meta=np.frombuffer(b'{"model": 3}', np.uint8), logits=scores.logits)
    with pytest.raises(FileFormatError, match="meta must have exactly model, domain"):
        Scores.load(path)
    with pytest.raises(FileFormatError, match=r"none\.npz: cannot be read"):
        Scores.load(tmp_path / "none.npz")


def test_a_checkpoint_and_its_base_are_one_model() -> None:
    checkpoint = model_fingerprint(CheckpointSource(Checkpoint.open(toy_dir("oracle-a"))))
    base = model_fingerprint(BaseSource(Base.open(toy_base("oracle-a", bits=9), toy_dir("oracle-a"))))
    other = model_fingerprint(CheckpointSource(Checkpoint.open(embedded.checkpoint())))
    assert checkpoint == base != other


@pytest.mark.parametrize("name", ["norm.weight", "layers.2.attn_norm.weight", "layers.0.ffn.gate.bias"])
def test_another_training_of_one_shape_is_another_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = CheckpointSource(Checkpoint.open(toy_dir("oracle-a")))
    first, dense = model_fingerprint(source), source.dense
    nudged = dense(name) * np.float32(1.01)
    monkeypatch.setattr(source, "dense", lambda asked: nudged if asked == name else dense(asked))
    assert model_fingerprint(source) != first


def test_marks_tell_files_and_folders_apart(tmp_path: Path) -> None:
    path = tmp_path / "base.gguf"
    data = bytearray(np.random.default_rng(0).bytes(3 << 20))
    path.write_bytes(data)
    first = file_mark(path)
    assert len(first) == 8 and file_mark(path) == first
    path.write_bytes(data + b"\0")
    longer = file_mark(path)
    data[-1] ^= 1
    path.write_bytes(data)
    assert len({first, longer, file_mark(path)}) == 3
    path.write_bytes(b"small")
    whole = folder_mark(tmp_path)
    path.rename(tmp_path / "other.gguf")
    assert folder_mark(tmp_path) != whole
    with pytest.raises(FileFormatError, match=r"nowhere: no such folder"):
        folder_mark(tmp_path / "nowhere")
    with pytest.raises(FileFormatError, match=r"nothing: cannot be read"):
        file_mark(tmp_path / "nothing")
