"""Every kernel of the launch table compiles for every GPU we mean to run on, without a spill or a warning.

No GPU is needed. The sizes are the released model's (each row's `released`) and, for those rows whose constants
allow it, the smallest fixture's. Registers, stack and spills are ptxas's own; dynamic shared memory is the
table's. Results are cached, so a second run compiles nothing.
"""

from __future__ import annotations

import time

import pytest

from ds4.device.build import Builder, default_cuda_dir, resources, warnings
from ds4.device.kernels import Kernel, all_kernels
from ds4.device.launch import evaluate
from ds4.device.report import released_unit
from ds4.settings import device_settings

KB = 1024
SMEM = {"sm_90": 227 * KB, "sm_100": 227 * KB, "sm_120": 99 * KB, "sm_121": 99 * KB}
REGISTERS = 65536  # of a block
ROWS = {row.name: row for row in all_kernels()}


@pytest.fixture(scope="module")
def builder() -> Builder:
    settings = device_settings()
    return Builder(settings.cuda_dir or default_cuda_dir(), settings.cache, settings.cxx)


def faults(row: Kernel, log: str, arch: str) -> list[str]:
    """What is wrong with one kernel on one architecture."""
    found = resources(log).get(row.name)
    if found is None:
        return [f"{row.source} has no kernel {row.name}"]
    wrong = [w for w in warnings(log) if row.name in w or "warning" not in w.lower()]
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
@pytest.mark.parametrize("source", sorted({row.source for row in ROWS.values()}))
def test_compiles_clean_at_the_released_shapes(
    builder: Builder, source: str, arch: str, compiles: dict[str, float]
) -> None:
    wrong = []
    started = time.monotonic()
    for row in ROWS.values():
        if row.source == source:
            _, log = builder.gpu(released_unit(row), arch)
            wrong += faults(row, log, arch)
            wrong += [f"{source} on {arch}: {w}" for w in warnings(log)]
    compiles[f"{source} {arch}"] = time.monotonic() - started
    assert list(dict.fromkeys(wrong)) == []


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
