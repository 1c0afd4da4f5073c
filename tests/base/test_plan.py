"""plan.py against the published inventory, and on small models."""

from dataclasses import replace
from pathlib import Path

import pytest

from ds4.base.plan import default_bits, expert_bits, plan
from ds4.base.types import BF16, FP8_32X32, Q4_K, Q8_0
from ds4.errors import UsageError
from ds4.model.config import ModelConfig

DATA = Path(__file__).resolve().parents[1] / "data"
PUBLISHED = ModelConfig.load(DATA / "published")


def published_rows() -> list[tuple[str, int, tuple[int, ...]]]:
    lines = (DATA / "published" / "base-tensors.tsv").read_text().splitlines()
    split = (line.split("\t") for line in lines)
    return [(name, int(t), tuple(int(d) for d in dims.split("x"))) for name, t, dims in split]


def test_the_published_inventory_in_order() -> None:
    planned = plan(PUBLISHED)
    assert [(t.name, t.type_id, t.dims) for t in planned] == published_rows()
    # every size is a multiple of the alignment or followed by padding: the sum packed at 32
    assert sum(-(-t.nbytes // 32) * 32 for t in planned) == 113_551_851_680


def test_sources_are_released_names_without_repetition() -> None:
    sources = [t.source for t in plan(PUBLISHED) if t.source]
    assert len(set(sources)) == len(sources)
    assert "mtp.2.confidence_head.proj.weight" in sources


@pytest.mark.parametrize("name", ["oracle-a", "oracle-b", "oracle-e"])
def test_toy_sources_exist_and_have_the_planned_shape(name: str) -> None:
    from ds4.checkpoint.reader import Checkpoint

    checkpoint = Checkpoint.open(DATA / name)
    planned = plan(checkpoint.config)
    used = set()
    for t in planned:
        if t.kind == "blob":
            used |= {n for n in checkpoint.infos if n.startswith(t.source)}
        elif t.source:
            assert checkpoint.infos[t.source].shape == t.dims[::-1], t.name
            used |= {t.source, t.source.removesuffix(".weight") + ".scale"}
    left = {n for n in checkpoint.infos if n not in used and ".engram.embed." not in n}
    assert all(n.startswith("mtp.") and n.endswith("gate.bias_vl") for n in left), sorted(left)[:5]


def test_vision_follows_the_published_order() -> None:
    c = ModelConfig.load(DATA / "oracle-a")
    text = plan(replace(c, vision=None))
    assert plan(c)[: len(text)] == text
    extra = {t.name for t in plan(c)[len(text) :]}
    assert {"blk.0.exp_probs_b_vl.bias", "v.patch_embed.proj.weight", "v.aligner.w1.bias", "v.image_end"} <= extra


def test_types_of_rows_that_q4k_cannot_hold() -> None:
    types = {t.name: t.type_id for t in plan(PUBLISHED)}
    assert types["blk.0.attn_q_a.weight"] == Q4_K
    assert types["mtp.0.attn_q_a.weight"] == FP8_32X32
    narrow = {t.name: t.type_id for t in plan(replace(PUBLISHED, q_lora_rank=96, o_lora_rank=30, hidden_size=5152))}
    assert narrow["blk.0.attn_q_a.weight"] == Q8_0  # rows of 5152 = 32 x 161
    assert narrow["blk.0.attn_q_b.weight"] == Q8_0  # rows of 96
    assert narrow["blk.0.attn_output_b.weight"] == BF16  # rows of 240
    assert narrow["mtp.0.attn_output_b.weight"] == BF16
    assert narrow["mtp.0.attn_output_a.weight"] == Q8_0  # 240 rows of 4096: tiles of 32 rows do not fit


def test_default_bits() -> None:
    assert default_bits(PUBLISHED) == (13,) * 14 + (12,) * 29
    for layers, first in ((1, 0), (2, 1), (6, 2), (7, 2), (8, 3), (10, 4)):
        c = replace(
            PUBLISHED, num_hidden_layers=layers, compress_ratios=(0,) * layers, kv_source_layer_ids=(),
            index_source_layer_ids=(), engram_layer_ids=(), engram_num_embeddings=(), num_nextn_predict_layers=0,
            dspark_target_layer_ids=(), candidate_source_layer_id=-1,
        )  # fmt: skip
        assert default_bits(c) == (13,) * first + (12,) * (layers - first)


def test_bits_given_by_hand() -> None:
    assert expert_bits(PUBLISHED, 9) == (9,) * 43
    assert expert_bits(PUBLISHED, [10] * 40) == (10,) * 40 + (12,) * 3
    assert expert_bits(PUBLISHED, [10] * 43) == (10,) * 43
    for bad in (0, 14, True, [12] * 41, [12] * 39 + [12.5], []):
        with pytest.raises(UsageError, match="--bits"):
            expert_bits(PUBLISHED, bad)  # type: ignore[arg-type]
