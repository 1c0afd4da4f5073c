"""tests/toy.py: a checkpoint of random weights that is whole, small, well-scaled and the same every time."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from ds4.checkpoint.preflight import preflight
from ds4.checkpoint.reader import Checkpoint
from ds4.engram.tables import derive_tables
from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import RELEASED_IDS, Special, Tokenizer
from tests.toy import make


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("toy") / "a/b"
    make(path, 1)
    return path


def digest(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.iterdir()}


def test_it_is_a_whole_small_checkpoint(toy: Path) -> None:
    assert preflight(toy) == []
    assert sum(p.stat().st_size for p in toy.iterdir()) <= 16_000_000
    c = Checkpoint.open(toy)
    assert c.engram_file(1)[0].name == "model-00003-of-00004.safetensors"
    assert c.engram_file(3)[0].name == "model-00004-of-00004.safetensors"


def test_it_has_every_mechanism(toy: Path) -> None:
    c = ModelConfig.load(toy)
    layers = range(c.num_hidden_layers)
    assert {c.compress_ratios[i] for i in layers} == {0, 1, 2}
    assert any(c.uses_candidates(i) for i in layers)
    assert any(i not in c.kv_source_layer_ids and c.kv_owner(i) is not None for i in layers)  # shared caches
    # top-k and candidate blocks both cut within the context
    assert c.index_topk < c.candidate_topk_blocks * c.candidate_block_size < c.max_position_embeddings
    assert c.max_position_embeddings >= 4096 and c.num_nextn_predict_layers == 3
    assert c.rope_frequencies(1) != c.rope_frequencies(0)


def test_tokenizer_and_tables_belong_to_the_config(toy: Path) -> None:
    c = ModelConfig.load(toy)
    t = Tokenizer.from_file(toy, c)
    derive_tables(c, t)
    assert set(t.added) == set(RELEASED_IDS)
    text = "def f(x):\n    return x + 12345  # café 中文 \u2603\n"
    ids = t.encode(text)
    assert t.decode(ids) == text and len(ids) < 0.7 * len(text.encode())  # it did learn merges
    assert ids == Tokenizer.from_parts(t.tokens, t.merges, t.token_types, c).encode(text)
    assert t.encode_segments([Special("<think>"), "<think>"])[0] == t.special_id("<think>")
    assert t.special_id("<think>") not in t.encode("<think>")


def test_weights_are_scaled_to_their_inputs(toy: Path) -> None:
    c = Checkpoint.open(toy)
    for name, info in c.infos.items():
        if info.dtype == "F8_E8M0" or ".engram.embed." in name or name.startswith(("embed.", "head.")):
            continue
        w = c.tensor(name)
        assert np.isfinite(w).all()
        if w.ndim == 2 and w.size > 5000 and "markov_head.embed" not in name:
            # FP4 rounding adds up to a tenth; the sample's own deviation is below 2 % here
            assert 0.9 < w.std() * np.sqrt(w.shape[1]) < 1.15, name
    assert 0.9 < c.engram_rows(1, np.arange(500)).std() < 1.1


def test_same_seed_same_bytes_and_run_again(toy: Path, tmp_path: Path) -> None:
    before = digest(toy)
    (toy / "config.json").unlink()  # an interrupted run: the last file is not there
    (toy / "model-00002-of-00004.safetensors").write_bytes(b"half")
    make(toy, 1)
    assert digest(toy) == before
    make(tmp_path, 2)
    other = digest(tmp_path)
    same = {name for name in before if other[name] == before[name]}
    assert same == {"config.json", "tokenizer.json", "model.safetensors.index.json"}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileFormatError, match="cannot be made"):
        make(tmp_path / "file", 1)
