"""Last in a whole run: every row of the launch table was launched by some test of this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4.device.kernels import all_kernels
from tests.conftest import LAUNCHED


def test_every_kernel_ran(request: pytest.FixtureRequest) -> None:
    files = set((Path(__file__).parent / "cuda").glob("test_*.py"))
    collected = {item.path for item in request.session.items}
    if not files <= collected or request.config.getoption("keyword"):
        pytest.skip("only a whole run knows")
    assert sorted({row.name for row in all_kernels()} - LAUNCHED) == []
