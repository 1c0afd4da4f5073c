"""Launch table of sample.cu, sample_penalty.cu, sample_mask.cu and sample_logprobs.cu."""

from __future__ import annotations

from ds4.device.kernels import Kernel

SMALL_VOCAB = 4096  # up to here a block of 128 threads does; the result is the same
ROW_SMEM = 4 * (256 + 256) + 8 * 2  # RowSmem of truncate.cuh: two histograms, the digit found
ONE_ROW = "one block a row: every pass ends in a decision of the whole row; the logits stay in L2"


def _sample(suffix: str, threads: int) -> Kernel:
    return Kernel(
        name=f"sample{suffix}",
        source="sample.cu",
        grid=lambda R: (R, 1, 1),
        block=threads,
        args=(
            "out: i32[R,4]", "tokens: i32[R]?", "logits: f32[R,V]", "raw: f32[R,V]?", "params: i32[R,8]",
            "pos: i32[R]", "vocab: i32",
        ),
        smem=ROW_SMEM,
        released={"R": 1, "V": 129280},
        traffic=lambda R, V: (4 * R * V * 3, 16 * R),
        in_flight=threads * 4,
        reason=ONE_ROW,
    )  # fmt: skip


def _top_logprobs(suffix: str, threads: int) -> Kernel:
    return Kernel(
        name=f"top_logprobs{suffix}",
        source="sample_logprobs.cu",
        grid=lambda R: (R, 1, 1),
        block=threads,
        args=("ids: i32[R,n]", "values: f32[R,n]", "logits: f32[R,V]", "n: i32", "vocab: i32"),
        smem=ROW_SMEM + 8 * 20 + 16,
        released={"R": 1, "V": 129280, "n": 20},
        traffic=lambda R, V, n: (4 * R * V * 9, 8 * R * n),
        in_flight=threads * 4,
        reason=ONE_ROW,
    )


SAMPLE, SAMPLE_SMALL = _sample("", 512), _sample("_small", 128)
TOP_LOGPROBS, TOP_LOGPROBS_SMALL = _top_logprobs("", 512), _top_logprobs("_small", 128)
PENALIZE = Kernel(
    name="penalize",
    source="sample_penalty.cu",
    grid=lambda R, V: (-(-V // 256), R, 1),
    block=256,
    args=(
        "out: f32[R,V]", "logits: f32[R,V]", "seen: u32[V]", "pending: i32[first+R-1]?", "bias: f32[V]?",
        "penalties: f32[4]", "first: i32", "vocab: i32",
    ),
    released={"R": 1, "V": 129280, "first": 0},
    traffic=lambda R, V: (4 * V * (R + 2), 4 * R * V),
    in_flight=256 * 12,
)  # fmt: skip
COUNT_TOKENS = Kernel(
    name="count_tokens",
    source="sample_penalty.cu",
    grid=lambda n: (-(-n // 256), 1, 1),
    block=256,
    args=(
        "seen: u32[vocab]", "ids: i32[n,stride]", "round: i32[4]?", "n: i32", "stride: i32", "prompt: i32",
        "vocab: i32",
    ),
    released={"n": 6, "stride": 4, "vocab": 129280},
    traffic=lambda n: (64 * n, 32 * n),
    in_flight=256 * 4,
    reason="a round has a handful of tokens; a prompt is counted once",
)  # fmt: skip
MASK_LOGITS = Kernel(
    name="mask_logits",
    source="sample_mask.cu",
    grid=lambda R, V: (-(-V // 256), R, 1),
    block=256,
    args=("out: f32[R,V]", "logits: f32[R,V]", "allowed: u32[R,words]", "words: i32", "vocab: i32"),
    released={"R": 1, "V": 129280, "words": 4040},
    traffic=lambda R, V: (4 * R * V + 4 * R * (-(-V // 32)), 4 * R * V),
    in_flight=256 * 4 + 32,
)
