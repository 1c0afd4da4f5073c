"""Checkpoint and preflight on the toy checkpoints: values, shards, and every way a folder can be wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ds4.checkpoint import codecs
from ds4.checkpoint.preflight import preflight
from ds4.checkpoint.reader import Checkpoint
from ds4.checkpoint.safetensors import load_arrays, read_header
from ds4.checkpoint.writer import write_safetensors
from ds4.errors import ConfigError, Ds4Error, FileFormatError, MissingTensorError

DATA = Path(__file__).parent.parent / "data"
ORACLE = DATA / "oracle-a"
Stored = dict[str, tuple[str, Any]]


def stored(path: Path = ORACLE) -> Stored:
    """Every tensor of a checkpoint: (dtype, array in storage type)."""
    infos = read_header(path / "model.safetensors")
    return {k: (infos[k].dtype, v) for k, v in load_arrays(path / "model.safetensors").items()}


def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(ORACLE / name, tmp_path / name)
    return tmp_path


def single(tmp_path: Path, change: Callable[[Stored], None]) -> Path:
    tensors = stored()
    change(tensors)
    write_safetensors(folder(tmp_path) / "model.safetensors", tensors)
    return tmp_path


def sharded(tmp_path: Path, index: bool = True, n: int = 5) -> Path:
    """The toy in n shards; an engram table's rows and scales share one."""
    folder(tmp_path)
    shards: list[Stored] = [{} for _ in range(n)]
    weight_map = {}
    for i, (name, tensor) in enumerate(stored().items()):
        at = n - 1 if ".engram.embed." in name else i % (n - 1)
        shards[at][name] = tensor
        weight_map[name] = f"model-{at + 1:05}-of-{n:05}.safetensors"
    for i, shard in enumerate(shards):
        write_safetensors(tmp_path / f"model-{i + 1:05}-of-{n:05}.safetensors", shard)
    if index:
        write_index(tmp_path, weight_map)
    return tmp_path


def write_index(path: Path, weight_map: object, **more: object) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map} | more))


@pytest.mark.parametrize("name", ["oracle-a", "oracle-b", "oracle-e"])
def test_raw_bytes_are_the_reference_readers(name: str) -> None:
    c = Checkpoint.open(DATA / name)
    with safe_open(DATA / name / "model.safetensors", "np") as f:
        for key in f.keys():  # noqa: SIM118
            if c.infos[key].dtype in ("F32", "I8"):
                assert np.array_equal(c.raw(key), f.get_tensor(key).view(c.raw(key).dtype)), key
            assert not c.raw(key).flags.writeable and c.raw(key).base is not None


def test_every_kind_of_tensor_is_dequantised() -> None:
    c, arrays = Checkpoint.open(ORACLE), {k: v for k, (_, v) in stored().items()}

    def of(name: str) -> Any:
        return arrays[name]

    assert np.array_equal(c.tensor("embed.weight"), codecs.bf16_to_f32(of("embed.weight")))
    assert np.array_equal(c.tensor("layers.3.hc_ffn_fn"), of("layers.3.hc_ffn_fn"))
    w, s = of("layers.2.attn.wq_b.weight"), of("layers.2.attn.wq_b.scale")
    got = c.tensor("layers.2.attn.wq_b.weight")
    assert got[40, 33] == codecs.E4M3_VALUES[w[40, 33]] * 2.0 ** (int(s[1, 1]) - 127)
    w, s = of("layers.5.ffn.experts.3.w2.weight").view(np.uint8), of("layers.5.ffn.experts.3.w2.scale")
    got = c.tensor("layers.5.ffn.experts.3.w2.weight")
    assert got[7, 9] == codecs.E2M1_VALUES[w[7, 4] >> 4] * 2.0 ** (int(s[7, 0]) - 127)
    assert c.tensor("layers.2.attn.wq_b.scale")[1, 1] == 2.0 ** (int(of("layers.2.attn.wq_b.scale")[1, 1]) - 127)


def test_engram_rows_by_offset() -> None:
    c, arrays = Checkpoint.open(ORACLE), {k: v for k, (_, v) in stored().items()}
    table = codecs.dequant_engram(arrays["layers.4.engram.embed.weight"], arrays["layers.4.engram.embed.scale"])
    rows = np.array([[605, 0, 17], [17, 17, 300]])
    assert np.array_equal(c.engram_rows(4, rows), table[rows])
    assert c.engram_rows(4, np.zeros((0, 3), np.int64)).shape == (0, 3, 32)
    path, weight_at, scale_at = c.engram_file(4)
    data = path.read_bytes()
    assert data[weight_at : weight_at + 32] == arrays["layers.4.engram.embed.weight"][0].tobytes()
    assert data[scale_at] == arrays["layers.4.engram.embed.scale"][0, 0]
    for bad in (-1, 606):
        with pytest.raises(IndexError, match="table of 606"):
            c.engram_rows(4, np.array([bad]))
    with pytest.raises(ValueError, match="read by rows"):
        c.tensor("layers.4.engram.embed.weight")
    with pytest.raises(ValueError, match="layer 2 has no engram table"):
        c.engram_file(2)


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_the_single_file(tmp_path: Path, index: bool) -> None:
    c, one = Checkpoint.open(sharded(tmp_path, index)), Checkpoint.open(ORACLE)
    assert c.infos.keys() == one.infos.keys() and preflight(tmp_path) == []
    assert all(np.array_equal(c.raw(k), one.raw(k)) for k in one.infos)
    assert c.engram_file(1)[0].name == "model-00005-of-00005.safetensors"


def test_unknown_tensor_and_config(tmp_path: Path) -> None:
    with pytest.raises(MissingTensorError, match=r"has no tensor layers\.99\.x"):
        Checkpoint.open(ORACLE).raw("layers.99.x")
    (folder(tmp_path) / "config.json").write_text("{}")
    shutil.copy(ORACLE / "model.safetensors", tmp_path)
    with pytest.raises(ConfigError, match="is missing"):
        Checkpoint.open(tmp_path)


def test_u8_scales_and_f32_engram_weights_are_accepted(tmp_path: Path) -> None:
    def change(t: Stored) -> None:
        for name, (dtype, value) in list(t.items()):
            if dtype == "F8_E8M0":
                t[name] = ("U8", value)
            elif name.endswith(("engram.q_weight", "engram.k_weight")):
                t[name] = ("F32", codecs.bf16_to_f32(value))

    c, one = Checkpoint.open(single(tmp_path, change)), Checkpoint.open(ORACLE)
    for name in ("layers.0.attn.wkv.weight", "mtp.0.ffn.experts.1.w3.weight", "layers.1.engram.q_weight"):
        assert np.array_equal(c.tensor(name), one.tensor(name))


def test_all_faults_of_the_inventory_at_once(tmp_path: Path) -> None:
    def change(t: Stored) -> None:
        del t["layers.3.attn.wkv.scale"], t["mtp.1.ffn.experts.2.w1.scale"]  # the latter: I8 without a scale
        t["layers.0.attn_norm.weight"] = ("BF16", np.zeros(63, np.uint16))
        t["layers.2.attn.attn_sink"] = ("BF16", np.zeros(4, np.uint16))
        t["layers.7.extra"] = ("F32", np.zeros(1, np.float32))

    path = single(tmp_path, change)
    want = [
        "misshapen: layers.0.attn_norm.weight is [63], expected [64]",
        "misshapen: layers.2.attn.attn_sink is stored as BF16 [4], expected F32 [4]",
        "missing: layers.3.attn.wkv.scale F8_E8M0 [3, 2]",
        "missing: mtp.1.ffn.experts.2.w1.scale F8_E8M0 [32, 2]",
        "extra: layers.7.extra F32 [1]",
    ]
    assert preflight(path) == want
    with pytest.raises(MissingTensorError, match=r"misshapen.*and 4 more problems") as error:
        Checkpoint.open(path)
    assert error.value.problems == tuple(want)


def test_vision_tensors_need_a_vision_config(tmp_path: Path) -> None:
    raw = json.loads((ORACLE / "config.json").read_text())
    del raw["vision_config"]

    def drop(t: Stored) -> None:
        for name in list(t):
            if name.startswith(("vision.", "aligner.", "image_")):
                del t[name]

    (single(tmp_path, drop) / "config.json").write_text(json.dumps(raw))
    assert preflight(tmp_path) == []
    (single(tmp_path, lambda t: None) / "config.json").write_text(json.dumps(raw))
    assert {p.split()[1].split(".")[0] for p in preflight(tmp_path)} == {"vision", "aligner"}  # image_* may stay


def test_stage_count_from_the_names(tmp_path: Path) -> None:
    raw = json.loads((ORACLE / "config.json").read_text())
    del raw["text_config"]["num_nextn_predict_layers"]
    raw["text_config"]["compress_ratios"] = raw["text_config"]["compress_ratios"][:7]
    (single(tmp_path, lambda t: None) / "config.json").write_text(json.dumps(raw))
    assert Checkpoint.open(tmp_path).config.num_nextn_predict_layers == 2


def test_absent_and_cut_shards_are_named_with_what_they_should_hold(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    (path / "model-00005-of-00005.safetensors").unlink()
    cut = path / "model-00002-of-00005.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    problems = preflight(path)
    assert len(problems) == 2
    assert "model-00002-of-00005.safetensors: is cut off: tensor" in problems[0]
    assert "model-00005-of-00005.safetensors: is absent; the index places layers.1.engram.embed.scale" in problems[1]
    with pytest.raises(FileFormatError, match=r"is cut off.*and 1 more problems"):
        Checkpoint.open(path)


def test_absent_shard_without_an_index_lists_its_tensors(tmp_path: Path) -> None:
    path = sharded(tmp_path, index=False)
    (path / "model-00005-of-00005.safetensors").unlink()
    assert {p.split()[1] for p in preflight(path)} == {
        f"layers.{i}.engram.embed.{kind}" for i in (1, 4) for kind in ("weight", "scale")
    }


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\b", "a\0b", "\ud800", 7, None],
)
def test_shard_names_stay_inside_the_folder(tmp_path: Path, name: object) -> None:
    path = sharded(tmp_path)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    index["embed.weight"] = name
    write_index(path, index)
    problems = preflight(path)
    assert any("is not a plain file name" in p for p in problems)
    "\n".join(problems).encode()
    with pytest.raises(FileFormatError, match="is not a plain file name"):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "weight_map must be an object"),
        ('{"weight_map": {}}', "weight_map must be an object"),
        ('{"weight_map": 3}', "weight_map must be an object"),
        ("{", "not valid JSON"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "key 'a' stands twice"),
    ],
)
def test_broken_index(tmp_path: Path, text: str, message: str) -> None:
    path = sharded(tmp_path)
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FileFormatError, match=message):
        Checkpoint.open(path)


def test_index_and_shards_that_disagree(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    home = index["norm.weight"]
    other = next(s for s in sorted(set(index.values())) if s != home)
    write_index(path, index | {"norm.weight": other})
    problems = preflight(path)
    assert sorted(p.split(": ", 1)[1] for p in problems) == [
        "holds tensor norm.weight, which the index does not place there",
        "lacks tensor norm.weight, which the index places there",
    ]


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    path = sharded(tmp_path, index=False)
    write_safetensors(path / "model-00006-of-00006.safetensors", {"norm.weight": stored()["norm.weight"]})
    with pytest.raises(FileFormatError, match=r"tensor norm\.weight is also in model-0000"):
        Checkpoint.open(path)


def test_folders_that_are_none(tmp_path: Path) -> None:
    assert preflight(tmp_path / "x") == [f"{tmp_path / 'x'}: does not exist"]
    assert "is not a folder" in preflight(ORACLE / "config.json")[0]
    assert any("holds no *.safetensors file" in p for p in preflight(folder(tmp_path)))
    (tmp_path / "tokenizer.json").unlink()
    assert any("tokenizer.json: is absent" in p for p in preflight(tmp_path))


def test_a_folder_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(FileFormatError, match=r"oracle-a: cannot be looked at \(Permission denied\)"):
        Checkpoint.open(ORACLE)


WHOLE = (ORACLE / "model.safetensors").read_bytes()
HEADER_END = 8 + int.from_bytes(WHOLE[:8], "little")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_real_header_with_wrong_bytes_is_refused_or_still_right(tmp_path: Path, data: st.DataObject) -> None:
    """Up to three bytes of a real header replaced: one error of ours, or the very same tensors at the same places."""
    damaged = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, HEADER_END - 1))] = data.draw(
            st.sampled_from(b'0123456789abcxyz{}[]",: -.eE\\\xff')
        )
    (folder(tmp_path) / "model.safetensors").write_bytes(damaged)
    try:
        got = Checkpoint.open(tmp_path)
    except Ds4Error as e:
        assert str(tmp_path) in str(e) and "\n" not in str(e)
        return
    places = {(i.name, i.dtype, i.shape, i.offset) for i in got.infos.values()}
    assert places == {(i.name, i.dtype, i.shape, i.offset) for i in Checkpoint.open(ORACLE).infos.values()}


def test_only_shards_with_engram_tables_may_not_be_links_out_of_the_folder(tmp_path: Path) -> None:
    """The layout of a download cache: names in one folder, all of them links to files in another."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "names").mkdir()
    path = sharded(tmp_path / "names")
    for file in sorted(path.iterdir()):
        file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(Path("..", "blobs", file.name))
    engram = path / "model-00005-of-00005.safetensors"
    assert preflight(path) == [
        f"{engram}: holds engram tables and is a link that leads out of {path}; "
        "copy or hard-link that shard into the folder in its place"
    ]
    assert Checkpoint.open(path).engram_rows(1, np.array([3])).shape == (1, 32)  # the teacher may read it
    engram.unlink()
    engram.hardlink_to(tmp_path / "blobs" / engram.name)
    assert preflight(path) == []
    (path / "deep").mkdir()
    engram.rename(path / "deep" / engram.name)
    engram.symlink_to(path / "deep" / engram.name)
    assert preflight(path) == []


def test_an_engram_shard_whose_name_a_base_cannot_hold(tmp_path: Path) -> None:
    path = sharded(tmp_path, index=False)
    (path / "model-00005-of-00005.safetensors").rename(path / "a\\b.safetensors")
    assert preflight(path) == [f"{path}: shard 'a\\\\b.safetensors' holds engram tables: give it a plain file name"]


def test_engram_parts_in_two_shards(tmp_path: Path) -> None:
    t = stored()
    part = {"layers.1.engram.embed.scale": t.pop("layers.1.engram.embed.scale")}
    write_safetensors(folder(tmp_path) / "a.safetensors", t)
    write_safetensors(tmp_path / "b.safetensors", part)
    c = Checkpoint.open(tmp_path)
    with pytest.raises(FileFormatError, match="a table and its scales must share a shard"):
        c.engram_file(1)
    assert c.engram_rows(1, np.array([3])).shape == (1, 32)


def test_cut_at_every_byte_of_the_first_4_kb_and_at_50_places_after(tmp_path: Path) -> None:
    """Whatever is cut off, opening says so in one error that names the file."""
    whole = (ORACLE / "model.safetensors").read_bytes()
    path = folder(tmp_path) / "model.safetensors"
    places = [*range(4096), *np.linspace(4096, len(whole) - 1, 50, dtype=int).tolist()]
    with path.open("wb") as f:
        f.write(whole)
    for n in reversed(places):  # one file, shortened step by step
        with path.open("r+b") as f:
            f.truncate(n)
        with pytest.raises(FileFormatError) as error:
            read_header(path)
        assert "cut off" in str(error.value) and str(path) in str(error.value)
    for n in (0, 9, 4000, 70_000, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(FileFormatError, match=r"model\.safetensors: is cut off"):
            Checkpoint.open(tmp_path)
