"""Bases of the fixtures, quantized once a session, and engines on the CPU driver's fast build.

Kernels themselves are tested in the check build (tests/cuda); here whole forward passes run, so the fast build is
used, and one pass of each kind runs in the check build as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ds4.base.quantize import quantize
from ds4.cli.quantize import tables_of
from ds4.device import Device
from ds4.engine import Engine
from tests.conftest import opened

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`bases("oracle-a")`: its base file by the default recipe."""
    folder = tmp_path_factory.mktemp("bases")

    def base(name: str) -> Path:
        out = folder / f"{name}.gguf"
        if not out.exists():
            quantize(DATA / name, out, tables_of(DATA / name))
        return out

    return base


@pytest.fixture(scope="session")
def fast_device() -> Device:
    return opened("fast", "greedy")


@pytest.fixture(scope="session")
def engines(bases: Callable[[str], Path], fast_device: Device) -> Callable[..., Engine]:
    """`engines("oracle-a", activations="f32", ...)`, opened once a combination."""
    made: dict[tuple[object, ...], Engine] = {}

    def engine(name: str, **options: object) -> Engine:
        key = (name, *sorted(options.items()))
        if key not in made:
            given = {"device": fast_device, **options}
            made[key] = Engine.open(bases(name), engram_dir=DATA / name, **given)  # type: ignore[arg-type]
        return made[key]

    return engine
