"""What is around the formulas: modes, other array libraries, memory, results and refusals."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.checkpoint import codecs
from ds4.errors import CapacityError, Ds4Error, MissingTensorError, RequestError, UsageError
from ds4.teacher import stream
from ds4.teacher.numerics import ARITHMETICS, round_bf16
from ds4.teacher.run import Teacher, Trace
from tests.teacher import lookalike
from tests.teacher.oracles import source, whole

IDS = np.array([0, 70, 80, 90, 100, 120, 11, 12, 13, 14, 15, 16, 17], dtype=np.int32)


class Changed:
    """A source with some tensors replaced."""

    def __init__(self, name: str, **tensors: NDArray) -> None:
        self._inner = source(name)
        self._tensors = {k.replace("__", "."): v for k, v in tensors.items()}
        self.config = self._inner.config
        self.hidden: set[str] = set()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def has(self, name: str) -> bool:
        return name not in self.hidden and self._inner.has(name)

    def dense(self, name: str) -> NDArray:
        return self._tensors.get(name, self._inner.dense(name))


@pytest.mark.parametrize("arith", ARITHMETICS)
@pytest.mark.parametrize("index_keys", ["owner", "released"])
def test_another_array_library_gives_the_same_bits(arith: str, index_keys: str) -> None:
    """Host and device arrays never meet, and the numbers do not depend on whose arrays they are."""
    expected = Teacher(source("oracle-a"), arith, index_keys).run(IDS, decode_from=9, streams=True)
    got = Teacher(source("oracle-a"), arith, index_keys, lookalike.module()).run(IDS, decode_from=9, streams=True)
    for name, array in expected.items():
        assert type(got[name]) is np.ndarray
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_lookalike_notices_mixing() -> None:
    xp = lookalike.module()
    x = xp.asarray(np.ones((2, 2), np.float32))
    for mix in (lambda: x + np.ones(2), lambda: xp.matmul(x, np.ones((2, 2))), lambda: x[np.array([0])]):
        with pytest.raises(TypeError, match="meets a device array"):
            mix()


def test_run_is_forward() -> None:
    """logits_TV, streams_LTSD and hash_rows_TGN have the documented shapes, prefilled or decoded."""
    teacher = Teacher(source("oracle-b"))
    c, t = teacher.config, len(IDS)
    whole_run = teacher.run(IDS, streams=True)
    assert whole_run["logits_TV"].shape == (t, c.vocab_size) and whole_run["logits_TV"].dtype == np.float32
    assert whole_run["streams_LTSD"].shape == (c.num_hidden_layers + 1, t, c.hc_mult, c.hidden_size)
    assert whole_run["hash_rows_TGN"].shape == (t, len(c.engram_layer_ids), c.engram_columns)
    embeds = teacher.forward(teacher.new_state(), IDS[:1])  # the first entry is the embedding, four times
    assert (whole_run["streams_LTSD"][0, 0, 0] == whole_run["streams_LTSD"][0, 0, -1]).all()
    assert whole(whole_run["logits_TV"][:1], embeds) < 1e-5
    for split in (0, 5, t):
        split_run = teacher.run(IDS, decode_from=split, streams=True)
        for name, array in whole_run.items():
            assert split_run[name].dtype == array.dtype
            assert whole(split_run[name], array) < 2e-5, (split, name)
    assert set(teacher.run(IDS)) == {"logits_TV"}


def test_streams_reach_the_logits() -> None:
    """The last entry of the streams is what the head reads: model-text 5's last two lines rebuild the logits."""
    s = source("oracle-a")
    teacher, trace = Teacher(s), Trace()
    logits = teacher.forward(teacher.new_state(), IDS, trace=trace)
    x = trace.streams_LRSD[0]
    assert x.shape[0] == s.config.num_hidden_layers + 1
    h = np.linalg.lstsq(s.dense("head.weight").astype(np.float64), logits.astype(np.float64).T, rcond=None)[0].T
    h = h / s.dense("norm.weight")
    # h is a combination of the streams, up to its norm
    for row in range(len(IDS)):
        basis, _ = np.linalg.qr(x[-1, row].astype(np.float64).T)
        out = h[row] - basis @ (basis.T @ h[row])
        assert np.linalg.norm(out) < 1e-4 * np.linalg.norm(h[row])


def test_vendor_rounds_streams_and_linear_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 streams, and Q8 before exactly the FP8 and FP4 weights of model-text 10's table."""
    s = source("oracle-a")
    c = s.config
    widths: list[int] = []
    plain = codecs.q8

    def counted(x: NDArray) -> NDArray:
        widths.append(x.shape[-1])
        return plain(x)

    monkeypatch.setattr(codecs, "q8", counted)
    teacher, trace = Teacher(s, "vendor"), Trace()
    teacher.forward(teacher.new_state(), IDS, trace=trace)
    x = trace.streams_LRSD[0]
    np.testing.assert_array_equal(x, round_bf16(np, x))
    layers, sources = c.num_hidden_layers, len(c.index_source_layer_ids)
    engram_in = c.engram_columns * c.engram_head_dim
    expected = {
        # wq_a, wkv, shared w1 and w3 read D; q_lora_rank (wq_b, indexer.wq_b) equals D in this model, wo_b too
        "fixed": layers * (1 + 1 + 2 + 1 + 1) + sources,
        "window": layers,
        "engram": len(c.engram_layer_ids),
        "shared w2": layers,
    }
    d = c.hidden_size
    assert c.q_lora_rank == d == c.o_groups * c.o_lora_rank
    assert widths.count(c.head_dim) == expected["window"]
    assert widths.count(engram_in) == expected["engram"]
    routed = widths.count(c.moe_intermediate_size) - expected["shared w2"]
    assert routed > layers  # one w2 an expert visited
    assert widths.count(d) == expected["fixed"] + 2 * routed
    assert len(widths) == sum(map(widths.count, {d, c.head_dim, engram_in, c.moe_intermediate_size}))


def test_one_layer_and_one_expert_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above RESIDENT_BYTES nothing is kept: at most two layers' names never coexist, nor do two experts."""
    monkeypatch.setattr(stream, "RESIDENT_BYTES", 0)
    dense: dict[int, str] = {}
    experts: dict[int, int] = {}

    class Watched(Changed):
        def _watch(self, alive: dict, x: NDArray, key: object) -> NDArray:
            x = np.array(x)
            owner = id(x)
            alive[owner] = key
            weakref.finalize(x, alive.pop, owner, None)
            return x

        def dense(self, name: str) -> NDArray:
            layers = {n.split(".")[1] for n in dense.values() if n.startswith("layers.")}
            assert not name.startswith("layers.") or layers <= {name.split(".")[1]}, (name, layers)
            return self._watch(dense, super().dense(name), name)

        def expert(self, prefix: str, e: int) -> tuple[NDArray, ...]:
            assert not experts, "an expert is asked for while another is still in memory"
            return tuple(self._watch(experts, w, e) for w in self._inner.expert(prefix, e))

    gc.collect()
    teacher = Teacher(Watched("oracle-a"))
    gc.disable()  # reference counts alone must free the arrays
    try:
        got = teacher.run(IDS, decode_from=11)["logits_TV"]
    finally:
        gc.enable()
    np.testing.assert_array_equal(got, Teacher(source("oracle-a")).run(IDS, decode_from=11)["logits_TV"])


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (np.array([], np.int64), "ids are empty"),
        (np.array([[1, 2]]), r"their shape is \[1, 2\]"),
        (np.array(3), r"their shape is \[\]"),
        (np.array([1.0, 2.0]), "ids must be integers, they are float64"),
        (np.array([1.0, np.nan], np.float32), "ids must be integers, they are float32"),
        (np.array([True]), "ids must be integers, they are bool"),
        (np.array([0, 320, 5]), "id 320 at position 1 is outside the vocabulary of 320"),
        (np.array([0, -1]), "id -1 at position 1"),
        (np.array([2**64 - 1], np.uint64), "id 18446744073709551615 at position 0"),
    ],
)
def test_bad_ids(ids: NDArray, says: str) -> None:
    teacher = Teacher(source("oracle-a"))
    with pytest.raises(RequestError, match=says):
        teacher.run(ids)
    with pytest.raises(RequestError, match=says):
        teacher.forward(teacher.new_state(), ids)


def test_bad_settings() -> None:
    s = source("oracle-a")
    with pytest.raises(UsageError, match="arithmetic 'bf16' is unknown; choose one of none, kv, vendor"):
        Teacher(s, "bf16")
    with pytest.raises(UsageError, match="index keys 'mine'"):
        Teacher(s, index_keys="mine")
    with pytest.raises(UsageError, match="position 14 of 13"):
        Teacher(s).run(IDS, decode_from=14)


def test_context_is_a_limit() -> None:
    teacher = Teacher(source("oracle-a"))
    most = teacher.config.max_position_embeddings
    with pytest.raises(CapacityError, match=f"{most + 1} tokens exceed the model's context of {most}"):
        teacher.run(np.zeros(most + 1, np.int64))
    state = teacher.new_state()
    teacher.forward(state, np.zeros(most, np.int64) + 70)
    with pytest.raises(CapacityError):
        teacher.forward(state, np.array([1]))


def test_broken_weights_name_the_layer() -> None:
    good = source("oracle-a").dense("layers.3.attn_norm.weight")
    bad = good.copy()
    bad[5] = np.nan
    with pytest.raises(Ds4Error, match="layer 3 gave a value that is not finite at position 0"):
        Teacher(Changed("oracle-a", layers__3__attn_norm__weight=bad)).run(IDS)
    gate = source("oracle-a").dense("layers.2.ffn.gate.weight") * np.float32(np.nan)
    with pytest.raises(Ds4Error, match="the router of layer 2 gave a value that is not finite at position 0"):
        Teacher(Changed("oracle-a", layers__2__ffn__gate__weight=gate)).run(IDS)


def test_images_need_their_bias() -> None:
    s = Changed("oracle-a")
    s.hidden = {f"layers.{layer}.ffn.gate.bias_vl" for layer in range(s.config.num_hidden_layers)}
    teacher = Teacher(s)
    with pytest.raises(MissingTensorError, match="bias_vl"):
        teacher.forward(teacher.new_state(), IDS, image_R=np.ones(len(IDS), bool))
    assert np.isfinite(teacher.run(IDS)["logits_TV"]).all()  # text needs none


def test_a_model_without_engram() -> None:
    s = Changed("oracle-a")
    s.config = replace(s.config, engram_layer_ids=(), engram_num_embeddings=())
    s.hidden = {"layers.1.engram.wkv.weight", "layers.4.engram.wkv.weight"}
    result = Teacher(s).run(IDS, decode_from=4, streams=True)
    assert np.isfinite(result["logits_TV"]).all() and result["hash_rows_TGN"].shape[:2] == (len(IDS), 0)
    assert whole(result["logits_TV"], Teacher(source("oracle-a")).run(IDS)["logits_TV"]) > 1e-3
