"""Encoders: exact on what they can hold, within half a step on the rest; shards laid out as in the release."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from ds4.checkpoint import codecs, writer
from ds4.checkpoint.names import expected
from ds4.checkpoint.preflight import preflight
from ds4.checkpoint.reader import Checkpoint
from ds4.errors import FileFormatError, MissingTensorError
from ds4.model.config import ModelConfig

DATA = Path(__file__).parent.parent / "data"


def dequantised(path: Path) -> dict[str, NDArray[np.float32]]:
    c = Checkpoint.open(path)
    out = {}
    for name, info in c.infos.items():
        if info.dtype == "F8_E8M0":
            continue
        if name.endswith("engram.embed.weight"):
            layer = int(name.split(".")[1])
            out[name] = c.engram_rows(layer, np.arange(info.shape[0]))
        else:
            out[name] = c.tensor(name)
    return out


@pytest.mark.parametrize("n_shards", [None, 3, 6])
def test_a_checkpoint_written_again_holds_the_same_values(tmp_path: Path, n_shards: int | None) -> None:
    """oracle-a: its values fit scales that are no larger than needed, so nothing may move."""
    weights = dequantised(DATA / "oracle-a")
    config = ModelConfig.load(DATA / "oracle-a")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((DATA / "oracle-a" / name).read_bytes())
    writer.write_checkpoint(tmp_path, writer.encode(config, weights), config.engram_layer_ids, n_shards)
    assert preflight(tmp_path) == []
    again = dequantised(tmp_path)
    assert again.keys() == weights.keys()
    for name, w in weights.items():
        assert np.array_equal(again[name], w), name


def test_shards_as_released(tmp_path: Path) -> None:
    config = ModelConfig.load(DATA / "oracle-a")
    (tmp_path / "config.json").write_bytes((DATA / "oracle-a/config.json").read_bytes())
    stored = writer.encode(config, dequantised(DATA / "oracle-a"))
    writer.write_checkpoint(tmp_path, stored, config.engram_layer_ids, 4)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    c = Checkpoint.open(tmp_path)
    for layer, file in ((1, files[2]), (4, files[3])):
        path, weight_at, scale_at = c.engram_file(layer)
        with safe_open(path, "np") as f:
            assert set(f.keys()) == {f"layers.{layer}.engram.embed.weight", f"layers.{layer}.engram.embed.scale"}
        n_rows = config.engram_num_embeddings[c.config.engram_layer_ids.index(layer)]
        assert (path.name, weight_at % 8, scale_at) == (file, 0, weight_at + n_rows * config.engram_head_dim)
    total = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == sum(s.nbytes for s in expected(config).values())
    assert not list(tmp_path.glob("*.part"))


def test_same_input_same_bytes(tmp_path: Path) -> None:
    config, weights = ModelConfig.load(DATA / "oracle-a"), dequantised(DATA / "oracle-a")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        writer.write_checkpoint(tmp_path / name, writer.encode(config, weights), config.engram_layer_ids)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def gaussian(seed: int, shape: tuple[int, int]) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-20, 20, (shape[0], 1)))).astype(np.float32)


def test_encode_fp8_rounds_within_half_a_step_and_never_saturates() -> None:
    w = gaussian(1, (70, 96))
    codes, scales = writer.encode_fp8(w)
    back, wide = codecs.dequant_fp8(codes, scales), np.repeat(np.repeat(codecs.ue8m0_to_f32(scales), 32, 0), 32, 1)
    wide = wide[:70]
    # e4m3: 3 mantissa bits, so half a step is 2^-4 of the value, and 2^-10 of the scale below 2^-6
    assert (np.abs(back - w) <= np.maximum(np.abs(w) * 2.0**-4, wide * 2.0**-10)).all()
    assert (np.abs(w) <= 448 * wide).all()
    blocks = np.abs(w[:64]).reshape(2, 32, 3, 32).max(axis=(1, 3))
    assert (blocks > 448 * codecs.ue8m0_to_f32(scales[:2]) / 2).all()  # the least such scale


def test_encode_fp4_rounds_within_half_a_step() -> None:
    w = gaussian(2, (40, 64))
    packed, scales = writer.encode_fp4(w)
    wide = np.repeat(codecs.ue8m0_to_f32(scales), 32, axis=1)
    # steps of 0.5 below 2, 1 below 4, 2 below 6
    step = np.select([np.abs(w) < 2 * wide, np.abs(w) < 4 * wide], [0.5 * wide, wide], 2 * wide)
    assert (np.abs(codecs.dequant_fp4(packed, scales) - w) <= step / 2).all()
    assert (np.abs(w) <= 6 * wide).all()


def test_fitted_fp4_scales_leave_the_least_error_of_all_scales() -> None:
    w = gaussian(3, (60, 96))
    w[::3, 5] *= 30  # an outlier alone: saturating it would cost more than it gains
    packed, scales = writer.encode_fp4(w, fit_scales=True)
    plain = writer.encode_fp4(w)[1].astype(int)

    def errors(step: int) -> NDArray[np.float64]:
        """Squared error a block, [60, 3], at the plain scale times 2^step."""
        wide = np.exp2(plain + step - 127.0)[:, :, None]
        blocks = w.reshape(60, 3, 32).astype(np.float64)
        rounded = codecs.e2m1_to_f32(codecs.f32_to_e2m1((blocks / wide).astype(np.float32))) * wide
        return np.asarray(np.square(rounded - blocks).sum(axis=2))

    got = np.square(codecs.dequant_fp4(packed, scales).astype(np.float64) - w).reshape(60, 3, 32).sum(axis=2)
    least = np.min([errors(step) for step in range(-4, 5)], axis=0)
    assert np.allclose(got, least, rtol=1e-6)
    assert set(np.unique(scales - plain)) == {-1, 0}
    assert got.sum() < errors(0).sum()


def test_a_checkpoint_encoded_with_fitted_scales_differs_in_its_experts_alone() -> None:
    """Values that already lie on a grid keep their bytes; others move only where that is better."""
    config, weights = ModelConfig.load(DATA / "oracle-a"), dequantised(DATA / "oracle-a")
    plain = writer.encode(config, weights)
    for name, (dtype, value) in writer.encode(config, weights, fit_scales=True).items():
        assert plain[name][0] == dtype and np.array_equal(plain[name][1], value), name
    moved = {n: w * np.float32(1.1) for n, w in weights.items()}
    plain, fitted = writer.encode(config, moved), writer.encode(config, moved, fit_scales=True)
    other = {n for n in plain if not np.array_equal(plain[n][1], fitted[n][1])}
    assert other and all(".ffn.experts." in n for n in other)


def test_zeros_and_the_smallest_numbers_stay_finite() -> None:
    for w in (np.zeros((32, 32), np.float32), np.full((32, 32), 1e-45, np.float32)):
        for encode, decode in (
            (writer.encode_fp8, codecs.dequant_fp8),
            (writer.encode_fp4, codecs.dequant_fp4),
            (partial(writer.encode_fp4, fit_scales=True), codecs.dequant_fp4),
            (writer.encode_engram, codecs.dequant_engram),
        ):
            assert (decode(*encode(w)) == 0).all()


def test_weights_that_do_not_fill_the_config_are_listed() -> None:
    config, weights = ModelConfig.load(DATA / "oracle-a"), dequantised(DATA / "oracle-a")
    del weights["norm.weight"]
    weights["head.weight"] = weights["head.weight"][:5]
    weights["nothing"] = weights["layers.0.attn.wkv.scale"] = np.zeros(1, np.float32)
    weights["layers.0.attn_norm.weight"] = np.full(64, np.nan, np.float32)
    with pytest.raises(MissingTensorError) as error:
        writer.encode(config, weights)
    assert sorted(error.value.problems) == [
        "extra: layers.0.attn.wkv.scale",
        "extra: nothing",
        "misshapen: head.weight [5, 64], not [320, 64]",
        "missing: norm.weight",
        "not finite: layers.0.attn_norm.weight",
    ]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"absent/x\.safetensors: cannot be written"):
        writer.write_safetensors(tmp_path / "absent/x.safetensors", {"a": ("U8", np.zeros(3, np.uint8))})
    with pytest.raises(FileFormatError, match="cannot be written"):
        (tmp_path / "x.safetensors").mkdir()
        writer.write_safetensors(tmp_path / "x.safetensors", {"a": ("U8", np.zeros(3, np.uint8))})
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
