"""The routing ruler: whether a layer chooses the experts that the original chooses, position by position.

Sets are compared, not weights: an expert that is not the original's is what a router bias can repair.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer
from ds4.engine import Engine
from ds4.errors import Ds4Error, FileFormatError
from ds4.teacher.files import save_results
from ds4.teacher.run import Teacher
from ds4.teacher.source import open_source
from ds4.teacher.walk import Walk
from rulers.identity import model_fingerprint
from rulers.scores import load_arrays
from rulers.teacher_scores import weights_mark
from rulers.text import Text

I32 = NDArray[np.int32]
Progress = Callable[[int, int], None]  # layers done, layers in all


def original_picks(
    checkpoint: str | Path, text: Text, *, arith: str, folder: Path, progress: Progress | None = None
) -> I32:
    """The original's experts, i32 [L, n, k], rising ids; from the cache in `folder`, or computed into it.

    Raises:
        FileFormatError: the checkpoint is broken, or a cached file is; names it.
        CapacityError: the disk is full, or a window too long. Ds4Error: a value is not finite.
    """
    teacher = Teacher(open_source(checkpoint), arith)
    c = teacher.config
    shape = (c.num_hidden_layers, len(text), c.num_experts_per_tok)
    model = model_fingerprint(teacher.stream.source)
    path = folder / f"{model}-{weights_mark(checkpoint)}-{text.digest[:16]}-{arith}.picks.npz"
    if path.exists():
        found = load_arrays(path, ("picks",))["picks"]
        if found.dtype != np.int32 or found.shape != shape:
            got = f"{found.dtype} {list(found.shape)}"
            raise FileFormatError(f"{path}: picks are {got}; expected int32 {list(shape)}; remove it")
        return found
    walk = Walk(teacher, [text.ids[part] for part in text.slices])
    picks = np.empty(shape, np.int32)
    for layer in range(c.num_hidden_layers):
        picks[layer] = walk.advance().picks_Tk
        if progress is not None:
            progress(layer + 1, c.num_hidden_layers)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise Ds4Error(f"{folder}: cannot be made ({e.strerror or e})") from e
    save_results(path, {"picks": picks})
    return picks


class EnginePicks:
    """A tap (ds4/engine/step.py) that notes which experts an engine's layers chose for a window of n positions.

    A tap is called on entry to every layer, and after the last one. A layer's choice is then still in the scratch
    that its router filled (ds4/engine/layer.py, `feed_forward`), and the next router has not run yet.

    Attributes:
        picks: i32 [L, n, k], by falling score; -1 where no pass was.
    """

    def __init__(self, engine: Engine, n: int) -> None:
        c = engine.config
        self._engine = engine
        self.picks: I32 = np.full((c.num_hidden_layers, n, c.num_experts_per_tok), -1, np.int32)

    def __call__(self, layer: int, first: int, x: Buffer) -> None:
        if layer == 0:
            return
        shape = (x.shape[0], self.picks.shape[2])
        chosen = self._engine.workspace.get("experts_chosen", shape, "i32")
        self.picks[layer - 1, first : first + shape[0]] = self._engine.device.download(chosen)


def same_experts(original: I32, ours: I32) -> NDArray[np.uint8]:
    """u8 [L, n]: whether both sets [L, n, k] are the same.

    Raises:
        FileFormatError: shapes that differ.
    """
    if original.shape != ours.shape:
        raise FileFormatError(
            f"experts of the original are {list(original.shape)} [layers, positions, k], ours {list(ours.shape)}"
        )
    same: NDArray[np.bool_] = (np.sort(original, axis=2) == np.sort(ours, axis=2)).all(axis=2)
    return same.astype(np.uint8)
