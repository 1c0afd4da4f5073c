"""What the driver must refuse, each by name: kernels that are wrong, launches, memory, handles, captures."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

from tests.simt.rig import ORDERS, Pointer, Refused, Rig, rig

SHARED = 1040  # sizeof(Shared) in probe.cu


def refusal(call: Any, *args: Any, **kwargs: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        call(*args, **kwargs)
    return caught.value


@pytest.fixture(params=ORDERS)
def check(request: pytest.FixtureRequest) -> Rig:
    return rig("check", request.param).use()


@pytest.fixture
def greedy() -> Rig:
    return rig("check").use()


def still_works(r: Rig) -> None:
    """After a fault the driver runs the next kernel as if nothing had been."""
    x = np.arange(256, dtype=np.float32)
    out, source = r.alloc(1024), r.upload(x)
    r.launch("read_too_early", Pointer(out), Pointer(source), 1, smem=SHARED)
    assert np.array_equal(r.download(out, 256, np.float32), x[np.arange(256) ^ 33])
    r.free(out)
    r.free(source)


# -- kernels


KERNEL_FAULTS = {
    # name: (kernel, arguments after the pointers, words the text must have)
    "out of bounds read": ("copy_at", (0, 64), ["out of bounds", "read of 4 bytes", "byte 256", "256 bytes"]),
    "out of bounds read before": ("copy_at", (0, -1), ["out of bounds", "read", "4 bytes before"]),
    "out of bounds write": ("copy_at", (64, 0), ["out of bounds", "write of 4 bytes", "byte 256"]),
    "misaligned vector": ("vector_at", (1,), ["misaligned global read of 16 bytes"]),
    "vector past the end": ("vector_at", (64,), ["out of bounds", "read of 16 bytes"]),
}


@pytest.mark.parametrize("name", KERNEL_FAULTS)
def test_global_memory_faults(greedy: Rig, name: str) -> None:
    kernel, args, words = KERNEL_FAULTS[name]
    to, source = greedy.upload(np.zeros(64, np.int32)), greedy.upload(np.zeros(64, np.int32))
    found = refusal(greedy.launch, kernel, Pointer(to), Pointer(source), *args, block=(32, 1, 1))
    assert found.code == "LAUNCH_FAILED"
    for word in [kernel, "probe.cu", "block (0,0,0)", "thread (0,0,0)", *words]:
        assert word in found.text, found.text
    still_works(greedy)


def test_a_divergent_barrier_is_a_message(check: Rig) -> None:
    found = refusal(check.launch, "skip_barrier", Pointer(check.alloc(1024)))
    assert "divergent barrier in block (0,0,0): 255 of 256 threads wait in sync_block (probe.cu:" in found.text
    assert "1 returned" in found.text
    still_works(check)


def test_a_barrier_at_two_places_is_divergent(check: Rig) -> None:
    found = refusal(check.launch, "two_barriers", Pointer(check.alloc(1024)))
    assert "divergent barrier: some threads wait at line" in found.text


def test_half_a_warp_in_a_shuffle(check: Rig) -> None:
    found = refusal(check.launch, "half_shuffle", Pointer(check.alloc(1024)))
    assert "shfl mismatch" in found.text or "divergent warp operation" in found.text
    still_works(check)


def test_two_operations_meet(check: Rig) -> None:
    found = refusal(check.launch, "two_operations", Pointer(check.alloc(1024)))
    assert "shuffle mismatch" in found.text and "shfl" in found.text and "ballot" in found.text


def test_a_mask_names_a_lane_that_returned(check: Rig) -> None:
    found = refusal(check.launch, "returned_lane", Pointer(check.alloc(1024)))
    assert "ballot mismatch: mask ffffffff names lanes 00000008 that have returned" in found.text or (
        "divergent warp operation" in found.text
    )


def test_a_missing_barrier_before_a_read(check: Rig) -> None:
    out, source = Pointer(check.alloc(1024)), Pointer(check.upload(np.ones(256, np.float32)))
    check.launch("read_too_early", out, source, 1, smem=SHARED)
    found = refusal(check.launch, "read_too_early", out, source, 0, smem=SHARED)
    # the thread that comes first reads poison; the race is reported by whoever comes second
    assert "shared-memory race" in found.text and "no barrier between" in found.text
    still_works(check)


def test_a_missing_barrier_before_a_write(check: Rig) -> None:
    out, source = Pointer(check.alloc(1024)), Pointer(check.upload(np.ones(256, np.float32)))
    check.launch("write_too_early", out, source, 1, smem=SHARED)
    found = refusal(check.launch, "write_too_early", out, source, 0, smem=SHARED)
    assert "shared-memory race" in found.text and "by thread" in found.text


def test_an_overwrite_that_nobody_reads_again(check: Rig) -> None:
    out, source = Pointer(check.alloc(1024)), Pointer(check.upload(np.ones(256, np.float32)))
    check.launch("overwrite", out, source, 1, smem=SHARED)
    found = refusal(check.launch, "overwrite", out, source, 0, smem=SHARED)
    # whoever comes second reports it
    first, second = ("written", "read") if check.order == "falling" else ("read", "overwritten")
    assert f"is {second} here and was {first} by thread" in found.text


def test_two_threads_write_one_place(check: Rig) -> None:
    found = refusal(check.launch, "two_writers", Pointer(check.alloc(1024)), smem=SHARED)
    assert "is written here and was written by thread" in found.text


@pytest.mark.parametrize(
    ("distance", "guarded", "right"), [(1, 1, True), (1, 0, False), (32, 1, False), (1, 2, False)]
)
def test_sync_warp_orders_its_warp_only(check: Rig, distance: int, guarded: int, right: bool) -> None:
    x = np.arange(256, dtype=np.float32)
    out, source = check.alloc(1024), check.upload(x)
    args = ("warp_exchange", Pointer(out), Pointer(source), distance, guarded)
    if right:
        check.launch(*args, smem=SHARED)
        assert np.array_equal(check.download(out, 256, np.float32), x[np.arange(256) ^ distance])
    else:
        assert "shared-memory race" in refusal(check.launch, *args, smem=SHARED).text


def test_shared_memory_starts_as_nan(check: Rig) -> None:
    out = check.upload(np.zeros(256, np.float32))
    check.launch("unwritten", Pointer(out), smem=SHARED)
    assert np.isnan(check.download(out, 256, np.float32)).all()


@pytest.mark.parametrize(
    ("at", "kind", "word"),
    [
        (4, 0, "index 4 is outside an array of 4"),
        (-1, 0, "index -1 is outside an array of 4"),
        (0, 1, "write of 4 bytes at offset 1040, the launch gave the block 1040 bytes"),
        (4, 2, "write of 4 bytes at offset 1040"),
    ],
)
def test_shared_memory_bounds(greedy: Rig, at: int, kind: int, word: str) -> None:
    found = refusal(greedy.launch, "shared_at", Pointer(greedy.alloc(64)), at, kind, smem=SHARED)
    assert word in found.text, found.text
    still_works(greedy)


def test_too_little_shared_memory_for_the_layout(greedy: Rig) -> None:
    found = refusal(greedy.launch, "unwritten", Pointer(greedy.alloc(1024)), smem=SHARED - 16)
    assert "lays out 1040 bytes of shared memory, the launch gave it 1024" in found.text


@pytest.mark.parametrize(
    ("mode", "word"),
    [(1, "cp.async"), (2, "shared-memory race"), (3, "returns without waiting for its cp.async")],
)
def test_cp_async_wrong(check: Rig, mode: int, word: str) -> None:
    x = np.arange(256, dtype=np.float32)
    out, source = check.alloc(1024), check.upload(x)
    check.launch("async_copy", Pointer(out), Pointer(source), 0, smem=SHARED)
    assert np.array_equal(check.download(out, 256, np.float32), x[np.arange(256) ^ 4])
    found = refusal(check.launch, "async_copy", Pointer(out), Pointer(source), mode, smem=SHARED)
    assert word in found.text, found.text
    still_works(check)


def test_cp_async_groups_land_one_by_one(check: Rig) -> None:
    x = np.arange(256, dtype=np.float32)
    out, source = check.alloc(1024), check.upload(x)
    check.launch("async_groups", Pointer(out), Pointer(source), 0, smem=SHARED)
    assert np.array_equal(check.download(out, 256, np.float32), x)
    found = refusal(check.launch, "async_groups", Pointer(out), Pointer(source), 1, smem=SHARED)
    assert "is read before thread" in found.text and "waited for the cp.async" in found.text


@pytest.mark.parametrize("kind", range(6))
def test_blocks_of_one_launch_do_not_meet(check: Rig, kind: int) -> None:
    """They have no order on a GPU, whatever order the driver runs them in; atomics may meet."""
    how = {1: ("written", "written"), 2: ("read", "written"), 3: ("written", "read"), 5: ("written", "written")}
    data, word = check.upload(np.zeros(16, np.uint8)), check.upload(np.zeros(1, np.uint32))
    args = ("blocks_meet", Pointer(data), Pointer(word), kind)
    for _ in range(2):  # launches come one after another: the second is no race with the first
        if kind in how:
            now, before = how[kind]
            found = refusal(check.launch, *args, grid=(4, 1, 1), block=(32, 1, 1))
            assert found.text.startswith("blocks_meet: race between blocks: byte "), found.text
            assert f"is {now} here and was {before} by another block of this launch" in found.text
        else:
            check.launch(*args, grid=(4, 1, 1), block=(32, 1, 1))
    if kind == 0:
        assert check.download(data, 4, np.uint8).tolist() == [0, 1, 2, 3]
    if kind == 4:
        assert check.download(word, 1, np.uint32)[0] == 8


def test_a_null_pointer_is_legal_until_it_is_used(greedy: Rig) -> None:
    found = refusal(greedy.launch, "copy_at", Pointer(greedy.alloc(64)), Pointer(0), 0, 0, block=(32, 1, 1))
    assert "parameter 2, which is null" in found.text


def test_a_freed_address_has_no_new_owner_at_once(greedy: Rig) -> None:
    gone = greedy.alloc(1024)
    greedy.free(gone)
    assert all(greedy.alloc(1024) != gone for _ in range(20))
    with pytest.raises(Refused, match="1024 bytes, which was freed"):
        greedy.launch("unwritten", Pointer(gone), smem=SHARED)


def test_a_thread_without_a_context(greedy: Rig) -> None:
    found: list[Refused] = []

    def work() -> None:
        for call, args in (("cuMemAlloc", (64,)), ("cuStreamCreate", (0,)), ("cuGraphLaunch", (0, 0))):
            found.append(refusal(greedy.call, call, *args))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [f.code for f in found] == ["INVALID_CONTEXT"] * 3
    assert "cuCtxSetCurrent comes first" in found[0].text


def test_fresh_memory_is_nan(greedy: Rig) -> None:
    assert np.isnan(greedy.download(greedy.alloc(4096), 1024, np.float32)).all()


# -- launches


def test_launch_limits_of_the_profile(greedy: Rig) -> None:
    p = Pointer(greedy.alloc(1 << 20))
    f = greedy.function("skip_barrier")
    attribute = greedy.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("INVALID_VALUE", {"block": (1025, 1, 1)}, "1025 threads, profile gb10 allows 1024"),
        ("INVALID_VALUE", {"block": (64, 32, 1)}, "2048 threads"),
        ("INVALID_VALUE", {"block": (1, 1, 65)}, "(1,1,65)"),
        ("INVALID_VALUE", {"block": (0, 1, 1)}, "at least 1"),
        ("INVALID_VALUE", {"grid": (0, 1, 1)}, "at least 1"),
        ("INVALID_VALUE", {"grid": (1, 65536, 1)}, "is over (2147483647,65535,65535)"),
        ("INVALID_VALUE", {"smem": 50_000}, "allowed 49152: raise"),
        ("INVALID_VALUE", {"smem": 101_377}, "profile gb10 has 101376"),
    ]
    for code, shape, word in cases:
        found = refusal(greedy.launch, f, p, **shape)
        assert found.code == code and "skip_barrier" in found.text and word in found.text, found
    found = refusal(greedy.call, "cuFuncSetAttribute", f, attribute, 101_377)
    assert "profile gb10 has 101376 a block" in found.text
    bounded = greedy.function("skip_barrier", limits="max_threads.skip_barrier=128\nregs.skip_barrier=255\n")
    assert "its launch bounds say 128" in refusal(greedy.launch, bounded, p).text
    heavy = greedy.function("skip_barrier", limits="regs.skip_barrier=255\n")
    found = refusal(greedy.launch, heavy, p, block=(512, 1, 1))
    assert found.code == "LAUNCH_OUT_OF_RESOURCES" and "131072 registers" in found.text


def test_arguments_missing_or_in_extra(greedy: Rig) -> None:
    f = greedy.function("copy_at")
    shape = (f, 1, 1, 1, 32, 1, 1, 0, 0)
    found = refusal(greedy.call, "cuLaunchKernel", *shape, 0, 0)
    assert found.code == "INVALID_VALUE" and "copy_at takes 4 parameters, none were given" in found.text
    slots = (ctypes.c_void_p * 4)(ctypes.addressof(ctypes.c_uint64(0)), None, None, None)
    found = refusal(greedy.call, "cuLaunchKernel", *shape, ctypes.addressof(slots), 0)
    assert "takes 4 parameters, number 2 is missing" in found.text
    found = refusal(greedy.call, "cuLaunchKernel", *shape, ctypes.addressof(slots), ctypes.addressof(slots))
    assert found.code == "NOT_SUPPORTED" and "extra" in found.text
    sizes = [greedy.call("cuFuncGetParamInfo", f, i) for i in range(4)]
    assert sizes == [(0, 8), (8, 8), (16, 4), (20, 4)]
    assert "copy_at has 4 parameters, not 5" in refusal(greedy.call, "cuFuncGetParamInfo", f, 4).text


def test_freed_and_foreign_pointers(greedy: Rig) -> None:
    out, gone = greedy.alloc(1024), greedy.alloc(4096)
    greedy.free(gone)
    found = refusal(greedy.launch, "unwritten", Pointer(gone), smem=SHARED)
    assert found.code == "ILLEGAL_ADDRESS"
    assert "parameter 1 (of 1)" in found.text and "4096 bytes, which was freed" in found.text
    host = np.zeros(16, np.float32)
    found = refusal(greedy.launch, "unwritten", Pointer(host.ctypes.data), smem=SHARED)
    assert found.code == "ILLEGAL_ADDRESS" and "not device memory" in found.text
    assert "was freed before" in refusal(greedy.free, gone).text
    assert "not the start of an allocation" in refusal(greedy.free, out + 16).text
    for name, args in (
        ("cuMemcpyDtoH", (host.ctypes.data, gone, 64)),
        ("cuMemcpyHtoD", (gone, host.ctypes.data, 64)),
    ):
        assert "which was freed" in refusal(greedy.call, name, *args).text
    found = refusal(greedy.call, "cuMemcpyHtoD", out + 1000, host.ctypes.data, 64)
    assert "ends 40 bytes past allocation" in found.text
    assert "not device memory" in refusal(greedy.call, "cuMemsetD8", host.ctypes.data, 0, 4).text
    assert "allocation of 0 bytes" in refusal(greedy.alloc, 0).text


# -- images, handles


def test_images_that_are_not_ours(greedy: Rig, tmp_path: Any) -> None:
    assert "begins with" in refusal(greedy.call, "cuModuleLoadData", b"\x7fELF\x02\x01\x01\0\0").text
    assert "names no path" in refusal(greedy.call, "cuModuleLoadData", b"ds4-simt-image 1\n\0").text
    missing = f"ds4-simt-image 1\npath={tmp_path}/none.so\n".encode() + b"\0"
    assert "none.so" in refusal(greedy.call, "cuModuleLoadData", missing).text
    unknown = b"ds4-simt-image 1\npath=/x\nsomething=1\n\0"
    assert "'something=1' is not understood" in refusal(greedy.call, "cuModuleLoadData", unknown).text
    module = greedy.call("cuFuncGetModule", greedy.function("unwritten"))
    assert "no kernel 'absent'" in refusal(greedy.call, "cuModuleGetFunction", module, b"absent").text


def test_destroyed_and_foreign_handles(greedy: Rig) -> None:
    stream, event = greedy.call("cuStreamCreate", 0), greedy.call("cuEventCreate", 0)
    greedy.call("cuStreamDestroy", stream)
    greedy.call("cuEventDestroy", event)
    p = Pointer(greedy.alloc(1024))
    found = refusal(greedy.launch, "unwritten", p, smem=SHARED, stream=int(stream))
    assert found.code == "INVALID_HANDLE" and "a destroyed stream" in found.text
    for call, args in (("cuStreamSynchronize", (stream,)), ("cuStreamDestroy", (stream,))):
        assert "a destroyed stream" in refusal(greedy.call, call, *args).text
    assert "a destroyed event" in refusal(greedy.call, "cuEventRecord", event, 0).text
    assert "no stream of this driver" in refusal(greedy.call, "cuStreamSynchronize", 0x1234560).text
    assert "no event of this driver" in refusal(greedy.call, "cuEventSynchronize", 0x1234560).text


# -- faults where several threads run blocks, and in the fast build


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fault_among_many_blocks(workers: int) -> None:
    r = rig("fast", "greedy", workers).use()
    p = Pointer(r.alloc(1024))
    for _ in range(20):
        found = refusal(r.launch, "skip_barrier", p, grid=(64, 1, 1))
        assert "skip_barrier: divergent barrier in block" in found.text
        x = np.arange(256 * 8, dtype=np.float32)
        out, source = r.alloc(x.nbytes), r.upload(x)
        r.launch("spread", Pointer(out), Pointer(source), grid=(8, 1, 1))
        assert np.array_equal(r.download(out, x.size, np.float32), x + 1)
        r.free(out)
        r.free(source)
