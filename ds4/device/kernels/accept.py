"""Launch table of accept.cu."""

from __future__ import annotations

from ds4.device.kernels import Kernel
from ds4.device.kernels.sample import ONE_ROW, ROW_SMEM


def _shares(suffix: str, threads: int) -> Kernel:
    return Kernel(
        name=f"accept_shares{suffix}",
        source="accept.cu",
        grid=lambda S: (S, 1, 1),
        block=threads,
        args=(
            "shares: i32[S,8]", "logits: f32[rows,V]", "draft_logits: f32[S-rows,V]?", "params: i32[rows,8]",
            "rows: i32", "vocab: i32",
        ),
        smem=ROW_SMEM,
        released={"S": 11, "rows": 6, "V": 129280},
        traffic=lambda S, V: (4 * V * S * 2, 32 * S),
        in_flight=threads * 4,
        reason=ONE_ROW,
    )  # fmt: skip


def _accept(suffix: str, threads: int) -> Kernel:
    return Kernel(
        name=f"accept{suffix}",
        source="accept.cu",
        grid=lambda R: (R, 1, 1),
        block=threads,
        args=(
            "out: i32[R,4]", "shares: i32[S,8]", "logits: f32[R,V]", "raw: f32[R,V]?",
            "draft_logits: f32[n_drafts,V]?", "drafts: i32[n_drafts]?", "params: i32[R,8]", "pos: i32[R]",
            "n_drafts: i32", "vocab: i32",
        ),
        released={"R": 6, "S": 11, "V": 129280, "n_drafts": 5},
        traffic=lambda R, V: (4 * V * (2 * R + 2), 16 * R),
        in_flight=threads * 4,
        reason=ONE_ROW,
    )  # fmt: skip


ACCEPT_SHARES, ACCEPT_SHARES_SMALL = _shares("", 512), _shares("_small", 128)
ACCEPT, ACCEPT_SMALL = _accept("", 512), _accept("_small", 128)
ACCEPT_PREFIX = Kernel(
    name="accept_prefix",
    source="accept.cu",
    grid=lambda: (1, 1, 1),
    block=32,
    args=(
        "round: i32[4]", "next_ids: i32[1]?", "next_pos: i32[n_next]?", "out: i32[n_drafts+1,4]",
        "drafts: i32[n_drafts]?", "pos: i32[n_drafts+1]", "n_drafts: i32", "n_next: i32",
    ),
    released={"n_drafts": 5, "n_next": 8},
    traffic=lambda n_drafts, n_next: (4 * (6 * n_drafts + 5), 20 + 4 * n_next),
    in_flight=32 * 8,
    reason="a handful of rows: one warp, one vote",
)  # fmt: skip
