"""Bytes that the cache, indexer and attention kernels ask for, counted per warp request, against the launch table.

Released widths, fewer rows. Formulas hold at the steady state they are written for: a full window, every pick valid,
all of `capacity` visible, whole groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ds4.device import Buffer, Device, Kernel
from ds4.device.launch import evaluate, signature
from ds4.engine.ops.attention import attention
from ds4.engine.ops.compress import compress_commit, compress_pool, compress_store, index_keys
from ds4.engine.ops.index import index_query, index_select, mask_words
from ds4.engine.ops.kv import KvLayout, window_commit, window_kv
from ds4.engine.ops.rope import rope_query
from ds4.engine.scratch import Workspace
from tests.reference_attention import frequencies

H, K, ROPE, HI, WIDTH, W, TOPK = 64, 512, 64, 32, 128, 128, 512
AT = 1022  # the first row's position: even, so that two rows are a group of ratio 2
EPS = 1e-20


class Counting(Device):
    """The count build with the formula of every launch held against what it counted."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.context, device.builder, device.variant, device.mode, device.constants)
        self.wrong: list[str] = []
        self.checked: list[str] = []

    def launch(self, kernel: Kernel, *args: Any, **given: Any) -> None:
        self.reset_counters()
        super().launch(kernel, *args, **given)
        axes = {name: self.constants[name] for name in kernel.constants} | given
        for argument, value in zip(signature(kernel).arguments, args):
            if argument.dims is None:
                axes.setdefault(argument.name, value)
            elif isinstance(value, Buffer) and len(value.shape) == len(argument.dims):
                for i, name in argument.binds:
                    axes.setdefault(name, value.shape[i])
        tallies = self.counters()["kernels"][kernel.name]["args"].values()
        found = tuple(sum(t[kind]["bytes"] for t in tallies) for kind in ("load", "store"))
        want = evaluate(kernel, "traffic", axes)
        self.checked.append(kernel.name)
        if found != tuple(want):
            self.wrong.append(f"{kernel.name}: counted {found}, formula {want}")


class Layer:
    """Buffers of a released layer for R rows, in one activation type and kv mode."""

    def __init__(self, dev: Device, R: int, kind: str, kv: str, at: int = AT) -> None:
        self.dev, self.R, self.kind, self.kv = dev, R, kind, kv
        self.ws, self.layout = Workspace(dev), KvLayout(kv, K, WIDTH)
        self.pos = dev.upload(np.arange(at, at + R, dtype=np.int32))
        self.freq = dev.upload(frequencies(ROPE))
        self.chunk = self.layout.empty_window(dev, R)
        self.ring = self.layout.empty_window(dev, W + 64)
        self.comp = self.layout.empty_compressed(dev, TOPK)
        for rows in (self.chunk, self.ring, self.comp):
            rows.write(np.zeros(rows.shape, rows.numpy))

    def act(self, *shape: int) -> Buffer:
        return self.dev.zeros(shape, self.kind)

    def f32(self, *shape: int) -> Buffer:
        return self.dev.upload(np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32))

    def rows(self) -> None:
        R, dev = self.R, self.dev
        rope_query(dev, self.act(R, H, K), self.pos, self.freq, R)
        window_kv(dev, self.chunk, self.act(R, K), self.f32(K), self.pos, self.freq, R, EPS)
        window_commit(dev, self.ring, self.chunk, self.pos, R)

    def publish(self) -> None:
        R, dev, lat = self.R, self.dev, self.act(self.R, K)
        a, g, partial = self.f32(R, K), self.f32(R, K), self.f32(2, 6, K)
        compress_pool(dev, lat, a, g, partial, self.f32(K), self.pos, R, 2, EPS)
        compress_commit(dev, partial, a, g, self.pos, R)
        compress_store(dev, self.comp, lat, self.pos, self.freq, R, 2)
        keys = self.layout.empty_keys(dev, TOPK)
        index_keys(dev, keys, self.f32(R, WIDTH), self.f32(WIDTH), self.pos, self.freq, R, 2, EPS)

    def select(self, capacity: int, family: str) -> None:
        R, dev = self.R, self.dev
        q = self.f32(R, HI, WIDTH)
        index_query(dev, q, self.pos, self.freq, R, self.kv)
        keys = self.layout.empty_keys(dev, capacity)
        keys.write(np.random.default_rng(0).integers(0, 120, keys.nbytes, dtype=np.uint8))
        mask, picks = dev.zeros((R, mask_words(capacity, 8)), "u32"), dev.empty((R, TOPK), "i32")
        index_select(
            dev, self.ws, family, picks, q, self.f32(R, HI), keys, self.pos, R, ratio=1, capacity=capacity,
            factor=0.1, candidates=("make", mask), block_size=8, topk_blocks=40,
        )  # fmt: skip

    def attend(self, family: str) -> None:
        R, dev = self.R, self.dev
        picks = dev.upload(np.tile(np.arange(TOPK, dtype=np.int32), (R, 1)))
        first = dev.zeros((1,), "i32")
        attention(
            dev, self.ws, family, self.act(R, H, K), self.act(R, H, K), self.ring, self.chunk, self.comp, picks,
            self.f32(H), self.pos, self.freq, first, R, window=W,
        )  # fmt: skip


def counting(count_device: Device) -> Counting:
    return Counting(count_device.with_constants({"HEAD_DIM": K, "ROPE_DIM": ROPE, "INDEX_DIM": WIDTH}))


def check(count_device: Device, R: int, kind: str, kv: str, run: Callable[[Layer], None], at: int = AT) -> None:
    dev = counting(count_device)
    run(Layer(dev, R, kind, kv, at))
    assert dev.checked and dev.wrong == []


@pytest.mark.parametrize(("kind", "kv"), [("bf16", "fp4"), ("f32", "f32")])
@pytest.mark.parametrize("R", [1, 2])
def test_rows_and_groups(count_device: Device, R: int, kind: str, kv: str) -> None:
    check(count_device, R, kind, kv, Layer.rows)
    check(count_device, R, kind, kv, Layer.publish)


@pytest.mark.parametrize("kv", ["fp4", "f32"])
def test_selection_of_a_step(count_device: Device, kv: str) -> None:
    check(count_device, 1, "f32", kv, lambda layer: layer.select(AT + 1, "step"))


def test_selection_of_a_prefill(count_device: Device) -> None:
    check(count_device, 1, "f32", "fp4", lambda layer: layer.select(AT + 1, "prefill"))


def test_selection_beyond_a_small_capacity(count_device: Device) -> None:
    check(count_device, 1, "f32", "fp4", lambda layer: layer.select(4608, "step"), at=4607)


@pytest.mark.parametrize(("kind", "kv"), [("bf16", "fp4"), ("f32", "f32")])
@pytest.mark.parametrize("family", ["step", "prefill"])
def test_attention(count_device: Device, family: str, kind: str, kv: str) -> None:
    check(count_device, 1, kind, kv, lambda layer: layer.attend(family))
