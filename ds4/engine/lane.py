"""Everything that one sequence needs on the device and that the next one can use again: state, step, draft head.

A lane's graphs hold the addresses of its state. A session that begins on a lane which another one has left therefore
captures nothing again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from ds4.device import Device
from ds4.engine.budget import StateBudget
from ds4.engine.draft import Drafter
from ds4.engine.draft_weights import DraftWeights
from ds4.engine.layer import Numerics
from ds4.engine.ngrams import NgramFeed
from ds4.engine.ops.kv import kv_layout
from ds4.engine.prefill import Prefill
from ds4.engine.rounds import RoundCounts, Rounds
from ds4.engine.scratch import Workspace
from ds4.engine.state import SequenceState
from ds4.engine.step import StepRunner
from ds4.engine.weights import ModelWeights
from ds4.model.config import ModelConfig

SERIALS = count(1)


@dataclass(frozen=True)
class SessionOptions:
    """How a session computes; see Engine.open."""

    numerics: Numerics
    prefill: str
    index_keys: str
    chunk: int
    graphs: bool
    budget: StateBudget | None = None
    draft: str = "drawn"


class Lane:
    """One sequence's device side. Empty at first, and after `clear`. No other lane ever has its `serial`."""

    def __init__(
        self, device: Device, ws: Workspace, config: ModelConfig, weights: ModelWeights, feed: NgramFeed,
        options: SessionOptions, draft: DraftWeights | None = None,
    ) -> None:  # fmt: skip
        self.serial = next(SERIALS)
        self.options, self.weights, self.draft = options, weights, draft
        layout = kv_layout(config, options.numerics.kv)
        self.state = SequenceState(device, config, layout, budget=options.budget)
        stages = config.num_nextn_predict_layers
        self.touched = device.zeros((config.num_hidden_layers + stages,), "u32")
        self.step = StepRunner(
            device, ws, config, options.numerics, weights, self.state, feed,
            index_keys=options.index_keys, graphs=options.graphs, touched=self.touched,
        )  # fmt: skip
        self.drafter: Drafter | None = None
        if draft is not None:
            self.drafter = Drafter(
                device, ws, config, options.numerics, draft, self.state, graphs=options.graphs, touched=self.touched
            )  # fmt: skip
            self.state.take_from_budget(self.drafter.state.nbytes())
        self.prefill = Prefill(
            device, ws, config, options.numerics, weights, self.state, feed, options.prefill, options.chunk,
            self.drafter,
        )  # fmt: skip
        self.rounds = Rounds(device, self.step, self.drafter, argmax=options.draft == "argmax")
        self.last = device.empty((1, config.vocab_size), "f32")

    def clear(self) -> None:
        """Back to an empty sequence that has counted nothing; buffers and graphs stay."""
        self.state.clear()
        self.step.forget_counts()
        self.rounds.counts = RoundCounts()
        self.rounds.chooser.forget_text()
        self.prefill.chunk = self.options.chunk
        self.step.device.fill(self.touched, 0)
        if self.drafter is not None:
            self.drafter.state.clear()
            self.drafter.forget_counts()

    def nbytes(self) -> int:
        """Device bytes of the sequence's state."""
        return self.state.nbytes() + (self.drafter.state.nbytes() if self.drafter is not None else 0)
