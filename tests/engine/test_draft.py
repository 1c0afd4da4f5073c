"""Rounds of the draft head on kernels: equal to the fixtures' and to the teacher's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.base.quantize import quantize
from ds4.base.reader import Base
from ds4.checkpoint.safetensors import load_arrays
from ds4.cli.quantize import tables_of
from ds4.device import Device
from ds4.engine import Engine
from ds4.engine.draft_weights import draft_bytes, place_draft
from ds4.engine.layer import Numerics
from ds4.engine.state import SLACK
from ds4.engine.weights import BaseTensors, ModelWeights, Placer, kernel_constants
from ds4.teacher.dspark import Drafter as TeacherDrafter
from ds4.teacher.dspark import Round
from ds4.teacher.run import Teacher
from ds4.teacher.source import BaseSource
from tests.engine.conftest import DATA
from tests.engine.draft_bench import DEFAULT, EXACT, F32, Bench, bench_of, bench_on, gaussian_rows
from tests.engine.test_against_teacher import distance
from tests.toy import make

LIMIT = 1e-4  # relative L2, as for the engine's logits against the teacher's


@cache
def reference(name: str) -> dict[str, NDArray]:
    return load_arrays(DATA / name / "reference.safetensors")


CASES = [
    (name, "", mode) for name in ("oracle-a", "oracle-b", "oracle-e") for mode in ("owner", "released")
] + [("oracle-e", "short.", "owner")]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "mode"), CASES)
def test_rounds_of_the_fixtures(name: str, kind: str, mode: str) -> None:
    """Seeded from the prompt's rows, one row committed a round; oracle-e's ring wraps, its short prompt does not fill
    the window.
    """
    bench, ref = bench_of(name), reference(name)
    drafter = bench.drafter()
    main = ref[f"{kind}prefill.main_hidden"]
    drafter.seed(bench.rows(main), 0, len(main))
    key = f"{kind}dspark.{mode}."
    assert (len(main) < bench.config.sliding_window) == (kind == "short.")
    got = []
    for k, row in enumerate(ref[f"{kind}decode.{mode}.main_hidden"]):
        bench.commit(drafter, row[None])
        anchor, *drafts = ref[key + "drafts"][k].tolist()
        got.append(bench.draft(drafter, anchor))
        assert got[-1][0] == drafts, f"round {k}"
    assert distance(np.array([g[2] for g in got]), ref[key + "confidence"]) <= LIMIT
    if key + "markov_logits" in ref:
        assert distance(np.array([g[1] for g in got]), ref[key + "markov_logits"]) <= LIMIT


def taught(base: Path, arith: str, main: F32, commits: list[int], token: int) -> list[Round]:
    """The teacher's rounds on a base's weights, one after each commit."""
    source = BaseSource(Base.open(base, with_shards=False))
    teacher, rounds, at = TeacherDrafter(Teacher(source, arith)), [], 0
    for n in commits:
        teacher.commit(main[at : at + n])
        rounds.append(teacher.draft(token))
        at += n
    return rounds


# rows committed before each round: one alone, fewer than a window, more than the ring (window + 64) holds
COMMITS = {"one": [1], "short": [3, 1, 2], "window": [8, 1], "wrapped": [90, 5, 1, 4]}


@pytest.mark.parametrize("commits", COMMITS)
@pytest.mark.parametrize("name", ["oracle-a", "oracle-b", "oracle-e"])
def test_rounds_from_a_base_are_the_teachers(engines: Callable[..., Engine], name: str, commits: str) -> None:
    """Weights as a base holds them, any rows: the draft head does not know where they come from."""
    engine = engines(name, activations="f32", kv="f32", prefill="full")
    bench = bench_on(engine)
    assert draft_bytes(engine.base) > 0
    main = gaussian_rows(engine.config, sum(COMMITS[commits]))
    drafter, at = bench.drafter(), 0
    for n, want in zip(COMMITS[commits], taught(Path(engine.base.path), "none", main, COMMITS[commits], 7)):
        for i in range(at, at + n, 8):
            bench.commit(drafter, main[i : min(i + 8, at + n)])
        at += n
        drafts, logits, confidence = bench.draft(drafter, 7)
        assert drafts == want.drafts_B.tolist()
        assert distance(logits, want.logits_BV) <= LIMIT and distance(confidence, want.confidence_B) <= LIMIT


def test_packed_keys_are_the_teachers_kv_rounding(engines: Callable[..., Engine]) -> None:
    """kv="fp4" with float32 activations; keys rounded another way would be off by percents."""
    engine = engines("oracle-b", activations="f32", kv="f32", prefill="full")
    bench = bench_on(engine)
    main = gaussian_rows(engine.config, 20)
    drafter = bench.drafter(Numerics("f32", "fp4"))
    drafter.seed(bench.rows(main), 0, len(main))
    got = bench.draft(drafter, 9)[1]
    (want,) = taught(Path(engine.base.path), "kv", main, [20], 9)
    (plain,) = taught(Path(engine.base.path), "none", main, [20], 9)
    assert distance(got, want.logits_BV) <= LIMIT
    assert distance(plain.logits_BV, want.logits_BV) > 10 * LIMIT


def test_bf16_is_near() -> None:
    """Another arithmetic, which random weights amplify; a wrong formula moves rows by about their norm."""
    bench = bench_of("oracle-b")
    main, got = gaussian_rows(bench.config, 30), []
    for numerics in (EXACT, DEFAULT):
        drafter = bench.drafter(numerics)
        drafter.seed(bench.rows(main, numerics.act), 0, len(main))
        got.append(bench.draft(drafter, 5)[1][0])  # later rows are biased by earlier drafts
    assert distance(got[1], got[0]) <= 0.3


def test_a_smaller_block_is_the_teachers_smaller_block(engines: Callable[..., Engine]) -> None:
    """Block rows see each other, so fewer of them are other drafts, not a prefix."""
    engine = engines("oracle-b", activations="f32", kv="f32", prefill="full")
    small = replace(engine.config, dspark_block_size=2)
    bench = bench_on(engine, small)
    main = gaussian_rows(small, 14)
    drafter = bench.drafter()
    drafter.seed(bench.rows(main), 0, len(main))
    drafts, logits, _ = bench.draft(drafter, 9)
    source = BaseSource(Base.open(engine.base.path, with_shards=False))
    source.config = small
    teacher = TeacherDrafter(Teacher(source))
    teacher.commit(main)
    want = teacher.draft(9)
    assert drafts == want.drafts_B.tolist() and distance(logits, want.logits_BV) <= LIMIT


def test_the_embedded_models_sizes(tmp_path: Path, fast_device: Device) -> None:
    """A toy of its shape, indices of 8 bits: dense tensors in tiles, a vocabulary of thousands, a ring that wraps."""
    make(tmp_path / "ckpt", 1)
    quantize(tmp_path / "ckpt", tmp_path / "toy.gguf", tables_of(tmp_path / "ckpt"), bits=8)
    base = Base.open(tmp_path / "toy.gguf", with_shards=False)
    device = fast_device.with_constants(kernel_constants(base.config))
    placer = Placer(BaseTensors(base), base.config, device)
    ends = [placer.matrix("token_embd.weight"), placer.matrix("output.weight")]
    model = ModelWeights(ends[0], (), placer.vector("output_norm.weight"), ends[1])
    bench = Bench(device, base.config, place_draft(base, device, model))
    n = base.config.sliding_window + SLACK + 30
    main = gaussian_rows(base.config, n)
    drafter = bench.drafter()
    drafter.seed(bench.rows(main[: n - 3]), 0, n)
    bench.commit(drafter, main[n - 3 :])
    drafts, logits, confidence = bench.draft(drafter, 1234)
    (want,) = taught(tmp_path / "toy.gguf", "none", main, [n], 1234)
    assert drafts == want.drafts_B.tolist() and len(drafts) == 5
    assert distance(logits, want.logits_BV) <= LIMIT and distance(confidence, want.confidence_B) <= LIMIT
