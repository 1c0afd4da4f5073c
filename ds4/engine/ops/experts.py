"""Routed experts: codes and codebook on the device; gate, up and down for few rows or many; the sums around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer, Device
from ds4.device.kernels.experts import (
    DOWN,
    DOWN_MMA,
    EXPERTS_PLAN,
    GATE_UP,
    GATE_UP_MMA,
    MOE_SUM,
    PREFILL_CAP,
    STEP_CAP,
    STEP_THREADS,
    SWIGLU,
    VQ_PLACE,
    code_bytes,
)
from ds4.engine.scratch import Workspace
from ds4.errors import DeviceError

GATE, UP, DOWN_MATRIX = 0, 1, 2


class PayloadLike(Protocol):
    """One matrix of an expert as the file has it: 12-bit stream, optional plane of bit 12, f16 gains."""

    @property
    def main(self) -> NDArray[np.uint8]: ...
    @property
    def plane(self) -> NDArray[np.uint8] | None: ...
    @property
    def gains(self) -> NDArray[Any]: ...


class BlobLike(Protocol):
    """A layer's experts: codebook u8 [nc, 8] (E4M3) and payloads; matrix 0 gate, 1 up, 2 down."""

    @property
    def codebook(self) -> NDArray[np.uint8]: ...
    def payload(self, expert: int, matrix: int) -> PayloadLike: ...


@dataclass(frozen=True)
class Factors:
    """One sidecar's factors of a layer's down rows, as its file has them: E2M1 u32 [E, D/8], UE8M0 u8 [E, D/32]."""

    codes: Buffer
    scales: Buffer


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's routed experts on the device, as cuda/codes.cuh lays them out.

    Attributes:
        n_expert, F, D: sizes.   n_codes: 4096 or 8192, the padded codebook's.   limit: SwiGLU's clamp.
        codebook: u64 [n_codes].   up_codes, down_codes: u32 blocks.   up_plane, down_plane: u8, with 8192 codewords.
        up_gains: f32 [E, F/8, 2, 8], gate's eight then up's.   down_gains: f32 [E, D].
        domain, post: mounted sidecars' factors, multiplied in this order; None: every factor is 1.
    """

    n_expert: int
    F: int
    D: int
    n_codes: int
    limit: float
    codebook: Buffer
    up_codes: Buffer
    up_plane: Buffer | None
    up_gains: Buffer
    down_codes: Buffer
    down_plane: Buffer | None
    down_gains: Buffer
    domain: Factors | None = None
    post: Factors | None = None

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        parts = [self.codebook, self.up_codes, self.up_plane, self.up_gains]
        parts += [self.down_codes, self.down_plane, self.down_gains, *self.factors]
        return sum(b.nbytes for b in parts if b is not None)

    @property
    def factors(self) -> tuple[Buffer | None, ...]:
        """What the down kernels take: codes and scales of both sidecars."""
        return tuple(b for f in (self.domain, self.post) for b in ((f.codes, f.scales) if f else (None, None)))


def place_experts(dev: Device, blob: BlobLike, n_expert: int, F: int, D: int, swiglu_limit: float) -> ExpertWeights:
    """Put one layer's experts on the device; the streams are re-laid there, expert by expert.

    Raises:
        DeviceError: F or D is not a multiple of 8, or a payload's streams have other lengths than its shape asks for.
    """
    if F % 8 or D % 8:
        raise DeviceError(f"experts of {F} x {D}: both must be multiples of 8, the length of a codeword")
    nc = len(blob.codebook)
    n_codes = 4096 if nc <= 4096 else 8192
    book = np.zeros((n_codes, 8), np.uint8)
    book[:nc] = blob.codebook
    up_blocks, down_blocks = F // 8 * 2 * -(-D // 256), D // 8 * -(-F // 256)
    high = n_codes > 4096
    up_codes, down_codes = (dev.empty((n_expert * n * 96,), "u32") for n in (up_blocks, down_blocks))
    planes = [dev.empty((n_expert * n * 32,), "u8") if high else None for n in (up_blocks, down_blocks)]
    up_gains = np.empty((n_expert, F // 8, 2, 8), np.float32)
    down_gains = np.empty((n_expert, D), np.float32)
    stage = _Stage(dev, F, D)
    for e in range(n_expert):
        for m in (GATE, UP):
            payload = blob.payload(e, m)
            first = e * up_blocks + m * -(-D // 256)
            stage.place(payload, F, D, up_codes, planes[0], first, 2 * -(-D // 256))
            up_gains[e, :, m] = np.asarray(payload.gains, np.float32).reshape(-1, 8)
        payload = blob.payload(e, DOWN_MATRIX)
        stage.place(payload, D, F, down_codes, planes[1], e * down_blocks, -(-F // 256))
        down_gains[e] = np.asarray(payload.gains, np.float32)
    return ExpertWeights(
        n_expert=n_expert,
        F=F,
        D=D,
        n_codes=n_codes,
        limit=swiglu_limit,
        codebook=dev.upload(book.view(np.uint64).reshape(-1)),
        up_codes=up_codes,
        up_plane=planes[0],
        up_gains=dev.upload(up_gains.reshape(-1)),
        down_codes=down_codes,
        down_plane=planes[1],
        down_gains=dev.upload(down_gains.reshape(-1)),
    )


class _Stage:
    """Two buffers in turn for a matrix's raw streams, so that a copy does not wait for the placement before it."""

    def __init__(self, dev: Device, F: int, D: int) -> None:
        self.dev = dev
        most = max(F * -(-D // 8), D * -(-F // 8)) * 2
        self.raw = [(dev.empty((most,), "u8"), dev.empty((most,), "u8")) for _ in range(2)]

    def place(
        self,
        payload: PayloadLike,
        rows: int,
        cols: int,
        out: Buffer,
        out_plane: Buffer | None,
        first: int,
        stride: int,
    ) -> None:
        n = cols // 8
        row_bytes, plane_bytes = -(-n * 12 // 8), -(-n // 8) if out_plane is not None else 0
        if payload.main.size != rows * row_bytes or (payload.plane is None) != (out_plane is None):
            raise DeviceError(f"an expert matrix of {rows} x {cols} has {payload.main.size} bytes of codes")
        main, plane = self.raw[0]
        self.raw.reverse()
        main.write(payload.main.reshape(-1))
        if payload.plane is not None:
            plane.write(payload.plane.reshape(-1))
        words = out.view(first * 96 * 4, (out.size - first * 96,))
        bits = None if out_plane is None else out_plane.view(first * 32, (out_plane.size - first * 32,))
        raw_plane = None if payload.plane is None else plane
        self.dev.launch(VQ_PLACE, words, bits, main, raw_plane, rows, n, row_bytes, plane_bytes, stride)


def step_blocks(dev: Device, ew: ExpertWeights, k: int, octets: int, threads: int) -> int:
    """Blocks of a step kernel: enough for `octets` warps of work, few enough that the codebook's copies (one a block,
    in both kernels) stay under a tenth of one row's codes; at least two."""
    codes = k * (2 * code_bytes(ew.F, ew.D, ew.n_codes) + code_bytes(ew.D, ew.F, ew.n_codes))
    afford = codes // (10 * 2 * 8 * ew.n_codes)
    return max(1, min(-(-octets // (threads // 32)), dev.info.n_sm, max(afford, 2)))


def experts(
    dev: Device, ws: Workspace, family: str, ew: ExpertWeights, y_slots: Buffer, x: Buffer, picks: Buffer,
    weights: Buffer, R: int, *, total: Buffer | None = None,
) -> None:  # fmt: skip
    """y_slots[r,j,:] = expert picks[r,j] of x[r], times weights[r,j]: gate and up, clamped SwiGLU, down.

    Args:
        family: "step" for 1..8 rows, one row alone the same bits as among eight; "prefill" for any number, a row's
            bits independent of it. In f32 the two are the same bits.
        y_slots: f32 [R, k, D].   x: A [R, D].   picks: i32 [R, k].   weights: f32 [R, k].
        total: u32 [1], added to by a step of several rows: the distinct experts that its rows picked.

    Raises:
        DeviceError: more than eight rows in a step.
    """
    if family == "step" and not 1 <= R <= 8:
        raise DeviceError(f"experts: a step has 1 to 8 rows, not {R}")
    k, F, D, A = picks.shape[-1], ew.F, ew.D, x.dtype
    h = ws.get("experts.h", (R * k, F), A)
    sizes = (k, F, D, ew.n_codes)
    up = (ew.codebook, ew.up_codes, ew.up_plane, ew.up_gains)
    down = (ew.codebook, ew.down_codes, ew.down_plane, ew.down_gains, *ew.factors)
    if R == 1 and (family == "step" or A == "f32"):
        threads = STEP_THREADS[1]
        n = step_blocks(dev, ew, k, k * F // 8, threads)
        dev.launch(GATE_UP[A, 1], h, *up, x, picks, weights, None, None, None, *sizes, ew.limit, R=1, blocks=n)
        n = step_blocks(dev, ew, k, k * D // 8, threads)
        dev.launch(DOWN[A, 1], y_slots, *down, h, picks, None, None, None, *sizes, R=1, blocks=n)
        return
    by_mma = family == "prefill" and A == "bf16"
    cap = PREFILL_CAP if by_mma else STEP_CAP
    most = min(R * k, ew.n_expert + R * k // cap)
    order = ws.get("experts.order", (R * k,), "i32")
    items = ws.get("experts.items", (most * 4,), "i32")
    count = ws.get("experts.n_items", (1,), "i32")
    dev.launch(EXPERTS_PLAN, order, items, count, None if by_mma else total, picks, R * k, ew.n_expert, cap)
    if by_mma:
        n = min(most * -(-F // 32), dev.info.n_sm)
        dev.launch(GATE_UP_MMA, h, *up, x, weights, order, items, count, *sizes, ew.limit, R=R, blocks=n)
        n = min(most * -(-D // 64), dev.info.n_sm)
        dev.launch(DOWN_MMA, y_slots, *down, h, order, items, count, F, D, ew.n_codes, R=R, k=k, blocks=n)
        return
    threads = STEP_THREADS[STEP_CAP]
    n = step_blocks(dev, ew, k, most * F // 8, threads)
    planned = (order, items, count)
    dev.launch(GATE_UP[A, STEP_CAP], h, *up, x, picks, weights, *planned, *sizes, ew.limit, R=R, blocks=n)
    n = step_blocks(dev, ew, k, most * D // 8, threads)
    dev.launch(DOWN[A, STEP_CAP], y_slots, *down, h, picks, *planned, *sizes, R=R, blocks=n)


def moe_sum(dev: Device, y: Buffer, y_slots: Buffer, shared: Buffer, R: int) -> None:
    """y[r,d] = sum_j y_slots[r,j,d] (rising j) + shared[r,d], rounded once. y, shared: A [R,D]; y_slots: f32."""
    k, D = y_slots.shape[-2:]
    dev.launch(MOE_SUM[y.dtype], y, y_slots, shared, k, D, R=R)


def swiglu(dev: Device, h: Buffer, g: Buffer, u: Buffer, R: int, F: int, limit: float) -> None:
    """h[r,f] = silu(min(g, limit)) clamp(u, -limit, limit), for the shared expert; all A [R, F]."""
    dev.launch(SWIGLU[h.dtype], h, g, u, F, limit, R=R)
