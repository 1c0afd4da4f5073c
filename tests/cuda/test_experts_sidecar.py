"""Mounted factors in the down kernels: against float64, against gains multiplied beforehand, against none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds4.device import Device
from ds4.engine.ops.experts import Factors
from tests.cuda.test_experts import ORDERS, Case, case
from tests.reference_dense import F32, UNIT, assert_within
from tests.reference_experts import Blob, Matrix
from tests.reference_experts import experts as reference
from tests.reference_sidecar import E2M1, Lattice, lattice

WAYS = [("step", "f32", 1), ("step", "bf16", 1), ("step", "f32", 8), ("step", "bf16", 8), ("prefill", "f32", 21),
        ("prefill", "bf16", 150)]  # fmt: skip
E, F, D, K = 5, 40, 96, 2


def placed(device: Device, made: Lattice) -> Factors:
    return Factors(device.upload(made.codes.reshape(-1).view(np.uint32)), device.upload(made.scales.reshape(-1)))


def mounted(c: Case, domain: Lattice | None, post: Lattice | None) -> Case:
    factors = [None if made is None else placed(c.device, made) for made in (domain, post)]
    return replace(c, ew=replace(c.ew, domain=factors[0], post=factors[1]))


def folded(c: Case, product: F32) -> Case:
    """The same layer with gains that were multiplied in numpy."""
    gains = c.device.download(c.ew.down_gains).reshape(product.shape) * product
    return replace(c, ew=replace(c.ew, down_gains=c.device.upload(gains.reshape(-1))))


def scaled(blob: Blob, product: F32) -> Blob:
    """The same layer with the factors in the float64 weights."""

    def down(m: Matrix, s: F32) -> Matrix:
        return replace(m, w=m.w * s.astype(np.float64)[:, None])

    return Blob(blob.codebook, [[*ms[:2], down(ms[2], s)] for ms, s in zip(blob.matrices, product, strict=True)])


@pytest.mark.parametrize("which", ["domain", "post", "both"])
@pytest.mark.parametrize("family, kind, R", WAYS)
def test_factors_are_in_the_result(device: Device, family: str, kind: str, R: int, which: str) -> None:
    """Near float64, and the bits of gain * (domain * post) in float32: that is why other types may be folded."""
    c = case(device, R, K, E, F, D, 8192 if R == 8 else 4096, kind)
    domain = lattice(E, D, 1) if which != "post" else None
    post = lattice(E, D, 2) if which != "domain" else None
    product = np.ones((E, D), np.float32)
    for made in (domain, post):
        product = product if made is None else product * made.s
    got = mounted(c, domain, post).run(family)
    assert np.array_equal(got, folded(c, product).run(family))
    mma = family == "prefill" and kind == "bf16"

    def steps(width: int) -> int:  # as in test_experts.check; a rounding each for two factors and two products
        return -(-width // 16) + 2 * 16 + 2 if mma else -(-width // 256) * 8 + 5 + 2

    weights = scaled(c.blob, product), c.x, c.picks, c.weights, c.ew.limit
    want = reference(*weights, kind == "bf16", steps(D), steps(F) + 4, UNIT)
    assert_within(got, want.y, want.bound)
    plain = c.run(family)
    assert np.linalg.norm(got - plain) > 0.1 * np.linalg.norm(plain), "the factors must be felt"


@pytest.mark.parametrize("family, kind, R", WAYS)
def test_factors_of_one_leave_every_bit(device: Device, family: str, kind: str, R: int) -> None:
    c = case(device, R, K, E, F, D, 4096, kind)
    ones = lattice(E, D, 3, ones=True)
    assert (ones.s == 1).all() and len(np.unique(ones.codes)) > 2 and len(np.unique(ones.scales)) > 2
    plain = c.run(family)
    for domain, post in ((ones, None), (None, ones), (ones, ones)):
        assert np.array_equal(mounted(c, domain, post).run(family), plain)


@pytest.mark.parametrize("device", ORDERS, indirect=True)
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_a_mounted_row_alone_is_the_row_among_others(device: Device, kind: str) -> None:
    c = mounted(case(device, 8, K, E, F, D, 8192, kind), lattice(E, D, 1), lattice(E, D, 2))
    together = c.run("step")
    for r in (0, 3, 7):
        assert np.array_equal(c.run("step", slice(r, r + 1))[0], together[r])
    chunk = mounted(case(device, 70, K, E, F, D, 4096, kind), lattice(E, D, 1), None)
    whole = chunk.run("prefill")
    for rows in (slice(0, 1), slice(0, 33), slice(33, 70)):
        assert np.array_equal(chunk.run("prefill", rows), whole[rows])


def test_extreme_scales_decode_as_a_file_does(device: Device) -> None:
    """2^-127, a subnormal, adds nothing to 1; 2^20 is a factor of millions; neither is lost in the kernels."""
    made = lattice(E, D, 4)
    scales = made.scales.copy()
    scales[:, 0], scales[:, 1] = 0, 147
    step = np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)
    nibbles = np.stack([made.codes & 15, made.codes >> 4], axis=2).reshape(E, D)
    extreme = Lattice(made.codes, scales, (1 + E2M1[nibbles] * step).astype(np.float32))
    c = case(device, 1, K, E, F, D, 4096)
    got = mounted(c, extreme, None).run("step")
    assert np.array_equal(got, folded(c, extreme.s).run("step"))
    assert np.abs(got[..., 32:64]).max() > 1e4 * np.abs(got[..., :32]).max()
