"""Engram shards of a base: where they are looked for, which names and links are refused, and their sizes."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ds4.base.gguf import Value
from ds4.base.reader import Base
from ds4.checkpoint.reader import Checkpoint
from ds4.errors import FileFormatError
from tests.base.edits import P, put, rebuild
from tests.base.toys import toy_base, toy_dir


def open_in(folder: Path, engram_dir: Path | None = None) -> Base:
    path = folder / "base.gguf"
    if not path.exists():
        shutil.copy(toy_base("oracle-a", 9), path)
    return Base.open(path, engram_dir)


def test_shards_are_found_beside_the_base_or_in_the_folder_given(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="--engram-dir"):
        open_in(tmp_path)
    shard = tmp_path / "model.safetensors"
    shutil.copy(toy_dir("oracle-a") / "model.safetensors", shard)
    assert open_in(tmp_path).engram_table(0).path == shard
    assert open_in(tmp_path).folders == (tmp_path,)
    assert open_in(tmp_path, toy_dir("oracle-a")).folders == (tmp_path, toy_dir("oracle-a"))  # words may lie there
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(FileFormatError, match=rf"model\.safetensors is not in {other}"):
        open_in(tmp_path, other)  # although it lies beside the base
    for wrong in (tmp_path / "absent", shard):
        with pytest.raises(FileFormatError, match=f"--engram-dir {wrong}: no such folder"):
            open_in(tmp_path, wrong)
    assert open_in(tmp_path, toy_dir("oracle-a")).engram_table(0).path == toy_dir("oracle-a") / "model.safetensors"
    assert Base.open(tmp_path / "base.gguf", with_shards=False).config.hidden_size == 64


@pytest.mark.parametrize("text", ["/mnt/x/../y/{}", "/{}", "C:\\x\\{}", "d:/x/{}", "E:\\{}"])
def test_only_the_last_part_of_an_absolute_table_path_counts(tmp_path: Path, text: str) -> None:
    path = rebuild(tmp_path, put(P + "engram.0.table_path", "str", text.format("model.safetensors")))
    shard = Base.open(path, toy_dir("oracle-a")).engram_table(0).path
    assert shard == toy_dir("oracle-a") / "model.safetensors"


@pytest.mark.parametrize(
    "text",
    [
        "../{}",
        "..\\{}",
        "./{}",
        "x/{}",
        "x\\{}",
        "\\\\host\\x\\{}",
        "C:{}",
        "C:x\\{}",
        "/x\\..\\{}",
        "{}/",
        "{}\0",
        "",
        ".",
        "..",
    ],
)
def test_a_relative_table_path_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """The shard itself is where the path's last part would find it."""
    name = text.format("model.safetensors")
    path = rebuild(tmp_path, put(P + "engram.0.table_path", "str", name))
    with pytest.raises(FileFormatError, match=r"engram table 0: table_path .* is neither a file name") as e:
        Base.open(path, toy_dir("oracle-a"))
    assert repr(name) in str(e.value)


def test_links_may_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    shutil.copy(toy_dir("oracle-a") / "model.safetensors", tmp_path / "elsewhere")
    (inside / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileFormatError, match="leads out"):
        open_in(inside)
    (inside / "model.safetensors").unlink()
    shutil.copy(tmp_path / "elsewhere", inside / "real")
    (inside / "model.safetensors").symlink_to("real")
    assert open_in(inside).engram_table(1).rows == 606
    (inside / "model.safetensors").unlink()
    (inside / "deep").mkdir()
    (inside / "real").rename(inside / "deep" / "real")
    (inside / "model.safetensors").symlink_to("deep/real")  # another place, but inside
    (tmp_path / "door").symlink_to("inside")  # and the folder itself may be a link
    for folder in (inside, tmp_path / "door"):
        assert open_in(inside, folder).engram_table(1).rows == 606
    (inside / "model.safetensors").unlink()
    (inside / "model.safetensors").mkdir()
    with pytest.raises(FileFormatError, match="not a file"):
        open_in(inside)


def test_a_shard_of_the_wrong_size(tmp_path: Path) -> None:
    raw = (toy_dir("oracle-a") / "model.safetensors").read_bytes()
    shard = tmp_path / "model.safetensors"
    for data in (raw[:-1], raw + b"\0", raw[:100], b"", bytes(len(raw))):
        shard.write_bytes(data)
        with pytest.raises(FileFormatError):
            open_in(tmp_path)


def test_a_shard_that_is_nothing_but_the_table(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(toy_dir("oracle-a"))
    tables_bytes = [
        checkpoint.raw(f"layers.{layer}.engram.embed.{kind}").tobytes()
        for layer in (1, 4)
        for kind in ("weight", "scale")
    ]
    (tmp_path / "t0").write_bytes(tables_bytes[0] + tables_bytes[1])
    (tmp_path / "t1").write_bytes(bytes(664) + tables_bytes[2] + tables_bytes[3])

    def edit(meta: Any, tensors: Any) -> None:
        for g, first, n in ((0, 0, len(tables_bytes[0])), (1, 664, len(tables_bytes[2]))):
            meta[f"{P}engram.{g}.table_path"] = Value("str", f"t{g}")
            meta[f"{P}engram.{g}.weight_offset"] = Value("u64", first)
            meta[f"{P}engram.{g}.scale_offset"] = Value("u64", first + n)

    path = rebuild(tmp_path, edit)
    assert Base.open(path).engram_table(1).weight_offset == 664
    os.truncate(tmp_path / "t1", 664 + 100)
    with pytest.raises(FileFormatError, match="cut short"):
        Base.open(path)
