"""Is this machine able to run ds4? Every finding comes with its remedy. Standard library only."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ds4.disk import cache_fault
from ds4.settings import DeviceSettings

MIN_PYTHON = (3, 11)
MIN_CUDA = 13  # the major version that the bindings speak
ENVIRONMENT_BYTES = 600_000_000  # the Python environment takes 350 MB, and while it is made its parts twice
WORK_BYTES = 300_000_000  # kernels, logs, the embedded model
MIN_MEMORY = 1_500_000_000  # a C++ compiler and the embedded model
# what -march=x86-64-v3 stands for, as /proc/cpuinfo spells it
V3_FLAGS = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"})
PROGRAM = "#include <concepts>\ntemplate <std::integral T> T f(T x) { return x; }\nint main() { return f(0); }\n"
PROBE = """
import ctypes, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit("no libcuda.so.1")
if cuda.cuInit(0):
    sys.exit("the driver finds no device")
version, count = ctypes.c_int(), ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(version))
cuda.cuDeviceGetCount(ctypes.byref(count))
name = ctypes.create_string_buffer(128)
cuda.cuDeviceGetName(name, 128, 0)
print(version.value // 1000, count.value, name.value.decode(errors="replace"))
"""


@dataclass(frozen=True)
class Gpu:
    """What NVIDIA's driver says: the CUDA major version it is for, and the name of its first device."""

    cuda: int
    name: str


def find_gpu(settings: DeviceSettings) -> tuple[Gpu | None, str]:
    """NVIDIA's device, or None and why there is none. Asked in a process of its own, which may crash."""
    if settings.driver == "simt":
        return None, "DS4_DRIVER=simt asks for the CPU"
    try:
        done = subprocess.run([sys.executable, "-I", "-c", PROBE], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as e:
        return None, f"NVIDIA's driver does not answer ({e})"
    words = done.stdout.split(maxsplit=2)
    if done.returncode != 0 or len(words) < 3 or words[1] == "0":
        return None, done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the driver has no device"
    return Gpu(int(words[0]), words[2].strip()), ""


def check(folder: Path, settings: DeviceSettings, gpu: Gpu | None, no_gpu: str, need_environment: bool) -> list[str]:
    """Everything that stands in the way, one text each with what to do.

    Args:
        folder: D, which need not exist yet.
        need_environment: whether a Python environment is still to be made.
    """
    found = []
    if not Path("/proc/self/stat").exists():
        found.append(f"ds4 runs on Linux; this is {platform.system()}")
    if sys.version_info < MIN_PYTHON:
        found.append(
            f"Python {platform.python_version()} is too old; install 3.11 or newer, or name one in DS4_PYTHON"
        )
    if need_environment and not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        found.append(
            f"{sys.executable} cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
        )
    if gpu is None and settings.driver == "nvidia":
        found.append(f"DS4_DRIVER=nvidia, but {no_gpu}; install NVIDIA's driver, or leave the variable out")
    elif gpu is not None and gpu.cuda < MIN_CUDA:
        found.append(
            f"NVIDIA's driver is one for CUDA {gpu.cuda}; install one for CUDA {MIN_CUDA} (release 580 or newer), "
            "or set DS4_DRIVER=simt to run on the CPU"
        )
    if gpu is None:
        found += _processor() + _compiler(settings.cxx)
    found += _cache(settings.cache)
    return found + _disk(folder, need_environment) + _memory(MIN_MEMORY, "building and running the embedded model")


def _cache(root: Path) -> list[str]:
    """Kernels are built into it, minutes later; where it is not there yet it is made as it has to be."""
    try:
        fault = cache_fault(root)
    except FileNotFoundError:
        return []
    except OSError as e:
        return [f"build cache {root}: cannot be looked at ({e.strerror}); set DS4_CACHE to a directory of your own"]
    return [] if fault is None else [fault]


def _processor() -> list[str]:
    machine = platform.machine()
    if machine == "aarch64":
        return []
    if machine != "x86_64":
        return [f"without a GPU, ds4 runs on x86_64 and aarch64; this is {machine}"]
    missing = V3_FLAGS - _cpu_flags()
    return [f"this processor lacks {', '.join(sorted(missing))} (x86-64-v3 is needed)"] if missing else []


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return V3_FLAGS  # unknown is no finding
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), V3_FLAGS)


def _compiler(cxx: str) -> list[str]:
    remedy = "on Debian and Ubuntu: apt-get install g++ (or name another compiler in DS4_CXX)"
    if shutil.which(cxx) is None:
        return [f"no C++ compiler ({cxx}): without a GPU, kernels are built with it; {remedy}"]
    command = [cxx, "-x", "c++", "-std=c++20", "-fsyntax-only", "-"]
    try:
        done = subprocess.run(command, input=PROGRAM, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as e:
        return [f"the C++ compiler {cxx} does not run ({e}); {remedy}"]
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no message"])[0]
        return [f"the C++ compiler {cxx} does not compile C++20 ({said}); version 11 or newer is needed; {remedy}"]
    return []


def _disk(folder: Path, need_environment: bool) -> list[str]:
    need = WORK_BYTES + (ENVIRONMENT_BYTES if need_environment else 0)
    return disk(folder, need)


def disk(folder: Path, need: int) -> list[str]:
    """A finding if the file system of `folder` (or of the parent that exists) has less than `need` bytes."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(there).free
    if free >= need:
        return []
    return [
        f"{there}: {free / 1e9:.1f} GB are free, {need / 1e9:.1f} GB are needed; free some, or choose another disk "
        "with --dir"
    ]


def _memory(need: int, what: str) -> list[str]:
    there = available_memory()
    if there is None or there >= need:
        return []
    return [
        f"{there / 1e9:.1f} GB of memory are available, {what} takes {need / 1e9:.1f} GB; end other programs, or "
        "choose a smaller model with --model"
    ]


def memory_for(model: str, nbytes: int) -> list[str]:
    """A finding if a base of so many bytes does not fit into memory: its weights are placed there whole."""
    return _memory(nbytes, f"the model {model}")


def available_memory() -> int | None:
    """MemAvailable: page cache counts as free."""
    return _meminfo("MemAvailable:")


def total_memory() -> int | None:
    """MemTotal, in bytes; None: nobody can say."""
    return _meminfo("MemTotal:")


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), None)
