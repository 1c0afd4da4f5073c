"""How a pass ends: penalties, masks, a token a row, which drafts stand, and what the next pass starts from.

All of it is launches on buffers that stay where they are, so it is part of the step's graph: a request's settings are
device words that are written when they change. The host reads 16 bytes a row, and the likeliest tokens where a
request wants them (docs/sampling.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ds4.device import Buffer, Device, Readback
from ds4.engine.constraint import TokenConstraint
from ds4.engine.draft import Drafter, Penalized
from ds4.engine.ops.accept import accept, accept_prefix
from ds4.engine.ops.sample import (
    DRAFT_STREAM,
    TARGET_STREAM,
    count_tokens,
    mask_logits,
    mask_words,
    pack_bias,
    pack_params,
    pack_penalties,
    penalize,
    sample,
    top_logprobs,
)
from ds4.engine.sampling import MOST_TOP, Sampling
from ds4.engine.slots import MAX_ROWS, Slots
from ds4.errors import DeviceError


@dataclass(frozen=True)
class Drawn:
    """A token, its log-probability under the model's own distribution, and the likeliest tokens with theirs, largest
    first, as many as the request asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Ending:
    """What follows the output head in a pass: launches on its logits f32 [R, V]. Two of one key launch the same.

    `prepare` writes what they read and the host has to work out; it is called right before the last segment, so that
    the host works while the layers before it run.
    """

    key: tuple[object, ...]
    launch: Callable[[Buffer], None]
    prepare: Callable[[], None] = _nothing


class Chooser:
    """Chooses the tokens of one sequence; the last one of a pass and the positions after it are left in `slots`."""

    def __init__(self, device: Device, vocab: int, slots: Slots, drafter: Drafter | None, *, argmax: bool) -> None:
        """`argmax`: without a seed too, drafts are the likeliest tokens and not drawn."""
        self.device, self.drafter, self.vocab, self._argmax = device, drafter, vocab, argmax
        self.slots = slots
        # one download: the round's four words, then four words a row
        self._result = device.zeros((1 + MAX_ROWS, 4), "i32")
        self._round = self._result.view(0, (4,), "i32")
        self._params = device.zeros((MAX_ROWS, 8), "i32")
        self._shares = device.empty((2 * MAX_ROWS - 1, 8), "i32")
        self._told = Readback(device, self._result.nbytes)
        self._top: tuple[Buffer, Buffer] | None = None  # ids i32, values f32 [8, MOST_TOP], once somebody asks
        self._penalized: Penalized | None = None  # once somebody is penalised
        self._logits: Buffer | None = None  # f32 [8, V], penalised, masked
        self._allowed: Buffer | None = None  # u32 [8, V / 32], once somebody is constrained
        self._all_allowed = False  # whether it forbids nothing
        self._sampling: Sampling | None = None
        self._counted: int | None = None  # tokens of the text that `seen` counts; None: it has to be counted again

    # -- settings

    def settle_on(self, s: Sampling, text: Sequence[int], prompt: int) -> None:
        """What the next passes choose by, for the text so far, the first `prompt` tokens of which are not its own."""
        if s != self._sampling:
            self._sampling = None  # until all of it is written
            self._write(s)
            self._sampling = s
        if not s.penalties.neutral and self._counted != len(text):
            self._count(text, prompt)

    def forget_text(self) -> None:
        """The text has changed otherwise than by the tokens chosen here."""
        self._counted = None

    def _write(self, s: Sampling) -> None:
        given = (s.device_temperature, s.top_k, s.top_p, s.min_p, s.seed)
        self._params.write(pack_params(MAX_ROWS, *given, TARGET_STREAM))
        penalized = None
        if not s.penalties.neutral:
            if self._penalized is None:
                dev, V = self.device, self.vocab
                self._penalized = Penalized(dev.zeros((V,), "u32"), dev.zeros((4,), "f32"), dev.zeros((V,), "f32"))
                self._changed_logits()
            penalized = self._penalized
            penalized.values.write(pack_penalties(s.penalties))
            penalized.bias.write(pack_bias(s.penalties, self.vocab))
        self._counted = None
        if s.top and self._top is None:
            shape = (MAX_ROWS, min(MOST_TOP, self.vocab))
            self._top = self.device.empty(shape, "i32"), self.device.empty(shape, "f32")
        if self.drafter is not None:
            stream = TARGET_STREAM if same_noise(s) else DRAFT_STREAM
            likeliest = s.temperature == 0 or (self._argmax and not s.seeded)
            self.drafter.pick_by(None if likeliest else pack_params(1, *given, stream), penalized)

    def _count(self, text: Sequence[int], prompt: int) -> None:
        assert self._penalized is not None
        ids = np.asarray(text, np.int64)
        seen = np.bincount(ids[prompt:], minlength=self.vocab).astype(np.uint32)
        seen[ids[:prompt]] |= np.uint32(1 << 31)
        self._penalized.seen.write(seen)
        self._counted = len(text)

    # -- launches

    def _changed_logits(self) -> Buffer:
        if self._logits is None:
            self._logits = self.device.empty((MAX_ROWS, self.vocab), "f32")
        return self._logits

    def _allow(self, constraint: TokenConstraint, drafts: Sequence[int]) -> None:
        """Write what the rows of the next choice may say."""
        rows = constraint.rows(drafts)
        shape = (MAX_ROWS, mask_words(self.vocab))
        if self._allowed is None:
            self._allowed = self.device.empty(shape, "u32")
            self._changed_logits()
        if rows is not None:
            self._all_allowed = False
            self._allowed.write(rows)
        elif not self._all_allowed:
            self._allowed.write(np.full(shape, 2**32 - 1, np.uint32))
            self._all_allowed = True

    def ending(self, k: int, constraint: TokenConstraint | None = None, drafts: Sequence[int] = ()) -> Ending:
        """The launches that end a pass of 1 + k rows, the last k of which are the drafter's first k drafts.

        Args:
            constraint: what the new tokens obey.
            drafts: the k drafts, as the host knows them. Of these only the last may be one that `constraint` forbids:
                its row says that it has no probability, and so it falls; the row after it is of no use.
        """
        assert self._sampling is not None
        s = self._sampling
        rule = "picks" if not k or same_noise(s) else "argmax" if self._argmax else "drawn"
        key = (rule, not s.penalties.neutral, s.top > 0)
        if constraint is None:
            return Ending(key, lambda logits: self._choose(logits, k))
        return Ending(
            (*key, "masked"), lambda logits: self._choose(logits, k, masked=True),
            partial(self._allow, constraint, drafts),
        )  # fmt: skip

    def choose_after(self, logits: Buffer, position: int, constraint: TokenConstraint | None = None) -> Drawn:
        """The token after the row that gave `logits` f32 [1, V] at `position`, without a pass.

        Raises:
            DeviceError: the logits are no distribution.
        """
        self.slots.set_start(position)
        if constraint is not None:
            self._allow(constraint, ())
        self._choose(logits, 0, masked=constraint is not None)
        self.submit(0)
        return self.chosen(0, position)[0]

    def _choose(self, raw: Buffer, k: int, masked: bool = False) -> None:
        s, dev, V = self._sampling, self.device, self.vocab
        assert s is not None
        R = 1 + k
        rows, pos = self._result.view(16, (R, 4), "i32"), self.slots.pos.view(0, (R,), "i32")
        drafts = None if not k or self.drafter is None else self.drafter.drafts.view(0, (k,), "i32")
        logits, model = raw, None
        if not s.penalties.neutral:
            assert self._penalized is not None and self._logits is not None
            p, logits, model = self._penalized, self._logits.view(0, (R, V), "f32"), raw
            penalize(dev, logits, raw, p.seen, p.values, R, pending=drafts, bias=p.bias)
        if masked:
            assert self._allowed is not None and self._logits is not None
            before, logits, model = logits, self._logits.view(0, (R, V), "f32"), raw
            mask_logits(dev, logits, before, self._allowed.view(0, (R, mask_words(V)), "u32"), R)
        if drafts is None or self.drafter is None or same_noise(s):
            sample(dev, rows, logits, self._params, pos, R, raw=model)
        else:
            drawn_from = None if self._argmax else self.drafter.picked_from.view(0, (k, V), "f32")
            shares = self._shares.view(0, (R if self._argmax else R + k, 8), "i32")
            accept(
                dev, rows, shares, logits, drafts, self._params, pos, R, draft_logits=drawn_from, raw=model
            )  # fmt: skip
        accept_prefix(
            dev, self._round, rows, drafts, pos, next_ids=self.slots.ids.view(0, (1,), "i32"), next_pos=self.slots.pos
        )  # fmt: skip
        if s.top and self._top is not None:
            n = self._top[0].shape[1]
            ids, values = (b.view(0, (R, n), b.dtype) for b in self._top)
            top_logprobs(dev, ids, values, raw, R)
        if not s.penalties.neutral and self._penalized is not None:
            count_tokens(dev, self._penalized.seen, rows, round_=self._round)

    # -- what came of it

    def submit(self, k: int) -> None:
        """Start to copy the words of a pass of 1 + k rows to the host; work submitted later does not delay them."""
        self.slots.changed()
        self._told.submit(self._result.view(0, (2 + k, 4), "i32"))

    def chosen(self, k: int, first: int) -> list[Drawn]:
        """The new tokens of the pass that was submitted, 1 to 1 + k; its first row stood at position `first`.

        Raises:
            DeviceError: the last row has no distribution.
        """
        assert self._sampling is not None
        told = self._told.wait().view(np.int32).reshape(-1, 4)
        accepted = int(told[0, 0]) if k else 0
        new = told[1 : 2 + accepted]
        if new[-1, 0] < 0:
            self.forget_text()
            raise DeviceError(f"the logits after {first + accepted + 1} tokens hold NaN or no finite value")
        self.slots.left(int(new[-1, 0]), int(told[0, 2]))
        if self._counted is not None:
            self._counted += len(new)
        n = self._sampling.top
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(new)
        if n and self._top is not None:
            ids, values = (self.device.download(b)[: len(new), :n].tolist() for b in self._top)
            tops = [tuple(zip(*row)) for row in zip(ids, values)]
        logprobs = new[:, 1].copy().view(np.float32)
        return [Drawn(int(t), float(lp), top) for t, lp, top in zip(new[:, 0], logprobs, tops)]


def same_noise(sampling: Sampling) -> bool:
    """Whether drafts stand where they are what plain decode says: at temperature 0, and with a seed."""
    return sampling.temperature == 0 or sampling.seeded
