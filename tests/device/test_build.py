"""What the compiler's log says: parsed from a real compile, and from texts that we never want to see."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from ds4.device import build
from ds4.device.build import Builder, Resources, Unit, defines_of, resources, warnings
from ds4.errors import BuildError

SPILLING = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_121'
ptxas info    : Function properties for one
ptxas         .     64 bytes stack frame, 24 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 64 bytes cumulative stack size, 132 bytes smem
ptxas info    : Compile time = 17.838 ms
ptxas warning : Value of threads per SM for entry one is out of range. .minnctapersm will be ignored
ptxas info    : Compiling entry function 'two' for 'sm_121'
ptxas info    : Function properties for two
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""


def test_resources_of_a_log() -> None:
    assert resources(SPILLING) == {"one": Resources(255, 64, 24, 28, 132), "two": Resources(12, 0, 0, 0, 0)}


def test_warnings_of_a_log() -> None:
    assert len(warnings(SPILLING)) == 1 and "out of range" in warnings(SPILLING)[0]


def test_a_gpu_compile_gives_a_cubin_and_its_log(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text(
        'extern "C" __global__ void __launch_bounds__(64) k(float* y) {\n'
        "    __shared__ float s[WIDTH];\n"
        "    s[threadIdx.x] = y[threadIdx.x];\n"
        "    __syncthreads();\n"
        "    y[threadIdx.x] = s[WIDTH - 1 - threadIdx.x];\n"
        "}\n"
    )
    cubin, log = Builder(tmp_path, tmp_path / "c").gpu(Unit("k.cu", defines_of({"WIDTH": 64})), "sm_121")
    found = resources(log)["k"]
    assert cubin[:4] == b"\x7fELF"
    assert found.static_smem == 256 and 0 < found.registers < 64 and found.spill_stores == 0
    assert warnings(log) == []


def test_an_old_processor_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_missing_instructions", lambda path: ["avx2"])
    with pytest.raises(BuildError, match=r"needs an x86-64 processor with AVX2 and FMA.*no avx2"):
        Builder(tmp_path, tmp_path / "c").host(Unit("k.cu"), "fast")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(BuildError, match="x86_64 and aarch64; this machine is riscv64"):
        Builder(tmp_path, tmp_path / "c").host(Unit("k.cu"), "fast")


def test_instructions_are_read_from_cpuinfo(tmp_path: Path) -> None:
    told = build._missing_instructions
    (tmp_path / "old").write_text("processor : 0\nflags\t\t: fpu sse2 f16c fma bmi2\n")
    (tmp_path / "new").write_text("flags : avx2 fma bmi2 f16c avx512f\n")
    assert told(tmp_path / "old") == ["avx2"] and told(tmp_path / "new") == [] and told(tmp_path / "none") == []


def test_defines_are_sorted_and_a_rows_own_win() -> None:
    assert defines_of({"B": 2, "A": 1}, ("C=x", "FLAG", "B=3")) == (("A", "1"), ("B", "3"), ("C", "x"), ("FLAG", "1"))
