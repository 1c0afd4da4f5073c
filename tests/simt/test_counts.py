"""The count build: sectors, lines and bytes a warp asks for, bank conflicts, launches; the same figures each run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.simt.rig import Pointer, Rig, rig


@pytest.fixture
def count() -> Rig:
    r = rig("count").use()
    r.simt.ds4simt_reset_counters()
    return r


def counters(r: Rig) -> Any:
    return json.loads(r.simt.ds4simt_counters_json())


def strided(r: Rig, stride: int) -> Any:
    r.simt.ds4simt_reset_counters()
    source, out = r.upload(np.zeros(32 * stride, np.float32)), r.alloc(128)
    r.launch("strided", Pointer(out), Pointer(source), stride, block=(32, 1, 1), smem=128 * stride)
    r.free(source)
    r.free(out)
    return counters(r)["kernels"]["strided"]


@pytest.mark.parametrize(
    ("stride", "sectors", "lines", "waves"),
    [(1, 4, 1, 1), (2, 8, 2, 2), (8, 32, 8, 8), (32, 32, 32, 32), (33, 32, 32, 1)],
)
def test_a_strided_warp(count: Rig, stride: int, sectors: int, lines: int, waves: int) -> None:
    """32 lanes, 4 bytes each, `stride` floats apart; memory starts on a line."""
    found = strided(count, stride)
    load = found["args"]["1"]["load"]
    assert (load["requests"], load["bytes"], load["lane_bytes"], load["touched_bytes"]) == (1, 128, 128, 128)
    if stride != 33:  # 33 straddles lines unevenly
        assert (load["sectors"], load["lines"]) == (sectors, lines)
    store = found["args"]["0"]["store"]
    assert (store["bytes"], store["sectors"], store["lines"]) == (128, 4, 1)
    assert found["args"]["0"]["load"]["requests"] == 0
    for way in ("load", "store"):
        shared = found["shared"][way]
        assert (shared["requests"], shared["wavefronts"], shared["ideal_wavefronts"]) == (1, waves, 1)


def test_broadcasts_count_once(count: Rig) -> None:
    found = strided(count, 1)
    assert found["launches"] == 1
    count.simt.ds4simt_reset_counters()
    source, out = count.upload(np.zeros(64, np.float32)), count.alloc(128)
    count.launch("strided", Pointer(out), Pointer(source), 0, block=(32, 1, 1), smem=128)
    found = counters(count)["kernels"]["strided"]
    load = found["args"]["1"]["load"]
    assert (load["bytes"], load["lane_bytes"], load["sectors"], load["touched_bytes"]) == (4, 128, 1, 4)
    assert (found["shared"]["load"]["bytes"], found["shared"]["load"]["wavefronts"]) == (4, 1)


def test_a_formula_holds_exactly(count: Rig) -> None:
    """rms_norm reads x twice and w once a row, writes y once."""
    rows, width = 3, 300
    x, w = np.ones((rows, width), np.float32), np.ones(width, np.float32)
    y, px, pw = count.alloc(x.nbytes), count.upload(x), count.upload(w)
    for _ in range(2):
        count.launch("rms_norm", Pointer(y), Pointer(px), Pointer(pw), width, 1e-6, grid=(rows, 1, 1))
    found = counters(count)
    assert found["launches"] == 2
    args = found["kernels"]["rms_norm"]["args"]
    assert args["1"]["load"]["bytes"] == 2 * 8 * rows * width
    assert args["1"]["load"]["touched_bytes"] == 2 * 4 * rows * width
    assert args["2"]["load"]["bytes"] == 2 * 4 * rows * width
    assert args["2"]["load"]["touched_bytes"] == 2 * 4 * width
    assert args["0"]["store"]["bytes"] == 2 * 4 * rows * width
    lines = found["kernels"]["rms_norm"]["lines"]
    assert {line["file"] for line in lines} == {"probe.cu"}
    assert sum(line["load"]["bytes"] for line in lines if line.get("arg") == 1) == 2 * 8 * rows * width


def test_cp_async_is_counted(count: Rig) -> None:
    x = np.arange(256, dtype=np.float32)
    out, source = count.alloc(1024), count.upload(x)
    count.launch("async_copy", Pointer(out), Pointer(source), 0, smem=1040)
    assert np.array_equal(count.download(out, 256, np.float32), x[np.arange(256) ^ 4])
    found = counters(count)["kernels"]["async_copy"]
    load = found["args"]["1"]["load"]
    assert (load["requests"], load["bytes"], load["sectors"], load["lines"]) == (2, 1024, 32, 8)
    assert found["shared"]["store"]["bytes"] == 1024


def test_orders_do_not_change_the_figures(count: Rig) -> None:
    seen = []
    for order in ("greedy", "rising", "falling"):
        r = rig("count", order).use()
        r.simt.ds4simt_reset_counters()
        out, bits = r.alloc(4 * 2560), r.alloc(4 * 1280)
        source = r.upload(np.ones(256, np.float32))
        r.launch("collectives", Pointer(out), Pointer(source), Pointer(bits))
        seen.append(counters(r))
        for p in (out, bits, source):
            r.free(p)
    assert seen[0] == seen[1] == seen[2]


def test_out_of_bounds_is_found_here_too(count: Rig) -> None:
    with pytest.raises(Exception, match="out of bounds"):
        p = Pointer(count.alloc(64))
        count.launch("copy_at", p, p, 16, 0, block=(32, 1, 1))
