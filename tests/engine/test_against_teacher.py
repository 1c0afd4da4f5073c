"""Comparison mode: the kernels in float32 agree with the teacher on the same dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ds4.base.quantize import quantize
from ds4.base.reader import Base
from ds4.checkpoint.safetensors import load_arrays
from ds4.cli.quantize import tables_of
from ds4.engine import Engine
from ds4.engine.score import score
from ds4.teacher.run import Teacher
from ds4.teacher.source import BaseSource
from tests.conftest import opened
from tests.engine.conftest import DATA

PARITY = {"activations": "f32", "kv": "f32", "prefill": "full"}
LIMIT = 1e-4  # relative L2 of all logits; the teacher itself is float32, and its own noise is about 1e-5


def prompt(name: str, n: int = 48) -> list[int]:
    ids = load_arrays(DATA / name / "reference.safetensors")["input_ids"]
    return [int(i) for i in ids[:n]]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(float) - b) / np.linalg.norm(b.astype(float)))


@pytest.fixture(scope="module")
def teach(bases: Callable[[str], Path]) -> Callable[..., dict[str, np.ndarray]]:
    def run(
        name: str, ids: list[int], arith: str = "none", index_keys: str = "owner", decode_from: int | None = None
    ):
        source = BaseSource(Base.open(bases(name), DATA / name))
        return Teacher(source, arith, index_keys).run(np.asarray(ids), decode_from=decode_from, streams=True)

    return run


@pytest.mark.parametrize("name", ["oracle-a", "oracle-b", "oracle-e"])
def test_prefill_equals_the_teacher(engines: Callable[..., Engine], teach: Callable[..., dict], name: str) -> None:
    ids = prompt(name)
    want = teach(name, ids)
    got = score(engines(name, **PARITY), ids, streams=True)
    assert np.array_equal(got["hash_rows_TGN"], want["hash_rows_TGN"])
    assert distance(got["logits_TV"], want["logits_TV"]) <= LIMIT
    for layer, (mine, theirs) in enumerate(zip(got["streams_LTSD"], want["streams_LTSD"])):
        assert distance(mine, theirs) <= LIMIT, f"streams entering layer {layer}"


def test_every_width_of_index_equals_the_teacher(tmp_path: Path) -> None:
    """Layers of 10 to 13 bits in one base, gains that keep the rows' lengths."""
    path, folder, ids = tmp_path / "widths.gguf", DATA / "oracle-a", prompt("oracle-a", 24)
    quantize(folder, path, tables_of(folder), bits=[13, 12, 11, 10, 10, 11, 12], gain="norm")
    want = Teacher(BaseSource(Base.open(path, folder))).run(np.asarray(ids), decode_from=16)["logits_TV"]
    engine = Engine.open(path, engram_dir=folder, device=opened("fast", "greedy"), **PARITY)
    assert distance(score(engine, ids, split=16)["logits_TV"], want) <= LIMIT
    engine.close()


@pytest.mark.parametrize("index_keys", ["owner", "released"])
@pytest.mark.parametrize("name", ["oracle-a", "oracle-b", "oracle-e"])
def test_decode_equals_the_teacher(
    engines: Callable[..., Engine], teach: Callable[..., dict], name: str, index_keys: str
) -> None:
    ids = prompt(name, 36)
    want = teach(name, ids, index_keys=index_keys, decode_from=25)
    got = score(engines(name, index_keys=index_keys, **PARITY), ids, split=25)
    assert distance(got["logits_TV"], want["logits_TV"]) <= LIMIT


def test_index_keys_make_a_difference(engines: Callable[..., Engine]) -> None:
    """The released slot is not a no-op here, or the test above would show nothing."""
    ids = prompt("oracle-a", 36)
    owner = score(engines("oracle-a", **PARITY), ids, split=25)["logits_TV"]
    released = score(engines("oracle-a", index_keys="released", **PARITY), ids, split=25)["logits_TV"]
    assert np.array_equal(owner[:25], released[:25])
    assert distance(released[25:], owner[25:]) > 1e-2


def test_stored_caches_equal_the_teachers_kv_rounding(
    engines: Callable[..., Engine], teach: Callable[..., dict]
) -> None:
    """kv="fp4" with float32 activations is the teacher's `kv`; a value on a rounding edge may flip and spread."""
    ids = prompt("oracle-b")
    want = teach("oracle-b", ids, arith="kv")["logits_TV"]
    got = score(engines("oracle-b", activations="f32", kv="fp4"), ids)["logits_TV"]
    rows = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert np.median(rows) <= 1e-4
    assert distance(want, teach("oracle-b", ids)["logits_TV"]) > 1e-2


@pytest.mark.parametrize(
    ("name", "kv", "arith", "limit"),
    [("oracle-a", "f32", "none", 0.2), ("oracle-b", "f32", "none", 0.2), ("oracle-b", "fp4", "kv", 0.3)],
)
def test_bf16_mode_is_near(
    engines: Callable[..., Engine], teach: Callable[..., dict], name: str, kv: str, arith: str, limit: float
) -> None:
    """bf16 between blocks is another arithmetic, and random weights amplify it (0.12 to 0.17 of a row's norm in the
    median when this was written); a wrong formula moves every row by about its norm.
    """
    ids = prompt(name)
    want = teach(name, ids, arith=arith)["logits_TV"]
    got = score(engines(name, kv=kv), ids)["logits_TV"]
    rows = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert np.median(rows) <= limit


def test_check_build_sees_nothing_wrong(bases: Callable[[str], Path]) -> None:
    """A prefill, steps of one and several rows, and a captured one, under bounds, race and NaN checks."""
    engine = Engine.open(bases("oracle-a"), engram_dir=DATA / "oracle-a", device=opened("check", "greedy"))
    session = engine.session()
    session.sync(prompt("oracle-a", 13))
    assert np.isfinite(session.step(prompt("oracle-a", 5))).all()
    for token in (5, 6, 7):
        session.step([token])
    assert session.counts["captures"] == 1
