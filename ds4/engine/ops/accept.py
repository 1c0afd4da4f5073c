"""Acceptance on the device: which drafts of a verify pass stand, and what comes after them.

Three rules, one per way of drafting (docs/sampling.md). At temperature 0, and with a seed, `sample` picks every row
by the position's own noise and a draft stands where it equals the pick. Without a seed, `accept` judges drafts that
were drawn from the draft head's distribution, or were its argmax. `accept_prefix` ends a round of either kind.
"""

from __future__ import annotations

from ds4.device import Buffer, Device
from ds4.device.kernels.accept import ACCEPT, ACCEPT_PREFIX, ACCEPT_SHARES, ACCEPT_SHARES_SMALL, ACCEPT_SMALL
from ds4.device.kernels.sample import SMALL_VOCAB


def accept(
    dev: Device, out: Buffer, shares: Buffer, logits: Buffer, drafts: Buffer | None, params: Buffer, pos: Buffer,
    R: int, *, draft_logits: Buffer | None = None, raw: Buffer | None = None,
) -> None:  # fmt: skip
    """One token a row: the row's draft if it stands, its replacement if not; a plain draw on rows without a draft.

    Args:
        out: i32 [R, 4]: token (-1: no distribution), log-probability bits, tokens kept, 0.
        shares: i32 [R + k, 8] (R without draft_logits), scratch.
        logits: f32 [R, V] of the target, penalised where penalties are wanted.
        drafts: i32 [k], k <= R; row r's draft is the token that would follow it. None: no drafts.
        params: i32 [R, 8], see `pack_params`; both distributions are tempered and truncated by it.
        pos: i32 [R], positions of the rows.
        draft_logits: f32 [k, V], the same numbers that `sample` drew the drafts from with DRAFT_STREAM (penalised,
            if those were). None: the drafts were not drawn; the rule is that of a point mass.
        raw: f32 [R, V] that the log-probability is of; None: `logits`.
    """
    V = logits.shape[1]
    k = drafts.shape[0] if drafts is not None else 0
    S = R if draft_logits is None else R + k
    small = V <= SMALL_VOCAB
    dev.launch(
        ACCEPT_SHARES_SMALL if small else ACCEPT_SHARES, shares, logits, draft_logits, params, R, V, S=S, V=V
    )  # fmt: skip
    dev.launch(
        ACCEPT_SMALL if small else ACCEPT,
        *(out, shares, logits, raw, draft_logits, drafts, params, pos, k, V), R=R, S=S, V=V,
    )  # fmt: skip


def accept_prefix(
    dev: Device, round_: Buffer, out: Buffer, drafts: Buffer | None, pos: Buffer, *,
    next_ids: Buffer | None = None, next_pos: Buffer | None = None,
) -> None:  # fmt: skip
    """End a round: round_ i32 [4] = accepted drafts A, the token of row A (0 for -1), its position, 0.

    Args:
        out: i32 [1 + k, 4] of `sample` or `accept`; rows 0 .. A hold the round's new tokens.
        drafts: i32 [k], k <= 31, or None.   pos: i32 [1 + k].
        next_ids, next_pos: where the next pass looks for the ids and positions of its rows: the token of row A and n
            positions from its own on, n the length of next_pos; `pos` may begin where next_pos does.

    Raises:
        ValueError: more than 31 drafts, or 32 positions.
    """
    k = drafts.shape[0] if drafts is not None else 0
    n = next_pos.shape[0] if next_pos is not None else 0
    if k > 31 or n > 32:
        raise ValueError(f"{k} drafts and {n} positions in a round; a warp votes on 31 and writes 32")
    dev.launch(ACCEPT_PREFIX, round_, next_ids, next_pos, out, drafts, pos, k, n)
