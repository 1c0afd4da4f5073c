"""Draft heads for the tests: on a fixture's checkpoint or on a base, fed with main-hidden rows, asked for a round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint.codecs import f32_to_bf16
from ds4.checkpoint.reader import Checkpoint
from ds4.device import Buffer, Device
from ds4.engine import Engine
from ds4.engine.draft import Drafter
from ds4.engine.draft_weights import DraftWeights, place_checkpoint_draft, place_draft
from ds4.engine.layer import Numerics
from ds4.engine.ops.kv import kv_layout
from ds4.engine.scratch import Workspace
from ds4.engine.state import SequenceState
from ds4.engine.weights import kernel_constants
from ds4.model.config import ModelConfig
from tests.conftest import opened
from tests.engine.conftest import DATA

F32 = NDArray[np.float32]
Drawn = tuple[list[int], F32, F32]  # drafts, logits, confidences
EXACT, DEFAULT = Numerics("f32", "f32"), Numerics("bf16", "fp4")


@dataclass
class Bench:
    """Draft heads on one device and one set of weights."""

    device: Device
    config: ModelConfig
    weights: DraftWeights

    def drafter(self, numerics: Numerics = EXACT, *, graphs: bool = True) -> Drafter:
        state = SequenceState(self.device, self.config, kv_layout(self.config, numerics.kv))
        return Drafter(self.device, Workspace(self.device), self.config, numerics, self.weights, state, graphs=graphs)

    def rows(self, main: F32, act: str = "f32") -> Buffer:
        """Main-hidden rows as a pass leaves them."""
        return self.device.upload(f32_to_bf16(main), "bf16") if act == "bf16" else self.device.upload(main)

    def commit(self, drafter: Drafter, main: F32, pending: int | None = None) -> None:
        """`main` as the first rows of a decode pass of `pending` rows at the drafter's position, then committed."""
        rows = self.rows(main, drafter.numerics.act)
        self.device.copy(drafter.state.expect(drafter.state.position, pending or len(main)), rows)
        drafter.commit(len(main))

    def draft(self, drafter: Drafter, token: int) -> Drawn:
        drafter.draft(self.device.upload(np.array([token], np.int32)))
        down = self.device.download
        return down(drafter.drafts).tolist(), down(drafter.logits), down(drafter.confidence)


@cache
def bench_of(name: str, build: str = "fast") -> Bench:
    """A fixture's checkpoint, not quantized again; `build` is the CPU driver's."""
    checkpoint = Checkpoint.open(DATA / name)
    device = opened(build, "greedy").with_constants(kernel_constants(checkpoint.config))
    return Bench(device, checkpoint.config, place_checkpoint_draft(checkpoint, device))


def bench_on(engine: Engine, config: ModelConfig | None = None) -> Bench:
    """The base that `engine` has open."""
    return Bench(engine.device, config or engine.config, place_draft(engine.base, engine.device, engine.weights))


def gaussian_rows(config: ModelConfig, n: int, seed: int = 1) -> F32:
    """Main-hidden rows f32 [n, targets * D]."""
    width = len(config.dspark_target_layer_ids) * config.hidden_size
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


def same(a: Drawn, b: Drawn) -> bool:
    """Bit for bit."""
    return a[0] == b[0] and np.array_equal(a[1], b[1]) and np.array_equal(a[2], b[2])


def live_keys(drafter: Drafter) -> list[bytes]:
    """What a round can see of each ring."""
    state, window = drafter.state, drafter.config.sliding_window
    rows = [state.device.download(r.view(0, (r.shape[0], r.nbytes // r.shape[0]), "u8")) for r in state.rings]
    seen = range(max(state.first, state.position - window), state.position)
    return [ring[[p % len(ring) for p in seen]].tobytes() for ring in rows]
