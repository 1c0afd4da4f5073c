"""`ds4 teacher` and `ds4 diff` as commands: what they write, print and refuse, and that nothing stays behind."""

import argparse
import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.cli import diff, teacher
from ds4.errors import CapacityError, Ds4Error, FileFormatError, RequestError, UsageError
from ds4.teacher import files
from ds4.teacher.compare import compare
from ds4.teacher.run import Teacher
from tests.teacher.oracles import DATA, reference, source, whole

IDS = np.array([0, 70, 80, 90, 100, 120, 11], dtype=np.int64)


def command(*argv: str) -> int:
    """The command line as main.py runs it; raises what main.py turns into a message and exit code."""
    parser = argparse.ArgumentParser(prog="ds4", exit_on_error=False)
    subparsers = parser.add_subparsers(required=True)
    teacher.add_parser(subparsers)
    diff.add_parser(subparsers)
    args = parser.parse_args([str(a) for a in argv])
    code = args.run(args)
    assert isinstance(code, int)
    return code


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    np.save(tmp_path / "ids.npy", IDS)
    return tmp_path / "ids.npy"


def test_teacher_writes_what_run_returns(ids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.npz"
    code = command(
        "teacher", DATA / "oracle-a", "--ids", ids, "-o", out, "--arith", "kv", "--index-keys", "released",
        "--decode-from", "5", "--streams", "--json",
    )  # fmt: skip
    assert code == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["positions"] == 7 and summary["decoded"] == 2 and summary["arith"] == "kv"
    expected = Teacher(source("oracle-a"), "kv", "released").run(IDS, decode_from=5, streams=True)
    got = files.load_results(out)
    assert summary["arrays"] == {name: list(array.shape) for name, array in expected.items()}
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ids.npy", "out.npz"]


def test_teacher_default_is_float32_prefill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ref = reference("oracle-b")
    np.save(tmp_path / "ids.npy", ref["input_ids"].astype(np.int32))
    out = tmp_path / "no_suffix"
    assert command("teacher", DATA / "oracle-b", "--ids", tmp_path / "ids.npy", "-o", out) == 0
    assert "logits_TV [56, 336]; 56 positions, 0 decoded" in capsys.readouterr().out.replace("\n", " ")
    got = files.load_results(out)
    assert set(got) == {"logits_TV"} and whole(got["logits_TV"], ref["prefill.logits"]) <= 2e-5


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros(0, np.int64), "ids are empty"),
        (np.zeros((2, 2), np.int64), r"their shape is \[2, 2\]"),
        (np.array([np.nan, 1.0]), "they are float64"),
        (np.array([5, 320]), "id 320 at position 1"),
        (np.array(["a"]), "they are <U1"),
    ],
)
def test_teacher_refuses_bad_ids(tmp_path: Path, array: NDArray, says: str) -> None:
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(RequestError, match=says) as e:
        command("teacher", DATA / "oracle-a", "--ids", tmp_path / "ids.npy", "-o", tmp_path / "out.npz")
    assert str(tmp_path / "ids.npy") in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["ids.npy"]


def test_teacher_refuses_ids_over_the_context(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.zeros(257, np.int64))
    with pytest.raises(RequestError, match=r"ids\.npy: 257 tokens exceed the model's context of 256"):
        command("teacher", DATA / "oracle-a", "--ids", tmp_path / "ids.npy", "-o", tmp_path / "out.npz")


def test_ids_file_cut_anywhere_is_one_error(ids: Path, tmp_path: Path) -> None:
    content = ids.read_bytes()
    for n in range(len(content)):
        (tmp_path / "cut.npy").write_bytes(content[:n])
        with pytest.raises(FileFormatError, match=r"cut\.npy"):
            files.load_ids(tmp_path / "cut.npy")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "archive.npz", ids=IDS)
    for bad in ("objects.npy", "archive.npz", "missing.npy"):
        with pytest.raises(FileFormatError, match=bad):
            files.load_ids(tmp_path / bad)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--decode-from", "8"], "--decode-from 8: must lie between 0 and the 7 tokens"),
        (["--decode-from", "-1"], "--decode-from -1"),
        (["-o", "nowhere/out.npz"], "nowhere: no such folder"),
        (["-o", "."], "is a folder"),
        (["--arrays", "cupy"], "cupy is not installed"),
    ],
)
def test_teacher_refuses_bad_flags_before_the_work(
    ids: Path, tmp_path: Path, extra: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "cupy" in extra:
        monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(UsageError, match=says):
        command("teacher", DATA / "oracle-a", "--ids", ids, "-o", tmp_path / "out.npz", *extra)
    assert [p.name for p in tmp_path.iterdir()] == ["ids.npy"]


def test_teacher_of_nothing(ids: Path, tmp_path: Path) -> None:
    with pytest.raises(Ds4Error):
        command("teacher", tmp_path / "nothing", "--ids", ids, "-o", tmp_path / "out.npz")


def test_an_output_that_is_no_file_is_refused_and_stays(tmp_path: Path) -> None:
    """A rename would put an ordinary file in its place."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "astray").symlink_to(tmp_path / "nothing")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "socket"))
    for name in ("pipe", "link", "astray", "socket"):
        with pytest.raises(UsageError, match=f"{name}: is there and is no regular file"):
            files.check_output(tmp_path / name)
        with pytest.raises(UsageError, match="no regular file"):
            command("teacher", DATA / "oracle-a", "--ids", tmp_path / "none.npy", "-o", tmp_path / name)
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "socket").is_socket()
    (tmp_path / "old.npz").write_bytes(b"")
    assert files.check_output(tmp_path / "old.npz") == tmp_path / "old.npz"


def test_results_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.npz"
    files.save_results(out, {"logits_TV": np.ones((1, 2), np.float32)})

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(CapacityError, match=r"out\.npz: cannot be written \(No space left"):
        files.save_results(out, {"logits_TV": np.zeros((1, 2), np.float32)})
    assert [p.name for p in tmp_path.iterdir()] == ["out.npz"]
    assert (files.load_results(out)["logits_TV"] == 1).all()


# ---- diff ----


def run_of(n_layers: int = 3, n_tokens: int = 5) -> dict[str, NDArray]:
    rng = np.random.default_rng(7)
    return {
        "streams_LTSD": rng.standard_normal((n_layers + 1, n_tokens, 2, 4)).astype(np.float32),
        "logits_TV": rng.standard_normal((n_tokens, 6)).astype(np.float32),
        "hash_rows_TGN": rng.integers(0, 9, (n_tokens, 2, 3)),
    }


def edited(base: dict[str, NDArray], **cells: tuple[tuple[int, ...], float]) -> dict[str, NDArray]:
    out = {k: v.copy() for k, v in base.items()}
    for name, (at, value) in cells.items():
        out[name][at] = value
    return out


def test_compare_finds_the_first_layer_then_the_first_position() -> None:
    b = run_of()
    a = edited(b, streams_LTSD=((2, 1, 1, 0), 9.0))
    a["streams_LTSD"][1, 4, 0, 3] += np.float32(1e-5)  # an earlier layer, a later position, a small difference
    found = compare(a, b)
    assert found.first_bits == found.first_apart == (1, 4) and not found.agree
    loose = compare(a, b, tolerance=1e-3)
    assert loose.first_bits == (1, 4) and loose.first_apart == (2, 1)
    assert loose.layers[2].worst_position == 1 and loose.layers[2].worst_copy == 1
    assert [d.n_bits_differ for d in loose.layers] == [0, 1, 1, 0]
    assert compare(b, b).agree and compare(b, b).first_bits is None


def test_compare_looks_at_each_copy_alone() -> None:
    """A copy of 1e-6 beside one of 1e3 is not drowned by it."""
    b = run_of()
    b["streams_LTSD"][1, 2, 0] *= np.float32(1e6)
    a = {k: v.copy() for k, v in b.items()}
    a["streams_LTSD"][1, 2, 1] *= np.float32(1.01)
    found = compare(a, b, tolerance=1e-3)
    assert found.first_apart == (1, 2) and found.layers[1].worst == pytest.approx(0.01, rel=1e-4)


def test_compare_skips_rows_that_were_not_computed_and_compares_the_common_part() -> None:
    b = run_of()
    a = {k: v[:, :4] if k == "streams_LTSD" else v[:4] for k, v in run_of().items()}
    a["streams_LTSD"][2, :2] = np.nan
    a["logits_TV"][:2] = np.nan
    found = compare(a, b)
    assert (found.n_positions, found.n_left_out, found.n_skipped) == (4, 1, 2)
    assert found.first_bits is None and not found.agree  # b has a position that nobody looked at
    assert compare(a, {k: v[:, :4] if k == "streams_LTSD" else v[:4] for k, v in b.items()}).agree
    a["streams_LTSD"][2, 3, 0, 0] = np.nan  # one NaN in a computed row is a difference
    assert compare(a, b, tolerance=1.0).first_apart == (2, 3)


def test_compare_names_hash_rows_and_logits() -> None:
    b = run_of()
    found = compare(edited(b, hash_rows_TGN=((2, 1, 0), 77), logits_TV=((3, 0), 50.0)), b, tolerance=1e-3)
    assert found.first_hash == (2, 1, 0) and found.logits_worst_position == 3 and not found.agree
    assert not compare(edited(b, logits_TV=((3, 0), 50.0)), b).agree


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"streams_LTSD": None}, "no streams_LTSD"),
        ({"streams_LTSD": np.zeros((4, 5, 2, 5), np.float32)}, "two different models"),
        ({"logits_TV": np.zeros((5, 7), np.float32)}, "logits of two different models"),
        ({"hash_rows_TGN": np.zeros((5, 2, 4), np.int64)}, "hash rows of two different models"),
    ],
)
def test_compare_refuses_what_cannot_be_compared(change: dict[str, NDArray | None], says: str) -> None:
    a = {k: v for k, v in {**run_of(), **change}.items() if v is not None}
    with pytest.raises(FileFormatError, match=says):
        compare(a, run_of())


def test_diff_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = run_of()
    files.save_results(tmp_path / "b.npz", b)
    files.save_results(tmp_path / "a.npz", edited(b, streams_LTSD=((3, 1, 1, 0), 9.0)))
    assert command("diff", tmp_path / "b.npz", tmp_path / "b.npz") == 0
    assert "no difference in bits" in capsys.readouterr().out
    assert command("diff", tmp_path / "a.npz", tmp_path / "b.npz") == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "first differ by bits entering the head: layer 2 is the one to look at, position 1" in text
    assert command("diff", tmp_path / "a.npz", tmp_path / "b.npz", "--json") == 1
    out = json.loads(capsys.readouterr().out)
    assert out["first_apart"] == {"layer": 3, "position": 1} and out["agree"] is False
    assert command("diff", tmp_path / "a.npz", tmp_path / "b.npz", "--tolerance", "100") == 0
    capsys.readouterr()
    files.save_results(tmp_path / "short.npz", {k: v[:, :3] if v.ndim == 4 else v[:3] for k, v in b.items()})
    for pair in (("short.npz", "b.npz"), ("b.npz", "short.npz")):
        assert command("diff", *(tmp_path / name for name in pair)) == 1
        assert "2 positions of the longer run are left out" in " ".join(capsys.readouterr().out.split())
        assert command("diff", *(tmp_path / name for name in pair), "--json") == 1
        out = json.loads(capsys.readouterr().out)
        assert (out["agree"], out["n_positions"], out["n_left_out"]) == (False, 3, 2)
    with pytest.raises(UsageError, match="--tolerance nan"):
        command("diff", tmp_path / "a.npz", tmp_path / "b.npz", "--tolerance", "nan")


def test_diff_of_broken_files_is_one_error(tmp_path: Path) -> None:
    files.save_results(tmp_path / "b.npz", run_of(1, 1))
    content = (tmp_path / "b.npz").read_bytes()
    for n in [*range(200), *range(200, len(content), 37)]:
        (tmp_path / "cut.npz").write_bytes(content[:n])
        with pytest.raises(FileFormatError, match=r"cut\.npz"):
            files.load_results(tmp_path / "cut.npz")
    np.save(tmp_path / "one.npy", IDS)
    with pytest.raises(FileFormatError, match=r"one\.npy"):
        files.load_results(tmp_path / "one.npy")


def test_diff_finds_the_layer_of_a_real_run() -> None:
    """owner and released keys part at the first released decode row, in the first ratio-2 index layer."""
    ids = reference("oracle-a")["input_ids"][:24]
    runs = [Teacher(source("oracle-a"), index_keys=k).run(ids, 16, streams=True) for k in ("owner", "released")]
    found = compare(*runs)
    assert found.first_hash is None and found.first_bits is not None
    layer, position = found.first_bits
    first_source = source("oracle-a").config.index_source_layer_ids[0]
    assert layer >= first_source + 1 and position >= 16 and position % 2 == 0
