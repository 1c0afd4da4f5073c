"""ModelConfig: both spellings, what it refuses and in which words, and the numbers derived from it."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import ConfigError, Ds4Error
from ds4.model.config import ModelConfig
from ds4.model.config_reader import FLAT_NAMES, FLAT_ROPE, FLAT_VISION

DATA = Path(__file__).parent.parent / "data"
PUBLISHED = json.loads((DATA / "published/config.json").read_text())
ORACLE = json.loads((DATA / "oracle-a/config.json").read_text())


def with_text(**changes: Any) -> dict[str, Any]:
    raw = copy.deepcopy(ORACLE)
    raw["text_config"].update(changes)
    return raw


def flat(raw: dict[str, Any]) -> dict[str, Any]:
    """The vendor's flat spelling of a composite file."""
    text = dict(raw["text_config"])
    rope = text.pop("rope_scaling")
    out = {FLAT_NAMES.get(k, k): v for k, v in text.items()}
    out |= {FLAT_ROPE[k]: v for k, v in rope.items() if k in FLAT_ROPE}
    out |= {FLAT_VISION[k]: v for k, v in raw.get("vision_config", {}).items() if k in FLAT_VISION}
    return out | {k: raw[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")}


def test_published_numbers() -> None:
    c = ModelConfig.from_json(PUBLISHED)
    assert (c.hidden_size, c.num_hidden_layers, c.hc_mixes, c.engram_columns) == (5120, 40, 24, 24)
    assert (c.nope_head_dim, c.last_kv_source, c.rms_norm_eps, c.gate_temp) == (448, 20, 1e-20, 1.0)
    assert [c.kv_owner(i) for i in (0, 1, 2, 7, 8, 13, 14, 19, 20, 39)] == [None, None, 2, 2, 8, 8, 14, 14, 20, 20]
    assert [c.index_owner(i) for i in (1, 19, 23, 24, 31, 39)] == [None, 14, 20, 24, 28, 36]
    assert [i for i in range(40) if c.uses_candidates(i)] == [24, 28, 32, 36]
    assert [c.engram_slot(i) for i in (0, 1, 14)] == [None, 0, 1]


def test_written_yarn_table() -> None:
    """Section 14's values, and plain frequencies where the ratio is 0."""
    c = ModelConfig.from_json(PUBLISHED)
    f = c.rope_frequencies(20)
    want = {0: 1, 1: 0.687656022, 15: 0.00363553858, 16: 0.002265625, 20: 2.96977778e-4, 24: 1.953125e-5}
    for i, value in (want | {25: 5.37231267e-6, 31: 5.68052904e-7}).items():
        assert math.isclose(f[i], value, rel_tol=5e-9), i
    for layer in (0, 1, 40, 42):
        assert c.rope_frequencies(layer)[31] == 10000 ** (-62 / 64)


@pytest.mark.parametrize("name", ["oracle-a", "oracle-b", "oracle-e", "published"])
def test_flat_and_composite_agree(name: str) -> None:
    raw = json.loads((DATA / name / "config.json").read_text())
    composite = ModelConfig.load(DATA / name)
    assert ModelConfig.from_json(flat(raw)) == composite
    mixed = copy.deepcopy(raw)
    mixed["text_config"]["dim"] = mixed["text_config"].pop("hidden_size")
    assert ModelConfig.from_json(mixed) == composite


def test_flat_file_without_a_context_stretches_as_yarn_does() -> None:
    raw = flat(PUBLISHED)
    del raw["max_seq_len"]
    assert ModelConfig.from_json(raw).max_position_embeddings == 1048576


def test_stage_count_from_elsewhere() -> None:
    raw = copy.deepcopy(PUBLISHED)
    del raw["text_config"]["num_nextn_predict_layers"]
    assert ModelConfig.from_json(raw).num_nextn_predict_layers == 3  # from the length of compress_ratios
    raw["text_config"]["compress_ratios"] = raw["text_config"]["compress_ratios"][:40]
    assert ModelConfig.from_json(raw, draft_stages=3).num_nextn_predict_layers == 3
    assert ModelConfig.from_json(raw).num_nextn_predict_layers == 0


@pytest.mark.parametrize("key", sorted(PUBLISHED["text_config"].keys()))
def test_every_key_is_needed_or_known_to_change_nothing(key: str) -> None:
    optional = {
        "model_type", "num_key_value_heads", "n_shared_experts", "scoring_func", "topk_method", "norm_topk_prob",
        "hidden_act", "tie_word_embeddings", "num_nextn_predict_layers",
    }  # fmt: skip
    raw = copy.deepcopy(PUBLISHED)
    del raw["text_config"][key]
    if key in optional:
        assert ModelConfig.from_json(raw) == ModelConfig.from_json(PUBLISHED)
    else:
        with pytest.raises(ConfigError, match=f"here.json: key {key}.* is missing"):
            ModelConfig.from_json(raw, "here.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_sise": 64}, "unknown key 'hidden_sise'"),
        ({"hidden_size": "64"}, "hidden_size is '64'; expected an integer"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 10**400}, "hidden_size is 1000"),
        ({"hidden_size": 65}, "hidden_size is 65, not a multiple of 32"),
        ({"swiglu_limit": "ten"}, "swiglu_limit is 'ten'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; expected true or false"),
        ({"compress_ratios": [0, 2]}, "compress_ratios has 2 entries for 7 layers"),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0]}, "draft stages must have compress ratio 0"),
        ({"compress_ratios": [0, 2, -2]}, "list of non-negative integers"),
        ({"kv_source_layer_ids": [1, 4, 3]}, "kv_source_layer_ids must rise"),
        ({"kv_source_layer_ids": [1, 2, 3, 4]}, "every kv source must be an index source"),
        ({"index_source_layer_ids": [0, 1, 3, 4, 6]}, "layer 0 has ratio 0 and cannot be an index source"),
        ({"candidate_source_layer_id": 5}, "candidate_source_layer_id must be an index source"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok exceeds"),
        ({"o_groups": 3}, "o_groups must divide"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; expected 'sqrtsoftplus'"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2; expected 1"),
        ({"n_shared_experts": True}, "n_shared_experts is True"),
        ({"dim": 128}, "hidden_size and dim are the same setting and disagree"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_scaling.rope_type is 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "key rope_scaling.beta_fast .* is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "mscale": 2}}, "unknown key rope_scaling.mscale"),
        ({"rope_scaling": 3}, "rope_scaling is 3"),
        ({"engram_num_embeddings": [434]}, "one entry an engram layer"),
        ({"engram_pad_token_id": 320}, "engram_pad_token_id is outside the vocabulary"),
        ({"dspark_noise_token_id": 999}, "dspark_noise_token_id is outside the vocabulary"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids is empty"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim must be even"),
    ],
)
def test_refusals_name_key_value_and_file(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        ModelConfig.from_json(with_text(**changes), "here.json")
    assert str(error.value).startswith("here.json: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown key 'extra' at the top level"),
        ({"model_type": "llama"}, "model_type is 'llama'; ds4 runs 'deepseek_v41'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'; only 'fp8'"),
        ({"quantization_config": {"bits": 4}}, "unknown key quantization_config.bits"),
        ({"quantization_config": 3}, "quantization_config must be an object"),
        ({"text_config": []}, "text_config must be an object"),
        ({"vision_config": {"hidden_size": 3}}, "key vision_config.num_hidden_layers is missing"),
        ({"vision_config": {"depth": 3}}, "unknown key vision_config.depth"),
        ({"bos_token_id": "0"}, "bos_token_id is '0'; expected a token id"),
        ({"eos_token_id": 320}, "eos_token_id is outside the vocabulary"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    ],
)
def test_top_level_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(copy.deepcopy(ORACLE) | change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "must be a JSON object, is list"),
        (b'{"dim": 1, "dim": 2}', "key 'dim' stands twice"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.load(tmp_path)


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.load(tmp_path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(ORACLE["text_config"])), values, st.booleans())
def test_any_value_anywhere_is_a_config_or_a_config_error(key: str, value: Any, top: bool) -> None:
    raw = copy.deepcopy(ORACLE)
    (raw if top and key in raw else raw["text_config"])[key] = value
    try:
        c = ModelConfig.from_json(raw)
    except Ds4Error:
        return
    for layer in range(c.num_hidden_layers + c.num_nextn_predict_layers):
        assert all(math.isfinite(f) for f in c.rope_frequencies(layer))
