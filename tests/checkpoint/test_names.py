"""The inventory against the released totals and against the toy checkpoints that others wrote."""

import copy
import json
import struct
from collections import Counter
from pathlib import Path

import pytest

from ds4.checkpoint.names import companion, draft_stages, expected
from ds4.model.config import ModelConfig

DATA = Path(__file__).parent.parent / "data"
# vision.md section 1; the published text config carries no vision_config
VISION = {
    "model_type": "deepseek_v41_vision", "num_hidden_layers": 32, "hidden_size": 1024, "num_attention_heads": 16,
    "intermediate_size": 2816, "patch_size": 14, "rope_theta": 10000, "downsample_ratio": 3,
    "max_image_tokens": 1024, "min_pixels": 295936, "max_wh_ratio": None,
}  # fmt: skip


def test_released_totals() -> None:
    """96,085 tensors, 510,286,023,000 bytes, and each dtype's share."""
    raw = json.loads((DATA / "published/config.json").read_text()) | {"vision_config": VISION}
    specs = expected(ModelConfig.from_json(raw))
    assert len(specs) == 96_085
    by_dtype: Counter[str] = Counter()
    for spec in specs.values():
        by_dtype[spec.dtype] += spec.nbytes
    assert by_dtype == {
        "I8": 278_585_671_680,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
    }
    assert by_dtype.total() == 510_286_023_000
    expert = sum(spec.nbytes for name, spec in specs.items() if name.startswith("layers.7.ffn.experts.9."))
    assert expert == 18_800_640


def test_without_vision_the_tower_is_absent_and_the_markers_optional() -> None:
    specs = expected(ModelConfig.load(DATA / "published"))
    assert not any(name.startswith(("vision.", "aligner.")) for name in specs)
    assert [name for name, spec in specs.items() if not spec.required] == [
        "image_start",
        "image_end",
        "image_newline",
    ]


@pytest.mark.parametrize("name", ["oracle-a", "oracle-b", "oracle-e"])
def test_toy_checkpoints_have_exactly_these_tensors(name: str) -> None:
    with (DATA / name / "model.safetensors").open("rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    header.pop("__metadata__")
    specs = expected(ModelConfig.load(DATA / name))
    assert {k: (v["dtype"], tuple(v["shape"])) for k, v in header.items()} == {
        k: (s.dtype, s.shape) for k, s in specs.items()
    }


def test_the_table_follows_the_config() -> None:
    raw = json.loads((DATA / "oracle-a/config.json").read_text())
    more = copy.deepcopy(raw)
    more["text_config"] |= {"hc_mult": 3, "index_source_layer_ids": [1, 3, 4, 5, 6]}
    specs = expected(ModelConfig.from_json(more))
    assert specs["layers.0.hc_attn_fn"].shape == (15, 192)
    assert specs["layers.1.engram.wkv.weight"].shape == (256, 192)
    assert "layers.5.attn.indexer.wq_b.scale" in specs and "layers.5.attn.indexer.wk.weight" not in specs
    assert "layers.3.attn.compressor.wgate.weight" in specs  # ratio 2
    assert "layers.4.attn.compressor.wgate.weight" not in specs  # ratio 1


def test_small_helpers() -> None:
    assert companion("layers.1.engram.embed.weight") == "layers.1.engram.embed.scale"
    assert draft_stages({"mtp.0.attn.wq_a.weight", "mtp.1.attn.wq_a.weight", "mtp.3.attn.wq_a.weight"}) == 2
