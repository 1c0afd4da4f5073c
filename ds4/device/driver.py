"""The CUDA driver of this process: NVIDIA's or ours, loaded once, and its calls with errors as exceptions.

Ours (`cuda/simt`) is a shared library with SONAME libcuda.so.1. It is loaded before cuda-python looks for a
driver, so the bindings find it; that works only where no other libcuda is in the process already, and is refused
otherwise: torch or cupy beside us would silently run on it.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4.device.build import Builder
from ds4.errors import DeviceError

NVIDIA_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/proc/driver/nvidia/version")
PROFILES = ("gb10", "h100", "b200", "rtx5090")
PROBE = (
    "import ctypes; l = ctypes.CDLL('libcuda.so.1'); n = ctypes.c_int(0); "
    "raise SystemExit(0 if l.cuInit(0) == 0 and l.cuDeviceGetCount(ctypes.byref(n)) == 0 and n.value > 0 else 1)"
)


@dataclass(frozen=True)
class Mode:
    """How the CPU driver runs: settings of the process's driver, applied when a device with others is used."""

    order: str = "greedy"
    replay: str = "recorded"
    workers: int = 1
    profile: str = "gb10"
    poison: bool = False


class Driver:
    """One loaded driver. `api` is cuda-python's module; `call` runs one of its functions and checks the result."""

    def __init__(self, kind: str, simt: ctypes.CDLL | None) -> None:
        from cuda.bindings import driver as api

        self.kind = kind
        self.api: Any = api
        self.simt = simt
        self._mode: Mode | None = None
        self.call("cuInit", 0)

    def call(self, name: str, *args: Any) -> Any:
        """`name(*args)`: None, the value, or the tuple of values after the error code.

        Raises:
            DeviceError: the driver refused; has the call, its code, and what the CPU driver says about it.
        """
        error, *values = getattr(self.api, name)(*args)
        if error:
            raise self.failed(name, error)
        return None if not values else values[0] if len(values) == 1 else tuple(values)

    def failed(self, what: str, error: Any) -> DeviceError:
        """The exception for error code `error` of `what`."""
        detail = self._detail()
        if not detail:
            ok, text = self.api.cuGetErrorString(error)
            detail = text.decode() if not ok and text else ""
        return DeviceError(f"{what}: {getattr(error, 'name', error)}{': ' + detail if detail else ''}")

    def _detail(self) -> str:
        text: bytes | None = self.simt.ds4simt_last_error_text() if self.simt else None
        return text.decode(errors="replace") if text else ""

    def use(self, mode: Mode) -> None:
        """Make the CPU driver run in `mode`; nothing to do on NVIDIA's, or when it does already."""
        if self.simt is None or mode == self._mode:
            return
        for setter, value in (
            ("ds4simt_set_order", mode.order.encode()),
            ("ds4simt_set_replay", mode.replay.encode()),
            ("ds4simt_set_workers", mode.workers),
            ("ds4simt_set_profile", mode.profile.encode()),
            ("ds4simt_set_poison", int(mode.poison)),
        ):
            if getattr(self.simt, setter)(value) != 0:
                raise DeviceError(f"the CPU driver refuses {setter}({value!r}): {self._detail()}")
        self._mode = mode

    def set_weights(self, function: Any, mask: int) -> None:
        """Tell the CPU driver which parameters of a function hold weights, a bit each; NVIDIA's need not know."""
        if self.simt is not None and self.simt.ds4simt_set_weights(int(function), mask) != 0:
            raise DeviceError(self._detail())

    def counters(self) -> dict[str, Any]:
        """The CPU driver's counters since the last reset: launches, and per kernel what the count build saw."""
        if self.simt is None:
            raise DeviceError("counters exist only on the CPU driver (DS4_DRIVER=simt)")
        found: dict[str, Any] = json.loads(self.simt.ds4simt_counters_json())
        return found

    def reset_counters(self) -> None:
        """Set all counters to zero."""
        if self.simt is not None:
            self.simt.ds4simt_reset_counters()


_loaded: Driver | None = None


def load(wanted: str, builder: Builder) -> Driver:
    """The driver of this process, loaded now if there is none yet.

    Args:
        wanted: "nvidia", "simt", or "auto": what is loaded, else NVIDIA's where it has a device, else ours.

    Raises:
        DeviceError: another driver is loaded already; "nvidia" without a working one; a foreign libcuda is mapped.
        BuildError: ours cannot be built.
    """
    global _loaded
    if _loaded is not None:
        if wanted not in ("auto", _loaded.kind):
            raise DeviceError(
                f"this process runs on the {_loaded.kind} driver; one driver a process, not {wanted} too"
            )
        return _loaded
    if wanted == "nvidia" or (wanted == "auto" and _nvidia_has_a_device()):
        try:
            _loaded = Driver("nvidia", None)
        except (DeviceError, RuntimeError, ImportError) as e:
            raise DeviceError(f"NVIDIA's driver does not work here ({e}); DS4_DRIVER=simt runs on the CPU") from e
    else:
        _loaded = Driver("simt", _load_simt(builder.driver()))
    return _loaded


def mapped_libcuda() -> list[str]:
    """Paths of every libcuda.so in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(p for p in paths if p.rsplit("/", 1)[-1].startswith("libcuda.so"))


def _load_simt(path: Path) -> ctypes.CDLL:
    foreign = [p for p in mapped_libcuda() if p != str(path)]
    if foreign:
        raise DeviceError(
            f"{foreign[0]} is loaded in this process already (by torch, cupy or another CUDA user); the CPU driver "
            f"needs a process of its own: open the device before, or without, that library"
        )
    try:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as e:
        raise DeviceError(f"the CPU driver {path} cannot be loaded: {e}") from e
    library.ds4simt_set_order.argtypes = [ctypes.c_char_p]
    library.ds4simt_set_replay.argtypes = [ctypes.c_char_p]
    library.ds4simt_set_weights.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    library.ds4simt_set_profile.argtypes = [ctypes.c_char_p]
    library.ds4simt_set_workers.argtypes = [ctypes.c_int]
    library.ds4simt_set_poison.argtypes = [ctypes.c_int]
    library.ds4simt_last_error_text.restype = ctypes.c_char_p
    library.ds4simt_counters_json.restype = ctypes.c_char_p
    return library


def _nvidia_has_a_device() -> bool:
    """Asked in another process, so that a driver without a device is not left mapped in this one."""
    if not any(Path(node).exists() for node in NVIDIA_NODES):
        return False
    try:
        return subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
