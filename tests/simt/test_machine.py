"""What the driver computes when nothing is wrong: every collective, in every order, build and number of workers."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.simt.rig import ORDERS, Pointer, Rig, rig

MACHINES = [("fast", order, 1) for order in ORDERS] + [("fast", "greedy", 2)]
MACHINES += [("check", order, 1) for order in ORDERS] + [("count", "greedy", 1)]


@pytest.fixture(params=MACHINES, ids=lambda p: "-".join(map(str, p)))
def machine(request: pytest.FixtureRequest) -> Rig:
    return rig(*request.param).use()


@pytest.fixture
def fast() -> Rig:
    return rig("fast").use()


def butterfly(v: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """The pinned order of a warp's sum: xor with width/2, ..., 1, in float32."""
    lanes = np.arange(v.size)
    while width > 1:
        width //= 2
        v = v + v[lanes ^ width]
    return v


def test_collectives(machine: Rig) -> None:
    x = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    out, bits, source = machine.alloc(4 * 2560), machine.alloc(4 * 1280), machine.upload(x)
    machine.launch("collectives", Pointer(out), Pointer(source), Pointer(bits))
    found = machine.download(out, (10, 256), np.float32)
    t = np.arange(256)
    lane, first = t & 31, t & ~31
    warps = butterfly(x, 32)
    total = warps[0]
    for w in range(1, 8):
        total = np.float32(total + warps[32 * w])
    by_warp = x.reshape(8, 32)
    want = [
        warps,
        np.repeat(by_warp.max(axis=1), 32),
        np.repeat(by_warp.min(axis=1), 32),
        np.full(256, total),
        np.full(256, x.max()),
        x[first + ((lane * 7 + 3) & 31)],
        x[t ^ 5],
        np.where(lane + 3 < 32, x[np.minimum(t + 3, 255)], x),
        np.where(lane >= 3, x[np.maximum(t - 3, 0)], x),
        butterfly(x, 8),
    ]
    for i, row in enumerate(want):
        assert np.array_equal(found[i], row), f"output {i}"
    votes = machine.download(bits, (5, 256), np.uint32)
    assert np.array_equal(votes[0], np.repeat(np.packbits(by_warp > 0, bitorder="little").view("<u4"), 32))
    assert np.array_equal(votes[1], np.repeat((by_warp[:, 9] > 0).astype(np.uint32), 32))
    assert votes[2].all()
    assert np.array_equal(votes[3], first + 31)
    assert np.array_equal(votes[4], np.repeat(t.reshape(8, 32).sum(axis=1), 32))
    for p in (out, bits, source):
        machine.free(p)


def test_many_sums_are_each_a_warp_sum(machine: Rig) -> None:
    x = np.random.default_rng(5).standard_normal(256).astype(np.float32)
    out, source = machine.alloc(5 * 1024), machine.upload(x)
    machine.launch("many_sums", Pointer(out), Pointer(source))
    found = machine.download(out, (5, 256), np.float32)
    for i in range(5):
        assert np.array_equal(found[i], butterfly(x * np.float32(i + 1), 32))


def test_spread_sums(machine: Rig) -> None:
    x = np.random.default_rng(6).standard_normal(256).astype(np.float32)
    out, source = machine.alloc(1024), machine.upload(x)
    machine.launch("spread_sums", Pointer(out), Pointer(source))
    t = np.arange(256)
    sums = np.stack([butterfly(x * np.float32(i + 1), 32) for i in range(16)])
    assert np.array_equal(machine.download(out, 256, np.float32), sums[(t & 31) // 2, t])


def test_rms_norm_is_the_same_everywhere(machine: Rig, fast: Rig) -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((37, 300)).astype(np.float32), rng.standard_normal(300).astype(np.float32)
    results = []
    for r in (fast, machine):
        y, px, pw = r.alloc(x.nbytes), r.upload(x), r.upload(w)
        r.launch("rms_norm", Pointer(y), Pointer(px), Pointer(pw), 300, 1e-20, grid=(37, 1, 1))
        results.append(r.download(y, x.shape, np.float32))
        for p in (y, px, pw):
            r.free(p)
    assert np.array_equal(results[0], results[1])
    exact = x.astype(np.float64)
    want = exact / np.sqrt((exact * exact).mean(axis=1, keepdims=True)) * w
    # as in the style guide's example: 2 column adds, 13 of the reduction, mean, eps, root, quotient, two products
    assert np.all(np.abs(results[0] - want) <= ((2 + 13 + 4) / 2 + 4) * 2.0**-24 * np.abs(want))


def test_every_thread_of_every_block_runs_once(machine: Rig) -> None:
    grid, block = (3, 2, 2), (4, 3, 8)
    n = 12 * 96
    out = machine.upload(np.zeros(n, np.uint32))
    machine.launch("places", Pointer(out), grid=grid, block=block)
    want = (np.arange(12)[:, None] * 1000 + np.arange(96)).reshape(-1)
    assert np.array_equal(machine.download(out, n, np.uint32), want)
    machine.free(out)


def test_named_barriers_and_atomics(machine: Rig) -> None:
    x = np.arange(256, dtype=np.int32)
    out, source = machine.alloc(1024), machine.upload(x)
    machine.launch("named_barriers", Pointer(out), Pointer(source), smem=1040)
    assert np.array_equal(machine.download(out, 256, np.int32), x ^ 64)
    total, high = machine.upload(np.zeros(2, np.uint32)), machine.upload(np.zeros(1, np.int32))
    machine.launch("counters", Pointer(total), Pointer(high), grid=(5, 1, 1), smem=16)
    assert machine.download(total, 2, np.uint32).tolist() == [5 * 255 * 128, 5 * 256]
    assert machine.download(high, 1, np.int32)[0] == 255


def test_many_blocks_on_two_workers(fast: Rig) -> None:
    both = rig("fast", "greedy", 2).use()
    x = np.arange(256 * 500, dtype=np.float32)
    out, source = both.alloc(x.nbytes), both.upload(x)
    for _ in range(20):
        both.call("cuMemsetD8", out, 0xFF, x.nbytes)
        both.launch("spread", Pointer(out), Pointer(source), grid=(500, 1, 1))
        assert np.array_equal(both.download(out, x.size, np.float32), x + 1)
    fast.use()


# -- memory


def test_copies_and_fills(fast: Rig) -> None:
    x = np.random.default_rng(2).integers(0, 255, 1 << 21).astype(np.uint8)  # over the size that is mapped
    a, b = fast.upload(x), fast.alloc(x.nbytes)
    stream = fast.call("cuStreamCreate", 0)
    fast.call("cuMemcpyDtoDAsync", b, a, x.nbytes, stream)
    fast.call("cuMemsetD8", b + 3, 7, 5)
    fast.call("cuMemsetD16", b + 16, 0x1234, 4)
    fast.call("cuMemsetD32Async", b + 32, 0x12345678, 4, stream)
    fast.call("cuStreamSynchronize", stream)
    x[3:8] = 7
    x[16:24].view(np.uint16)[:] = 0x1234
    x[32:48].view(np.uint32)[:] = 0x12345678
    assert np.array_equal(fast.download(b, x.size, np.uint8), x)
    base, size = fast.call("cuMemGetAddressRange", b + 100)
    assert (int(base), int(size)) == (b, x.nbytes)
    free, total = fast.call("cuMemGetInfo")
    assert 0 < free <= total
    fast.free(a)
    fast.free(b)


def test_host_memory(fast: Rig) -> None:
    p = fast.call("cuMemHostAlloc", 4096, 0)
    fast.call("cuMemFreeHost", p)
    x = np.zeros(4096, np.uint8)
    fast.call("cuMemHostRegister", x.ctypes.data, 4096, 0)
    fast.call("cuMemHostUnregister", x.ctypes.data)


def test_the_device_is_what_its_profile_says(fast: Rig) -> None:
    attribute = fast.api.CUdevice_attribute
    want = {
        "MULTIPROCESSOR_COUNT": 48,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 99 * 1024,
        "MAX_THREADS_PER_BLOCK": 1024,
        "MAX_REGISTERS_PER_BLOCK": 65536,
        "COMPUTE_CAPABILITY_MAJOR": 12,
        "COMPUTE_CAPABILITY_MINOR": 1,
        "WARP_SIZE": 32,
    }
    for name, value in want.items():
        assert fast.call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), 0) == value
    try:
        assert fast.simt.ds4simt_set_profile(b"h100") == 0
        assert fast.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0) == 132
        assert fast.simt.ds4simt_set_profile(b"abacus") != 0
        assert b"'abacus' is not gb10" in fast.simt.ds4simt_last_error_text()
    finally:
        fast.simt.ds4simt_set_profile(b"gb10")


def test_unknown_entry_points_say_so(fast: Rig) -> None:
    error, *_ = fast.api.cuCtxGetLimit(fast.api.CUlimit.CU_LIMIT_STACK_SIZE)
    assert error.name == "CUDA_ERROR_NOT_SUPPORTED"
    assert b"does not have this entry point" in fast.simt.ds4simt_last_error_text()
    assert fast.call("cuGetErrorName", fast.api.CUresult.CUDA_ERROR_LAUNCH_FAILED) == b"CUDA_ERROR_LAUNCH_FAILED"


def test_launch_ex_takes_the_attributes_of_dependent_launches(fast: Rig) -> None:
    config = fast.api.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.blockDimX = 256
    attribute = fast.api.CUlaunchAttribute()
    attribute.id = fast.api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs = [attribute]
    config.numAttrs = 1
    x = np.arange(256, dtype=np.float32)
    out, source = fast.alloc(1024), fast.upload(x)
    parameters: Any = ((out, source), (ctypes.c_void_p, ctypes.c_void_p))
    fast.call("cuLaunchKernelEx", config, fast.function("spread"), parameters, 0)
    assert np.array_equal(fast.download(out, 256, np.float32), x + 1)
