"""docs/sampling.md in float64: penalties, temperature, truncation, noise, the draw. No line of it is the kernels'."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ds4.engine.sampling import Sampling

F64 = NDArray[np.float64]


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., 2011)."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k0, q & 0xFFFFFFFF, (p >> 32) ^ d ^ k1, p & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


def noise(tokens: Sequence[int], seed: int, position: int, stream: int) -> F64:
    """Gumbel noise of `tokens` in the row at `position`."""
    key = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    bits = [philox(key, (v // 4, position + 1, stream, 0))[v % 4] for v in tokens]
    u = np.minimum((np.array(bits, float) + 0.5) * 2.0**-32, float(np.float32(1) - np.float32(2.0**-24)))
    return np.asarray(-np.log(-np.log1p(-u)))


def penalised(logits: F64, s: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> F64:
    """Logits f64 [V] after step 1."""
    p, out = s.penalties, logits.copy()
    for v in {*prompt, *answer}:
        out[v] = out[v] / p.repetition if out[v] > 0 else out[v] * p.repetition
    for v in set(answer):
        out[v] -= p.frequency * answer.count(v) + p.presence
    for v, bias in p.logit_bias:
        out[v] += bias
    return out


def kept(logits: F64, s: Sampling) -> list[int]:
    """Ids of the truncated set, largest first, lowest id of equals; temperature above 0."""
    z = logits / s.temperature
    order = np.lexsort((np.arange(len(z)), -z))
    order = order[: s.top_k or len(order)]
    p = np.exp(z[order] - z[order[0]])
    if s.top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(p), s.top_p * p.sum()) + 1)]
    return [int(v) for v in order if np.exp(z[v] - z[order[0]]) >= s.min_p]


def drawn(logits: F64, s: Sampling, position: int, stream: int = 0) -> tuple[int, float]:
    """The token, and by how much it won: what is nearer than float32 can tell proves nothing."""
    if s.temperature == 0:
        best = np.lexsort((np.arange(len(logits)), -logits))
        return int(best[0]), np.inf if logits[best[0]] == logits[best[1]] else logits[best[0]] - logits[best[1]]
    ids = kept(logits, s)
    scores = logits[ids] / s.temperature + noise(ids, s.seed, position, stream)
    first, *rest = np.sort(scores)[::-1]
    return ids[int(np.argmax(scores))], float(first - rest[0]) if rest else np.inf


def logprobs(logits: F64) -> F64:
    """Log-probabilities f64 [V] of the model itself: logits before step 1, temperature 1."""
    top = logits.max()
    return np.asarray(logits - top - np.log(np.exp(logits - top).sum()))
