"""The training forward in float32 equals the teacher on the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.engram.tables import EngramTables, derive_tables
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer
from ds4.teacher.run import Teacher
from tests import toy
from train import vocabulary
from train.tests.memory_source import MemorySource
from train.weights import from_released, read_checkpoint, state_shapes, to_released

torch = pytest.importorskip("torch")
from train import model as training  # noqa: E402  # needs torch

DATA = Path(__file__).parents[2] / "tests/data"
F32 = NDArray[np.float32]
Case = tuple[ModelConfig, dict[str, F32], EngramTables]


@pytest.fixture(scope="module")
def embedded() -> Case:
    """The embedded model's dimensions, random weights that no format has rounded."""
    text = toy.make_tokenizer()
    config = ModelConfig.from_json(vocabulary.make_config(text))
    state = from_released(config, toy.make_weights(config, 5))
    return config, state, derive_tables(config, Tokenizer.from_json(text))


def fixture(name: str) -> Case:
    config, state = read_checkpoint(DATA / name)
    return config, state, derive_tables(config, Tokenizer.from_file(DATA / name / "tokenizer.json", config))


def teacher_logits(case: Case, ids: NDArray[np.int64]) -> F32:
    config, state, tables = case
    teacher = Teacher(MemorySource(config, to_released(config, state), tables))
    return teacher.forward(teacher.new_state(), ids)


def build(case: Case) -> training.Model:
    config, state, tables = case
    model = training.Model(config, tables, torch.float32)
    model.load_weights({n: torch.from_numpy(w) for n, w in state.items() if not n.startswith("mtp.")})
    return model


def training_logits(model: training.Model, ids: NDArray[np.int64], sparse: bool = True) -> F32:
    """Windows [B, n] -> logits [B, n, V]. A window must be whole; what is appended stands after every row judged."""
    whole = np.pad(ids, ((0, 0), (0, -ids.shape[1] % model.config.sliding_window)))
    with torch.no_grad():
        hidden, run = model.trunk(torch.from_numpy(whole), sparse=sparse)
        logits = model.logits(hidden).numpy().reshape(*whole.shape, -1)[:, : ids.shape[1]]
    if sparse and ids.shape[1] > 2 * model.config.index_topk:
        chosen = [g.chosen for g in run.groups]
        assert all(
            c is not None and (c[:, -1].sum(-1) == model.config.index_topk).all() for c in chosen
        )  # it does cut
    return np.asarray(logits)


def test_its_weights_are_what_export_asks_for(embedded: Case) -> None:
    shapes = {n: tuple(w.shape) for n, w in build(embedded).weights().items()}
    assert shapes == {n: s for n, s in state_shapes(embedded[0]).items() if not n.startswith("mtp.")}


def random_ids(config: ModelConfig, n: int) -> NDArray[np.int64]:
    return np.random.default_rng(n).integers(0, config.vocab_size, n)


def assert_close(got: F32, want: F32) -> None:
    """Every row within 1e-4 relative L2 (measured: 1e-6, rows at most 1e-5)."""
    rows = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    wrong = np.flatnonzero(rows > 1e-4)
    assert not len(wrong), f"{len(wrong)} rows differ, the first is {wrong[0]}, by {rows[wrong[0]]:.2g}"


@pytest.mark.parametrize("n", [200, 600])
def test_the_embedded_dimensions_equal_the_teacher(embedded: Case, n: int) -> None:
    """200: the index cuts. 600: the candidate pool (256 rows) cuts too."""
    ids = random_ids(embedded[0], n)
    assert_close(training_logits(build(embedded), ids[None])[0], teacher_logits(embedded, ids))


@pytest.mark.parametrize("name", ["oracle-a", "oracle-b"])
@pytest.mark.parametrize("n", [30, 200])
def test_a_fixture_equals_the_teacher(name: str, n: int) -> None:
    case = fixture(name)
    ids = random_ids(case[0], n)
    assert_close(training_logits(build(case), ids[None])[0], teacher_logits(case, ids))


def test_where_nothing_is_cut_the_dense_pass_is_the_same(embedded: Case) -> None:
    ids = random_ids(embedded[0], embedded[0].index_topk)
    assert_close(training_logits(build(embedded), ids[None], sparse=False)[0], teacher_logits(embedded, ids))


def test_windows_of_a_batch_do_not_meet(embedded: Case) -> None:
    model, ids = build(embedded), random_ids(embedded[0], 2 * 192).reshape(2, 192)
    together = training_logits(model, ids)
    for row in range(2):
        assert_close(together[row], training_logits(model, ids[row : row + 1])[0])


def test_equal_scores_go_to_the_lowest_row() -> None:
    """Scores of exactly 0 are common: relu closes every head of a row."""
    hidden = -torch.inf
    scores = torch.tensor([[0.0, 1.0, 0.0, 0.0, -1.0], [0.0] * 5, [0.0, -1.0, hidden, hidden, hidden], [hidden] * 5])
    want = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    assert torch.equal(training.best(scores[None], 3)[0], want)
    wide = torch.zeros(1, 1, 500)
    assert torch.equal(training.best(wide, 64)[0, 0].nonzero()[:, 0], torch.arange(64))
