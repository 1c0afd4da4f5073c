"""Tokenizer, dialogues and token files: what the product reads, and the same batches after a break."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ds4.errors import FileFormatError
from ds4.model.completion import argument_values, parse_ids
from ds4.model.tokenizer import ASSISTANT, BOS, EOS, RELEASED_IDS, THINK
from train import config, data, dialogues, tokenizer
from train.tests.made_up import write_corpora

ROWS = 120


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    write_corpora(folder)
    assert dialogues.main(["--work", str(folder), "--count", str(ROWS)]) == 0
    assert tokenizer.main(["--work", str(folder)]) == 0
    assert data.main(["--work", str(folder)]) == 0
    return folder


@pytest.fixture
def copy(work: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(work, tmp_path / "copy"))


def test_the_tokenizer_has_every_special_of_the_release_and_fits_its_config(work: Path) -> None:
    product = config.read_tokenizer(work)
    assert product.vocab_size == 4096 and set(RELEASED_IDS) <= set(product.added)
    assert [product.special_id(n) for n in (BOS, EOS)] == [0, 1]
    raw, read = config.read_config(work)
    assert raw["text_config"]["dspark_markov_rank"] == 64 and read.vocab_size == 4096


def test_the_same_corpora_give_the_same_files(work: Path, copy: Path) -> None:
    def hashes(folder: Path) -> dict[str, str]:
        names = ["tokenizer.json", "config.json", "corpora/dialogues.train.jsonl", "tokens/general.train.bin"]
        return {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names}

    shutil.rmtree(copy / "tokens")
    (copy / "tokenizer.json").unlink()
    dialogues.write(copy, "train", ROWS)
    tokenizer.make(copy)
    data.encode_all(copy)
    assert hashes(copy) == hashes(work)


def test_plain_documents_are_what_the_product_encodes_between_bos_and_eos(work: Path) -> None:
    product = config.read_tokenizer(work)
    for domain in ("code", "chinese", "science"):
        file = data.TokenFile(work, domain, "judge")
        texts = [row["text"] for row in config.read_rows(config.corpus_path(work, domain, "judge"))]
        ends = [*file.starts[1:], len(file.ids)]
        assert len(file.starts) == len(texts)
        for text, a, b in zip(texts, file.starts, ends):
            assert file.ids[a:b].tolist() == [0, *product.encode(text), 1]


def test_text_that_spells_a_special_token_stays_text(copy: Path) -> None:
    text = f"a {BOS} b {EOS} c {THINK} d"
    row = json.dumps({"source": "x", "text": text})
    config.corpus_path(copy, "law", "judge").write_text(row + "\n", encoding="utf-8")
    data.encode_all(copy)
    ids = data.TokenFile(copy, "law", "judge").ids.tolist()
    product = config.read_tokenizer(copy)
    assert product.decode(ids[1:-1]) == text and not any(product.is_added(i) for i in ids[1:-1])


def test_dialogues_are_what_the_server_renders_and_parse_back(work: Path) -> None:
    product = config.read_tokenizer(work)
    rows = list(config.read_rows(config.corpus_path(work, "dialogues", "train")))
    file = data.TokenFile(work, "dialogues", "train")
    assert len(rows) == len(file.starts) == ROWS
    called = 0
    for row, a, b in zip(rows, file.starts, [*file.starts[1:], len(file.ids)]):
        ids = file.ids[a:b].tolist()
        assert ids[0] == product.special_id(BOS) and ids[-1] == product.special_id(EOS)
        at = len(ids) - 1 - ids[::-1].index(product.special_id(ASSISTANT))
        assert (ids[at + 1] == product.special_id(THINK)) == row["thinking"]
        answer = row["messages"][-1]
        got = parse_ids(ids[at + 2 :], product, thinking=row["thinking"])
        assert got.content == answer["content"] and not got.malformed
        assert got.reasoning == (answer["reasoning_content"] if row["thinking"] else "")
        calls = answer.get("tool_calls") or []
        called += len(calls)
        wanted = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
        assert [(c.name, argument_values(c)) for c in got.calls] == wanted
    assert called


def test_the_index_counts_tokens_and_bytes(work: Path) -> None:
    index = data.read_index(work)
    texts = [row["text"] for row in config.read_rows(config.corpus_path(work, "law", "fit"))]
    assert index["law.fit"]["bytes"] == sum(len(t.encode()) for t in texts)
    assert index["law.fit"]["tokens"] == len(data.TokenFile(work, "law", "fit").ids)
    assert data.bytes_per_token(work)["law.fit"] == index["law.fit"]["bytes"] / index["law.fit"]["tokens"]
    assert "unseen.judge" in index and "unseen.train" not in index


def test_batches_depend_on_seed_rank_and_step_only(work: Path) -> None:
    def batches(seed: int = 3, rank: int = 0) -> data.Batches:
        return data.Batches(work, {"code": 0.3, "general": 0.6, "dialogues": 0.1}, 8, 32, seed, rank)

    first = batches()
    forward = [first.batch(n) for n in range(5)]
    resumed = batches()
    assert all(np.array_equal(resumed.batch(n), forward[n]) for n in (4, 2, 3))
    assert forward[0].shape == (8, 33) and forward[0].dtype == np.int64
    assert not np.array_equal(forward[0], forward[1])
    assert not np.array_equal(batches(rank=1).batch(0), forward[0])
    assert not np.array_equal(batches(seed=4).batch(0), forward[0])


def test_batches_follow_the_mix_and_begin_dialogues_at_their_start(work: Path) -> None:
    rows = np.concatenate([data.Batches(work, {"dialogues": 1}, 16, 32, 1, 0).batch(n) for n in range(40)])
    share = float(np.mean(rows[:, 0] == 0))
    assert 0.7 < share < 0.9
    code = {tuple(w) for w in np.lib.stride_tricks.sliding_window_view(data.TokenFile(work, "code", "train").ids, 33)}
    mixed = data.Batches(work, {"code": 1, "law": 3}, 16, 32, 1, 0)
    assert all(sum(tuple(row) in code for row in mixed.batch(n)) == 4 for n in range(10))


def test_held_out_windows_are_evenly_spaced_and_do_not_overlap(work: Path) -> None:
    ids = data.TokenFile(work, "general", "judge").ids
    windows = data.held_out(work, "general", "judge", 3, 50)
    assert windows.shape == (3, 51)
    assert np.array_equal(windows[0], ids[:51]) and np.array_equal(windows[-1], ids[-51:])
    assert len(data.held_out(work, "general", "judge", 10**6, 50)) == len(ids) // 51


def test_an_interrupted_encoding_goes_on_where_it_was(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.token_path(copy, "law", "train").unlink()
    data.encode_all(copy)
    out = capsys.readouterr().out
    assert "law.train: 2" in out and "code.train: is there" in out


@pytest.mark.parametrize("key, value", [("hidden_size", 256), ("dspark_markov_rank", 32)])
def test_a_config_of_other_dimensions_is_refused(copy: Path, key: str, value: int) -> None:
    raw = json.loads((copy / "config.json").read_text())
    raw["text_config"][key] = value
    (copy / "config.json").write_text(json.dumps(raw))
    with pytest.raises(FileFormatError, match=f"{key} is {value}, this checkout trains"):
        config.read_config(copy)


def test_bad_input_is_one_clear_error(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data.main(["--work", str(tmp_path / "none")]) == 1
    assert "run `python -m train.tokenizer` first" in capsys.readouterr().err
    assert tokenizer.main(["--work", str(tmp_path / "none")]) == 1
    assert "run `python -m train.corpora`" in capsys.readouterr().err
    config.corpus_path(copy, "law", "train").write_text('{"source": "x", "text": "y"}\n{"source": \n')
    assert data.main(["--work", str(copy)]) == 1
    assert "law.train.jsonl: line 2 is not JSON" in capsys.readouterr().err
    config.corpus_path(copy, "law", "train").unlink()
    assert data.main(["--work", str(copy)]) == 1
    assert "law.train.jsonl: is not there; run `python -m train.corpora` first" in capsys.readouterr().err
    with pytest.raises(FileFormatError, match=r"poems\.train\.bin: cannot be used"):
        data.Batches(copy, {"poems": 1.0}, 2, 8, 1, 0)
    with pytest.raises(FileFormatError, match="a window needs 1000001"):
        data.Batches(copy, {"code": 1.0}, 2, 10**6, 1, 0)
    with pytest.raises(SystemExit) as stop:
        dialogues.main(["--count", "0"])
    assert stop.value.code == 2
