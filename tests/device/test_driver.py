"""Which driver a process gets, and the refusals around it. Each case has a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds4.device import Device

OPEN = "from ds4.device import Device; d = Device.open(); print(d.info.driver, d.info.name)"


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DS4_") or k == "DS4_CACHE"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=kept | env)


def test_the_cpu_driver_is_a_device_like_any_other(device: Device) -> None:
    if device.info.driver != "simt":
        pytest.skip("runs on NVIDIA's driver")
    info = device.info
    assert (info.cc, info.arch, info.n_sm) == ((12, 1), "sm_121", 48)
    assert (info.smem_per_block, info.threads_per_block, info.regs_per_block) == (99 * 1024, 1024, 65536)


def test_without_a_gpu_the_cpu_driver_is_chosen() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    done = run(OPEN)
    assert done.stdout.startswith("simt "), done.stderr


def test_nvidia_without_a_driver_is_an_error() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    done = run(OPEN, DS4_DRIVER="nvidia")
    assert done.returncode == 1 and "NVIDIA's driver does not work here" in done.stderr
    assert "DS4_DRIVER=simt runs on the CPU" in done.stderr


def test_another_libcuda_in_the_process_is_refused(tmp_path: Path) -> None:
    """As torch or cupy would have mapped it."""
    (tmp_path / "e.c").write_text("int cuInit(unsigned f) { return 0; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "e.c", "-o", "libcuda.so.1"], cwd=tmp_path, check=True)
    library = tmp_path / "libcuda.so.1"
    done = run(f"import ctypes; ctypes.CDLL({str(library)!r}); {OPEN}", DS4_DRIVER="simt")
    assert done.returncode == 1 and f"{library} is loaded in this process already" in done.stderr


def test_one_driver_a_process() -> None:
    code = OPEN + "; Device.open(driver='nvidia')"
    done = run(code, DS4_DRIVER="simt")
    assert "runs on the simt driver; one driver a process, not nvidia too" in done.stderr


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"DS4_DRIVER": "metal"}, "DS4_DRIVER is 'metal'; expected one of auto, nvidia, simt"),
        ({"DS4_CXX": "/no/such/g++", "DS4_DRIVER": "simt"}, "no C++ compiler"),
        ({"DS4_CACHE": "/proc/nothing", "DS4_DRIVER": "simt"}, "set DS4_CACHE to a writable directory"),
        ({"DS4_CUDA_DIR": "/nowhere", "DS4_DRIVER": "simt"}, "sources of the CPU driver are missing"),
    ],
)
def test_what_is_missing_is_said(env: dict[str, str], says: str) -> None:
    done = run(OPEN, **env)
    assert done.returncode == 1 and says in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("ds4.errors.")


def test_a_bad_argument_of_open_is_named() -> None:
    done = run(OPEN.replace("open()", "open(order='sideways')"), DS4_DRIVER="simt")
    assert "order is 'sideways'; expected one of greedy, rising, falling" in done.stderr
