"""Every kernel of the launch table compiles for every GPU we mean to run on, without a spill or a warning.

No GPU is needed. The sizes are the released model's (each row's `released`) and, where sizes are compiled in, a
fixture's too. Registers, stack and spills are ptxas's own; dynamic shared memory is the
table's. Results are cached, so a second run compiles nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from ds4.device.build import Builder, Unit, default_cuda_dir, defines_of, resources, warnings
from ds4.device.kernels import Kernel, all_kernels, for_file
from ds4.device.launch import evaluate
from ds4.device.report import released_unit
from ds4.engine.weights import kernel_constants
from ds4.model.config import ModelConfig
from ds4.settings import device_settings
from tests.cuda.conftest import COMPILES

KB = 1024
SMEM = {"sm_90": 227 * KB, "sm_100": 227 * KB, "sm_120": 99 * KB, "sm_121": 99 * KB}
REGISTERS = 65536  # of a block
SOURCES = sorted({row.source for row in all_kernels()})
TOY = kernel_constants(ModelConfig.load(Path(__file__).parent.parent / "data" / "oracle-a" / "config.json"))

Logs = Callable[[Unit, str], str]


@pytest.fixture(scope="module")
def log_of(request: pytest.FixtureRequest) -> Iterator[Logs]:
    """The log of a unit for one architecture. What the selected tests need is compiled ahead, in parallel."""
    settings = device_settings()
    builder = Builder(settings.cuda_dir or default_cuda_dir(), settings.cache, settings.cxx)
    seconds = request.config.stash[COMPILES]

    def build(unit: Unit, arch: str) -> str:
        started = time.monotonic()
        log = builder.gpu(unit, arch)[1]
        seconds[f"{unit.source} {dict(unit.defines)} {arch}"] = time.monotonic() - started
        return log

    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    pairs = {(p["source"], p.get("arch", "sm_121")): None for p in asked if p.get("source") in SOURCES}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ready: dict[tuple[Unit, str], Future[str]] = {}
        for source, arch in pairs:
            for unit in dict.fromkeys(released_unit(row) for row in for_file(source)):
                ready[unit, arch] = pool.submit(build, unit, arch)
        yield lambda unit, arch: ready[unit, arch].result() if (unit, arch) in ready else build(unit, arch)
        pool.shutdown(cancel_futures=True)


def faults(row: Kernel, log: str, arch: str) -> list[str]:
    """What is wrong with one kernel on one architecture."""
    found = resources(log).get(row.name)
    if found is None:
        return [f"{row.source} has no kernel {row.name}"]
    wrong = []
    if found.spill_stores or found.spill_loads:
        wrong.append(f"spills {found.spill_stores} bytes out, {found.spill_loads} in")
    if found.stack:
        wrong.append(f"has a stack frame of {found.stack} bytes")
    smem = found.static_smem + int(evaluate(row, "smem", row.released or {}))
    if smem > SMEM[arch]:
        wrong.append(f"takes {smem} bytes of shared memory of {SMEM[arch]}")
    registers = -(-found.registers * 32 // 256) * 256 * -(-row.block // 32)
    if registers > REGISTERS:
        wrong.append(f"takes {registers} registers a block of {REGISTERS}")
    return [f"{row.name} on {arch}: {w}" for w in wrong]


@pytest.mark.parametrize("arch", SMEM)
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_clean_at_the_released_shapes(log_of: Logs, source: str, arch: str) -> None:
    wrong = []
    for row in for_file(source):
        log = log_of(released_unit(row), arch)
        wrong += [f"{source} on {arch}: {w}" for w in warnings(log)] + faults(row, log, arch)
    assert list(dict.fromkeys(wrong)) == []


@pytest.mark.parametrize("source", [s for s in SOURCES if any(row.constants for row in for_file(s))])
def test_compiles_at_a_fixtures_shapes(log_of: Logs, source: str) -> None:
    """Sizes that are compiled in, at those of a toy: no warning. A few spilled bytes there cost nobody anything."""
    wrong = []
    for row in for_file(source):
        log = log_of(Unit(source, defines_of({name: TOY[name] for name in row.constants}, row.defines)), "sm_121")
        assert row.name in resources(log)
        wrong += warnings(log)
    assert list(dict.fromkeys(wrong)) == []


@pytest.mark.parametrize("source", SOURCES)
def test_file_and_table_have_the_same_kernels(log_of: Logs, source: str) -> None:
    """A kernel that is not in the launch table does not exist, and a row without a kernel is a lie."""
    rows = for_file(source)
    compiled = {name for row in rows for name in resources(log_of(released_unit(row), "sm_121"))}
    assert compiled == {row.name for row in rows}


def test_the_check_itself() -> None:
    """A log that we never want to see is reported, every fault of it."""
    row = Kernel(name="k", source="k.cu", grid=lambda: (1, 1, 1), block=512, args=(), smem=100 * KB)
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_121'\nptxas info    : Function properties for k\n"
        "ptxas         .     64 bytes stack frame, 24 bytes spill stores, 28 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers, 132 bytes smem\n"
    )
    said = " ".join(faults(row, log, "sm_121"))
    for fault in ("spills 24 bytes out, 28 in", "stack frame of 64", "102532 bytes of shared", "86016 registers"):
        assert fault in said
    assert "shared" not in " ".join(faults(row, log, "sm_90"))
