"""The embedded model's base, and a log of two days that it answered: made once for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from ds4 import embedded
from ds4.cli.embedded_base import embedded_base
from ds4.engine import Engine
from tests.conftest import opened
from tests.nightly.days import make_log

DAYS = (date(2026, 11, 28), date(2026, 11, 29))


@pytest.fixture(scope="session")
def night_engine() -> Iterator[Engine]:
    """As the server opens it, no sidecar on."""
    made = Engine.open(
        embedded_base(), engram_dir=embedded.checkpoint(), prefill="replay", device=opened("fast", "greedy")
    )
    yield made
    made.close()


@pytest.fixture(scope="session")
def night_log(night_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two requests a day, one corrected on each; not to be written to (`copied`)."""
    folder = tmp_path_factory.mktemp("nights") / "log"
    assert len(make_log(night_engine, folder, DAYS, 2, 1)) == 2
    return folder
