"""Looking at a sidecar folder: what is in it, and everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from ds4.sidecar.files import (
    FINGERPRINT,
    GAIN_F16,
    GAIN_F32,
    GAIN_FP4,
    bias_head,
    gain_head,
    layer_of,
    list_folder,
    load_gains,
    read_bias,
    read_gains,
)
from ds4.sidecar.fingerprint import check_base, format_fingerprint, sidecar_fingerprint, solved_on

F32 = NDArray[np.float32]
TYPE_NAMES = {GAIN_F32: "f32", GAIN_F16: "f16", GAIN_FP4: "fp4x32"}


def look(folder: str | Path) -> dict[str, object]:
    """What a folder holds, without a model: sizes by the files' own headers.

    Returns:
        {"folder", "fingerprint", "solved_on", "files", "bytes", "layers": [{"layer", "gains", "bias"}]}; of gains
        {"type", "experts", "width", "rms", "least", "largest", "ones"}: root mean square of s - 1, extremes of s,
        share of s that is exactly 1; of a bias {"experts", "least", "largest"}.

    Raises:
        FileFormatError: a file is unknown or broken, by name.
    """
    folder = Path(folder)
    found = list_folder(folder)
    paths = [*found.gains.values(), *found.biases.values()]
    layers = sorted({*found.gains, *found.biases})
    base = solved_on(folder)
    return {
        "folder": str(folder),
        "fingerprint": format_fingerprint(*sidecar_fingerprint(folder, max(layers, default=-1) + 1)).strip(),
        "solved_on": None if base is None else format_fingerprint(*base).strip(),
        "files": len(paths),
        "bytes": sum(path.stat().st_size for path in paths),
        "layers": [
            {
                "layer": layer,
                "gains": _gains(found.gains[layer]) if layer in found.gains else None,
                "bias": _bias(found.biases[layer]) if layer in found.biases else None,
            }
            for layer in layers
        ],
    }


def _gains(path: Path) -> dict[str, object]:
    n_expert, width, kind = gain_head(path)
    s = load_gains(path, n_expert, width).s
    return {
        "type": TYPE_NAMES[kind],
        "experts": n_expert,
        "width": width,
        "rms": float(np.sqrt(np.mean(np.square(s.astype(np.float64) - 1)))),
        "least": float(s.min()),
        "largest": float(s.max()),
        "ones": float(np.mean(s == 1)),
    }


def _bias(path: Path) -> dict[str, object]:
    delta = read_bias(path, bias_head(path))
    return {"experts": len(delta), "least": float(delta.min()), "largest": float(delta.max())}


@dataclass(frozen=True)
class Findings:
    """What `verify_folder` found: `problems` stop a load, `warnings` do not."""

    posttrain: bool
    problems: list[str]
    warnings: list[str]


def verify_folder(
    config: ModelConfig, folder: str | Path, zchain: str | Path | None, base_gains: Callable[[int], F32]
) -> Findings:
    """Every reason why a load would refuse the folder, not only the first.

    Args:
        zchain: the sidecar that a post-training folder is to be mounted on. A folder that has a base.fnv, or is given
            one of these, is a post-training folder; any other is a sidecar.
        base_gains: layer -> the base's gains of the down rows, f32 [n_expert, D].

    Raises:
        FileFormatError: it is not a folder, or `zchain` itself is broken.
    """
    folder = Path(folder)
    shape, n_layers = (config.n_routed_experts, config.hidden_size), config.num_hidden_layers
    if not folder.is_dir():
        list_folder(folder)
    posttrain = zchain is not None or (folder / FINGERPRINT).exists()
    found = Findings(posttrain, [], [])
    below = list_folder(zchain, n_layers).gains if zchain is not None else {}
    if posttrain:
        try:
            warning = check_base(folder, zchain, n_layers)
            found.warnings.extend([warning] if warning else [])
        except FileFormatError as e:
            found.problems.append(str(e))
    n_files = 0
    for path in sorted(folder.iterdir()):
        try:
            file = layer_of(path, n_layers)
            if file is None:
                continue
            n_files += 1
            kind, layer = file
            if kind == "gr":
                second = [read_gains(below[layer], *shape)] if layer in below else []
                _check_product(path, [*second, read_gains(path, *shape)], base_gains(layer))
            elif posttrain:
                found.warnings.append(f"{path}: is ignored; only a sidecar's biases count")
            else:
                read_bias(path, config.n_routed_experts)
        except FileFormatError as e:
            found.problems.append(str(e))
    if not n_files:
        found.warnings.append(f"{folder}: has no layer files, nothing would be mounted from it")
    return found


def _check_product(path: Path, factors: list[F32], gains: F32) -> None:
    with np.errstate(over="ignore"):
        product = np.ones_like(gains)
        for s in factors:
            product *= s
        effective = gains * product
    beyond = np.argwhere(~np.isfinite(effective))
    if len(beyond):
        e, d = beyond[0]
        raise FileFormatError(f"{path}: the factor {product[e, d]} of expert {e}, channel {d}, is too large")
