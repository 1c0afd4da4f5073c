"""A small refit: eight requests of an oracle's vocabulary, and four documents beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.corpus import Document
from ds4.engine import Engine
from rulers.text import Text
from solvers.capture import Captures
from solvers.day_text import SOURCE
from solvers.fixture import Fixture, Target, make_fixture, plan_fixture
from solvers.refit import refit
from tests.solvers.solving import teacher_of

F32 = NDArray[np.float32]
ABOUT = {"base": "oracle-a.gguf 0", "teacher": "oracle-a 0"}
REQUESTS = 8
DOCUMENTS = tuple(Document(f"d{i}", SOURCE if i < REQUESTS else "news", "") for i in range(REQUESTS + 4))


def requests_in(folder: Path) -> Fixture:
    """Twelve windows of 48 that begin with the same four tokens."""
    rng = np.random.default_rng(12)
    text = Text.of([[0, 9, 8, 7, *rng.integers(3, 320, 44).tolist()] for _ in DOCUMENTS], list(range(len(DOCUMENTS))))
    teacher = teacher_of()
    plan = plan_fixture(folder / "f.fixture", teacher, text, DOCUMENTS, domain=SOURCE, split="2026-11-30")
    return make_fixture(plan, teacher)


class Wanting(Fixture):
    """A fixture whose original gives other outputs in the last layer."""

    def __init__(self, fixture: Fixture, output_TD: F32) -> None:
        super().__init__(fixture.path, fixture.head)
        self._output_TD = output_TD

    def layer(self, layer: int) -> Target:
        return replace(super().layer(layer), output_TD=self._output_TD)


def gained(engine: Engine, fixture: Fixture, zchain: Path | None, noise: float = 0.0) -> tuple[F32, F32]:
    """Outputs f32 [T, D] that the last layer would have with other gains on the sidecar, and what it has.

    Args:
        noise: as loud as what the experts add, times this, is added: then the least error is quieter.
    """
    captures = Captures(engine, fixture.text)
    captures.mount(zchain)
    c = captures.layer(engine.config.num_hidden_layers - 1)
    rng = np.random.default_rng(3)
    s_ED = rng.choice(np.array([0.75, 1, 1.5], np.float32), (engine.config.n_routed_experts, c.slots_TKD.shape[2]))
    routed_TD = (c.slots_TKD * s_ED[c.picks_TK]).sum(axis=1)
    off_TD = noise * routed_TD.std() * rng.standard_normal(routed_TD.shape)
    return (routed_TD + c.shared_TD + off_TD).astype(np.float32), c.slots_TKD.sum(axis=1) + c.shared_TD


def solve(
    engine: Engine, fixture: Fixture, zchain: Path | None, out: Path, say: Callable[[str], None] | None = None,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    return refit(engine, teacher_of(), fixture, zchain, out, ABOUT, say=say, **options)
