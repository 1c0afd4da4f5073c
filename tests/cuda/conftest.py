"""What the compile check took, printed at the end of a run."""

from __future__ import annotations

import pytest

COMPILES = pytest.StashKey[dict[str, float]]()  # seconds a compilation; next to none where it was cached


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COMPILES] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash.get(COMPILES, {})
    if found:
        slowest = max(found, key=lambda name: found[name])
        total = sum(found.values())
        terminalreporter.write_line(
            f"kernels: {len(found)} compilations, {total:.1f} s together (cached ones included); "
            f"slowest {slowest}, {found[slowest]:.1f} s"
        )
