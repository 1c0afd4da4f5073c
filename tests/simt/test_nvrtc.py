"""Every wrapper of common.cuh through NVRTC, for every architecture: no warning, no spill. Needs no GPU."""

from __future__ import annotations

import pytest

from ds4.device.build import Unit, resources, warnings
from tests.simt.rig import HERE, rig


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120", "sm_121"])
@pytest.mark.parametrize("source", ["probe.cu", "formats.cu"])
def test_compiles(source: str, arch: str) -> None:
    cubin, log = rig("fast").device.builder.gpu(Unit(str(HERE / source)), arch)
    assert cubin[:4] == b"\x7fELF"
    assert not warnings(log), log
    found = resources(log)
    exported = {line[7:-1] for line in (HERE / source).read_text().splitlines() if line.startswith("EXPORT(")}
    assert exported <= found.keys()
    assert [name for name, r in found.items() if r.spill_stores or r.spill_loads] == []
