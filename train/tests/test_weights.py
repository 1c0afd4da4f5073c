"""The map between training state and released tensors: there and back, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.checkpoint.names import expected
from ds4.checkpoint.reader import Checkpoint
from ds4.errors import MissingTensorError
from ds4.model.config import ModelConfig
from train.weights import from_released, read_checkpoint, state_shapes, to_released

DATA = Path(__file__).parents[2] / "tests/data"
F32 = NDArray[np.float32]


@pytest.fixture(params=["oracle-a", "oracle-b", "oracle-e"])
def fixture(request: pytest.FixtureRequest) -> tuple[ModelConfig, dict[str, F32]]:
    return read_checkpoint(DATA / request.param)


def numbered(config: ModelConfig) -> dict[str, F32]:
    """A state in which no two values of a tensor are equal."""
    out = {}
    for i, (name, shape) in enumerate(state_shapes(config).items()):
        out[name] = (np.arange(np.prod(shape), dtype=np.float32) + i).reshape(shape)
    return out


def test_there_and_back_changes_nothing(fixture: tuple[ModelConfig, dict[str, F32]]) -> None:
    config, state = fixture
    again = from_released(config, to_released(config, state))
    assert list(again) == list(state) == list(state_shapes(config))
    assert all(np.array_equal(again[name], state[name]) for name in state)


def test_released_tensors_are_all_there_and_in_their_places() -> None:
    config = ModelConfig.load(DATA / "oracle-b")
    state = numbered(config)
    released = to_released(config, state)
    want = {n for n, s in expected(config).items() if s.required and s.dtype != "F8_E8M0"}
    assert set(released) == want
    F = config.moe_intermediate_size
    for e in (0, config.n_routed_experts - 1):
        p, w13 = f"layers.2.ffn.experts.{e}", state["layers.2.ffn.experts.w13"]
        assert np.array_equal(released[f"{p}.w1.weight"], w13[e, :F])
        assert np.array_equal(released[f"{p}.w3.weight"], w13[e, F:])
        assert np.array_equal(released[f"{p}.w2.weight"], state["layers.2.ffn.experts.w2"][e])
    shared = state["mtp.1.ffn.shared_experts.w13"]
    assert np.array_equal(released["mtp.1.ffn.shared_experts.w1.weight"], shared[:F])
    assert np.array_equal(released["mtp.1.ffn.shared_experts.w3.weight"], shared[F:])
    for p in ("layers.0", "mtp.2"):
        assert np.array_equal(released[f"{p}.ffn.gate.bias_vl"], state[f"{p}.ffn.gate.bias"])
    for name in ("embed.weight", "layers.0.hc_attn_fn", "layers.1.attn.wo_a.weight", "mtp.0.main_proj.weight"):
        assert np.array_equal(released[name], state[name])
    assert not released["image_start"].any() and not released["vision.norm.weight"].any()


def test_shapes_of_the_stacked_tensors() -> None:
    config = ModelConfig.load(DATA / "oracle-b")
    shapes, D, F = state_shapes(config), config.hidden_size, config.moe_intermediate_size
    assert shapes["layers.0.ffn.experts.w13"] == (config.n_routed_experts, 2 * F, D)
    assert shapes["layers.0.ffn.experts.w2"] == (config.n_routed_experts, D, F)
    assert shapes["mtp.0.ffn.experts.w13"] == (config.dspark_n_routed_experts, 2 * F, D)
    assert shapes["layers.0.ffn.shared_experts.w13"] == (2 * F, D)
    assert shapes["layers.0.ffn.shared_experts.w2"] == (D, F)
    assert shapes[f"layers.{config.engram_layer_ids[0]}.engram.embed.weight"][1] == config.engram_head_dim
    assert not any(n.endswith("bias_vl") or n.startswith(("image_", "vision.", "aligner.")) for n in shapes)


def test_a_fixture_reads_as_its_checkpoint_says() -> None:
    config, state = read_checkpoint(DATA / "oracle-b")
    checkpoint = Checkpoint.open(DATA / "oracle-b")
    last = config.n_routed_experts - 1
    F = config.moe_intermediate_size
    w3 = checkpoint.tensor(f"layers.3.ffn.experts.{last}.w3.weight")
    assert np.array_equal(state["layers.3.ffn.experts.w13"][last, F:], w3)
    layer = config.engram_layer_ids[-1]
    rows = checkpoint.engram_rows(layer, np.arange(7))
    assert np.array_equal(state[f"layers.{layer}.engram.embed.weight"][:7], rows)


def test_every_problem_is_named_and_the_first_is_the_message() -> None:
    config = ModelConfig.load(DATA / "oracle-b")
    state = numbered(config)
    del state["norm.weight"]
    state["layers.0.ffn.gate.bias_vl"] = np.zeros(config.n_routed_experts, np.float32)
    state["layers.0.ffn.experts.w13"] = state["layers.0.ffn.experts.w13"][:, 1:]
    state["head.weight"] = state["head.weight"].astype(np.float16)
    with pytest.raises(MissingTensorError) as error:
        to_released(config, state)
    assert str(error.value) == ("weights do not fit the configuration: missing: norm.weight (and 3 more problems)")
    E, D, F = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    assert error.value.problems == (
        "missing: norm.weight",
        "extra: layers.0.ffn.gate.bias_vl",
        f"misshapen: layers.0.ffn.experts.w13 is {[E, 2 * F - 1, D]}, not {[E, 2 * F, D]}",
        "head.weight is float16, not float32",
    )


def test_another_models_weights_are_told_in_one_line() -> None:
    a, b = ModelConfig.load(DATA / "oracle-a"), ModelConfig.load(DATA / "published")
    with pytest.raises(MissingTensorError, match=r"of a model of other dimensions: embed.weight is .*, not "):
        to_released(a, {name: np.zeros((3,) * len(shape), np.float32) for name, shape in state_shapes(a).items()})
    assert state_shapes(b)["layers.39.ffn.experts.w13"] == (384, 2 * 2304, 5120)
    with pytest.raises(MissingTensorError, match="missing"):
        from_released(a, {})
