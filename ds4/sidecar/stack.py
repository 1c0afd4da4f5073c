"""Base x ② x ③: the one place that knows the order.

    g_eff[e, d] = g_base[e, d] * (1 * s_2[e, d] * s_3[e, d])      rows of w2, in float32, ② then ③
    selection score += delta_b_2                                   mixing weights untouched; ③'s rb is ignored

A file that is present but broken refuses the whole load.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.model.config import ModelConfig
from ds4.sidecar.files import LayerFiles, list_folder, read_bias, read_gains
from ds4.sidecar.fingerprint import check_base

F32 = NDArray[np.float32]


class SidecarStack:
    """Mounted sidecars of one model. `warnings` is for people."""

    def __init__(self, config: ModelConfig, sidecar: LayerFiles, posttrain: LayerFiles, warnings: list[str]) -> None:
        self.config, self.warnings = config, warnings
        self._sidecar, self._posttrain = sidecar, posttrain

    @staticmethod
    def open(
        config: ModelConfig, sidecar: str | Path | None = None, posttrain: str | Path | None = None
    ) -> SidecarStack:
        """Check ② and ③ whole.

        Raises:
            FileFormatError: ③ belongs to another ②, or any layer file is broken.
        """
        n_layers = config.num_hidden_layers
        warnings = []
        if posttrain is not None:
            warning = check_base(posttrain, sidecar, n_layers)
            if warning:
                warnings.append(warning)
        none = LayerFiles({}, {})
        second = list_folder(sidecar, n_layers) if sidecar is not None else none
        third = list_folder(posttrain, n_layers) if posttrain is not None else none
        stack = SidecarStack(config, second, LayerFiles(third.gains, {}), warnings)
        for layer in range(n_layers):
            stack.gain(layer)
            stack.bias(layer)
        return stack

    def gain(self, layer: int) -> F32 | None:
        """f32 [n_expert, D], the factor of each row of each expert's w2; None where no file touches the layer."""
        paths = [f.gains[layer] for f in (self._sidecar, self._posttrain) if layer in f.gains]
        if not paths:
            return None
        product = np.ones((self.config.n_routed_experts, self.config.hidden_size), np.float32)
        for path in paths:
            product *= read_gains(path, *product.shape)
        return product

    def bias(self, layer: int) -> F32 | None:
        """f32 [n_expert], added to the selection score; None without a file."""
        path = self._sidecar.biases.get(layer)
        return None if path is None else read_bias(path, self.config.n_routed_experts)
