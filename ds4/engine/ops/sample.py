"""Sampling on the device: settings packed for the kernels, penalties, masks, the draw, the likeliest tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer, Device
from ds4.device.kernels.sample import (
    COUNT_TOKENS,
    MASK_LOGITS,
    PENALIZE,
    SAMPLE,
    SAMPLE_SMALL,
    SMALL_VOCAB,
    TOP_LOGPROBS,
    TOP_LOGPROBS_SMALL,
)
from ds4.engine.sampling import Penalties

# Noise streams (truncate.cuh): draws of one position that must not know of each other. 2 and 3 are accept.cu's own.
TARGET_STREAM, DRAFT_STREAM = 0, 1


def pack_params(
    rows: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    stream: int = TARGET_STREAM,
) -> NDArray[np.int32]:
    """i32 [rows, 8] as sample.cu reads it: the same settings for every row."""
    out = np.zeros((rows, 8), np.int32)
    out[:, 0] = np.float32(temperature).view(np.int32)
    out[:, 1] = top_k
    out[:, 2] = np.float32(top_p).view(np.int32)
    out[:, 3] = np.float32(min_p).view(np.int32)
    out[:, 4:6] = np.array([seed & (2**64 - 1)], np.uint64).view(np.int32)
    out[:, 6] = stream
    return out


def pack_penalties(penalties: Penalties) -> NDArray[np.float32]:
    """f32 [4] as sample_penalty.cu reads it."""
    return np.array([penalties.presence, penalties.frequency, penalties.repetition, 0.0], np.float32)


def pack_bias(penalties: Penalties, vocab: int) -> NDArray[np.float32]:
    """f32 [vocab]: `logit_bias`, zero elsewhere. Its ids are below `vocab` (Penalties.check_vocab)."""
    out = np.zeros(vocab, np.float32)
    for token, value in penalties.logit_bias:
        out[token] = value
    return out


def sample(
    dev: Device, out: Buffer, logits: Buffer, params: Buffer, pos: Buffer, R: int, *,
    raw: Buffer | None = None, tokens: Buffer | None = None,
) -> None:  # fmt: skip
    """One token a row: the plain step's, a draft's, and a verify pass's under the rule of equal picks.

    Args:
        out: i32 [R, 4]: token (-1: no distribution), log-probability bits, tokens kept, 0.
        logits: f32 [R, V], penalised where penalties are wanted.
        params: i32 [R, 8], see `pack_params`.   pos: i32 [R], positions of the rows that gave the logits.
        raw: f32 [R, V] that the log-probability is of; None: `logits`.
        tokens: i32 [R], the token again (0 for -1): the ids of the next step.
    """
    V = logits.shape[1]
    kernel = SAMPLE_SMALL if V <= SMALL_VOCAB else SAMPLE
    dev.launch(kernel, out, tokens, logits, raw, params, pos, V, R=R, V=V)


def top_logprobs(dev: Device, ids: Buffer, values: Buffer, logits: Buffer, R: int) -> None:
    """The n likeliest tokens of each row, largest first, untempered: ids i32 [R, n], values f32 [R, n].

    Raises:
        ValueError: n is not in 1..20, or above the vocabulary.
    """
    n, V = ids.shape[1], logits.shape[1]
    if not 1 <= n <= min(20, V):
        raise ValueError(f"{n} log-probabilities a row; 1 to {min(20, V)} can be had")
    dev.launch(TOP_LOGPROBS_SMALL if V <= SMALL_VOCAB else TOP_LOGPROBS, ids, values, logits, n, V, R=R, V=V)


def penalize(
    dev: Device, out: Buffer, logits: Buffer, seen: Buffer, penalties: Buffer, R: int, *,
    pending: Buffer | None = None, bias: Buffer | None = None, first: int = 0,
) -> None:  # fmt: skip
    """out f32 [R, V] = logits with penalties and bias; target and draft rows alike.

    Args:
        seen: u32 [V], see `count_tokens`.   penalties: f32 [4], see `pack_penalties`.
        pending: i32 [first + R - 1], the drafts of the pass: row t counts those before it, pending[0 .. t - 1].
        bias: f32 [V], see `pack_bias`.
        first: which row of its pass the first one is; a draft head that picks one by one gives 0, 1, 2, ...
    """
    V = logits.shape[1]
    dev.launch(PENALIZE, out, logits, seen, pending, bias, penalties, first, V, R=R, V=V)


def mask_words(vocab: int) -> int:
    """u32 words of a row's mask: a bit a token."""
    return -(-vocab // 32)


def mask_logits(dev: Device, out: Buffer, logits: Buffer, allowed: Buffer, R: int) -> None:
    """out f32 [R, V] = logits, -inf for tokens whose bit in `allowed` u32 [R, mask_words(V)] is not set."""
    V = logits.shape[1]
    dev.launch(MASK_LOGITS, out, logits, allowed, mask_words(V), V, R=R, V=V)


def count_tokens(
    dev: Device, seen: Buffer, ids: Buffer, *, prompt: bool = False, round_: Buffer | None = None
) -> None:
    """Enter tokens into the counts: u32 [V], zero at first; bit 31: the prompt has it; below: times in the answer.

    Args:
        ids: i32 [n] or [n, stride], the token first (what `sample` or `accept` wrote).
        round_: i32 [4] of `accept_prefix`: only the round's new tokens count, rows 0 .. round_[0].
    """
    stride = ids.shape[1] if len(ids.shape) == 2 else 1
    n = ids.shape[0]
    dev.launch(COUNT_TOKENS, seen, ids, round_, n, stride, int(prompt), seen.shape[0])
