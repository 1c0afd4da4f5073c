"""Open a base as a load does and compile every kernel that it needs, all cores at once, into the build cache.

    python -m ds4.cli.build BASE [--engram-dir D]

The installer runs it, so that a broken file, an absent n-gram shard or a compiler's complaint shows before a server
is started, and the first answer does not wait for compilers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from os import cpu_count

from ds4.base.reader import Base
from ds4.cli.main import guarded
from ds4.cli.model_flags import progress_bar
from ds4.device import Device
from ds4.device.build import Unit, defines_of
from ds4.device.kernels import all_kernels
from ds4.engine.weights import kernel_constants

TELL_EVERY_S = 5.0  # without a terminal: a line, so that minutes of compilers do not look like a hang


def build(path: str, engram_dir: str | None) -> tuple[str, int]:
    """The device's name, and how many modules are in the cache now.

    Raises:
        FileFormatError: the base, by place. BuildError: a kernel does not compile. DeviceError: no device.
    """
    base = Base.open(path, engram_dir)
    constants = kernel_constants(base.config)
    device = Device.open()
    units = {
        Unit(k.source, defines_of({name: constants[name] for name in k.constants}, k.defines))
        for k in all_kernels()
        if set(k.constants) <= set(constants)
    }

    def compile_one(unit: Unit) -> None:
        if device.variant == "gpu":
            device.builder.gpu(unit, device.info.arch)
        else:
            device.builder.host(unit, device.variant)

    ordered = sorted(units, key=lambda u: (u.source, u.defines))
    with ThreadPoolExecutor(cpu_count() or 1) as pool, progress_bar("compiling kernels") as bar:
        told = time.monotonic()
        jobs = [pool.submit(compile_one, unit) for unit in ordered]
        try:
            for n, job in enumerate(as_completed(jobs), start=1):
                job.result()
                if bar is not None:
                    bar(n, len(ordered))
                elif time.monotonic() - told >= TELL_EVERY_S:
                    told = time.monotonic()
                    print(f"      {n} of {len(ordered)} kernel files", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)  # one failed: the others are not waited for
    return device.info.name, len(ordered)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="ds4.cli.build", description="Check a base and compile its kernels.")
    p.add_argument("path", metavar="BASE")
    p.add_argument("--engram-dir", metavar="D")
    args = p.parse_args(argv)

    def work() -> int:
        name, n = build(args.path, args.engram_dir)
        print(f"{name}: {n} kernel files")
        return 0

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
