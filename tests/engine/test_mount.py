"""Sidecars on an engine: the teacher's numbers with the factors folded in, base alone when they say nothing, the same
bits however the rows are cut, and no load that is half a sidecar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from ds4.base.reader import Base
from ds4.engine import Engine, Sampling
from ds4.engine.mount import Mounted, mount
from ds4.engine.score import score
from ds4.engine.session import Session
from ds4.engine.traffic import weight_bytes
from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from ds4.sidecar.files import GAIN_F16, GAIN_F32, bias_path, encode_bias, encode_gains, gain_path
from ds4.teacher.run import Teacher
from ds4.teacher.source import BaseSource
from tests.conftest import opened
from tests.engine.conftest import DATA
from tests.engine.drafted import same_as_plain
from tests.engine.test_against_teacher import LIMIT, PARITY, distance, prompt
from tests.engine.test_bits import MODES, state_of
from tests.reference_sidecar import Lattice, biases_of, sign, write_sidecar

NAME = "oracle-a"
CONFIG = ModelConfig.load(DATA / NAME)
F32 = np.ndarray


@dataclass(frozen=True)
class Folders:
    """A sidecar, a post-training folder that was solved on it, and what their files decode to."""

    zchain: Path
    posttrain: Path
    second: list[Lattice]
    third: list[Lattice]

    def factor(self, layer: int, *, post: bool) -> F32:
        """float64; the second layer has no files."""
        if layer == 1:
            return np.ones_like(self.second[1].s, np.float64)
        s = self.second[layer].s.astype(np.float64)
        return s * self.third[layer].s if post else s


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    where = tmp_path_factory.mktemp("sidecars")
    second = write_sidecar(where / "law", CONFIG, 1)
    third = write_sidecar(where / "tuned", CONFIG, 2, biases=False)
    sign(where / "tuned", where / "law", CONFIG)
    return Folders(where / "law", where / "tuned", second, third)


class Folded(BaseSource):
    """The base's weights with the factors in them and the biases added."""

    def __init__(self, base: Base, folders: Folders, *, post: bool) -> None:
        super().__init__(base)
        self._folders, self._post = folders, post

    def expert(self, prefix: str, e: int) -> tuple[F32, F32, F32]:
        w1, w3, w2 = super().expert(prefix, e)
        kind, layer = prefix.split(".")
        if kind == "layers":
            w2 = (w2 * self._folders.factor(int(layer), post=self._post)[e][:, None]).astype(np.float32)
        return w1, w3, w2

    def dense(self, name: str) -> F32:
        found = super().dense(name)
        part = name.split(".")
        if part[0] == "layers" and part[2:] == ["ffn", "gate", "bias"] and part[1] != "1":
            return found + biases_of(self.config, 1 + int(part[1]))
        return found


@pytest.mark.parametrize("post", [False, True], ids=["sidecar", "with post-training"])
def test_equals_the_teacher_with_the_factors_folded(
    bases: Callable[[str], Path], engines: Callable[..., Engine], folders: Folders, post: bool
) -> None:
    """In prefill and in decode; and far from the base alone, so that it shows something."""
    ids = prompt(NAME, 40)
    source = Folded(Base.open(bases(NAME), DATA / NAME), folders, post=post)
    want = Teacher(source).run(np.asarray(ids), decode_from=28, streams=True)
    more = {"posttrain": folders.posttrain} if post else {}
    got = score(engines(NAME, zchain=folders.zchain, **more, **PARITY), ids, split=28, streams=True)
    assert distance(got["logits_TV"], want["logits_TV"]) <= LIMIT
    for layer, (mine, theirs) in enumerate(zip(got["streams_LTSD"], want["streams_LTSD"])):
        assert distance(mine, theirs) <= LIMIT, f"streams entering layer {layer}"
    assert distance(score(engines(NAME, **PARITY), ids)["logits_TV"], want["logits_TV"]) > 0.1


@pytest.mark.parametrize("mode", MODES, ids=["default", "f32"])
def test_factors_of_one_and_biases_of_zero_leave_every_bit(
    engines: Callable[..., Engine], tmp_path: Path, mode: dict[str, str]
) -> None:
    write_sidecar(tmp_path / "ones", CONFIG, 3, biases=False, ones=True)
    for layer in range(CONFIG.num_hidden_layers):
        zeros = np.zeros(CONFIG.n_routed_experts, np.float32)
        bias_path(tmp_path / "ones", layer).write_bytes(encode_bias(zeros))
    ids, seen = prompt(NAME, 40), []
    for options in ({}, {"zchain": tmp_path / "ones"}):
        session = engines(NAME, **options, **mode).session()
        logits = [session.sync(ids[:25], logits="all"), session.step(ids[25:30]), session.step(ids[30:31])]
        seen.append((np.concatenate(logits), state_of(session)))
    assert np.array_equal(seen[0][0], seen[1][0]) and seen[0][1] == seen[1][1]


@pytest.mark.parametrize("kind", [GAIN_F32, GAIN_F16])
def test_other_types_are_not_rounded(
    engines: Callable[..., Engine], folders: Folders, tmp_path: Path, kind: int
) -> None:
    """The lattice's own values as f32 or f16 (which holds them) give the bits that the kernels give from FP4; also
    where only one of two files is of another type."""
    zchain, posttrain = tmp_path / "two", tmp_path / "three"
    for folder, made in ((zchain, folders.second), (posttrain, folders.third)):
        folder.mkdir()
        for layer, lattice in enumerate(made):
            if layer != 1:
                gain_path(folder, layer).write_bytes(encode_gains(lattice.s, kind))
    for layer in range(CONFIG.num_hidden_layers):
        if layer != 1:
            bias_path(zchain, layer).write_bytes(bias_path(folders.zchain, layer).read_bytes())
    ids = prompt(NAME, 30)

    def run(**options: object) -> F32:
        session = engines(NAME, **options).session()
        return np.concatenate([session.sync(ids[:20], logits="all"), session.step(ids[20:])[:8]])

    ids = ids[:28]
    assert np.array_equal(run(zchain=zchain), run(zchain=folders.zchain))
    both = run(zchain=folders.zchain, posttrain=folders.posttrain)
    sign(posttrain, folders.zchain, CONFIG)
    assert np.array_equal(run(zchain=folders.zchain, posttrain=posttrain), both)


@pytest.fixture
def on(engines: Callable[..., Engine], folders: Folders) -> Callable[..., Engine]:
    """An engine with both mounted."""
    return lambda **options: engines(NAME, zchain=folders.zchain, posttrain=folders.posttrain, **options)


@pytest.mark.parametrize("mode", MODES, ids=["default", "f32"])
def test_bits_do_not_depend_on_chunks_rows_or_graphs(on: Callable[..., Engine], mode: dict[str, str]) -> None:
    ids = prompt(NAME, 44)
    engine = on(**mode)
    whole = engine.session()
    want = whole.sync(ids[:20], logits="all", chunk=64)
    for chunk in (1, 7):
        session = engine.session()
        assert np.array_equal(session.sync(ids[:20], logits="all", chunk=chunk), want)
        assert state_of(session) == state_of(whole)
    among = np.concatenate([whole.step(ids[20:28]), whole.step(ids[28:31])])
    one, direct = engine.session(), on(graphs=False, **mode).session()
    for session in (one, direct):
        session.sync(ids[:20])
        assert np.array_equal(np.concatenate([session.step([t]) for t in ids[20:31]]), among)
        assert state_of(session) == state_of(whole)
    assert one.counts["replays"] > 0 and direct.counts["direct"] == 11


def test_drafts_change_no_token_and_have_no_sidecar(
    on: Callable[..., Engine], engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = on(dspark=True), engines(NAME, dspark=True)
    assert engine.draft is not None and plain.draft is not None
    for mine, theirs in zip(engine.draft.model.layers, plain.draft.model.layers, strict=True):
        assert mine.experts.factors == (None,) * 4 and mine.router_delta is None
        gains = [engine.device.download(lw.experts.down_gains) for lw in (mine, theirs)]
        assert np.array_equal(*gains)
    same_as_plain(engine, monkeypatch, prompt(NAME, 20), 12, Sampling(), [2, engine.block])


def test_a_token_reads_the_factors_of_its_experts(on: Callable[..., Engine], engines: Callable[..., Engine]) -> None:
    """17 bytes for 32 rows of each picked expert and file, 4 a router bias: counted from the placed weights."""
    read = []
    for engine in (engines(NAME), on()):
        session = engine.session()
        session.sync(prompt(NAME, 12))
        session.step([7])
        read.append(weight_bytes(session.lane))
    layers = CONFIG.num_hidden_layers - 1
    factors = 2 * CONFIG.num_experts_per_tok * CONFIG.hidden_size * 17 // 32
    assert read[1] - read[0] == layers * (factors + 4 * CONFIG.n_routed_experts)


def test_check_build_sees_nothing_wrong(bases: Callable[[str], Path], folders: Folders) -> None:
    engine = Engine.open(
        bases(NAME), engram_dir=DATA / NAME, device=opened("check", "greedy"), zchain=folders.zchain,
        posttrain=folders.posttrain,
    )  # fmt: skip
    session = engine.session()
    session.sync(prompt(NAME, 13))
    assert np.isfinite(session.step(prompt(NAME, 3))).all()
    for token in (5, 6, 7):
        session.step([token])
    assert session.counts["captures"] == 1


def test_post_trainings_biases_are_ignored_and_said_so(
    engines: Callable[..., Engine], folders: Folders, tmp_path: Path
) -> None:
    third = tmp_path / "three"
    third.mkdir()
    for path in folders.posttrain.iterdir():
        (third / path.name).write_bytes(path.read_bytes())
    bias_path(third, 0).write_bytes(encode_bias(np.full(CONFIG.n_routed_experts, 9.0, np.float32)))
    ids, got = prompt(NAME, 20), []
    for posttrain in (folders.posttrain, third):
        engine = engines(NAME, zchain=folders.zchain, posttrain=posttrain)
        got.append(engine.session().sync(ids, logits="all"))
    assert np.array_equal(*got)
    assert engine.mounted is not None and "1 rb file" in engine.mounted.warnings[0]


def test_what_is_mounted_is_told(on: Callable[..., Engine], engines: Callable[..., Engine], folders: Folders) -> None:
    mounted = on().mounted
    assert mounted is not None and mounted.warnings == ()
    told = mounted.describe()
    assert told["zchain"] is not None and told["zchain"]["name"] == "law"
    assert (folders.posttrain / "base.fnv").read_text().strip() == told["zchain"]["fingerprint"]
    assert told["posttrain"] is not None and told["posttrain"]["name"] == "tuned"
    assert engines(NAME).mounted is None


def test_a_remount_is_what_a_load_gives_and_leaves_sessions_under_way(
    bases: Callable[[str], Path], engines: Callable[..., Engine], folders: Folders, tmp_path: Path
) -> None:
    """None, both, one, none again, on the same base; a session keeps what it began with to its end, and the lane that
    it leaves is not handed out again. What cannot be mounted changes nothing."""
    ids = prompt(NAME, 30)

    def read(session: Session) -> F32:
        session.sync(ids[:20])
        rows = [session.step(ids[at : at + 1]) for at in range(20, 24)]  # the third replays a graph
        return np.concatenate(rows)

    both = {"zchain": folders.zchain, "posttrain": folders.posttrain}
    cases = [{}, both, {"zchain": folders.zchain}, {}]
    want = [read(engines(NAME, **case).session()) for case in cases]
    engine = Engine.open(bases(NAME), engram_dir=DATA / NAME, device=opened("fast", "greedy"))
    early = engine.session()
    early.sync(ids[:20])
    for case, logits in zip(cases, want, strict=True):
        engine.remount(case.get("zchain"), case.get("posttrain"))
        assert np.array_equal(read(engine.session()), logits)
    assert engine.mounted is None
    engine.remount(folders.zchain, folders.posttrain)
    assert np.array_equal(np.concatenate([early.step(ids[at : at + 1]) for at in range(20, 24)]), want[0])
    del early  # its lane comes back, with the weights of before
    assert np.array_equal(read(engine.session()), want[1])
    with pytest.raises(FileFormatError, match=r"base\.fnv: solved on"):
        engine.remount(None, folders.posttrain)
    with pytest.raises(FileFormatError, match="is not a folder"):
        engine.remount(folders.zchain, tmp_path / "gone")
    assert np.array_equal(read(engine.session()), want[1]) and engine.sidecars["posttrain"] is not None


BROKEN = {
    "other experts": ("gr_L02.bin", lambda raw: raw[:0] + np.int32(9).tobytes() + raw[4:], "9 experts x 64"),
    "other width": ("gr_L02.bin", lambda raw: raw[:4] + np.int32(32).tobytes() + raw[8:], "x 32"),
    "a cut file": ("gr_L06.bin", lambda raw: raw[:-1], "bytes"),
    "a scale of NaN": ("gr_L00.bin", lambda raw: raw[:28] + b"\xff" + raw[29:], "NaN"),
    "a factor beyond float32": ("gr_L00.bin", lambda raw: raw[:12] + b"\x77" * 16 + b"\xfe" + raw[29:], "finite"),
    "an infinite bias": ("rb_L03.bin", lambda raw: raw[:8] + np.float32(np.inf).tobytes() + raw[12:], "finite"),
    "a cut bias": ("rb_L03.bin", lambda raw: raw[:-4], "bytes"),
    "a correction": ("amp_L00.bin", lambda raw: b"", "low-rank"),
    "an unknown one": ("lr_L00.bin", lambda raw: b"", "not known"),
    "half a write": ("gr_L00.bin.part", lambda raw: b"", "not known"),
    "no layer of this model": ("gr_L07.bin", lambda raw: b"", "layers 00 to 06"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_refuses_the_load_by_name_before_any_weight(
    bases: Callable[[str], Path], folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    name, change, says = BROKEN[what]
    zchain = tmp_path / "law"
    zchain.mkdir()
    for path in folders.zchain.iterdir():
        (zchain / path.name).write_bytes(path.read_bytes())
    raw = (zchain / name).read_bytes() if (zchain / name).exists() else b""
    (zchain / name).write_bytes(change(raw))

    def never(*_: object) -> None:
        raise AssertionError("weights were placed")

    monkeypatch.setattr("ds4.engine.engine.place", never)
    with pytest.raises(FileFormatError, match=f"{name}.*{says}"):
        Engine.open(bases(NAME), engram_dir=DATA / NAME, device=opened("fast", "greedy"), zchain=zchain)


def test_post_training_of_another_sidecar_is_refused_before_its_files(
    bases: Callable[[str], Path], folders: Folders, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_sidecar(other, CONFIG, 5)
    third = tmp_path / "three"
    third.mkdir()
    (third / "gr_L00.bin").write_bytes(b"broken")
    (third / "amp_L00.bin").write_bytes(b"")
    sign(third, folders.zchain, CONFIG)
    device = opened("fast", "greedy")
    for zchain in (other, None):
        with pytest.raises(FileFormatError, match=r"base\.fnv: solved on"):
            Engine.open(bases(NAME), engram_dir=DATA / NAME, device=device, zchain=zchain, posttrain=third)
    with pytest.raises(FileFormatError, match="amp_L00"):
        Engine.open(bases(NAME), engram_dir=DATA / NAME, device=device, zchain=folders.zchain, posttrain=third)


def test_products_beyond_float32_are_refused(engines: Callable[..., Engine], tmp_path: Path) -> None:
    """Of two files, and of a factor with the base's gain."""
    second, third = tmp_path / "two", tmp_path / "three"
    huge = np.ones((CONFIG.n_routed_experts, CONFIG.hidden_size), np.float32)
    huge[2, 3] = 3e38
    for folder in (second, third):
        folder.mkdir()
        gain_path(folder, 0).write_bytes(encode_gains(huge, GAIN_F32))
    sign(third, second, CONFIG)
    with pytest.raises(FileFormatError, match=r"three.*beyond float32"):
        Mounted.open(CONFIG, second, third)
    engine = engines(NAME)
    lw = engine.weights.layers[0]
    gains = engine.device.upload(np.full(lw.experts.down_gains.size, 2.0, np.float32))
    weights = replace(engine.weights, layers=(replace(lw, experts=replace(lw.experts, down_gains=gains)),))
    with pytest.raises(FileFormatError, match=r"gr_L00.*expert 2, channel 3, is too large"):
        mount(weights, Mounted.open(CONFIG, second, None), engine.device)
