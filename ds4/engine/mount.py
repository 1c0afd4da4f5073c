"""Sidecars on a placed model: factors beside the down rows' gains, biases beside the router's.

    g_eff[e, d] = g_base[e, d] * (1 * s_2[e, d] * s_3[e, d])      in float32; selection score += delta_b_2

Factors in FP4 (type 43) are placed as the file has them, and the down kernels multiply: 17 bytes for 32 rows of each
picked expert. In a layer with a file of another type (f32, f16) the whole product is multiplied into the gains here.
Gains are float32 on the device and the kernels multiply in float32 in the same order, so that both ways give the same
bits, and a type that no solver writes needs no path of its own in the kernels. Draft stages have no sidecars.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ds4.device import Device
from ds4.engine.ops.experts import Factors
from ds4.engine.weights import LayerWeights, ModelWeights
from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from ds4.sidecar.files import GAIN_FP4, Gains
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from ds4.sidecar.stack import SidecarStack


@dataclass(frozen=True)
class Mounted:
    """What an engine has mounted. `warnings` is for people."""

    stack: SidecarStack
    zchain: Path | None
    posttrain: Path | None
    fingerprints: tuple[str | None, str | None]

    @staticmethod
    def open(config: ModelConfig, zchain: str | Path | None, posttrain: str | Path | None) -> Mounted:
        """Check both folders whole; nothing is on a device yet.

        Raises:
            FileFormatError: ③ belongs to another ②, or a file that is unknown or broken, by name.
        """
        stack = SidecarStack.open(config, zchain, posttrain)
        folders = [None if f is None else Path(f) for f in (zchain, posttrain)]
        marks = [
            None if f is None else format_fingerprint(*sidecar_fingerprint(f, config.num_hidden_layers)).strip()
            for f in folders
        ]
        return Mounted(stack, folders[0], folders[1], (marks[0], marks[1]))

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self.stack.warnings)

    def describe(self) -> dict[str, dict[str, str] | None]:
        """{"zchain", "posttrain"}: name of the folder and fingerprint of its layer files, or None."""
        found = zip(("zchain", "posttrain"), (self.zchain, self.posttrain), self.fingerprints, strict=True)
        return {
            key: None if folder is None or mark is None else {"name": folder.resolve().name, "fingerprint": mark}
            for key, folder, mark in found
        }


def mount(weights: ModelWeights, mounted: Mounted, dev: Device) -> ModelWeights:
    """The model with the sidecars on; buffers that they do not touch are shared.

    Raises:
        FileFormatError: a factor takes a gain beyond float32.
    """
    return replace(weights, layers=tuple(_mount_layer(lw, mounted.stack, dev) for lw in weights.layers))


def _mount_layer(lw: LayerWeights, stack: SidecarStack, dev: Device) -> LayerWeights:
    bias, product = stack.bias(lw.layer), stack.gain(lw.layer)
    if bias is not None:
        lw = replace(lw, router_delta=dev.upload(bias))
    if product is None:
        return lw
    gains = np.asarray(dev.download(lw.experts.down_gains), np.float32).reshape(product.shape)
    with np.errstate(over="ignore"):
        effective = gains * product
    beyond = np.argwhere(~np.isfinite(effective))
    if len(beyond):
        e, d = beyond[0]
        path = (stack.sidecar.gains | stack.posttrain.gains)[lw.layer]
        raise FileFormatError(f"{path}: the factor {product[e, d]} of expert {e}, channel {d}, is too large")
    second, third = stack.gains(lw.layer)
    if all(g is None or g.kind == GAIN_FP4 for g in (second, third)):
        return replace(lw, experts=replace(lw.experts, domain=_place(second, dev), post=_place(third, dev)))
    return replace(lw, experts=replace(lw.experts, down_gains=dev.upload(effective.reshape(-1))))


def _place(gains: Gains | None, dev: Device) -> Factors | None:
    """Codes as words of an octet of rows each, scales as they are."""
    if gains is None:
        return None
    assert gains.codes is not None and gains.scales is not None
    return Factors(dev.upload(gains.codes.reshape(-1).view(np.uint32)), dev.upload(gains.scales.reshape(-1)))
