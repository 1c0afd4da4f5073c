"""Float64 references and file bytes for the dense kernels: storage formats, products, RMSNorm, router, experts.

Plain and slow on purpose; nothing is shared with the engine. Formats are decoded from the file's layout as it is
written in the specification (the base container's types, the GGUF block formats).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

UNIT = 2.0**-24  # unit roundoff of float32
BF16 = 2.0**-8  # of bfloat16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def bf16_bits(x: NDArray[Any]) -> NDArray[np.uint16]:
    """Nearest bfloat16, ties to even, of finite float32 values; as bits."""
    u = np.asarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits: NDArray[np.uint16]) -> F64:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def round_bf16(x: NDArray[Any]) -> F64:
    """float64 -> float32 -> bfloat16, as float64."""
    return bf16_values(bf16_bits(np.asarray(x, np.float64).astype(np.float32)))


def e4m3(codes: U8) -> F64:
    c = codes.astype(np.int64)
    exponent, mantissa = c >> 3 & 15, c & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    return np.where(c & 128, -value, value)


def random_file(format: str, N: int, K: int, rng: np.random.Generator) -> U8:
    """File bytes of a [N, K] matrix with every code in use and scales of ordinary size."""
    if format == "f32":
        return rng.standard_normal((N, K), np.float32).view(np.uint8).reshape(-1)
    if format == "bf16":
        return bf16_bits(rng.standard_normal((N, K))).view(np.uint8).reshape(-1)
    if format == "f16":
        return rng.standard_normal((N, K)).astype(np.float16).view(np.uint8).reshape(-1)
    if format == "q8_0":
        blocks = rng.integers(0, 256, (N * K // 32, 34), np.uint8)
        blocks[:, :2] = rng.uniform(-0.02, 0.02, (len(blocks), 1)).astype(np.float16).view(np.uint8)
        return blocks.reshape(-1)
    if format == "q4_k":
        blocks = rng.integers(0, 256, (N * K // 256, 144), np.uint8)
        blocks[:, :4] = rng.uniform(0.001, 0.02, (len(blocks), 2)).astype(np.float16).view(np.uint8)
        return blocks.reshape(-1)
    if format == "fp4x32":
        blocks = rng.integers(0, 256, (N * K // 32, 17), np.uint8)
        blocks[:, 16] = rng.integers(120, 130, len(blocks))
        return blocks.reshape(-1)
    assert format == "fp8_32x32"
    codes = rng.integers(0, 256, N * K, np.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    return np.concatenate([codes, rng.integers(114, 124, N // 32 * (K // 32)).astype(np.uint8)])


def decode(format: str, raw: U8, N: int, K: int) -> F64:
    """The matrix that file bytes mean, exactly."""
    if format == "f32":
        return raw.view(np.float32).reshape(N, K).astype(np.float64)
    if format == "bf16":
        return bf16_values(raw.view(np.uint16)).reshape(N, K)
    if format == "f16":
        return raw.view(np.float16).reshape(N, K).astype(np.float64)
    if format == "q8_0":
        blocks = raw.reshape(-1, 34)
        scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float64)
        return (np.ascontiguousarray(blocks[:, 2:]).view(np.int8) * scale).reshape(N, K)
    if format == "q4_k":
        return np.stack([q4_k_block(b) for b in raw.reshape(-1, 144)]).reshape(N, K)
    if format == "fp4x32":
        blocks = raw.reshape(-1, 17)
        codes = np.stack([blocks[:, :16] & 15, blocks[:, :16] >> 4], axis=2).reshape(len(blocks), 32)
        return (E2M1[codes] * 2.0 ** (blocks[:, 16:].astype(np.float64) - 127)).reshape(N, K)
    codes, tiles = raw[: N * K].reshape(N, K), raw[N * K :].reshape(N // 32, K // 32)
    scale = np.repeat(np.repeat(2.0 ** (tiles.astype(np.float64) - 127), 32, axis=0), 32, axis=1)
    return e4m3(codes) * scale


def q4_k_block(b: U8) -> F64:
    """256 weights of 144 bytes: d, dmin (f16), 12 bytes of eight 6-bit (scale, min) pairs, 128 bytes of nibbles."""
    d, low = b[:4].view(np.float16).astype(np.float64)
    packed, codes = b[4:16].astype(int), b[16:]
    out = np.empty(256)
    for j in range(8):
        if j < 4:
            scale, minimum = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
            minimum = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
        half = codes[j // 2 * 32 : j // 2 * 32 + 32]
        out[32 * j : 32 * j + 32] = d * scale * (half >> 4 if j % 2 else half & 15) - low * minimum
    return out


def grouped(x: F64, w: F64, groups: int) -> F64:
    """y[r,n] = sum_k x[r, g(n) K + k] w[n,k]."""
    N, K = w.shape
    parts = [x[:, g * K : g * K + K] @ w[g * N // groups : (g + 1) * N // groups].T for g in range(groups)]
    return np.concatenate(parts, axis=1)


def rms_norm(x: F64, w: F64, eps: float) -> F64:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * w


def route(
    u: F64, bias: F64, k: int, gate_temp: float, scale: float, norm: bool
) -> tuple[NDArray[np.int64], F64, F64]:
    """picks [R,k] by falling score + bias (ties: lowest id), weights [R,k], selection scores [R,E]."""
    t = u / gate_temp
    s = np.sqrt(np.where(t > 20, t, np.log1p(np.exp(np.minimum(t, 30)))))
    picks = np.argsort(-(s + bias), axis=1, kind="stable")[:, :k]
    w = np.take_along_axis(s, picks, axis=1)
    return picks, (w / (w.sum(axis=1, keepdims=True) + 1e-20) if norm else w) * scale, s + bias


def silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


def clamped_swiglu(g: F64, u: F64, limit: float) -> F64:
    return silu(np.minimum(g, limit)) * np.clip(u, -limit, limit)


def assert_within(got: NDArray[Any], want: F64, bound: NDArray[Any] | float) -> None:
    """NaN and infinity in place first, then |got - want| <= bound; says where it fails."""
    got64 = got.astype(np.float64)
    assert got64.shape == want.shape, f"{got64.shape} is not {want.shape}"
    assert np.all(np.isfinite(got64)), f"not finite at {np.argwhere(~np.isfinite(got64))[0]}"
    excess = np.abs(got64 - want) - bound
    if np.any(excess > 0):
        at = np.unravel_index(int(np.argmax(excess)), excess.shape)
        limit = np.broadcast_to(bound, want.shape)[at]
        raise AssertionError(f"at {at}: got {got64[at]!r}, want {want[at]!r}, bound {limit:.3e}")
