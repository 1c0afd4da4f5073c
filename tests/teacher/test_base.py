"""The teacher on a base file: every weight arrives under its released name, close to what was quantized."""

from pathlib import Path

import numpy as np
import pytest

from ds4.base.quantize import quantize
from ds4.errors import MissingTensorError
from ds4.teacher import source as sources
from ds4.teacher.dspark import Drafter
from ds4.teacher.files import load_results
from ds4.teacher.run import Teacher, Trace
from ds4.teacher.source import Source, open_source
from tests.teacher.oracles import DATA, reference, source, whole
from tests.teacher.test_commands import command as run_command

NAMES = ["oracle-a", "oracle-b"]
Q8_0_ERROR = 0.01  # half a step of 1/127 of a block's largest value, against an rms well below it
VQ_ERROR = 0.75  # six bits for eight weights: most of a Gaussian's energy is lost, none of its layout


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    for name in NAMES:
        quantize(DATA / name, folder / f"{name}.gguf", source(name).engram_tables(), bits=6)
    return {name: folder / f"{name}.gguf" for name in NAMES}


def opened(bases: dict[str, Path], name: str) -> Source:
    return open_source(bases[name], engram_dir=DATA / name)


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_is_the_checkpoints(bases: dict[str, Path], name: str) -> None:
    original, base = source(name), opened(bases, name)
    c = original.config
    infos = original._checkpoint.infos  # type: ignore[attr-defined]
    dense = [
        n for n in infos
        if n.startswith(("layers.", "mtp.", "norm", "embed", "head")) and ".ffn.experts." not in n
        and not n.endswith((".scale", ".engram.embed.weight")) and not (n.startswith("mtp.") and "bias_vl" in n)
    ]  # fmt: skip
    assert len(dense) > 100
    n_exact = 0
    for n in dense:
        want, got = original.dense(n), base.dense(n)
        assert whole(got, want) <= Q8_0_ERROR, n
        n_exact += bool((got == want).all())
    assert n_exact > len(dense) // 2  # F32, BF16 and FP8 tensors are not requantized
    for prefix, n_expert in [(f"layers.{i}", c.n_routed_experts) for i in range(c.num_hidden_layers)] + [
        (f"mtp.{i}", c.dspark_n_routed_experts) for i in range(c.num_nextn_predict_layers)
    ]:
        for e in range(n_expert):
            for want, got in zip(original.expert(prefix, e), base.expert(prefix, e)):
                assert whole(got, want) <= VQ_ERROR, (prefix, e)
    for layer in c.engram_layer_ids:
        rows = np.array([0, 5, 5, 17])
        np.testing.assert_array_equal(base.engram_rows(layer, rows), original.engram_rows(layer, rows))
    for field in ("token_map", "multipliers", "primes", "offsets"):
        np.testing.assert_array_equal(getattr(base.engram_tables(), field), getattr(original.engram_tables(), field))


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_blocks_are_slices_of_the_whole(
    bases: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "HEAD_BLOCK_ROWS", 100)  # 320 and 336 rows: a ragged last block
    ids = np.array([3, 0, 319, 3])
    for s in (source(name), opened(bases, name)):
        np.testing.assert_array_equal(s.rows("embed.weight", ids), s.dense("embed.weight")[ids])
        parts = list(s.blocks("head.weight"))
        assert len(parts) == 4
        np.testing.assert_array_equal(np.concatenate(parts), s.dense("head.weight"))
        # a type whose rows are not apart in the file takes the slow way round
        n = f"layers.{s.config.engram_layer_ids[0]}.engram.wkv.weight"
        if isinstance(s, sources.BaseSource):
            np.testing.assert_array_equal(s.rows(n, ids[:2]), s.dense(n)[ids[:2]])
            np.testing.assert_array_equal(np.concatenate(list(s.blocks(n))), s.dense(n))


@pytest.mark.parametrize("name", NAMES)
def test_decode_on_a_base_equals_its_prefill(bases: dict[str, Path], name: str) -> None:
    ids = reference(name)["input_ids"][:20]
    teacher = Teacher(opened(bases, name))
    prefilled = teacher.run(ids)["logits_TV"]
    assert whole(teacher.run(ids, decode_from=11)["logits_TV"], prefilled) < 2e-5
    assert whole(Teacher(source(name)).run(ids)["logits_TV"], prefilled) > 1e-2  # these are the base's weights


def test_drafts_from_a_base(bases: dict[str, Path]) -> None:
    teacher, trace = Teacher(opened(bases, "oracle-b")), Trace()
    teacher.forward(teacher.new_state(), reference("oracle-b")["input_ids"][:9], trace=trace)
    drafter = Drafter(teacher)
    drafter.commit(trace.main_hidden[0])
    drafted = drafter.draft(5)
    assert drafted.drafts_B.shape == (teacher.config.dspark_block_size,)
    assert np.isfinite(drafted.logits_BV).all() and np.isfinite(drafted.confidence_B).all()


def test_command_on_a_base(bases: dict[str, Path], tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", reference("oracle-a")["input_ids"][:9])
    code = run_command(
        "teacher", str(bases["oracle-a"]), "--ids", str(tmp_path / "ids.npy"), "-o", str(tmp_path / "out.npz"),
        "--engram-dir", str(DATA / "oracle-a"), "--streams",
    )  # fmt: skip
    assert code == 0
    got = load_results(tmp_path / "out.npz")
    expected = Teacher(opened(bases, "oracle-a")).run(reference("oracle-a")["input_ids"][:9], streams=True)
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)


def test_names_that_a_base_lacks(bases: dict[str, Path]) -> None:
    base = opened(bases, "oracle-a")
    assert not base.has("layers.0.attn.indexer.wk.weight")
    with pytest.raises(MissingTensorError, match=r"no tensor for layers\.0\.attn\.indexer\.wk\.weight"):
        base.dense("layers.0.attn.indexer.wk.weight")
