"""sample_mask.cu: the kept logits bit for bit, -inf elsewhere, and what draws and judgements make of it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from ds4.device import Device
from ds4.engine.ops.accept import accept
from ds4.engine.ops.sample import mask_logits, mask_words, pack_params, sample

V = 301
ORDERS = pytest.mark.parametrize("device", ["rising", "falling", "greedy"], indirect=True)


def packed(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """bool [R, V] as the kernel reads it; the bits past V are set, and mean nothing."""
    R, n = allowed.shape
    bits = np.ones((R, 32 * mask_words(n)), bool)
    bits[:, :n] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def some(R: int, seed: int = 1) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((R, V)) * 4).astype(np.float32), rng.random((R, V)) < 0.4


@ORDERS
def test_kept_logits_keep_every_bit(device: Device) -> None:
    logits, allowed = some(5)
    logits[0, :4] = np.nan, np.inf, -np.inf, -0.0
    allowed[0, :4] = True
    logits[1, :2] = np.nan, np.inf
    allowed[1, :2] = False
    allowed[2], allowed[3] = False, True
    allowed[2, [0, 31, 32, 300]] = True
    want = np.where(allowed, logits, np.float32(-np.inf))
    words = device.upload(packed(allowed))
    source, out = device.upload(logits), device.empty((5, V), "f32")
    mask_logits(device, out, source, words, 5)
    assert np.array_equal(device.download(out).view(np.uint32), want.view(np.uint32))
    assert np.array_equal(device.download(source).view(np.uint32), logits.view(np.uint32))
    mask_logits(device, source, source, words, 5)  # in place, as after penalties
    assert np.array_equal(device.download(source).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("settings", [{}, {"top_k": 6, "top_p": 0.9}])
@pytest.mark.parametrize("device", ["fast"], indirect=True)
def test_draws_follow_the_distribution_of_what_is_allowed(device: Device, settings: dict[str, float]) -> None:
    n, vocab = 4000, 24
    rng = np.random.default_rng(7)
    logits = (rng.standard_normal(vocab) * 1.5).astype(np.float32)
    allowed = rng.random(vocab) < 0.5
    allowed[logits.argmax()] = False  # truncation looks at what is left, not at what was there
    masked = device.empty((n, vocab), "f32")
    mask_logits(
        device, masked, device.upload(np.tile(logits, (n, 1))), device.upload(packed(np.tile(allowed, (n, 1)))), n
    )
    out = device.empty((n, 4), "i32")
    params = pack_params(n, 1.0, int(settings.get("top_k", 0)), settings.get("top_p", 1.0), 0.0, 123)
    sample(device, out, masked, device.upload(params), device.upload(np.arange(n, dtype=np.int32)), n)
    tokens = device.download(out)[:, 0]
    p = np.where(allowed, np.exp(logits.astype(float)), 0.0)
    if settings:
        order = np.argsort(-p)[:6]
        mass = np.cumsum(p[order]) / p[order].sum()
        p[np.setdiff1d(np.arange(vocab), order[: int(np.searchsorted(mass, 0.9)) + 1])] = 0.0
    expected = p / p.sum() * n
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[expected == 0].any()
    kept = expected > 0
    assert chisquare(counts[kept], expected[kept]).pvalue > 1e-3


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "argmax"])
@pytest.mark.parametrize("device", ["fast"], indirect=True)
def test_drafts_of_an_open_distribution_leave_the_masked_one(device: Device, drawn: bool) -> None:
    """Drafts come from a head that knows no mask; a draft that is forbidden falls, and the others are told by p."""
    n, vocab = 4000, 12
    rng = np.random.default_rng(3)
    logits, head = (rng.standard_normal((2, vocab)) * [[0.6], [1.2]]).astype(np.float32)
    allowed = np.arange(vocab) % 3 > 0
    q = np.exp(head.astype(float)) / np.exp(head.astype(float)).sum()
    drafts = rng.choice(vocab, n, p=q) if drawn else np.full(n, head.argmax())
    allowed[head.argmax()] = False
    rows = device.empty((n, vocab), "f32")
    words = device.upload(packed(np.tile(allowed, (n, 1))))
    mask_logits(device, rows, device.upload(np.tile(logits, (n, 1))), words, n)
    out, shares = device.empty((n, 4), "i32"), device.empty((2 * n if drawn else n, 8), "i32")
    accept(
        device, out, shares, rows, device.upload(drafts.astype(np.int32)), device.upload(pack_params(
            n, 1.0, 0, 1.0, 0.0, 9)), device.upload(np.arange(n, dtype=np.int32)), n,
        draft_logits=device.upload(np.tile(head, (n, 1))) if drawn else None,
    )  # fmt: skip
    tokens = device.download(out)[:, 0]
    p = np.where(allowed, np.exp(logits.astype(float)), 0.0)
    counts, expected = np.bincount(tokens, minlength=vocab), p / p.sum() * n
    assert not counts[~allowed].any() and (~allowed[drafts]).sum() > 200
    assert chisquare(counts[allowed], expected[allowed]).pvalue > 1e-3
    left_out = tokens[allowed[drafts]]  # to judge allowed drafts only is another distribution
    rest = np.bincount(left_out, minlength=vocab)
    if drawn:
        own = rng.choice(vocab, n - len(left_out), p=p / p.sum())
        wrong = rest + np.bincount(own, minlength=vocab)
        assert chisquare(wrong[allowed], expected[allowed]).pvalue < 1e-4


def test_a_forbidden_draft_falls_even_where_nothing_else_is_left(device: Device) -> None:
    """p and q differ by less than float32 tells, but for the draft, which the mask forbids."""
    logits = np.zeros((1, 8), np.float32)
    logits[0, 5], logits[0, 3] = -18.5, 0.25
    allowed = np.ones((1, 8), bool)
    allowed[0, 5] = False
    target = device.empty((1, 8), "f32")
    mask_logits(device, target, device.upload(logits), device.upload(packed(allowed)), 1)
    shares, out = device.empty((2, 8), "i32"), device.empty((1, 4), "i32")
    params, pos = device.upload(pack_params(1, 1.0, 0, 1.0, 0.0, 3)), device.upload(np.zeros(1, np.int32))
    draft = device.upload(np.array([5], np.int32))
    accept(device, out, shares, target, draft, params, pos, 1, draft_logits=device.upload(logits))
    assert device.download(out)[0, 0] == 3
