"""accept.cu: what each rule does where it has no choice, rounds of several rows, rows without a distribution."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.device import Buffer, Device
from ds4.device.kernels.accept import ACCEPT, ACCEPT_SHARES, ACCEPT_SHARES_SMALL, ACCEPT_SMALL
from ds4.engine.ops.accept import accept, accept_prefix
from ds4.engine.ops.sample import DRAFT_STREAM, pack_params, sample

F32, I32 = NDArray[np.float32], NDArray[np.int32]
V = 150
ORDERS = pytest.mark.parametrize("device", ["rising", "falling", "greedy"], indirect=True)


def random_rows(R: int, seed: int, scale: float = 2.0) -> F32:
    return (np.random.default_rng(seed).standard_normal((R, V)) * scale).astype(np.float32)


class Round:
    """A verify pass of k drafts, at positions 20 .. 20 + k."""

    def __init__(self, device: Device, logits: F32, *, T: float = 1.0, top_p: float = 0.9, seed: int = 4) -> None:
        R = len(logits)
        self.device, self.R = device, R
        self.logits = device.upload(logits)
        self.pos = device.upload(np.arange(20, 20 + R, dtype=np.int32))
        self.params = device.upload(pack_params(R, T, 0, top_p, 0.0, seed))
        self.draft_params = device.upload(pack_params(R, T, 0, top_p, 0.0, seed, DRAFT_STREAM))
        self.out, self.round = device.empty((R, 4), "i32"), device.empty((4,), "i32")

    def draw(self, draft_logits: F32, params: Buffer) -> I32:
        k = len(draft_logits)
        out, tokens = self.device.empty((k, 4), "i32"), self.device.empty((k,), "i32")
        sample(self.device, out, self.device.upload(draft_logits), params, self.pos, k, tokens=tokens)
        return self.device.download(tokens)

    def accept(self, drafts: I32 | list[int], draft_logits: F32 | None = None) -> tuple[I32, list[int]]:
        """Tokens of all rows, and what accept_prefix says."""
        dev = self.device
        ids = dev.upload(np.asarray(drafts, np.int32)) if len(drafts) else None
        q = None if draft_logits is None else dev.upload(draft_logits)
        shares = dev.empty((self.R + (0 if q is None else len(drafts)), 8), "i32")
        accept(dev, self.out, shares, self.logits, ids, self.params, self.pos, self.R, draft_logits=q)
        return self.finish(ids)

    def equal(self, drafts: I32) -> tuple[I32, list[int]]:
        """The rule of equal picks."""
        sample(self.device, self.out, self.logits, self.params, self.pos, self.R)
        return self.finish(self.device.upload(drafts))

    def finish(self, ids: Buffer | None) -> tuple[I32, list[int]]:
        accept_prefix(self.device, self.round, self.out, ids, self.pos)
        return self.device.download(self.out)[:, 0], self.device.download(self.round).tolist()


@ORDERS
def test_a_draft_head_that_equals_the_model_is_always_right(device: Device) -> None:
    logits = random_rows(6, 1)
    for seed in range(3):
        r = Round(device, logits, seed=seed)
        drafts = r.draw(logits[:5], r.draft_params)
        tokens, said = r.accept(drafts, logits[:5])
        assert np.array_equal(tokens[:5], drafts)
        bonus = r.draw(logits, r.params)[5]  # as plain decode draws at that position
        assert tokens[5] == bonus and said == [5, bonus, 26, 0]


@ORDERS
def test_temperature_zero_takes_the_argmax_whatever_the_draft(device: Device) -> None:
    logits = random_rows(4, 2)
    best = logits.argmax(1).astype(np.int32)
    for wrong in (0, 1, 2, None):
        drafts = best[:3].copy()
        if wrong is not None:
            drafts[wrong] = (drafts[wrong] + 1) % V
        accepted = 3 if wrong is None else wrong
        for draft_logits in (None, random_rows(3, 3)):
            r = Round(device, logits, T=0.0)
            tokens, said = r.accept(drafts, draft_logits)
            assert np.array_equal(tokens, best) and said == [accepted, best[accepted], 21 + accepted, 0]
        tokens, said = Round(device, logits, T=0.0).equal(drafts)
        assert np.array_equal(tokens, best) and said[0] == accepted


@ORDERS
def test_a_draft_that_the_model_never_says_falls(device: Device) -> None:
    """p(d) = 0, by truncation or by -inf: replaced by another token, which p says."""
    logits = random_rows(3, 4)
    logits[:, 40:] = -np.inf
    other = random_rows(2, 5)
    other[:, :40] = -np.inf
    r = Round(device, logits)
    tokens, said = r.accept([77, 140], other)
    assert said[0] == 0 and np.all(tokens < 40)
    tokens, said = r.accept([77, int(logits[1].argmin())])
    assert said[0] == 0 and np.all(tokens < 40)


def test_a_point_mass_on_the_only_token_stands(device: Device) -> None:
    logits = np.zeros((2, V), np.float32)
    logits[:, 9] = 200.0
    for seed in range(5):
        assert Round(device, logits, top_p=1.0, seed=seed).accept([9])[1][:2] == [1, 9]


@ORDERS
def test_equal_picks_give_what_plain_decode_gives(device: Device) -> None:
    """With a seed: same noise for draft and target. Whatever the drafts, the new tokens are the plain ones."""
    logits = random_rows(6, 6)
    heads = {"same": logits[:5], "near": logits[:5] + random_rows(5, 7, 0.3), "far": random_rows(5, 8)}
    stood = {}
    for name, head in heads.items():
        r = Round(device, logits, T=1.3, top_p=0.97)
        plain = r.draw(logits, r.params)
        tokens, said = r.equal(r.draw(head, r.params))
        assert np.array_equal(tokens, plain) and said[1] == plain[said[0]]
        stood[name] = said[0]
    assert stood["same"] == 5 and stood["far"] < 5


def test_a_round_without_drafts_is_plain_sampling(device: Device) -> None:
    r = Round(device, random_rows(1, 9))
    plain = r.draw(random_rows(1, 9), r.params)[0]
    assert r.accept([])[1] == [0, plain, 21, 0]


@ORDERS
def test_the_four_words_are_those_of_a_sampled_row(device: Device) -> None:
    """Token, its untempered log-probability under the raw row, how many p keeps, 0."""
    logits, raw = random_rows(3, 10), random_rows(3, 11)
    r = Round(device, logits)
    out, shares = device.empty((3, 4), "i32"), device.empty((3, 8), "i32")
    drafts = device.upload(np.array([3, 4], np.int32))
    accept(device, out, shares, r.logits, drafts, r.params, r.pos, 3, raw=device.upload(raw))
    sample(device, r.out, r.logits, r.params, r.pos, 3)
    got, plain = device.download(out), device.download(r.out)
    assert np.array_equal(got[:, 2:], plain[:, 2:]) and got[2, 0] == plain[2, 0]
    exact = raw - np.log(np.exp(raw.astype(float)).sum(1, keepdims=True))
    assert got[:, 1].view(np.float32) == pytest.approx(exact[np.arange(3), got[:, 0]], abs=2e-6)


def test_rows_without_a_distribution_are_refused(device: Device) -> None:
    logits, head = random_rows(5, 12), random_rows(4, 13)
    logits[0, 7], logits[3] = np.nan, -np.inf
    head[1, 149] = np.inf
    r = Round(device, logits)
    tokens, said = r.accept([1, 2, 3, 4], head)
    assert [t == -1 for t in tokens] == [True, True, False, True, False] and said == [0, 0, 21, 0]
    assert r.accept([1, V, -1, 4])[0].tolist()[1:3] == [-1, -1]  # not tokens at all
    with pytest.raises(ValueError, match="32 drafts"):
        accept_prefix(device, r.round, r.out, device.zeros((32,), "i32"), r.pos)


def test_the_next_pass_finds_its_ids_and_positions(device: Device) -> None:
    """Over the slots that this pass read its own from."""
    logits = random_rows(5, 16)
    r = Round(device, logits, T=0.0)
    right = logits.argmax(1).astype(np.int32)
    for kept in range(5):
        ids, pos = device.upload(np.full(8, -7, np.int32)), device.upload(np.arange(20, 28, dtype=np.int32))
        drafts = right[:4].copy()
        if kept < 4:
            drafts[kept] = (drafts[kept] + 1) % V
        sample(device, r.out, r.logits, r.params, pos.view(0, (5,)), 5)
        accept_prefix(
            device, r.round, r.out, device.upload(drafts), pos.view(0, (5,)), next_ids=ids.view(0, (1,)), next_pos=pos
        )
        assert device.download(r.round).tolist() == [kept, right[kept], 21 + kept, 0]
        assert device.download(ids).tolist() == [right[kept], *[-7] * 7]
        assert device.download(pos).tolist() == list(range(21 + kept, 29 + kept))
    with pytest.raises(ValueError, match="33 positions"):
        accept_prefix(device, r.round, r.out, None, r.pos, next_pos=device.zeros((33,), "i32"))


def test_a_replay_says_what_the_launches_said(device: Device) -> None:
    logits, head = random_rows(4, 14), random_rows(3, 15)
    r = Round(device, logits)
    drafts = r.draw(head, r.draft_params)
    tokens, said = r.accept(drafts, head)
    ids, q, shares = device.upload(drafts), device.upload(head), device.empty((7, 8), "i32")
    with device.capture() as graph:
        accept(device, r.out, shares, r.logits, ids, r.params, r.pos, 4, draft_logits=q)
        accept_prefix(device, r.round, r.out, ids, r.pos)
    device.fill(r.out, 0), device.fill(r.round, 0)
    graph.replay()
    assert np.array_equal(device.download(r.out)[:, 0], tokens) and device.download(r.round).tolist() == said
    r.params.write(pack_params(4, 0.0, 0, 1.0, 0.0, 0))  # settings are read at replay
    graph.replay()
    assert np.array_equal(device.download(r.out)[:, 0], logits.argmax(1))


def test_the_number_of_threads_changes_nothing(device: Device) -> None:
    logits, head = random_rows(5, 16), random_rows(4, 16) + random_rows(4, 17, 0.7)
    r = Round(device, logits)
    ids, q = device.upload(r.draw(head, r.draft_params)), device.upload(head)
    got = []
    for first, second in ((ACCEPT_SHARES, ACCEPT), (ACCEPT_SHARES_SMALL, ACCEPT_SMALL)):
        out, shares = device.empty((5, 4), "i32"), device.empty((9, 8), "i32")
        device.launch(first, shares, r.logits, q, r.params, 5, V, S=9, V=V)
        device.launch(second, out, shares, r.logits, None, q, ids, r.params, r.pos, 4, V, R=5, S=9, V=V)
        got.append((device.download(shares), device.download(out)))
    assert np.array_equal(got[0][0], got[1][0]) and np.array_equal(got[0][1], got[1][1])


@pytest.mark.parametrize("device", ["fast"], indirect=True)
def test_released_vocabulary(device: Device) -> None:
    wide = (np.random.default_rng(1).standard_normal((3, 129_280)) * 3).astype(np.float32)
    r = Round(device, wide)
    tokens, said = r.accept(r.draw(wide[:2], r.draft_params), wide[:2])
    assert said[0] == 2 and said[1] == tokens[2]
