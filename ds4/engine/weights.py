"""Names become fields, once; weights are placed on the device, once.

After `place` no tensor is looked up by name. Norm weights, biases, sinks and hyper-connection tensors are float32 on
the device whatever their type in the file; matrices keep their block type (`Weight`), experts their indices and
codebook. `place` leaves the draft stages (`mtp.*`) alone: draft_weights.py places those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ds4.base.reader import Base
from ds4.device import Buffer, Device
from ds4.engine.ops.experts import BlobLike, ExpertWeights, place_experts
from ds4.engine.ops.hyper import HyperParams
from ds4.engine.ops.linear import Weight, place_weight
from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig

FORMATS = {0: "f32", 1: "f16", 8: "q8_0", 12: "q4_k", 30: "bf16", 43: "fp4x32", 44: "fp8_32x32"}


@dataclass(frozen=True)
class Compressor:
    """A kv source's compressor and index keys; `gate` exists only at ratios above 1."""

    kv: Weight
    gate: Weight | None
    norm: Buffer
    index_key: Weight
    index_key_norm: Buffer


@dataclass(frozen=True)
class Indexer:
    """An index source's query projection and head weights."""

    query: Weight
    weights: Weight


@dataclass(frozen=True)
class EngramWeights:
    """The n-gram projection of one engram layer and its per-stream norm weights f32 [S, D]."""

    wkv: Weight
    q: Buffer
    k: Buffer


@dataclass(frozen=True)
class LayerWeights:
    """One layer of the backbone, or one draft stage (numbered on after the last layer)."""

    layer: int
    ratio: int
    hyper_attn: HyperParams
    hyper_ffn: HyperParams
    attn_norm: Buffer
    q_a: Weight
    q_a_norm: Buffer
    q_b: Weight
    kv: Weight
    kv_norm: Buffer
    sinks: Buffer
    out_a: Weight
    out_b: Weight
    freq: Buffer
    compressor: Compressor | None
    indexer: Indexer | None
    ffn_norm: Buffer
    router: Weight
    router_bias: Buffer
    experts: ExpertWeights
    shared_gate: Weight
    shared_up: Weight
    shared_down: Weight
    engram: EngramWeights | None
    router_delta: Buffer | None = None  # a mounted sidecar's, f32 [E]


@dataclass(frozen=True)
class ModelWeights:
    """Everything that a forward pass reads and that never changes."""

    embed: Weight
    layers: tuple[LayerWeights, ...]
    norm: Buffer
    head: Weight


class Tensors(Protocol):
    """Where weights come from, under the base's tensor names."""

    def vector(self, name: str) -> NDArray[np.float32]:
        """A small tensor, f32, in the file's shape."""
        ...

    def matrix(self, name: str) -> tuple[str, NDArray[np.uint8], int, int]:
        """Format (one of `FORMATS`), bytes as the format lies in a base, rows, columns."""
        ...

    def experts(self, prefix: str) -> BlobLike:
        """The routed experts of "blk.N" or "mtp.T"."""
        ...


class BaseTensors:
    """A base file as `Tensors`."""

    def __init__(self, base: Base) -> None:
        self.base = base

    def vector(self, name: str) -> NDArray[np.float32]:
        return self.base.tensor(name)

    def matrix(self, name: str) -> tuple[str, NDArray[np.uint8], int, int]:
        """Raises FileFormatError for a type that no kernel reads."""
        info = self.base.tensors[name]
        form = FORMATS.get(info.type_id)
        if form is None or len(info.dims) != 2:
            raise FileFormatError(
                f"{self.base.path}: tensor {name} has type id {info.type_id} and dims {info.dims}; "
                f"a matrix needs one of {sorted(FORMATS)} and two dims"
            )
        cols, rows = info.dims
        return form, self.base.raw(name), rows, cols

    def experts(self, prefix: str) -> BlobLike:
        return self.base.experts(prefix)


class Placer:
    """Puts named tensors of one model on one device."""

    def __init__(self, tensors: Tensors, config: ModelConfig, device: Device) -> None:
        self.tensors, self.config, self.device = tensors, config, device
        self.freqs: dict[int, Buffer] = {}

    def vector(self, name: str) -> Buffer:
        """A small tensor as float32, in the file's shape."""
        return self.device.upload(np.ascontiguousarray(self.tensors.vector(name), np.float32))

    def matrix(self, name: str) -> Weight:
        """A matrix in its stored format."""
        return place_weight(self.device, *self.tensors.matrix(name))

    def hyper(self, prefix: str) -> HyperParams:
        """One mixing site's tensors and the model's constants."""
        c = self.config
        return HyperParams(
            self.vector(f"{prefix}_fn.weight"), self.vector(f"{prefix}_scale.weight"),
            self.vector(f"{prefix}_base.weight"), c.hc_sinkhorn_iters, c.rms_norm_eps, c.hc_eps,
        )  # fmt: skip

    def freq(self, layer: int, ratio: int) -> Buffer:
        """Rotation frequencies f32 [r/2]: one buffer for window-only layers, one for the compressed ones."""
        key = min(ratio, 1)
        if key not in self.freqs:
            self.freqs[key] = self.device.upload(np.asarray(self.config.rope_frequencies(layer), np.float32))
        return self.freqs[key]

    def layer(self, layer: int) -> LayerWeights:
        """One layer of the backbone."""
        c, b = self.config, f"blk.{layer}"
        ratio = c.compress_ratios[layer]
        compressor = indexer = engram = None
        if layer in c.kv_source_layer_ids:
            compressor = Compressor(
                self.matrix(f"{b}.attn_compressor_kv.weight"),
                self.matrix(f"{b}.attn_compressor_gate.weight") if ratio > 1 else None,
                self.vector(f"{b}.attn_compressor_norm.weight"),
                self.matrix(f"{b}.indexer.wk.weight"),
                self.vector(f"{b}.indexer.k_norm.weight"),
            )
        if layer in c.index_source_layer_ids:
            indexer = Indexer(self.matrix(f"{b}.indexer.attn_q_b.weight"), self.matrix(f"{b}.indexer.proj.weight"))
        if layer in c.engram_layer_ids:
            engram = EngramWeights(
                self.matrix(f"{b}.engram_wkv.weight"),
                self.vector(f"{b}.engram_q.weight"),
                self.vector(f"{b}.engram_k.weight"),
            )
        return self.block(b, layer, ratio, c.n_routed_experts, compressor, indexer, engram)

    def block(
        self, b: str, layer: int, ratio: int, n_experts: int, compressor: Compressor | None = None,
        indexer: Indexer | None = None, engram: EngramWeights | None = None,
    ) -> LayerWeights:  # fmt: skip
        """What every layer and every draft stage has, under the prefix `b`."""
        c = self.config
        return LayerWeights(
            layer=layer,
            ratio=ratio,
            hyper_attn=self.hyper(f"{b}.hc_attn"),
            hyper_ffn=self.hyper(f"{b}.hc_ffn"),
            attn_norm=self.vector(f"{b}.attn_norm.weight"),
            q_a=self.matrix(f"{b}.attn_q_a.weight"),
            q_a_norm=self.vector(f"{b}.attn_q_a_norm.weight"),
            q_b=self.matrix(f"{b}.attn_q_b.weight"),
            kv=self.matrix(f"{b}.attn_kv.weight"),
            kv_norm=self.vector(f"{b}.attn_kv_a_norm.weight"),
            sinks=self.vector(f"{b}.attn_sinks.weight"),
            out_a=self.matrix(f"{b}.attn_output_a.weight"),
            out_b=self.matrix(f"{b}.attn_output_b.weight"),
            freq=self.freq(layer, ratio),
            compressor=compressor,
            indexer=indexer,
            ffn_norm=self.vector(f"{b}.ffn_norm.weight"),
            router=self.matrix(f"{b}.ffn_gate_inp.weight"),
            router_bias=self.vector(f"{b}.exp_probs_b.bias"),
            experts=place_experts(
                self.device, self.tensors.experts(b), n_experts, c.moe_intermediate_size, c.hidden_size,
                c.swiglu_limit,
            ),
            shared_gate=self.matrix(f"{b}.ffn_gate_shexp.weight"),
            shared_up=self.matrix(f"{b}.ffn_up_shexp.weight"),
            shared_down=self.matrix(f"{b}.ffn_down_shexp.weight"),
            engram=engram,
        )  # fmt: skip


def placed_bytes(base: Base) -> int:
    """Device bytes that `place` will take, from the file's table alone: the tensors that a forward pass reads."""
    return sum(t.nbytes for name, t in base.tensors.items() if not name.startswith(("mtp.", "v.", "engram.")))


def place(base: Base, device: Device, progress: Callable[[int, int], None] | None = None) -> ModelWeights:
    """Upload every weight of the text model.

    Args:
        progress: called with (layers done, layers) after each layer.

    Raises:
        FileFormatError: a tensor of a type that no kernel reads.
    """
    return place_all(Placer(BaseTensors(base), base.config, device), progress)


def place_all(placer: Placer, progress: Callable[[int, int], None] | None = None) -> ModelWeights:
    """`place` by any placer."""
    n_layers = placer.config.num_hidden_layers
    layers = []
    for layer in range(n_layers):
        layers.append(placer.layer(layer))
        if progress:
            progress(layer + 1, n_layers)
    return ModelWeights(
        embed=placer.matrix("token_embd.weight"),
        layers=tuple(layers),
        norm=placer.vector("output_norm.weight"),
        head=placer.matrix("output.weight"),
    )


def kernel_constants(config: ModelConfig) -> dict[str, int]:
    """Sizes that kernels are compiled for."""
    return {
        "HC": config.hc_mult,
        "HEAD_DIM": config.head_dim,
        "ROPE_DIM": config.qk_rope_head_dim,
        "INDEX_DIM": config.index_head_dim,
    }
