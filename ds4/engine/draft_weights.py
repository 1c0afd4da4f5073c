"""The draft stages' weights (`mtp.*`, dspark 2) on the device, from a base or from a checkpoint.

Dense tensors keep the release's bytes in both: the base holds draft stages as the checkpoint does. Routed experts of
a base are indices into a codebook and placed as the backbone's. A checkpoint's FP4 experts are placed as they are
where their groups of eight, each row scaled by a power of two, fit one codebook; larger models need `ds4 quantize`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds4.base.blob import DIM, MAIN_BITS, MATRICES, MAX_BITS, pack_main, pack_plane
from ds4.base.plan import plan
from ds4.base.reader import Base
from ds4.checkpoint.codecs import f32_to_e4m3
from ds4.checkpoint.names import companion
from ds4.checkpoint.reader import Checkpoint
from ds4.device import Buffer, Device
from ds4.engine.ops.linear import Weight
from ds4.engine.weights import BaseTensors, ModelWeights, Placer
from ds4.errors import FileFormatError, MissingTensorError
from ds4.model.config import ModelConfig


@dataclass(frozen=True)
class DraftWeights:
    """What a drafting round reads.

    Attributes:
        model: the stages as layers between the backbone's embedding and output head; its norm is the last stage's.
        main_proj: [D, targets * D].   main_norm: f32 [D].
        markov_embed, markov_head: [V, K].   confidence: f32 [D + K].
    """

    model: ModelWeights
    main_proj: Weight
    main_norm: Buffer
    markov_embed: Weight
    markov_head: Weight
    confidence: Buffer


def draft_bytes(base: Base) -> int:
    """Device bytes that `place_draft` will take, from the file's table alone."""
    return sum(t.nbytes for name, t in base.tensors.items() if name.startswith("mtp."))


def place_draft(base: Base, device: Device, model: ModelWeights) -> DraftWeights:
    """Upload the draft stages of a base; embedding and output head are `model`'s.

    Raises:
        MissingTensorError: the base has no draft stages.
        FileFormatError: a tensor of a type that no kernel reads.
    """
    _need_stages(base.config, str(base.path))
    return place_stages(Placer(BaseTensors(base), base.config, device), model.embed, model.head)


def place_checkpoint_draft(checkpoint: Checkpoint, device: Device) -> DraftWeights:
    """Upload the draft stages of a checkpoint with its embedding and output head, not quantized again.

    Raises:
        MissingTensorError: the checkpoint has no draft stages.
        FileFormatError: a stage's experts do not fit one codebook.
    """
    _need_stages(checkpoint.config, str(checkpoint.path))
    placer = Placer(_CheckpointTensors(checkpoint), checkpoint.config, device)
    return place_stages(placer, placer.matrix("token_embd.weight"), placer.matrix("output.weight"))


def _need_stages(config: ModelConfig, path: str) -> None:
    if not config.num_nextn_predict_layers:
        raise MissingTensorError(f"{path}: the model has no draft stages (mtp.*)")


def place_stages(placer: Placer, embed: Weight, head: Weight) -> DraftWeights:
    """The stages by any placer, between that embedding and output head."""
    c = placer.config
    stages = tuple(
        placer.block(f"mtp.{stage}", c.num_hidden_layers + stage, 0, c.dspark_n_routed_experts)
        for stage in range(c.num_nextn_predict_layers)
    )
    return DraftWeights(
        model=ModelWeights(embed, stages, placer.vector("mtp.out_norm.weight"), head),
        main_proj=placer.matrix("mtp.main_proj.weight"),
        main_norm=placer.vector("mtp.main_norm.weight"),
        markov_embed=placer.matrix("mtp.markov_embd.weight"),
        markov_head=placer.matrix("mtp.markov_head.weight"),
        confidence=placer.vector("mtp.confidence.weight"),
    )


class _CheckpointTensors:
    """A checkpoint under the base's tensor names, which the planner's table translates."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._sources = {p.name: p.source for p in plan(checkpoint.config)}

    def vector(self, name: str) -> NDArray[np.float32]:
        return self._checkpoint.tensor(self._sources[name])

    def matrix(self, name: str) -> tuple[str, NDArray[np.uint8], int, int]:
        source = self._sources[name]
        raw = self._checkpoint.raw(source)
        rows, cols = raw.shape
        if raw.dtype == np.uint8:  # codes, then the scales of their tiles, as a base stores them
            scales = self._checkpoint.raw(companion(source))
            return "fp8_32x32", np.concatenate([raw.reshape(-1), scales.reshape(-1)]), rows, cols
        form = "bf16" if raw.dtype == np.uint16 else "f32"
        return form, np.ascontiguousarray(raw).view(np.uint8).reshape(-1), rows, cols

    def experts(self, prefix: str) -> _ExactExperts:
        return _ExactExperts(self._checkpoint, prefix)


@dataclass(frozen=True)
class _Matrix:
    """One expert matrix in the streams that `place_experts` takes."""

    main: NDArray[np.uint8]
    plane: NDArray[np.uint8] | None
    gains: NDArray[np.float32]


class _ExactExperts:
    """A stage's FP4 experts as gains, codewords and indices.

    The codebook is the set of the groups that occur, the gain a power of two that brings the row's largest value just
    below 448. What E4M3 has no room for then, values under 2^-16 of the row's largest, is off by at most 2^-17 of it;
    all else is exact.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        n_expert = checkpoint.config.dspark_n_routed_experts
        groups: list[NDArray[np.uint64]] = []
        self._gains: list[NDArray[np.float32]] = []
        for e in range(n_expert):
            for matrix in MATRICES:
                codes, gains = _split(checkpoint.tensor(f"{prefix}.ffn.experts.{e}.{matrix}.weight"))
                groups.append(codes)
                self._gains.append(gains)
        book, inverse = np.unique(np.concatenate([g.reshape(-1) for g in groups]), return_inverse=True)
        if len(book) > 1 << MAX_BITS:
            raise FileFormatError(
                f"{checkpoint.path}: the experts of {prefix} have {len(book)} different groups of {DIM} weights, one "
                f"codebook holds {1 << MAX_BITS}; make a base with `ds4 quantize` and run that"
            )
        self._book = book
        bounds = np.cumsum([g.size for g in groups])[:-1]
        self._indices = [
            part.astype(np.uint16).reshape(g.shape) for part, g in zip(np.split(inverse.reshape(-1), bounds), groups)
        ]

    @property
    def codebook(self) -> NDArray[np.uint8]:
        """u8 [nc, 8], E4M3."""
        return self._book.view(np.uint8).reshape(-1, DIM)

    def payload(self, expert: int, matrix: int) -> _Matrix:
        """Matrix 0 gate, 1 up, 2 down."""
        at = expert * len(MATRICES) + matrix
        indices = self._indices[at]
        plane = pack_plane(indices) if len(self._book) > 1 << MAIN_BITS else None
        return _Matrix(pack_main(indices), plane, self._gains[at])


def _split(w: NDArray[np.float32]) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """f32 [rows, cols] -> groups of eight E4M3 codes as u64 [rows, cols / 8], gains f32 [rows], powers of two."""
    fraction, exponent = np.frexp(np.abs(w).max(axis=1))  # in [0.5, 1); 448 is 0.875 * 2^9
    gains = np.ldexp(np.float32(1), exponent - np.where(fraction <= 0.875, 9, 8)).astype(np.float32)
    return np.ascontiguousarray(f32_to_e4m3(w / gains[:, None])).view(np.uint64), gains
