"""The solver's targets: what the file holds, the same bytes after a kill, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ds4.checkpoint.codecs import bf16_to_f32, f32_to_bf16
from ds4.corpus import Document
from ds4.errors import CapacityError, FileFormatError, UsageError
from ds4.model.config import ModelConfig
from ds4.teacher import walk as walks
from ds4.teacher.run import Teacher
from ds4.teacher.source import open_source
from ds4.teacher.walk import Moe, Walk
from rulers.identity import model_fingerprint
from rulers.text import Text
from solvers import fixture as module
from solvers.fixture import PREFIX, Fixture, Plan, make_fixture, plan_fixture

DATA = Path(__file__).parent.parent / "data"
SIZES, NUMBERS = (40, 17, 33), (0, 2, 2)
DOCUMENTS = tuple(Document(f"d{i}", source, "text") for i, source in enumerate(("news", "book", "law")))


def some_text() -> Text:
    rng = np.random.default_rng(7)
    return Text.of([rng.integers(0, 320, n).tolist() for n in SIZES], NUMBERS)


def teacher_of(name: str = "oracle-a", arith: str = "none") -> Teacher:
    return Teacher(open_source(DATA / name), arith)


def planned(out: Path, teacher: Teacher, dtype: str = "f32", text: Text | None = None) -> Plan:
    return plan_fixture(out, teacher, text or some_text(), DOCUMENTS, domain="made", dtype=dtype)


def made(out: Path, dtype: str = "f32") -> Fixture:
    teacher = teacher_of()
    return make_fixture(planned(out, teacher, dtype), teacher)


def walked() -> Sequence[Moe]:
    text = some_text()
    walk, out = Walk(teacher_of(), [text.ids[s] for s in text.slices]), []
    while not walk.done:
        out.append(walk.advance())
    return out


def test_it_holds_what_the_originals_experts_did(tmp_path: Path) -> None:
    teacher, said, steps = teacher_of(), [], []  # type: ignore[var-annotated]
    plan = planned(tmp_path / "f.fixture", teacher)
    fixture = make_fixture(plan, teacher, say=said.append, progress=lambda *a: steps.append(a))
    c, expected = teacher.config, walked()
    assert fixture.n_layers == c.num_hidden_layers == len(expected) and fixture.n_tokens == 90
    for moe in expected:
        target = fixture.layer(moe.layer)
        np.testing.assert_array_equal(target.input_TD, moe.input_TD)
        np.testing.assert_array_equal(target.output_TD, moe.output_TD)
        np.testing.assert_array_equal(target.picks_Tk, moe.picks_Tk)
        np.testing.assert_array_equal(target.weights_Tk, moe.mix_Tk)
        assert target.input_TD.dtype == target.output_TD.dtype == target.weights_Tk.dtype == np.float32
    assert fixture.text.digest == some_text().digest
    assert fixture.sources == ["news"] * 40 + ["law"] * 50
    head = fixture.head
    assert (head["model"], head["arithmetic"], head["domain"], head["split"]) == (
        model_fingerprint(teacher.stream.source), "f32 none", "made", "fit",
    )  # fmt: skip
    assert steps == [(i + 1, c.num_hidden_layers) for i in range(c.num_hidden_layers)]
    assert plan.nbytes == (tmp_path / "f.fixture").stat().st_size and f"{plan.nbytes:,} bytes" in said[0]
    assert "90 tokens x 64 channels in f32" in said[0] and len(said) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["f.fixture"]
    fixture.verify()
    with pytest.raises(UsageError, match=r"has no 99\.input; it has"):
        fixture.layer(99)


def test_bf16_is_rounded_to_nearest_and_half_as_large(tmp_path: Path) -> None:
    fixture = made(tmp_path / "f.fixture", "bf16")
    for moe in walked():
        target = fixture.layer(moe.layer)
        np.testing.assert_array_equal(target.input_TD, bf16_to_f32(f32_to_bf16(moe.input_TD)))
        np.testing.assert_array_equal(target.output_TD, bf16_to_f32(f32_to_bf16(moe.output_TD)))
        np.testing.assert_array_equal(target.weights_Tk, moe.mix_Tk)
        assert target.input_TD.dtype == np.float32
    entries = fixture.head["arrays"]
    assert entries["0.output"]["dtype"] == "<u2" and entries["0.weights"]["dtype"] == "<f4"


def test_the_size_at_released_dimensions_is_known_without_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8,192 tokens: 13.4 GB in f32, half of it in bf16."""
    teacher, text = teacher_of(), Text.of([[1] * 1024] * 8, [0] * 8)
    monkeypatch.setattr(module, "model_fingerprint", lambda _: "0123456789abcdef")
    monkeypatch.setattr(teacher, "config", ModelConfig.load(DATA / "published" / "config.json"))
    for dtype, least, most in (("f32", 13.42e9, 13.46e9), ("bf16", 6.71e9, 6.75e9)):
        assert least < planned(tmp_path / "f.fixture", teacher, dtype, text).nbytes < most


KILLED = """
import os, signal, sys
from pathlib import Path
from ds4.base.output import Output
from ds4.teacher.walk import Walk
from tests.solvers.test_fixture import made

where = {"layer": (Walk, "advance"), "save": (Walk, "save"), "data": (Output, "write")}[sys.argv[2]]
count = [int(sys.argv[3])]
work = getattr(*where)

def dies(*args):
    if count[0] == 0:
        if sys.argv[2] == "data":
            work(args[0], args[1], bytes(args[2])[:700])
        os.kill(os.getpid(), signal.SIGKILL)
    count[0] -= 1
    return work(*args)

setattr(*where, dies)
made(Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "where, count, again",
    [
        ("layer", 3, 3),  # before a layer's work
        ("save", 2, 2),  # a layer's data are down, the walk still stands before it
        ("data", 3 + 4 * 2 + 1, 2),  # in the middle of writing layer 2's output
    ],
)
def test_a_killed_run_gives_the_same_bytes(
    tmp_path: Path, where: str, count: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "whole.fixture")
    out = tmp_path / "killed.fixture"
    argv = [sys.executable, "-c", textwrap.dedent(KILLED), str(out), where, str(count)]
    root = Path(__file__).parent.parent.parent
    assert subprocess.run(argv, check=False, cwd=root, capture_output=True).returncode == -9
    assert not out.exists() and out.with_name("killed.fixture.part").exists()
    layers: list[int] = []
    advance = Walk.advance
    monkeypatch.setattr(Walk, "advance", lambda self: (layers.append(self.layer), advance(self))[1])
    made(out)
    assert layers == list(range(again, teacher_of().config.num_hidden_layers))
    assert out.read_bytes() == (tmp_path / "whole.fixture").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["killed.fixture", "whole.fixture"]


def test_what_an_interrupted_run_left_of_another_job_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "f.fixture"
    save = Walk.save

    def stop(self: Walk, path: Path, key: str) -> None:
        save(self, path, key)
        if self.layer == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(Walk, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            made(out)
        with pytest.raises(KeyboardInterrupt):  # the part file gone, the walk's is not believed
            out.with_name("f.fixture.part.journal").unlink()
            made(out)
    made(out, "bf16")
    expected = made(tmp_path / "other.fixture", "bf16")
    assert out.read_bytes() == expected.path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.fixture", "other.fixture"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return made(tmp_path_factory.mktemp("whole") / "f.fixture").path.read_bytes()


@pytest.mark.parametrize("part", ["input", "output", "picks", "weights"])
def test_a_corrupt_layer_is_refused_by_name(whole: bytes, tmp_path: Path, part: str) -> None:
    path = tmp_path / "f.fixture"
    path.write_bytes(whole)
    entry = Fixture.open(path).head["arrays"][f"1.{part}"]
    data = bytearray(whole)
    data[entry["offset"] + 5] ^= 0x10
    path.write_bytes(data)
    fixture = Fixture.open(path)
    fixture.layer(0)
    for look in (lambda: fixture.layer(1), fixture.verify):
        with pytest.raises(FileFormatError, match=rf"f\.fixture: {part} of layer 1 is not what was written there"):
            look()


def test_a_corrupt_head_or_text_is_refused_by_name(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.fixture"
    _, n, _ = PREFIX.unpack(whole[: PREFIX.size])
    head = json.loads(whole[PREFIX.size : PREFIX.size + n])
    at = head["arrays"]["ids"]["offset"]
    wrong = {
        r"f\.fixture: not a fixture \(it begins with b'GGUF": b"GGUF" + whole[4:],
        r"f\.fixture: not a fixture": b"",
        r"f\.fixture: its header was changed or cut short": whole[:60] + b"x" + whole[61:],
        r"f\.fixture: has \d+ bytes, its header says": whole[:-4096],
        r"f\.fixture: ids is not what was written there": whole[:at] + b"\1\1" + whole[at + 2 :],
    }
    for says, data in wrong.items():
        path.write_bytes(data)
        with pytest.raises(FileFormatError, match=says):
            Fixture.open(path)
    with pytest.raises(FileFormatError, match=r"none\.fixture: cannot be read"):
        Fixture.open(tmp_path / "none.fixture")


def test_another_model_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.fixture"
    path.write_bytes(whole)
    fixture = Fixture.open(path)
    fixture.require(model_fingerprint(open_source(DATA / "oracle-a")), "oracle-a")
    with pytest.raises(UsageError, match=r"f\.fixture holds targets of model .* teacher and base must be the same"):
        fixture.require(model_fingerprint(open_source(DATA / "oracle-b")), "oracle-b")


def test_a_full_disk_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, said = teacher_of(), []  # type: ignore[var-annotated]
    plan = planned(tmp_path / "f.fixture", teacher)
    monkeypatch.setattr(walks.Walk, "advance", lambda self: pytest.fail("work began"))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=plan.nbytes))
    with pytest.raises(CapacityError, match=r"f\.fixture: needs [\d,]+ bytes while it is made, [\d,]+ are free"):
        make_fixture(plan, teacher, say=said.append)
    assert list(tmp_path.iterdir()) == [] and len(said) == 1  # the sizes were told


def test_a_disk_that_fills_up_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program took the room: the error is one line, and the next run goes on."""
    out, replace, n = tmp_path / "f.fixture", walks.os.replace, [0]

    def full(a: Path, b: Path) -> None:
        n[0] += 1
        if n[0] == 3:
            raise OSError(28, "No space left on device")
        replace(a, b)

    monkeypatch.setattr(walks.os, "replace", full)
    with pytest.raises(CapacityError, match=r"part\.walk: cannot be written \(No space left"):
        made(out)
    assert not out.exists()
    layers: list[int] = []
    advance = Walk.advance
    monkeypatch.setattr(Walk, "advance", lambda self: (layers.append(self.layer), advance(self))[1])
    assert made(out).n_tokens == 90 and layers[0] == 2


def test_a_finished_file_is_used_and_another_is_not_replaced(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "f.fixture"
    out.write_bytes(whole)
    out.with_name("f.fixture.part.walk").write_bytes(b"left by a kill after the rename")
    monkeypatch.setattr(Walk, "advance", lambda self: pytest.fail("computed again"))
    assert made(out).n_tokens == 90
    assert [p.name for p in tmp_path.iterdir()] == ["f.fixture"]
    with pytest.raises(UsageError, match=r"f\.fixture: another fixture is there"):
        made(out, "bf16")
    out.write_bytes(whole[:-4096])
    with pytest.raises(FileFormatError, match=r"f\.fixture: has \d+ bytes"):
        made(out)


def test_arguments_that_cannot_be(tmp_path: Path) -> None:
    teacher = teacher_of()
    with pytest.raises(UsageError, match="dtype 'f16' is unknown; choose one of f32, bf16"):
        planned(tmp_path / "f.fixture", teacher, "f16")
    with pytest.raises(UsageError, match=r"no such folder to write f\.fixture in"):
        planned(tmp_path / "none" / "f.fixture", teacher)
