"""Base.open on the toy bases: what it gives back, what it reads, and everything that it must refuse."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4.base import metadata
from ds4.base.gguf import Value, header_bytes, read_container
from ds4.base.inspect import inspect_path, packed_bytes, part_of, plan_rows
from ds4.base.plan import plan
from ds4.base.reader import Base
from ds4.base.types import BF16, F32, Q8_0, VQBLOB
from ds4.base.verify import verify
from ds4.checkpoint.reader import Checkpoint
from ds4.errors import ConfigError, Ds4Error, FileFormatError, MissingTensorError
from ds4.model.config import ModelConfig
from tests.base.edits import P, drop, forget, poke, put, rebuild, retype
from tests.base.toys import tables, toy_base, toy_dir

NAMES = ("oracle-a", "oracle-b", "oracle-e")


@pytest.fixture(scope="module")
def base() -> Base:
    return Base.open(toy_base("oracle-a", 9), toy_dir("oracle-a"))


# ---- what it gives back ----


@pytest.mark.parametrize("name", NAMES)
def test_config_survives_the_round_trip(name: str) -> None:
    assert Base.open(toy_base(name, 9), toy_dir(name)).config == ModelConfig.load(toy_dir(name))


@pytest.mark.parametrize("name", ["published", *NAMES])
def test_metadata_round_trip_without_a_file(name: str, tmp_path: Path) -> None:
    c = ModelConfig.load(toy_dir(name))
    head, _, size = header_bytes(metadata.from_config(c, 2), [])
    path = tmp_path / "x.gguf"
    path.write_bytes(head)
    assert size == len(head)
    assert metadata.to_config(read_container(path).metadata, None, "x") == c


def test_published_keys_have_their_kinds() -> None:
    meta = metadata.from_config(ModelConfig.load(toy_dir("published")), 2)
    kinds = {
        "rope.scaling.original_context_length": "u64", "attention.compress_ratios": "[i32]",
        "attention.kv_source_layers": "[i32]", "swiglu_clamp_exp": "[f32]", "engram.num_embeddings": "[u64]",
        "engram.layer_ids": "[i32]", "mtp.target_layers": "[i32]", "hash_layer_count": "u32",
    }  # fmt: skip
    for key, kind in kinds.items():
        assert meta["deepseek4." + key].kind == kind
    assert len(meta["deepseek4.attention.compress_ratios"].value) == 43
    assert len(meta["deepseek4.swiglu_clamp_exp"].value) == 40


def test_pad_token_without_our_own_key() -> None:
    c = ModelConfig.load(toy_dir("oracle-a"))
    meta = plain(metadata.from_config(c, 258 - 1))
    del meta["ds4.engram_pad_token_id"]
    token_map = np.zeros(c.vocab_size, np.int32)
    token_map[5] = 257
    assert metadata.to_config(meta, token_map, "x").engram_pad_token_id == 5
    token_map[5] = 0
    with pytest.raises(ConfigError, match="pad_id_compressed"):
        metadata.to_config(meta, token_map, "x")


@pytest.mark.parametrize("key", metadata.MTP_RUNTIME)
def test_draft_keys_count_only_together(key: str) -> None:
    c = ModelConfig.load(toy_dir("oracle-a"))
    meta = plain(metadata.from_config(c, 2))
    del meta[f"deepseek4.mtp.{key}"]
    got = metadata.to_config(meta, None, "x")
    assert got.num_nextn_predict_layers == 0 and len(got.compress_ratios) == c.num_hidden_layers
    assert got.dspark_target_layer_ids == ()


def plain(meta: dict[str, Value]) -> dict[str, Any]:
    dtypes = {"[f32]": "f4", "[i32]": "i4", "[u64]": "u8"}
    return {k: np.array(v.value, dtypes[v.kind]) if v.kind in dtypes else v.value for k, v in meta.items()}


def test_dense_tensors_are_the_checkpoints(base: Base) -> None:
    checkpoint = Checkpoint.open(toy_dir("oracle-a"))
    for t in plan(base.config):
        if t.kind == "blob" or not t.source:
            continue
        want = checkpoint.tensor(t.source)
        got = base.tensor(t.name)
        assert got.shape == want.shape and got.dtype == np.float32, t.name
        if t.kind in ("f32", "exact", "bf16"):
            assert np.array_equal(got, want), t.name
        else:
            # Q8_0: half a step of max / 127 and the f16 rounding of the step, see test_gguf
            block = np.repeat(np.abs(want.reshape(-1, 32)).max(axis=1), 32).reshape(want.shape)
            assert np.all(np.abs(got - want) <= block / 127 * (0.5 + 127 * 2.0**-11)), t.name


def test_engram_tables_and_references(base: Base) -> None:
    got, want = base.engram_tensors(), tables("oracle-a")
    for key in ("token_map", "multipliers", "primes", "offsets"):
        assert np.array_equal(getattr(got, key), getattr(want, key))
    assert got.primes.shape == (2, 3, 2)
    checkpoint = Checkpoint.open(toy_dir("oracle-a"))
    for g, layer in enumerate(base.config.engram_layer_ids):
        ref = base.engram_table(g)
        assert (ref.path.name, ref.weight_offset, ref.scale_offset) == (
            "model.safetensors",
            *checkpoint.engram_file(layer)[1:],
        )
        raw = ref.path.read_bytes()[ref.weight_offset : ref.weight_offset + ref.rows * ref.head_dim]
        assert raw == checkpoint.raw(f"layers.{layer}.engram.embed.weight").tobytes()
    with pytest.raises(MissingTensorError):
        base.engram_table(2)


def test_tokenizer_data(base: Base) -> None:
    t = base.tokenizer_data()
    assert t.tokenizer_json == (toy_dir("oracle-a") / "tokenizer.json").read_text()
    assert len(t.tokens) == base.config.vocab_size and t.token_types is not None
    assert t.tokens[0] == "<｜begin▁of▁sentence｜>" and t.token_types[0] == 3
    assert t.tokens[319] == "<｜deepseek_image｜>" and t.token_types[319] == 4
    assert t.tokens[3] == "Ā" and t.token_types[3] == 1


def test_unknown_names(base: Base) -> None:
    for f in (base.raw, base.tensor, base.experts):
        with pytest.raises(MissingTensorError, match="nothing"):
            f("nothing")
    with pytest.raises(ValueError, match="experts"):
        base.tensor("blk.0.ffn_exps_vq.blob")


def test_a_load_does_not_read_the_index_streams(base: Base) -> None:
    """Bytes read of the blobs are headers, slots, codebooks and gains, and nothing beside."""
    c = base.config
    f, d = c.moe_intermediate_size, c.hidden_size
    n_expert = [c.n_routed_experts] * c.num_hidden_layers + [c.dspark_n_routed_experts] * c.num_nextn_predict_layers
    want = sum(16 + 24 * n + 512 * 8 + n * (3 * 32 + 2 * (2 * f + d)) for n in n_expert)
    assert sum(n for _, n in base.load_reads) == want


# ---- what it refuses ----


def test_rebuilding_without_an_edit_changes_nothing(tmp_path: Path) -> None:
    assert rebuild(tmp_path, lambda meta, tensors: None).read_bytes() == toy_base("oracle-a", 9).read_bytes()


REFUSALS: dict[str, tuple[Any, str]] = {
    "tensor missing": (drop("blk.3.attn_kv.weight"), "missing: blk.3.attn_kv.weight"),
    "blob missing": (drop("mtp.1.ffn_exps_vq.blob"), "missing: mtp.1.ffn_exps_vq.blob"),
    "token map missing": (drop("engram.token_map"), "missing: engram.token_map"),
    "tensor unknown": (retype("blk.0.something", F32, (4,), 16), "unknown: blk.0.something"),
    "misshapen": (retype("blk.0.attn_norm.weight", F32, (65,), 260), "is 65, expected 64"),
    "transposed": (retype("blk.0.attn_q_b.weight", BF16, (384, 64), 384 * 128), "is 384x64, expected 64x384"),
    "norm quantized": (retype("blk.0.attn_norm.weight", Q8_0, (64,), 68), "q8_0; allowed: f32"),
    "dense as blob": (retype("output.weight", VQBLOB, (100,), 100), "vqblob; allowed"),
    "blob of two dims": (retype("blk.0.ffn_exps_vq.blob", VQBLOB, (10, 10), 100), "one dimension"),
    "blob empty": (retype("blk.0.ffn_exps_vq.blob", VQBLOB, (8,), 8), "past the blob"),
    "blob of another layer": (poke("blk.0.ffn_exps_vq.blob", "<u4", 2, 1), "layer 1"),
    "blob version": (poke("blk.0.ffn_exps_vq.blob", "<u4", 1, 9), "version 9"),
    "architecture": (put("general.architecture", "str", "llama"), "'llama'"),
    "no architecture": (forget("general.architecture"), "general.architecture is missing"),
    "key missing": (forget(P + "attention.q_lora_rank"), "attention.q_lora_rank is missing"),
    "key of another kind": (put(P + "embedding_length", "str", "64"), "embedding_length is '64'"),
    "key negative": (put(P + "attention.sliding_window", "i32", -8), "sliding_window"),
    "list negative": (put(P + "attention.kv_source_layers", "[i32]", [-1, 3, 4]), "kv_source_layers"),
    "list is a number": (put(P + "engram.layer_ids", "u32", 1), "must be a list"),
    "eps nan": (put(P + "attention.layer_norm_rms_epsilon", "f32", float("nan")), "layer_norm_rms_epsilon"),
    "two kv heads": (put(P + "attention.head_count_kv", "u32", 2), "head_count_kv is 2"),
    "clamps differ": (put(P + "swiglu_clamp_exp", "[f32]", [2.5, 3.0]), "one value for all layers"),
    "ratios short": (put(P + "attention.compress_ratios", "[i32]", [0, 2]), "compress_ratios"),
    "pad elsewhere": (put(P + "engram.pad_id_compressed", "u32", 99), "pad_id_compressed"),
    "vision broken": (forget("ds4.vision.patch_size"), "ds4.vision.patch_size is missing"),
    "vision huge": (put("ds4.vision.num_hidden_layers", "u32", 2**31), "ds4.vision.num_hidden_layers is"),
    "tokens short": (put("tokenizer.ggml.tokens", "[str]", ["a"]), "1 strings for 320 ids"),
    "merges missing": (forget("tokenizer.ggml.merges"), "merges"),
    "token types short": (put("tokenizer.ggml.token_type", "[i32]", [1, 2]), "token_type must be 320"),
    "tokenizer of another kind": (put("tokenizer.ggml.model", "str", "llama"), "'llama'"),
    "eos outside": (put("tokenizer.ggml.eos_token_id", "u32", 320), "eos_token_id is"),
    "token map outside": (poke("engram.token_map", "<i4", 7, 258), "token_map has 258"),
    "token map negative": (poke("engram.token_map", "<i4", 7, -1), "token_map has -1"),
    "prime 0": (poke("engram.primes", "<i8", 3, 0), "primes has 0"),
    "prime huge": (poke("engram.primes", "<i8", 0, 2**61), "offsets has"),
    "offset negative": (poke("engram.offsets", "<i8", 1, -1), "offsets has -1"),
    "offset outside": (poke("engram.offsets", "<i8", 5, 434), "offsets has"),
    "multiplier negative": (poke("engram.multipliers", "<i8", 0, -3), "multipliers has -3"),
    "multiplier overflows": (poke("engram.multipliers", "<i8", 0, 2**60), "multipliers has"),
    "no table path": (forget(P + "engram.0.table_path"), "table_path is missing"),
    "table path a folder": (put(P + "engram.0.table_path", "str", "/shards/"), "neither a file name"),
    "table path dots": (put(P + "engram.0.table_path", "str", "/a/.."), "neither a file name"),
    "table path a drive": (put(P + "engram.0.table_path", "str", "C:\\"), "neither a file name"),
    "table path a number": (put(P + "engram.0.table_path", "u32", 3), "table_path is missing"),
    "offset of rows missing": (forget(P + "engram.1.weight_offset"), "weight_offset is None"),
    "offset of rows past the end": (put(P + "engram.1.weight_offset", "u64", 2**40), "needs"),
    "offset of rows elsewhere": (put(P + "engram.0.weight_offset", "u64", 664), "no tensors where|overlap"),
    "offset negative when signed": (put(P + "engram.0.scale_offset", "u64", 2**63 + 8), "byte offset"),
    "rows and scales overlap": (put(P + "engram.0.scale_offset", "u64", 0), "overlap|no tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(tmp_path: Path, name: str) -> None:
    edit, message = REFUSALS[name]
    path = rebuild(tmp_path, edit)
    with pytest.raises(Ds4Error, match=message) as e:
        Base.open(path, toy_dir("oracle-a"))
    assert "edited.gguf" in str(e.value)


def test_all_problems_at_once(tmp_path: Path) -> None:
    def edit(meta: Any, tensors: Any) -> None:
        del tensors["blk.3.attn_kv.weight"], tensors["output.weight"]
        tensors["odd"] = (F32, (1,), bytes(4))

    with pytest.raises(MissingTensorError) as e:
        Base.open(rebuild(tmp_path, edit), toy_dir("oracle-a"))
    assert len(e.value.problems) == 3


def test_vision_may_be_absent(tmp_path: Path) -> None:
    def edit(meta: Any, tensors: Any) -> None:
        for name in [n for n in tensors if n.startswith("v.") or n.endswith("exp_probs_b_vl.bias")]:
            del tensors[name]

    path = rebuild(tmp_path, edit)
    assert "v.norm.weight" not in Base.open(path, toy_dir("oracle-a")).tensors
    assert verify(path, toy_dir("oracle-a")) == []


def test_without_draft_keys_the_stages_are_ignored(tmp_path: Path) -> None:
    path = rebuild(tmp_path, forget(P + "mtp.block_size"))
    base = Base.open(path, toy_dir("oracle-a"))
    assert base.config.num_nextn_predict_layers == 0 and "mtp.0.attn_norm.weight" in base.tensors
    assert verify(path, toy_dir("oracle-a")) == []
    assert inspect_path(path)["parts"]["draft"] > 0
    with pytest.raises(MissingTensorError):
        base.experts("mtp.0")


def test_a_base_as_published(tmp_path: Path) -> None:
    """No key of ours, no token types, no vision."""

    def edit(meta: Any, tensors: Any) -> None:
        for name in [n for n in tensors if n.startswith("v.") or n.endswith("exp_probs_b_vl.bias")]:
            del tensors[name]
        for key in [k for k in meta if k.startswith("ds4.") or k.endswith("token_type")]:
            del meta[key]

    base = Base.open(rebuild(tmp_path, edit), toy_dir("oracle-a"))
    t = base.tokenizer_data()
    assert t.token_types is None and t.tokenizer_json is None
    want = replace(ModelConfig.load(toy_dir("oracle-a")), vision=None, image_token_id=None)
    assert base.config == want


def test_every_cut_is_refused(tmp_path: Path) -> None:
    """Every byte of the first 4 KB and fifty places after it."""
    path = tmp_path / "cut.gguf"
    shutil.copy(toy_base("oracle-a", 9), path)
    size = path.stat().st_size
    places = sorted({*range(4096), *np.linspace(4096, size - 1, 50).astype(int).tolist()}, reverse=True)
    for n in places:
        os.truncate(path, n)
        with pytest.raises(FileFormatError, match=r"cut\.gguf"):
            Base.open(path, toy_dir("oracle-a"))


# ---- verify and inspect ----


@pytest.mark.parametrize("name", NAMES)
def test_our_bases_verify(name: str) -> None:
    assert verify(toy_base(name, 9), toy_dir(name)) == []
    assert verify(toy_base(name), toy_dir(name)) == []


DAMAGE: dict[str, tuple[Any, str]] = {
    "nan": (poke("output_norm.weight", "<f4", 3, np.nan), "output_norm.weight: 1 values are not finite"),
    "inf": (poke("blk.2.hc_attn_fn.weight", "<f4", 100, np.inf), "inf at element 100"),
    "q8_0 scale nan": (poke("output.weight", "<u2", 0, 0x7E00), "output.weight: 32 values"),
    "fp8 nan": (poke("blk.1.engram_wkv.weight", "u1", 5, 0x7F), "blk.1.engram_wkv.weight: 1 values"),
    "e8m0 nan": (poke("blk.1.engram_wkv.weight", "u1", -1, 0xFF), "1024 values"),
    "bf16 inf": (poke("blk.1.indexer.wk.weight", "<u2", 0, 0x7F80), "blk.1.indexer.wk.weight: 1 values"),
    "map with a hole": (poke("engram.token_map", "<i4", 200, 0), "distinct ids"),
    "offset not the sum": (poke("engram.offsets", "<i8", 1, 1), "running sum"),
    "even multiplier": (poke("engram.multipliers", "<i8", 1, 4), "even"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_verify_finds_what_a_load_does_not_look_at(tmp_path: Path, name: str) -> None:
    edit, message = DAMAGE[name]
    path = rebuild(tmp_path, edit)
    Base.open(path, toy_dir("oracle-a"))
    problems = verify(path, toy_dir("oracle-a"))
    assert len(problems) >= 1 and any(message in p for p in problems), problems


def test_verify_reads_streams_and_padding(tmp_path: Path) -> None:
    """An index past a codebook of 512, a bit after a row's last index, a byte after the streams."""
    raw = toy_base("oracle-a", 9).read_bytes()
    source = read_container(toy_base("oracle-a", 9))
    base = Base.open(toy_base("oracle-a", 9), toy_dir("oracle-a"))
    blob = source.tensors["blk.2.ffn_exps_vq.blob"].offset
    at = blob + int(base.experts("blk.2").slots[1, 0])
    main = at + 32 + 2 * 32  # 32 rows of 64 columns: 12 bytes a row
    end = main + 32 * 12
    path = tmp_path / "x.gguf"
    for place, value, message in ((main + 1, 0x02, "there are 512 codewords"), (end, 1, "padding after the streams")):
        damaged = bytearray(raw)
        damaged[place] |= value
        path.write_bytes(damaged)
        Base.open(path, toy_dir("oracle-a"))
        problems = verify(path, toy_dir("oracle-a"))
        assert len(problems) == 1 and "expert 1 w1" in problems[0] and message in problems[0], problems
    t = source.tensors["blk.0.hc_attn_scale.weight"]  # 12 bytes, then padding
    damaged = bytearray(raw)
    damaged[t.offset + t.nbytes] = 1
    path.write_bytes(damaged)
    assert verify(path, toy_dir("oracle-a")) == [f"{t.name}: the padding after it is not zero"]


def test_inspect() -> None:
    got = inspect_path(toy_base("oracle-a", 9))
    assert got["kind"] == "base" and got["config"]["hidden_size"] == 64
    assert sum(got["parts"].values()) == sum(t["bytes"] for t in got["tensors"])
    assert got["experts"][0] == {"name": "blk.0", "version": 3, "codewords": 512, "n_expert": 8}
    assert "other" not in got["parts"]
    assert [t["name"] for t in got["tensors"]] == [t.name for t in plan(ModelConfig.load(toy_dir("oracle-a")))]
    assert inspect_path(toy_dir("oracle-a"))["kind"] == "checkpoint"


def test_plan_rows_and_parts_of_the_published_model() -> None:
    planned = plan(ModelConfig.load(toy_dir("published")))
    assert all(part_of(t.name) != "other" for t in planned)
    last = plan_rows(planned)[-1]
    assert packed_bytes(planned) == 113_551_851_680 == last["offset"] + last["bytes"]  # 384 bytes: no padding
    assert plan_rows(planned)[0] == {
        "name": "token_embd.weight", "type": "q4_K", "type_id": 12, "dims": [5120, 129280], "bytes": 372_326_400,
        "offset": 0,
    }  # fmt: skip
