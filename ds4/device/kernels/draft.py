"""Launch table of draft.cu: the tap of the backbone, and the pass from draft to draft."""

from __future__ import annotations

from ds4.device.kernels import Kernel
from ds4.device.kernels.linear import ITEM

EACH = 1024  # logits a block of draft_bias
STREAMS = {"S": 4, "D": 5120, "HC": 4}
LOGITS = {"V": 129280, "HC": 4}

DRAFT_TAP: dict[str, Kernel] = {
    a: Kernel(
        name=f"draft_tap_{a}",
        source="draft.cu",
        grid=lambda R, D: (-(-D // 256), R, 1),
        block=256,
        args=(f"y: {a}[R,W]", "x: f32[R,S,D]", "width: i32", "stride: i32", "first: i32"),
        constants=("HC",),
        traffic=lambda R, S, D, a=a: (4 * R * S * D, R * D * ITEM[a]),
        released={"R": 1, **STREAMS},
        in_flight=256 * 16,
        reason="a row has 5,120 columns: 20 blocks of one column a thread, 80 KB that the layer before left in L2",
    )
    for a in ("f32", "bf16")
}
DRAFT_BIAS = Kernel(
    name="draft_bias",
    source="draft.cu",
    grid=lambda V: (-(-V // EACH), 1, 1),
    block=256,
    args=("logits: f32[V]", "bias: f32[V]", "vocab: i32"),
    constants=("HC",),
    traffic=lambda V: (8 * V, 4 * V),
    released=LOGITS,
    in_flight=256 * 4 * 8,
)
DRAFT_ARGMAX = Kernel(
    name="draft_argmax",
    source="draft.cu",
    grid=lambda: (1, 1, 1),
    block=1024,
    args=("token: i32[1]", "logits: f32[V]", "vocab: i32"),
    constants=("HC",),
    traffic=lambda V: (4 * V, 4),
    released=LOGITS,
    in_flight=1024 * 8 * 4,
    reason="the largest of one row in L2: a second launch to bring blocks together would cost more than it saves",
)
DRAFT_CONFIDENCE = Kernel(
    name="draft_confidence",
    source="draft.cu",
    grid=lambda B: (B, 1, 1),
    block=256,
    args=(
        "conf: f32[B]", "w: f32[D+K]", "x: f32[B,S,D]", "pre: f32[B,S]", "e: f32[B,K]", "width: i32", "rank: i32",
    ),
    weights=("w",),
    constants=("HC",),
    traffic=lambda B, S, D, K: (4 * B * (S * D + D + 2 * K) + 8 * 4 * B * S, 4 * B),
    released={"B": 5, "K": 256, **STREAMS},
    in_flight=256 * 20,
    reason="one number a draft row, once a round: a block a row reads its 80 KB of streams from L2",
)  # fmt: skip
