"""Base x ② x ③: the one place that knows the order.

    g_eff[e, d] = g_base[e, d] * (1 * s_2[e, d] * s_3[e, d])      rows of w2, in float32, ② then ③
    selection score += delta_b_2                                   mixing weights untouched; ③'s rb is ignored

A file that is present but broken refuses the whole load.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from ds4.sidecar.files import FINGERPRINT, Gains, LayerFiles, list_folder, load_gains, read_bias
from ds4.sidecar.fingerprint import check_base

F32 = NDArray[np.float32]


class SidecarStack:
    """Mounted sidecars of one model. `warnings` is for people; `sidecar` and `posttrain` are the folders' files."""

    def __init__(self, config: ModelConfig, sidecar: LayerFiles, posttrain: LayerFiles, warnings: list[str]) -> None:
        self.config, self.warnings = config, warnings
        self.sidecar, self.posttrain = sidecar, posttrain

    @staticmethod
    def open(
        config: ModelConfig, sidecar: str | Path | None = None, posttrain: str | Path | None = None
    ) -> SidecarStack:
        """Check ② and ③ whole, ③'s `base.fnv` before any of its layer files.

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
        if sidecar is not None and (Path(sidecar) / FINGERPRINT).exists():
            warnings.append(f"{sidecar}: has a {FINGERPRINT}, as post-training folders do; mounted as a sidecar")
        for folder, found in ((sidecar, second), (posttrain, third)):
            if folder is not None and not found.gains and not found.biases:
                warnings.append(f"{folder}: has no layer files, nothing is mounted from it")
        if third.biases:
            warnings.append(f"{posttrain}: its {len(third.biases)} rb files are ignored; only a sidecar's count")
        stack = SidecarStack(config, second, LayerFiles(third.gains, {}), warnings)
        for layer in range(n_layers):
            stack.gain(layer)
            stack.bias(layer)
        return stack

    def gains(self, layer: int) -> tuple[Gains | None, Gains | None]:
        """②'s and ③'s gain files of a layer."""
        second, third = (
            None if layer not in f.gains else load_gains(f.gains[layer], *self._shape)
            for f in (self.sidecar, self.posttrain)
        )
        return second, third

    def gain(self, layer: int) -> F32 | None:
        """f32 [n_expert, D], the factor of each row of each expert's w2; None where no file touches the layer.

        Raises:
            FileFormatError: ②'s and ③'s factors multiply to more than float32 holds.
        """
        found = [g.s for g in self.gains(layer) if g is not None]
        if not found:
            return None
        product = np.ones(self._shape, np.float32)
        with np.errstate(over="ignore"):
            for s in found:
                product *= s
        if not np.isfinite(product).all():
            path = self.posttrain.gains[layer]
            raise FileFormatError(f"{path}: its factors times the sidecar's are beyond float32")
        return product

    def bias(self, layer: int) -> F32 | None:
        """f32 [n_expert], added to the selection score; None without a file."""
        path = self.sidecar.biases.get(layer)
        return None if path is None else read_bias(path, self.config.n_routed_experts)

    @property
    def nbytes(self) -> int:
        """Device bytes that mounting takes at most: the layer files' own."""
        found = [*self.sidecar.gains.values(), *self.sidecar.biases.values(), *self.posttrain.gains.values()]
        return sum(path.stat().st_size for path in found)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.config.n_routed_experts, self.config.hidden_size
