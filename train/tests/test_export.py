"""`train.export`: the released layout from a training state, whole or not there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.checkpoint import codecs, writer
from ds4.checkpoint.names import expected
from ds4.checkpoint.preflight import preflight
from ds4.checkpoint.reader import Checkpoint
from ds4.errors import CapacityError, FileFormatError, MissingTensorError, UsageError
from ds4.model.config import ModelConfig
from tests import toy
from train import export as ex
from train import vocabulary
from train.weights import from_released, read_checkpoint, state_shapes

F32 = NDArray[np.float32]
DATA = Path(__file__).parents[2] / "tests/data"
Run = tuple[dict[str, Any], dict[str, F32], Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Raw configuration, training state and tokenizer of the embedded model's dimensions, random weights."""
    path = tmp_path_factory.mktemp("run") / "tokenizer.json"
    path.write_text(toy.make_tokenizer())
    raw = vocabulary.make_config(path.read_text())
    config = ModelConfig.from_json(raw)
    return raw, from_released(config, toy.make_weights(config, 1)), path


@pytest.fixture(scope="module")
def exported(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ex.PartSize]]:
    folder = tmp_path_factory.mktemp("out") / "model"
    return folder, ex.export(*run, folder)


def test_it_is_a_whole_checkpoint_in_the_released_layout(exported: tuple[Path, list[ex.PartSize]], run: Run) -> None:
    folder, _ = exported
    assert preflight(folder) == []
    names = [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    rest = ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert sorted(p.name for p in folder.iterdir()) == sorted(names + rest)
    checkpoint = Checkpoint.open(folder)
    assert [checkpoint.engram_file(layer)[0].name for layer in (1, 3)] == names[2:]
    assert {n for n, i in checkpoint.infos.items() if i.dtype == "I8"} == {
        n for n in checkpoint.infos if ".ffn.experts." in n and n.endswith(".weight")
    }
    assert json.loads((folder / "config.json").read_text()) == run[0]
    assert (folder / "tokenizer.json").read_bytes() == run[2].read_bytes()
    assert list(folder.parent.iterdir()) == [folder]


def test_it_reads_back_as_the_state_within_rounding(exported: tuple[Path, list[ex.PartSize]], run: Run) -> None:
    _, state = read_checkpoint(exported[0])
    for name, w in run[1].items():
        error = np.linalg.norm(state[name] - w) / max(np.linalg.norm(w), 1e-30)
        # normal weights: FP4 .111, FP8 .0266; bf16 at most 2^-9
        most = 0.115 if ".ffn.experts." in name else 0.03
        assert error < most, name


def test_parts_add_up_and_fit_the_budget(exported: tuple[Path, list[ex.PartSize]], run: Run) -> None:
    folder, parts = exported
    assert sum(p.n_bytes for p in parts) == sum(
        s.nbytes for s in expected(ModelConfig.from_json(run[0])).values() if s.required
    )
    assert sum(p.stat().st_size for p in folder.iterdir()) <= ex.BUDGET_BYTES
    error = {p.part: p.error for p in parts}
    assert error["hyper"] == 0 and 0 < error["global"] < 0.003
    assert 0.02 < error["table"] < 0.03 and 0.02 < error["shared"] < 0.03 and 0.10 < error["experts"] < 0.115


def test_fitted_scales_are_what_is_stored(exported: tuple[Path, list[ex.PartSize]], run: Run) -> None:
    w = run[1]["layers.2.ffn.experts.w2"][7]
    checkpoint = Checkpoint.open(exported[0])
    stored = checkpoint.tensor("layers.2.ffn.experts.7.w2.weight")
    plain = codecs.dequant_fp4(*writer.encode_fp4(w))
    assert np.linalg.norm(stored - w) < 0.98 * np.linalg.norm(plain - w)
    assert np.array_equal(stored, codecs.dequant_fp4(*writer.encode_fp4(w, fit_scales=True)))


def test_the_trunk_alone(run: Run, tmp_path: Path) -> None:
    raw, state, tokenizer = run
    trunk = {n: w for n, w in state.items() if not n.startswith("mtp.")}
    with pytest.raises(MissingTensorError, match=r"3 draft stages .* export with --without-draft"):
        ex.refuse_no_draft(raw, trunk, Path("x.pt"))
    for given in (trunk, state):
        less, kept = ex.without_draft(raw, given)
        ex.refuse_no_draft(less, kept, Path("x.pt"))
        ex.export(less, kept, tokenizer, tmp_path / "out", force=True)
        config = ModelConfig.load(tmp_path / "out")
        assert (config.num_nextn_predict_layers, config.compress_ratios) == (0, (0, 2, 2, 1, 1, 1))
        assert preflight(tmp_path / "out") == []
    assert raw["text_config"]["num_nextn_predict_layers"] == 3  # the caller's is left alone


def test_an_existing_folder_is_kept_unless_forced(run: Run, tmp_path: Path) -> None:
    raw, state = ex.without_draft(run[0], run[1])
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("mine")
    with pytest.raises(UsageError, match="is there already; --force replaces it"):
        ex.export(raw, state, run[2], folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds notes\.txt, which no export wrote"):
        ex.export(raw, state, run[2], folder, force=True)
    assert (folder / "config.json").read_text() == "mine"
    (folder / "notes.txt").unlink()
    (tmp_path / "out.part").mkdir()  # of an interrupted export
    (tmp_path / "out.part/half").write_text("x")
    ex.export(raw, state, run[2], folder, force=True)
    assert preflight(folder) == [] and list(tmp_path.iterdir()) == [folder]
    with pytest.raises(UsageError, match="no such folder to write it in"):
        ex.export(raw, state, run[2], tmp_path / "no/such")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is no folder"):
        ex.export(raw, state, run[2], tmp_path / "file", force=True)


def test_a_failed_write_leaves_the_old_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, state = ex.without_draft(run[0], run[1])
    ex.export(raw, state, run[2], tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ex, "write_checkpoint", full)
    with pytest.raises(FileFormatError, match=r"cannot be written .No space left"):
        ex.export(raw, state, run[2], tmp_path / "out", force=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_too_little_disk_and_too_large_a_model(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, state, tokenizer = run
    monkeypatch.setattr(ex.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10_000_000}))
    with pytest.raises(CapacityError, match=r"needs 16.\d MB, 10.0 MB are free"):
        ex.export(raw, state, tokenizer, tmp_path / "out")
    monkeypatch.setattr(ex, "BUDGET_BYTES", 15_000_000)
    with pytest.raises(CapacityError, match=r"takes 15.\d\d MB, the tree has room for 15 MB"):
        ex.export(raw, state, tokenizer, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_state_that_is_not_the_configurations(run: Run, tmp_path: Path) -> None:
    raw, state, tokenizer = run
    _, other = read_checkpoint(DATA / "oracle-b")
    with pytest.raises(MissingTensorError, match=r"embed\.weight is"):
        ex.export(raw, other, tokenizer, tmp_path / "out")
    with pytest.raises(MissingTensorError, match=r"missing: norm.weight$"):
        ex.export(raw, {n: w for n, w in state.items() if n != "norm.weight"}, tokenizer, tmp_path / "out")
    with pytest.raises(MissingTensorError, match=r"not finite: norm.weight$"):
        ex.export(raw, {**state, "norm.weight": np.full(192, np.inf, np.float32)}, tokenizer, tmp_path / "out")
    with pytest.raises(FileFormatError):
        ex.export(raw, state, DATA / "oracle-b/tokenizer.json", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def save(tmp_path: Path, run: Run) -> Callable[..., Path]:
    """Writes a working folder with one training file; returns the file."""
    torch = pytest.importorskip("torch")

    def write(name: str, content: dict[str, Any] | None = None) -> Path:
        path = tmp_path / "work/runs/trial" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "work/tokenizer.json").write_bytes(run[2].read_bytes())
        weights = {n: torch.from_numpy(w) for n, w in run[1].items()}
        torch.save({"config": run[0], "weights": weights, "step": 3} if content is None else content, path)
        return path

    return write


def test_the_command(save: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("step-1.pt")
    argv = ["--work", str(tmp_path / "work"), "--run", "trial", "-o", str(tmp_path / "out")]
    assert ex.main(argv) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{tmp_path / 'work/runs/trial/step-1.pt'} -> ") and "\nexperts " in printed
    assert preflight(tmp_path / "out") == []
    assert ex.main(argv) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert ex.main([*argv, "--force", "--without-draft", "--file", "step-1.pt"]) == 0
    assert ModelConfig.load(tmp_path / "out").num_nextn_predict_layers == 0


def test_the_command_refuses(
    save: Callable[..., Path], run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    def fails(*extra: str, run_name: str = "trial") -> tuple[int, str]:
        argv = ["--work", str(tmp_path / "work"), "--run", run_name, "-o", str(tmp_path / "out"), *extra]
        return ex.main(argv), capsys.readouterr().err

    assert fails() == (
        2,
        f"train.export: {tmp_path}/work/runs/trial: no such run; there is none in {tmp_path}/work/runs\n",
    )
    path = save("a.pt")
    path.write_bytes(path.read_bytes()[:100_000])
    code, text = fails()
    assert code == 1 and "is not a whole file of this training" in text
    save("a.pt", {"weights": {}})
    code, text = fails()
    assert code == 1 and "has no `config` and `weights`" in text
    trunk = {n: torch.from_numpy(w) for n, w in run[1].items() if not n.startswith("mtp.")}
    save("a.pt", {"config": run[0], "weights": trunk})
    code, text = fails()
    assert code == 1 and "export with --without-draft" in text
    code, text = fails(run_name="other")
    assert code == 2 and "there are trial" in text
    code, text = fails("--file", "b.pt")
    assert code == 2 and "there are a.pt" in text
    assert not (tmp_path / "out").exists()


def test_the_state_of_the_embedded_dimensions_is_what_training_holds(run: Run) -> None:
    shapes = state_shapes(ModelConfig.from_json(run[0]))
    assert shapes["layers.5.ffn.experts.w13"] == (24, 192, 192)
    assert shapes["mtp.2.markov_head.embed.weight"] == (4096, 64)
