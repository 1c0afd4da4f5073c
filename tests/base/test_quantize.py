"""The quantizing job: what it writes, that the bytes depend on nothing else, and what a failure leaves."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4.base import output
from ds4.base.experts import DEFAULT_GAIN
from ds4.base.quantize import quantize
from ds4.base.reader import Base
from ds4.checkpoint.preflight import preflight
from ds4.checkpoint.reader import Checkpoint
from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError
from tests.base.toys import small_checkpoint, tables, toy_base, toy_dir

NAME = "oracle-a"


def run(out: Path, **more: Any) -> dict[str, Any]:
    return quantize(toy_dir(NAME), out, tables(NAME), bits=6, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("whole") / "x.gguf"
    run(out)
    return out.read_bytes()


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# ---- what it writes ----


def test_the_report_is_what_the_engine_will_see(tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    report = run(out)
    assert names(tmp_path) == ["x.gguf", "x.gguf.report.json"]
    assert json.loads((tmp_path / "x.gguf.report.json").read_text()) == report
    base, checkpoint = Base.open(out, toy_dir(NAME)), Checkpoint.open(toy_dir(NAME))
    c = base.config
    assert len(report["layers"]) == c.num_hidden_layers + c.num_nextn_predict_layers
    for layer in report["layers"]:
        source = layer["name"].replace("blk.", "layers.")
        blob = base.experts(layer["name"])
        error = energy = 0.0
        for e in range(blob.n_expert):
            for m, matrix in enumerate(("w1", "w3", "w2")):
                w = checkpoint.tensor(f"{source}.ffn.experts.{e}.{matrix}.weight").astype(np.float64)
                error += float(((w - blob.dequant(e, m)) ** 2).sum())
                energy += float((w**2).sum())
        assert layer["error"] == pytest.approx(error / energy, rel=1e-9)
        assert 0.2 < layer["error"] < 0.5  # six bits: a shuffled matrix or gain would give about 1
    meta = base.metadata
    assert np.allclose(meta["ds4.layer_error"], [layer["error"] for layer in report["layers"]], rtol=1e-6)
    assert meta["ds4.recipe"] == "override" and meta["ds4.expert_bits"].tolist() == [6] * 9
    assert meta["ds4.gain"] == DEFAULT_GAIN and meta["ds4.source_hash"] == report["source_hash"] != "0" * 64
    assert meta["ds4.assigner"] == report["assigner"] and "openblas" in report["assigner"]
    assert report["notes"] and "fewer than 1,000 vectors a codeword" in report["notes"][0]


def test_the_recipe_is_recorded() -> None:
    meta = Base.open(toy_base(NAME), toy_dir(NAME)).metadata
    assert meta["ds4.recipe"] == "default" and meta["ds4.expert_bits"].tolist() == [13] * 2 + [12] * 7


def test_lists_of_bits_and_the_gain_rule(tmp_path: Path) -> None:
    bits = [13, 12, 11, 10, 9, 8, 7]
    quantize(toy_dir(NAME), tmp_path / "x.gguf", tables(NAME), bits=bits, gain="norm")
    base = Base.open(tmp_path / "x.gguf", toy_dir(NAME))
    assert [base.experts(f"blk.{i}").nc for i in range(7)] == [1 << b for b in bits]
    assert base.experts("mtp.1").nc == 4096 and base.metadata["ds4.gain"] == "norm"


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    run(tmp_path / "x.gguf", progress=lambda *a: seen.append(a))
    done = [d for _, d, _ in seen]
    assert done == sorted(done) and done[-1] <= seen[-1][2]
    assert ("blk.0.ffn_exps_vq.blob/7" in [n for n, _, _ in seen]) and seen[-1][0] == "v.image_newline"


def test_the_source_hash_follows_the_weights(tmp_path: Path, whole: bytes) -> None:
    folder = copy_checkpoint(tmp_path / "c")
    shard = folder / "model.safetensors"
    info = Checkpoint.open(folder).infos["layers.2.attn_norm.weight"]
    raw = bytearray(shard.read_bytes())
    raw[info.offset] ^= 1
    shard.write_bytes(raw)
    report = quantize(folder, tmp_path / "x.gguf", tables(NAME), bits=6)
    base = Base.open(toy_base(NAME, 9), toy_dir(NAME))
    assert report["source_hash"] != base.metadata["ds4.source_hash"]


# ---- the same bytes ----


def test_twice_and_with_two_workers(tmp_path: Path, whole: bytes) -> None:
    run(tmp_path / "again.gguf")
    run(tmp_path / "two.gguf", workers=2)
    assert (tmp_path / "again.gguf").read_bytes() == whole
    assert (tmp_path / "two.gguf").read_bytes() == whole


class Killed(BaseException):
    """Stands for a process that is gone: nothing catches it."""


class Faults:
    """Counts the system calls that change the disk; at the given one it writes half and stops."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.count, self.at = 0, at
        real = {name: getattr(os, name) for name in ("pwrite", "write", "fsync", "replace")}

        def pwrite(fd: int, data: Any, offset: int) -> int:
            if self._now():
                real["pwrite"](fd, bytes(data)[: len(data) // 2], offset)
                raise Killed
            return int(real["pwrite"](fd, data, offset))

        def write(fd: int, data: Any) -> int:
            if self._now():
                real["write"](fd, bytes(data)[: len(data) // 2])
                raise Killed
            return int(real["write"](fd, data))

        def other(name: str) -> Any:
            def call(*args: Any) -> Any:
                if self._now():
                    raise Killed
                return real[name](*args)

            return call

        monkeypatch.setattr(output.os, "pwrite", pwrite)
        monkeypatch.setattr(output.os, "write", write)
        monkeypatch.setattr(output.os, "fsync", other("fsync"))
        monkeypatch.setattr(output.os, "replace", other("replace"))

    def _now(self) -> bool:
        self.count += 1
        return self.count == self.at


def run_small(out: Path, **more: Any) -> dict[str, Any]:
    folder, small_tables = small_checkpoint()
    return quantize(folder, out, small_tables, bits=4, **more)


def n_calls(tmp_path: Path) -> tuple[bytes, int]:
    """The small model's base, and how many system calls it takes."""
    out = tmp_path / "count.gguf"
    small_checkpoint()  # made before anything is counted
    with pytest.MonkeyPatch.context() as m:
        faults = Faults(m, -1)
        run_small(out, commit_bytes=1)
    return out.read_bytes(), faults.count


def test_killed_at_twenty_seeded_points_gives_the_same_bytes(tmp_path: Path) -> None:
    whole, total = n_calls(tmp_path)
    assert total > 150
    points = np.random.default_rng(2024).choice(np.arange(1, total + 1), 17, replace=False).tolist()
    for at in [*points, total, total - 2, 1]:  # among them the very first call and the last renames
        folder = tmp_path / f"kill{at}"
        folder.mkdir()
        out = folder / "x.gguf"
        with pytest.MonkeyPatch.context() as m, pytest.raises(Killed):
            Faults(m, at)
            run_small(out, commit_bytes=1)
        if out.exists():  # killed after the rename: the name appeared with the whole file behind it
            assert out.read_bytes() == whole
            continue
        run_small(out)
        assert out.read_bytes() == whole, f"killed at call {at} of {total}"
        assert names(folder) == ["x.gguf", "x.gguf.report.json"]


def test_killed_twice_and_resumed_units_are_not_done_again(tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    whole, total = n_calls(tmp_path)
    for at in (total // 3, total // 3):
        with pytest.MonkeyPatch.context() as m, pytest.raises(Killed):
            Faults(m, at)
            run_small(out, commit_bytes=1)
        with open(tmp_path / "x.gguf.part.journal", "ab") as f:
            f.write(b'{"unit": "torn')
    with pytest.MonkeyPatch.context() as m:
        faults = Faults(m, -1)
        run_small(out, commit_bytes=1)
    assert out.read_bytes() == whole
    assert faults.count < total * 0.4


def test_a_process_that_dies(tmp_path: Path, whole: bytes) -> None:
    """The same with a real process that is gone between two system calls."""
    out = tmp_path / "x.gguf"
    script = f"""
import os
from ds4.base import output
from tests.base.test_quantize import run
from pathlib import Path
real, count = os.pwrite, 0
def pwrite(fd, data, offset):
    global count
    count += 1
    if count == 150:
        os._exit(9)
    return real(fd, data, offset)
output.os.pwrite = pwrite
run(Path({str(out)!r}), commit_bytes=1)
"""
    root = Path(__file__).resolve().parents[2]
    got = subprocess.run([sys.executable, "-c", script], cwd=root, check=False)
    assert got.returncode == 9 and not out.exists() and (tmp_path / "x.gguf.part").exists()
    run(out)
    assert out.read_bytes() == whole


def test_a_part_file_of_another_job_is_not_continued(tmp_path: Path, whole: bytes) -> None:
    out = tmp_path / "x.gguf"
    with pytest.MonkeyPatch.context() as m, pytest.raises(Killed):
        Faults(m, 400)
        quantize(toy_dir(NAME), out, tables(NAME), bits=6, gain="rms", commit_bytes=1)
    run(out)
    assert out.read_bytes() == whole


def test_a_damaged_journal_is_not_trusted(tmp_path: Path, whole: bytes) -> None:
    out = tmp_path / "x.gguf"
    for damage in (b"", b"nonsense\n", b'{"key": "x"}\n'):
        with pytest.MonkeyPatch.context() as m, pytest.raises(Killed):
            Faults(m, 300)
            run(out, commit_bytes=1)
        (tmp_path / "x.gguf.part.journal").write_bytes(damage)
        run(out)
        assert out.read_bytes() == whole
        out.unlink()


# ---- failures leave nothing behind ----


def copy_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(toy_dir(NAME) / name, folder / name)
    return folder


def set_byte(folder: Path, tensor: str, value: int) -> None:
    info = Checkpoint.open(folder).infos[tensor]
    with open(folder / "model.safetensors", "r+b") as f:
        f.seek(info.offset + 1)
        f.write(bytes([value]))


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        ("layers.3.ffn.experts.5.w2.scale", 0xFF),
        ("layers.1.attn.wkv.weight", 0x7F),
        ("layers.1.engram.wkv.scale", 0xFF),
        ("layers.1.engram.wkv.weight", 0xFF),
        ("layers.6.ffn_norm.weight", 0x7F),
    ],
)
def test_a_nan_in_the_checkpoint(tmp_path: Path, tensor: str, value: int) -> None:
    folder = copy_checkpoint(tmp_path / "c")
    set_byte(folder, tensor, value)
    if tensor.endswith("norm.weight"):  # BF16 0x7Fxx with the low byte at 0x80 or more is an infinity or NaN
        raw = Checkpoint.open(folder).infos[tensor]
        with open(folder / "model.safetensors", "r+b") as f:
            f.seek(raw.offset)
            f.write(b"\x80\x7f")
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(FileFormatError, match="NaN") as e:
        quantize(folder, target / "x.gguf", tables(NAME), bits=6)
    assert tensor.rsplit(".", 1)[0] in str(e.value)
    assert names(target) == []


def test_a_checkpoint_without_its_tokenizer(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path / "c")
    bad_vocab = ('{"a": 999999}', '{"a": "1"}', '{"a": -1}', '{"\\ud800": 1}', "3")
    for text in (None, "{", "[]", *(f'{{"model": {{"vocab": {v}, "merges": []}}}}' for v in bad_vocab)):
        path = folder / "tokenizer.json"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        with pytest.raises(FileFormatError, match=r"tokenizer\.json"):
            quantize(folder, tmp_path / "x.gguf", tables(NAME), bits=6)
        assert names(tmp_path) == ["c"]


def test_an_engram_shard_that_is_a_link_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would refuse the finished base; parts of an earlier run stay as they are."""
    folder = copy_checkpoint(tmp_path / "c")
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    (tmp_path / "x.gguf.part").write_text("earlier")
    with pytest.raises(FileFormatError, match="copy or hard-link") as e:
        quantize(folder, tmp_path / "x.gguf", tables(NAME), bits=6)
    assert [str(e.value)] == preflight(folder)
    assert names(tmp_path) == ["blob", "c", "x.gguf.part"]
    assert (tmp_path / "x.gguf.part").read_text() == "earlier"


def test_arguments(tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    for more, message in (({"gain": "best"}, "--gain"), ({"workers": 0}, "--workers")):
        with pytest.raises(UsageError, match=message):
            run(out, **more)
    with pytest.raises(UsageError, match="--bits"):
        quantize(toy_dir(NAME), out, tables(NAME), bits=14)
    with pytest.raises(UsageError, match="engram"):
        quantize(toy_dir(NAME), out, None)
    with pytest.raises(UsageError, match="derived table"):
        quantize(toy_dir(NAME), out, tables("oracle-b"), bits=6)
    with pytest.raises(UsageError, match="cannot be written"):
        run(tmp_path / "absent" / "x.gguf")
    assert names(tmp_path) == []


def test_an_existing_file_is_kept(tmp_path: Path, whole: bytes) -> None:
    out = tmp_path / "x.gguf"
    out.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        run(out)
    assert out.read_text() == "mine" and names(tmp_path) == ["x.gguf"]
    run(out, overwrite=True)
    assert out.read_bytes() == whole


def test_two_at_once(tmp_path: Path) -> None:
    part = tmp_path / "x.gguf.part"
    with open(part, "wb") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process"):
            run(tmp_path / "x.gguf")
    assert names(tmp_path) == ["x.gguf.part"]


def no_space(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.os, "posix_fallocate", no_space)
    with pytest.raises(CapacityError, match="disk is full"):
        run(tmp_path / "x.gguf")
    assert names(tmp_path) == []


def test_too_little_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CapacityError, match="1000 are free"):
        run(tmp_path / "x.gguf")
    assert names(tmp_path) == []


def test_a_file_size_limit(tmp_path: Path) -> None:
    """A real limit of the system, in a process of its own."""
    script = f"""
import resource, sys
from pathlib import Path
from ds4.errors import CapacityError
from tests.base.test_quantize import run
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
try:
    run(Path({str(tmp_path)!r}) / "x.gguf")
except CapacityError as e:
    sys.exit(7)
"""
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", script], cwd=root, check=False).returncode == 7
    assert names(tmp_path) == []


def test_a_disk_that_fills_up_later_keeps_the_finished_part(tmp_path: Path, whole: bytes) -> None:
    out = tmp_path / "x.gguf"
    with pytest.MonkeyPatch.context() as m:
        real, calls = os.pwrite, iter(range(10**6))
        m.setattr(output.os, "pwrite", lambda *a: no_space() if next(calls) > 200 else real(*a))
        with pytest.raises(CapacityError, match="same command"):
            run(out, commit_bytes=1)
    assert names(tmp_path) == ["x.gguf.part", "x.gguf.part.journal"]
    run(out)
    assert out.read_bytes() == whole


def test_a_result_that_does_not_open_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Iterator[None]:
        raise FileFormatError("self-check")

    monkeypatch.setattr(Base, "open", broken)
    with pytest.raises(Ds4Error, match="self-check"):
        run(tmp_path / "x.gguf")
    assert names(tmp_path) == []
