"""What the compile check took, printed at the end of a run."""

from __future__ import annotations

import pytest

COMPILES = pytest.StashKey[dict[str, float]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COMPILES] = {}


@pytest.fixture
def compiles(request: pytest.FixtureRequest) -> dict[str, float]:
    """Seconds a compilation, by file and architecture; cached ones take next to none."""
    return request.config.stash[COMPILES]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash.get(COMPILES, {})
    if found:
        slowest = max(found, key=lambda name: found[name])
        total = sum(found.values())
        terminalreporter.write_line(
            f"kernels: {len(found)} files x architectures in {total:.1f} s of compiling (cached ones included); "
            f"slowest {slowest}, {found[slowest]:.1f} s"
        )
