"""The map between the training state and the released tensors, both ways, in float32.

Training keeps what it multiplies at once as one array; the release keeps matrices apart:
    P.ffn.experts.w13 [E, 2F, D]       P.ffn.experts.{e}.w1.weight over .w3.weight, each [F, D]
    P.ffn.experts.w2 [E, D, F]         P.ffn.experts.{e}.w2.weight [D, F]
    P.ffn.shared_experts.w13 [2F, D]   P.ffn.shared_experts.w1.weight over .w3.weight
    P.ffn.shared_experts.w2 [D, F]     P.ffn.shared_experts.w2.weight
P is `layers.L` or `mtp.i`; every other tensor has its released name and shape. Not in the training state:
`gate.bias_vl` (a copy of `gate.bias`), the image vectors and the vision tower (zeros where the configuration
calls for them). No files here but `read_checkpoint`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint.names import Spec, expected
from ds4.checkpoint.reader import Checkpoint
from ds4.errors import MissingTensorError
from ds4.model.config import ModelConfig

F32 = NDArray[np.float32]
_MATRIX = re.compile(r"(.+\.ffn\.(?:experts|shared_experts))(?:\.(\d+))?\.(w[123])\.weight")


class _Place(NamedTuple):
    """Where a released tensor lies in the training state: `state[name][key]`, and how far it reaches there."""

    name: str
    key: tuple[int | slice, ...]
    end: tuple[int, ...]


def state_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of everything that training must hold, in the released order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place in _places(config).values():
        shapes[place.name] = tuple(map(max, shapes.get(place.name, place.end), place.end))
    return shapes


def to_released(config: ModelConfig, state: Mapping[str, F32]) -> dict[str, F32]:
    """Training state -> every tensor that the configuration requires, as `writer.encode` takes them.

    The arrays may be views of the state's.

    Raises:
        MissingTensorError: a tensor is missing, extra, misshapen or not float32; `problems` has one line each.
    """
    _refuse(state_shapes(config), state)
    places, out = _places(config), {}
    for name, spec in _weights(config):
        if name in places:
            out[name] = state[places[name].name][places[name].key]
        elif name.endswith(".gate.bias_vl"):
            out[name] = state[name.removesuffix("_vl")].copy()
        else:
            out[name] = np.zeros(_shape(spec), np.float32)
    return out


def from_released(config: ModelConfig, weights: Mapping[str, F32]) -> dict[str, F32]:
    """Released tensors, dequantised, -> a training state of its own memory. What training does not hold is left.

    Raises:
        MissingTensorError: as `to_released`.
    """
    wanted = {name: _shape(spec) for name, spec in expected(config).items() if spec.dtype != "F8_E8M0"}
    optional = {name for name, spec in expected(config).items() if not spec.required}
    _refuse(wanted, {**{name: np.zeros(wanted[name], np.float32) for name in optional}, **weights})
    state = {name: np.empty(shape, np.float32) for name, shape in state_shapes(config).items()}
    for name, place in _places(config).items():
        state[place.name][place.key] = weights[name]
    return state


def read_checkpoint(path: str | Path) -> tuple[ModelConfig, dict[str, F32]]:
    """A checkpoint folder in the released layout -> its configuration and its weights as a training state.

    Raises:
        FileFormatError: as `Checkpoint.open`.
    """
    checkpoint = Checkpoint.open(path)
    weights = {}
    for name, info in checkpoint.infos.items():
        if name.endswith(".engram.embed.weight"):
            weights[name] = checkpoint.engram_rows(int(name.split(".")[1]), np.arange(info.shape[0]))
        elif info.dtype not in ("F8_E8M0", "U8"):
            weights[name] = checkpoint.tensor(name)
    return checkpoint.config, from_released(checkpoint.config, weights)


def _weights(config: ModelConfig) -> Iterator[tuple[str, Spec]]:
    for name, spec in expected(config).items():
        if spec.required and spec.dtype != "F8_E8M0":
            yield name, spec


def _places(config: ModelConfig) -> dict[str, _Place]:
    """Released name -> its place, of every tensor that is trained."""
    return {
        name: _place(name, _shape(spec))
        for name, spec in _weights(config)
        if spec.part != "vision" and not name.endswith(".gate.bias_vl") and not name.startswith("image_")
    }


def _place(name: str, shape: tuple[int, ...]) -> _Place:
    matrix = _MATRIX.fullmatch(name)
    if matrix is None:
        return _Place(name, (), shape)
    group, expert, which = matrix.groups()
    first = shape[0] if which == "w3" else 0
    key: tuple[int | slice, ...] = (slice(first, first + shape[0]),)
    end: tuple[int, ...] = (first + shape[0], shape[1])
    if expert is not None:
        key, end = (int(expert), *key), (int(expert) + 1, *end)
    return _Place(f"{group}.{'w2' if which == 'w2' else 'w13'}", key, end)


def _shape(spec: Spec) -> tuple[int, ...]:
    """The weight's own shape: FP4 holds two columns a byte."""
    return spec.shape if spec.dtype != "I8" else (spec.shape[0], spec.shape[1] * 2)


def _refuse(wanted: Mapping[str, tuple[int, ...]], got: Mapping[str, F32]) -> None:
    problems = [f"missing: {name}" for name in wanted if name not in got]
    problems += [f"extra: {name}" for name in got if name not in wanted]
    wrong = [name for name in wanted if name in got and got[name].shape != wanted[name]]
    problems += [f"misshapen: {name} is {list(got[name].shape)}, not {list(wanted[name])}" for name in wrong]
    other = [name for name in wanted if name in got and got[name].dtype != np.float32]
    problems += [f"{name} is {got[name].dtype}, not float32" for name in other]
    if not problems:
        return
    first = problems[0]
    if len(wrong) > len(wanted) // 4:  # not a slip in a tensor: another model
        n = "embed.weight" if "embed.weight" in wrong else wrong[0]
        first = f"they are of a model of other dimensions: {n} is {list(got[n].shape)}, not {list(wanted[n])}"
    more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
    raise MissingTensorError(f"weights do not fit the configuration: {first}{more}", tuple(problems))
