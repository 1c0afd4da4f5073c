"""Fixtures shared by all tests: the device they run on.

Kernel tests run on the CPU driver in the check build (bounds, races, divergence, NaN in fresh memory), one worker,
greedy thread order. `DS4_DRIVER=nvidia` runs the same tests on a GPU.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from ds4.device import Device, Kernel

os.environ.setdefault("DS4_DRIVER", "simt")
LAUNCHED: set[str] = set()  # names of kernels that this process launched, for test_zz_every_kernel_ran.py


@functools.cache
def opened(simt: str, order: str) -> Device:
    """One device a build and order in a session: modules are loaded once."""
    return Device.open(simt=simt, order=order, workers=1)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    """The device of the check build, greedy order.

    `@pytest.mark.parametrize("device", ["rising", "falling", "greedy"], indirect=True)` runs a test in those
    thread orders; "fast" and "count" choose that build.
    """
    wanted = getattr(request, "param", "greedy")
    build, order = (wanted, "greedy") if wanted in ("fast", "check", "count") else ("check", wanted)
    return opened(build, order)


@pytest.fixture
def count_device() -> Device:
    """The device of the count build, its counters at zero. Skipped on a GPU, which does not count."""
    made = opened("count", "greedy")
    if made.info.driver != "simt":
        pytest.skip("only the CPU driver counts traffic")
    made.reset_counters()
    return made


@pytest.fixture(scope="session", autouse=True)
def _note_launches() -> Iterator[None]:
    """Every launch of the session leaves its kernel's name in LAUNCHED."""
    launch = Device.launch

    def noting(self: Device, kernel: Kernel, *args: Any, **kwargs: Any) -> None:
        launch(self, kernel, *args, **kwargs)
        LAUNCHED.add(kernel.name)

    Device.launch = noting  # type: ignore[method-assign]
    yield
    Device.launch = launch  # type: ignore[method-assign]
