"""hyper.cu against float64, at several stream counts, and the vectors of model-text section 14."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.device import Device
from ds4.device.kernels.hyper import HYPER_MIX
from ds4.engine.ops.hyper import HyperParams, collapse_norm, expand, mixes
from ds4.engine.scratch import Workspace

F64 = NDArray[np.float64]
UNIT = 2.0**-24


def sinkhorn(logits: F64, heps: float, iters: int) -> F64:
    c = np.exp(logits - logits.max(-1, keepdims=True))
    c = c / c.sum(-1, keepdims=True) + heps
    c = c / (c.sum(-2, keepdims=True) + heps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdims=True) + heps)
        c = c / (c.sum(-2, keepdims=True) + heps)
    return c


def sigmoid(x: F64) -> F64:
    return 1.0 / (1.0 + np.exp(-x))


def split_mixes(m: F64, s: F64, b: F64, S: int, heps: float, iters: int) -> tuple[F64, F64, F64]:
    pre = sigmoid(m[..., :S] * s[0] + b[:S]) + heps
    post = 2 * sigmoid(m[..., S : 2 * S] * s[1] + b[S : 2 * S])
    logits = (m[..., 2 * S :] * s[2] + b[2 * S :]).reshape(*m.shape[:-1], S, S)
    return pre, post, sinkhorn(logits, heps, iters)


def reference(x: F64, fn: F64, s: F64, b: F64, S: int, eps: float, heps: float, iters: int) -> tuple[F64, F64, F64]:
    v = x.reshape(x.shape[0], -1)
    m = (v @ fn.T) / np.sqrt((v * v).mean(1, keepdims=True) + eps)
    return split_mixes(m, s, b, S, heps, iters)


def run_mixes(device: Device, x, fn, s, b, eps, heps=1e-6, iters=20):
    R, S, _ = x.shape
    dev = device.with_constants({"HC": S})
    hp = HyperParams(dev.upload(fn), dev.upload(s), dev.upload(b), iters, eps, heps)
    pre, post = dev.empty((R, S), "f32"), dev.empty((R, S), "f32")
    comb = dev.empty((R, S, S), "f32")
    mixes(dev, Workspace(dev), hp, dev.upload(x), pre, post, comb, R)
    return dev.download(pre), dev.download(post), dev.download(comb)


def random_case(R: int, S: int, D: int):
    rng = np.random.default_rng(100 * R + 10 * S + D)
    M = S * (S + 2)
    x = rng.standard_normal((R, S, D), np.float32)
    fn = (rng.standard_normal((M, S * D)) / np.sqrt(S * D)).astype(np.float32)
    s = np.array([0.7, 0.4, 2.0], np.float32)
    return x, fn, s, rng.standard_normal(M).astype(np.float32)


@pytest.mark.parametrize(("R", "S", "D"), [(1, 4, 64), (3, 3, 64), (9, 2, 132), (2, 4, 192)])
def test_mixes_agree_with_float64(device: Device, R: int, S: int, D: int) -> None:
    x, fn, s, b = random_case(R, S, D)
    got = run_mixes(device, x, fn, s, b, 1e-20)
    want = reference(x.astype(float), fn.astype(float), s.astype(float), b.astype(float), S, 1e-20, 1e-6, 20)
    # |m| is O(1); a dot of n products in f32 errs by at most (n/256 + 16) UNIT of sum |x f|, here below 3 sqrt(n)
    # UNIT; it is scaled by at most 2, and each Sinkhorn quotient adds 4 UNIT to a value below 1
    bound = (3 * np.sqrt(S * D) * 2 + 40 * 4) * UNIT
    for g, w in zip(got, want):
        assert np.abs(g - w).max() <= bound


def test_tiny_streams_see_epsilon(device: Device) -> None:
    x, fn, s, b = random_case(2, 4, 64)
    x *= np.float32(1e-10)
    got = run_mixes(device, x, fn, s, b, 1e-20)
    want = reference(x.astype(float), fn.astype(float), s.astype(float), b.astype(float), 4, 1e-20, 1e-6, 20)
    wrong = reference(x.astype(float), fn.astype(float), s.astype(float), b.astype(float), 4, 1e-12, 1e-6, 20)
    for g, w, other in zip(got, want, wrong):
        assert np.abs(g - w).max() < 3e-5 < np.abs(g - other).max()


@pytest.mark.parametrize("s2", [1.0, 20.0])
def test_specification_vectors(device: Device, s2: float) -> None:
    """Section 14: m given directly (one slice, sum of squares of one), 20 iterations; s2 = 20 sees the count."""
    i = np.arange(24)
    m = (((7 * i) % 11) - 5) / 4.0
    b = ((i % 5) - 2) / 10.0
    dev = device.with_constants({"HC": 4})
    part = np.concatenate([m, [1.0]]).astype(np.float32).reshape(1, 1, 25)
    out = [dev.empty((1, 4), "f32"), dev.empty((1, 4), "f32"), dev.empty((1, 4, 4), "f32")]
    dev.launch(
        HYPER_MIX, *out, dev.upload(part), dev.upload(np.array([0.5, 0.25, s2], np.float32)),
        dev.upload(b.astype(np.float32)), 1, 1, 20, 1e-20, 1e-6, R=1, S=4, P=1, M=24,
    )  # fmt: skip
    pre, post, comb = (dev.download(o)[0] for o in out)
    assert np.allclose(pre, [0.304704, 0.537431, 0.437824, 0.673708], atol=1e-6)
    assert np.allclose(post, [1.130501, 0.808639, 1.074860, 1.0], atol=1e-6)
    want = {
        1.0: [[0.181581, 0.485882, 0.198642, 0.133894], [0.269391, 0.046083, 0.485883, 0.198642],
              [0.149361, 0.399666, 0.269391, 0.181581], [0.399666, 0.068368, 0.046083, 0.485882]],
        20.0: [[0.041007, 0.5, 0.000158, 0.452504], [0.000326, 0.0, 0.999684, 0.00288],
               [0.041007, 0.499999, 0.000158, 0.452504], [0.917659, 0.0, 0.0, 0.09211]],
    }[s2]  # fmt: skip
    assert np.allclose(comb, want, atol=2e-5 if s2 == 20.0 else 1e-6)


def test_a_row_does_not_depend_on_its_neighbours(device: Device) -> None:
    x, fn, s, b = random_case(9, 4, 64)
    whole = run_mixes(device, x, fn, s, b, 1e-20)
    for r in (0, 7, 8):
        alone = run_mixes(device, x[r : r + 1], fn, s, b, 1e-20)
        assert all(np.array_equal(a[0], w[r]) for a, w in zip(alone, whole))


@pytest.mark.parametrize("scale", [1.0, 1e-10])
@pytest.mark.parametrize(("R", "S", "D"), [(3, 4, 68), (1, 3, 192)])
def test_collapse_is_a_norm_of_the_weighted_streams(device: Device, R: int, S: int, D: int, scale: float) -> None:
    rng = np.random.default_rng(D)
    x = (rng.standard_normal((R, S, D)) * scale).astype(np.float32)
    pre, w = rng.random((R, S), np.float32), rng.standard_normal(D).astype(np.float32)
    dev = device.with_constants({"HC": S})
    y = dev.empty((R, D), "f32")
    collapse_norm(dev, y, dev.upload(x), dev.upload(pre), dev.upload(w), R, 1e-20)
    h = (pre[:, :, None].astype(float) * x).sum(1)
    mass = (pre[:, :, None].astype(float) * np.abs(x)).sum(1)
    root = np.sqrt((h * h).mean(1, keepdims=True) + 1e-20)
    # h errs by S roundings of its terms; the norm's factor by those of the sum of squares, halved, plus four more
    bound = (S * mass + (D / 256 + 13 + S + 8) * np.abs(h)) / root * np.abs(w) * UNIT
    assert np.all(np.abs(dev.download(y) - h / root * w) <= bound)


def test_collapse_in_bf16_rounds_once(device: Device) -> None:
    rng = np.random.default_rng(5)
    x, pre = rng.standard_normal((2, 4, 64), np.float32), rng.random((2, 4), np.float32)
    w = rng.standard_normal(64).astype(np.float32)
    dev = device.with_constants({"HC": 4})
    y32, y16 = dev.empty((2, 64), "f32"), dev.empty((2, 64), "bf16")
    args = (dev.upload(x), dev.upload(pre), dev.upload(w), 2, 1e-20)
    collapse_norm(dev, y32, *args)
    collapse_norm(dev, y16, *args)
    bits = dev.download(y32).view(np.uint32)
    assert np.array_equal(
        dev.download(y16).view(np.uint16), (bits + 0x7FFF + ((bits >> 16) & 1) >> 16).astype(np.uint16)
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("R", "S", "D"), [(2, 4, 260), (3, 3, 64)])
def test_expand_sums_over_the_first_index(device: Device, R: int, S: int, D: int, dtype: str) -> None:
    rng = np.random.default_rng(S)
    x, post = rng.standard_normal((R, S, D), np.float32), rng.random((R, S), np.float32)
    comb = rng.random((R, S, S), np.float32)  # far from symmetric: the other index would show
    y = rng.standard_normal((R, D), np.float32)
    dev = device.with_constants({"HC": S})
    bits = (y.view(np.uint32) >> 16).astype(np.uint16)
    y_dev = dev.upload(y) if dtype == "f32" else dev.empty((R, D), "bf16")
    if dtype == "bf16":
        y_dev.write(bits)
        y = (bits.astype(np.uint32) << 16).view(np.float32)
    x_dev = dev.upload(x)
    expand(dev, x_dev, y_dev, dev.upload(post), dev.upload(comb), R)
    want = post[:, :, None].astype(float) * y[:, None, :] + np.einsum("rjk,rjd->rkd", comb.astype(float), x)
    mass = np.abs(post[:, :, None] * y[:, None, :]) + np.einsum("rjk,rjd->rkd", comb, np.abs(x))
    assert np.all(np.abs(dev.download(x_dev) - want) <= (S + 1) * UNIT * mass)
