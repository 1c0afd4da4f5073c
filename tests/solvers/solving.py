"""A small solve: an oracle checkpoint, its base, and a made text of four documents and two sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ds4.corpus import Document
from ds4.device import Device
from ds4.engine import Engine
from ds4.teacher.run import Teacher
from ds4.teacher.source import open_source
from rulers.text import Text
from solvers.fixture import Fixture, make_fixture, plan_fixture
from solvers.sidecar import solve_sidecar

DATA = Path(__file__).parent.parent / "data"
NAME = "oracle-a"
ABOUT = {"base": "oracle-a.gguf 0", "teacher": "oracle-a 0"}
DOCUMENTS = tuple(Document(f"d{i}", source, "text") for i, source in enumerate(("news", "news", "law", "law")))


def some_text(length: int = 128) -> Text:
    """Eight windows of `length`."""
    rng = np.random.default_rng(11)
    return Text.of([rng.integers(3, 320, length).tolist() for _ in range(8)], [0, 0, 1, 1, 2, 2, 3, 3])


def teacher_of() -> Teacher:
    return Teacher(open_source(DATA / NAME))


def fixture_in(folder: Path, length: int = 128) -> Fixture:
    teacher = teacher_of()
    plan = plan_fixture(folder / "f.fixture", teacher, some_text(length), DOCUMENTS, domain="made")
    return make_fixture(plan, teacher)


def engine_on(base: Path, device: Device, **options: Any) -> Engine:
    return Engine.open(base, engram_dir=DATA / NAME, device=device, **options)


def solve(
    engine: Engine, fixture: Fixture, out: Path, say: Callable[[str], None] | None = None, **options: Any
) -> dict[str, Any]:
    return solve_sidecar(engine, teacher_of(), fixture, out, ABOUT, say=say, **options)
