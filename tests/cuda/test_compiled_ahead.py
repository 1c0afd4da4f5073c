"""Kernels that are launched ahead, as the compiler left them: they ask for weights, wait, and then go on.

The check build sees that a kernel waits, and what it touches before; whether the requests still stand before the wait
in the compiled code only the compiler's output says.
"""

from __future__ import annotations

import re
from functools import cache

import pytest

from ds4.device.build import GPU_FLAGS, Unit, default_cuda_dir
from ds4.device.kernels import Kernel, all_kernels
from ds4.device.report import released_unit

ROWS = [row for row in all_kernels() if row.weights]
UNITS = list(dict.fromkeys(released_unit(row) for row in ROWS))
FIRST = {unit.source: unit for unit in reversed(UNITS)}  # one a file in the usual run
ASKS = re.compile(r"\b(?:ld\.global|prefetch\.global|cp\.async\.cg)")
STORES = re.compile(r"\b(?:st\.global|red\.|atom\.)")
WAIT, RELEASE = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@cache
def ptx(unit: Unit, arch: str) -> str:
    from cuda.bindings import nvrtc

    folder = default_cuda_dir()
    _, program = nvrtc.nvrtcCreateProgram((folder / unit.source).read_bytes(), unit.source.encode(), 0, [], [])
    options = [f"--gpu-architecture={arch}", *GPU_FLAGS, f"--include-path={folder}"]
    options += [f"-D{name}={value}" for name, value in unit.defines]
    options.remove("--ptxas-options=-v")
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        assert not error, error
        _, size = nvrtc.nvrtcGetPTXSize(program)
        text = b" " * size
        nvrtc.nvrtcGetPTX(program, text)
        return text.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def faults(name: str, text: str) -> list[str]:
    """What is wrong with kernel `name` of a module."""
    found = re.search(rf"\.entry {name}\((.*?)\n}}", text, re.S)
    if found is None:
        return [f"{name} is not there"]
    before, wait, after = found[1].partition(WAIT)
    if not wait:
        return [f"{name} never waits"]
    wrong = [] if ASKS.search(before) else [f"{name} asks for nothing before it waits"]
    wrong += [f"{name} stores before it waits"] if STORES.search(before) else []
    return wrong + ([] if RELEASE in after and RELEASE not in before else [f"{name} lets nobody start, or too early"])


def check(unit: Unit) -> None:
    text = ptx(unit, "compute_90")
    assert [fault for row in ROWS if released_unit(row) == unit for fault in faults(row.name, text)] == []


@pytest.mark.parametrize("source", FIRST)
def test_weights_are_asked_for_before_the_wait(source: str) -> None:
    check(FIRST[source])


@pytest.mark.long
@pytest.mark.parametrize("unit", [u for u in UNITS if u not in FIRST.values()], ids=lambda u: u.defines[-1][-1])
def test_weights_are_asked_for_before_the_wait_in_every_format(unit: Unit) -> None:
    check(unit)


def test_before_sm_90_there_is_nothing_to_wait_with() -> None:
    text = ptx(FIRST["norm.cu"], "compute_80")
    assert "rms_norm_bf16_bf16" in text and "griddepcontrol" not in text


def module(body: str) -> str:
    return f".visible .entry k(\n.param .u64 p\n)\n{{\n{body}\n}}\n"


def test_the_check_itself() -> None:
    load, store = "ld.global.nc.v4.u32 {%r1};", "st.global.f32 [%rd1], %f1;"
    assert faults("k", module(f"{load}\n{WAIT};\n{RELEASE};\n{store}")) == []
    for body, words in (
        (f"{load}\n{store}", "never waits"),
        (f"{WAIT};\n{RELEASE};\n{load}", "asks for nothing"),
        (f"{load}\n{store}\n{WAIT};\n{RELEASE};", "stores before"),
        (f"{load}\n{RELEASE};\n{WAIT};", "too early"),
        (f"{load}\n{WAIT};", "lets nobody start"),
    ):
        assert words in " ".join(faults("k", module(body)))
    assert faults("other", module(load)) == ["other is not there"]


def test_every_row_is_compiled_by_one_of_these() -> None:
    def of(unit: Unit) -> list[Kernel]:
        return [row for row in ROWS if released_unit(row) == unit]

    assert sum(len(of(unit)) for unit in UNITS) == len(ROWS) > 40
