"""Kernel source + sizes + flags + compiler -> a binary, cached under the hash of all of it.

One `.cu` file makes one module with all its kernels. For a GPU it is compiled by NVRTC to CUBIN for exactly the
device's architecture; for the CPU driver by a C++ compiler to a shared object. The CPU driver itself, a
`libcuda.so.1`, is built here too. Contraction of multiply and add is off in both (`fmaf` is written where it is
wanted), so that a kernel has one set of bits.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds4.device.cache import Cache
from ds4.errors import BuildError

GPU_FLAGS = (
    "--std=c++20",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ptxas-options=-v",
)
ARITHMETIC_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-fno-stack-protector")
DRIVER_FLAGS = (
    *("-std=c++20", "-O2", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror", *ARITHMETIC_FLAGS),
    "-ftls-model=initial-exec",  # kernels read the current thread without a call, so its slot must be static
)
HOST_FLAGS = (
    *("-std=c++20", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *("-Wno-unused-parameter", "-Wno-unused-function", "-Wno-unused-variable"),
    "-Wframe-larger-than=49152",  # a thread's stack is 64 KB there
    *("-fno-trapping-math", "-fno-exceptions", "-fno-rtti", *ARITHMETIC_FLAGS),
)
MACHINE_FLAGS = {"x86_64": ("-march=x86-64-v3", "-mno-red-zone"), "aarch64": ("-march=armv8.2-a",)}
VARIANT_FLAGS = {"fast": ("-O3",), "check": ("-O1", "-DSIMT_CHECK"), "count": ("-O1", "-DSIMT_COUNT")}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)


@dataclass(frozen=True)
class Unit:
    """One compilation: a source file with the names it is compiled with (-DNAME=value)."""

    source: str
    defines: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one architecture, from the compiler's log."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int


def default_cuda_dir() -> Path:
    """The kernel sources: inside the installed package, or beside it in a source tree."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_cuda"
    return inside if inside.is_dir() else package.parent / "cuda"


class Builder:
    """Compiles the files of one source directory into one cache."""

    def __init__(self, cuda_dir: Path, cache: Path, cxx: str = "g++") -> None:
        self.cuda_dir = cuda_dir.resolve()
        self.cache = Cache(cache)
        self.cxx = cxx
        self._texts: dict[tuple[Path, ...], bytes] = {}

    def gpu(self, unit: Unit, arch: str) -> tuple[bytes, str]:
        """CUBIN of `unit` for `arch` ("sm_121"), and the compiler's log.

        Raises:
            BuildError: it does not compile; has the log.
        """
        key = self._key("gpu", unit, [*GPU_FLAGS, arch, _nvrtc_version()])

        def build(out: Path) -> None:
            cubin, log = _nvrtc(self.cuda_dir / unit.source, self.cuda_dir, unit, arch)
            (out / "module.cubin").write_bytes(cubin)
            (out / "log.txt").write_text(log)

        entry = self.cache.get("gpu", key, build)
        return (entry / "module.cubin").read_bytes(), (entry / "log.txt").read_text()

    def host(self, unit: Unit, variant: str) -> Path:
        """Shared object of `unit` for the CPU driver, in the "fast", "check" or "count" build.

        Raises:
            BuildError: it does not compile, or there is no C++ compiler.
        """
        flags = [*HOST_FLAGS, *_machine_flags(), *VARIANT_FLAGS[variant]]
        key = self._key("host", unit, [*flags, _cxx_version(self.cxx)])
        defines = [f"-D{name}={value}" for name, value in unit.defines]
        name = unit.source.replace("/", "_") + ".so"

        def build(out: Path) -> None:
            source = ["-x", "c++", str(self.cuda_dir / unit.source)]
            _run([self.cxx, *flags, *defines, f"-I{self.cuda_dir}", *source, "-o", str(out / name)], unit.source)

        return self.cache.get("host", key, build) / name

    def driver(self) -> Path:
        """The CPU driver, a shared object with SONAME libcuda.so.1.

        Raises:
            BuildError: it does not compile, or there is no C++ compiler.
        """
        sources = sorted((self.cuda_dir / "simt").glob("*.cpp"))
        if not sources:
            raise BuildError(f"{self.cuda_dir / 'simt'} has no .cpp file: the sources of the CPU driver are missing")
        flags = [*DRIVER_FLAGS, *_machine_flags(), "-Wl,-soname,libcuda.so.1"]
        texts = b"".join(self._text(p) for p in sources)
        key = _hash(b"driver", *(f.encode() for f in flags), _cxx_version(self.cxx).encode(), texts)

        def build(out: Path) -> None:
            paths = [str(p) for p in sources]
            command = [self.cxx, *flags, f"-I{self.cuda_dir}", *paths, "-ldl", "-o", str(out / "libcuda.so.1")]
            _run(command, "the CPU driver")

        return self.cache.get("driver", key, build) / "libcuda.so.1"

    def mark(self, variant: str, arch: str) -> str:
        """Hash of what decides about the bits of every kernel: all sources, flags, compiler. `variant` "gpu", or of
        the CPU driver's builds.

        Raises:
            BuildError: as `gpu` and `host`.
        """
        if variant == "gpu":
            settings = [*GPU_FLAGS, arch, _nvrtc_version()]
        else:
            settings = [*HOST_FLAGS, *_machine_flags(), *VARIANT_FLAGS[variant], _cxx_version(self.cxx)]
        texts = [self._text(path) for path in sorted(self.cuda_dir.glob("*.cu"))]
        return _hash(*(s.encode() for s in settings), *texts)

    def _key(self, kind: str, unit: Unit, settings: list[str]) -> str:
        defines = [f"{name}={value}" for name, value in unit.defines]
        text = self._text(self.cuda_dir / unit.source)
        return _hash(kind.encode(), *(s.encode() for s in [unit.source, *settings, "|", *defines]), text)

    def _text(self, source: Path) -> bytes:
        """Source and, recursively, every file it includes, each with its name and length.

        Read once a builder: a process works with the sources it started with.
        """
        held = self._texts.get((source,))
        if held is None:
            found: dict[Path, bytes] = {}
            self._gather(source, found, source)
            held = b"".join(
                f"{os.path.relpath(p, self.cuda_dir)} {len(t)}\n".encode() + t for p, t in sorted(found.items())
            )
            self._texts[(source,)] = held
        return held

    def _gather(self, path: Path, found: dict[Path, bytes], asked_by: Path) -> None:
        if path in found:
            return
        try:
            found[path] = path.read_bytes()
        except OSError as e:
            raise BuildError(f"{path}: cannot be read ({e.strerror}); wanted by {asked_by.name}") from e
        for name in INCLUDE.findall(found[path].decode()):
            beside = (path.parent / name).resolve()
            self._gather(beside if beside.exists() else (self.cuda_dir / name).resolve(), found, path)


def resources(log: str) -> dict[str, Resources]:
    """Registers, stack, spills and static shared memory a kernel, from ptxas's log."""
    pattern = re.compile(
        r"entry function '(?P<name>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads.*?Used (?P<regs>\d+) registers(?P<rest>[^\n]*)",
        re.S,
    )
    found = {}
    for m in pattern.finditer(log):
        smem = re.search(r"(\d+) bytes smem", m["rest"])
        found[m["name"]] = Resources(
            int(m["regs"]), int(m["stack"]), int(m["stores"]), int(m["loads"]), int(smem[1]) if smem else 0
        )
    return found


def warnings(log: str) -> list[str]:
    """The lines of a compiler log that warn."""
    return [
        line.strip() for line in log.splitlines() if re.search(r"\bwarning\b|ptxas.*(error|advisory)", line, re.I)
    ]


def defines_of(
    constants: Mapping[str, int | float | str], extra: tuple[str, ...] = ()
) -> tuple[tuple[str, str], ...]:
    """Name-value pairs for a `Unit`, sorted: model-wide constants and a row's own "NAME=VALUE" texts."""
    pairs = {name: str(value) for name, value in constants.items()}
    for text in extra:
        name, _, value = text.partition("=")
        pairs[name] = value or "1"
    return tuple(sorted(pairs.items()))


def _hash(*parts: bytes) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.hexdigest()


def _machine_flags() -> tuple[str, ...]:
    machine = platform.machine()
    if machine not in MACHINE_FLAGS:
        raise BuildError(f"the CPU driver runs on {' and '.join(MACHINE_FLAGS)}; this machine is {machine}")
    lacks = _missing_instructions(Path("/proc/cpuinfo")) if machine == "x86_64" else []
    if lacks:
        raise BuildError(f"the CPU driver needs an x86-64 processor with AVX2 and FMA (2013 or later): no {lacks[0]}")
    return MACHINE_FLAGS[machine]


@functools.cache
def _missing_instructions(cpuinfo: Path) -> list[str]:
    """What x86-64-v3 needs and this processor does not say that it has; empty where it says nothing."""
    try:
        found = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.M)
    except OSError:
        return []
    return [name for name in ("avx2", "fma", "bmi2", "f16c") if found and name not in found[1].split()]


@functools.cache
def _cxx_version(cxx: str) -> str:
    path = shutil.which(cxx)
    if path is None:
        raise BuildError(
            f"no C++ compiler: {cxx!r} is not on PATH, and without a GPU every kernel is built with it; "
            f"install one (Debian and Ubuntu: apt-get install g++) or name one in DS4_CXX"
        )
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        raise BuildError(f"the C++ compiler {path} does not run: {e}; name another in DS4_CXX") from e
    return done.stdout.splitlines()[0] if done.stdout else path


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as e:
        raise BuildError(f"{what}: the compiler cannot be started: {e}") from e
    if done.returncode != 0:
        errors = done.stderr.strip()
        raise BuildError(
            f"{what} does not compile ({' '.join(command[:1])} exit {done.returncode}):\n{errors[-6000:]}"
        )


@functools.cache
def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    try:
        package = importlib.metadata.version("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        package = "system"
    return f"nvrtc {major}.{minor} {package}"


def _nvrtc(path: Path, include: Path, unit: Unit, arch: str) -> tuple[bytes, str]:
    from cuda.bindings import nvrtc

    options = [f"--gpu-architecture={arch}", *GPU_FLAGS, f"--include-path={include}"]
    options += [f"-D{name}={value}" for name, value in unit.defines]
    error, program = nvrtc.nvrtcCreateProgram(path.read_bytes(), unit.source.encode(), 0, [], [])
    if error:
        raise BuildError(f"{unit.source}: NVRTC refuses the program: {error}")
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        raw = b" " * (size + 1)  # NVRTC writes into it, and Python shares the strings of one byte
        nvrtc.nvrtcGetProgramLog(program, raw)
        log = raw.rstrip(b" \0").decode(errors="replace")
        if error:
            raise BuildError(f"{unit.source} does not compile for {arch} ({error}):\n{log[-6000:]}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = b" " * size
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)
