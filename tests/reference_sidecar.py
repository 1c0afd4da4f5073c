"""Sidecars for tests: factors on the FP4 lattice in the bytes that a file holds, and folders of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.model.config import ModelConfig
from ds4.sidecar.files import GAIN_FP4, bias_path, encode_bias, gain_path
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from tests.reference_dense import F32, U8

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)


@dataclass(frozen=True)
class Lattice:
    """Every code and scales of 2^-7 .. 2^-2: factors from -0.5 to 2.5, `s` f32 [E, D] by this module's own decoding.

    codes u8 [E, D/2], scales u8 [E, D/32], as in a file.
    """

    codes: U8
    scales: U8
    s: F32

    def file(self) -> bytes:
        """A gain file of type 43."""
        n_expert, width = self.s.shape
        blocks = np.concatenate([self.codes.reshape(-1, 16), self.scales.reshape(-1, 1)], axis=1)
        return np.array([n_expert, width, GAIN_FP4], "<i4").tobytes() + blocks.tobytes()


def lattice(n_expert: int, width: int, seed: int, *, ones: bool = False) -> Lattice:
    """`ones`: zeros of both signs under any scale, so that every factor is 1."""
    rng = np.random.default_rng(1000 * seed + n_expert + width)
    nibbles = rng.integers(0, 16, (n_expert, width), np.uint8)
    if ones:
        nibbles &= np.uint8(8)
    scales = rng.integers(120, 126, (n_expert, width // 32), np.uint8)
    step = np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)
    s = (1 + E2M1[nibbles] * step).astype(np.float32)
    return Lattice(nibbles[:, ::2] | nibbles[:, 1::2] << 4, scales, s)


def write_sidecar(
    folder: Path, config: ModelConfig, seed: int, *, gains: bool = True, biases: bool = True, ones: bool = False,
) -> list[Lattice]:  # fmt: skip
    """Factors and router biases for every layer but the second; the lattices are returned, all layers' own."""
    folder.mkdir()
    made = []
    for layer in range(config.num_hidden_layers):
        made.append(lattice(config.n_routed_experts, config.hidden_size, seed + 10 * layer, ones=ones))
        if layer == 1:
            continue
        if gains:
            gain_path(folder, layer).write_bytes(made[-1].file())
        if biases:
            bias_path(folder, layer).write_bytes(encode_bias(biases_of(config, seed + layer)))
    return made


def biases_of(config: ModelConfig, seed: int) -> NDArray[np.float32]:
    """Of the size of the scores' differences: they move picks."""
    return np.random.default_rng(seed).normal(0, 0.2, config.n_routed_experts).astype(np.float32)


def sign(posttrain: Path, sidecar: Path | None, config: ModelConfig) -> None:
    """Write ③'s base.fnv."""
    line = format_fingerprint(*sidecar_fingerprint(sidecar, config.num_hidden_layers))
    (posttrain / "base.fnv").write_text(line)
