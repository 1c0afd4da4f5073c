"""The five numbers: how far one model's next-token distribution is from another's, position by position.

With p the original's distribution, q ours, both softmax of float32 logits computed in float64:

    same top-1    argmax p == argmax q; ties go to the lowest id
    Sigma-min     sum_v min(p_v, q_v) = 1 - 1/2 sum_v |p_v - q_v|, the mass that both agree on
    KL            sum_v p_v (ln p_v - ln q_v), nats, KL(original || ours)
    PPL ratio     exp(mean of nll_ours - nll_teacher), nll = -ln of the probability of the token that does follow

Sigma-min is computed in its second form, so that a model against itself has exactly 1 and not what rounding leaves of
a sum: exactly (1, 1, 0, 1), with standard errors of exactly 0.

Positions of a document are not independent, so standard errors are clustered by document: the sandwich estimator of
a mean over n positions in G documents with mean m,

    se^2 = G / (G - 1) * sum_g ( sum_{i in g} (x_i - m) )^2 / n^2

(Liang and Zeger 1986; Cameron and Miller 2015, "A Practitioner's Guide to Cluster-Robust Inference", equations 6 and
11 with one regressor, a constant, for which the small-sample factor G / (G - 1) * (n - 1) / (n - K) is G / (G - 1)).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds4.errors import FileFormatError

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
FIGURES = ("same_top1", "sigma_min", "kl", "nll_teacher", "nll_ours")
BLOCK_BYTES = 64 << 20  # of one float64 temporary


def position_figures(teacher_RV: F32, ours_RV: F32, next_R: NDArray[np.int32] | I64) -> F64:
    """f64 [5, R], rows as in FIGURES.

    Args:
        teacher_RV, ours_RV: float32 logits of the same R positions.
        next_R: the token that follows each.

    Raises:
        FileFormatError: shapes that differ, or a value that is not finite, by position.
    """
    if teacher_RV.shape != ours_RV.shape or teacher_RV.shape[:1] != next_R.shape:
        shapes = f"{list(teacher_RV.shape)}, {list(ours_RV.shape)} and {list(next_R.shape)}"
        raise FileFormatError(f"logits of the original, ours and next tokens have shapes {shapes}; they must agree")
    out = np.empty((len(FIGURES), len(next_R)), np.float64)
    for part in _blocks(*teacher_RV.shape):
        out[:, part] = _block(teacher_RV[part], ours_RV[part], np.asarray(next_R[part], np.int64), part.start)
    return out


def _blocks(n: int, vocab: int) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES // (8 * max(1, vocab)))
    yield from (slice(i, min(i + step, n)) for i in range(0, n, step))


def _block(teacher: F32, ours: F32, following: I64, start: int) -> F64:
    for whose, logits in (("the original", teacher), ("ours", ours)):
        finite = np.isfinite(logits).all(axis=1)
        if not finite.all():
            raise FileFormatError(f"logits of {whose} are not finite at position {start + int(finite.argmin())}")
    lp, lq = _log_softmax(teacher), _log_softmax(ours)
    p, q = np.exp(lp), np.exp(lq)
    rows = np.arange(len(following))
    return np.stack(
        [
            (teacher.argmax(axis=1) == ours.argmax(axis=1)).astype(np.float64),
            1.0 - 0.5 * np.abs(p - q).sum(axis=1),
            (p * (lp - lq)).sum(axis=1),
            -lp[rows, following],
            -lq[rows, following],
        ]
    )


def _log_softmax(logits: F32) -> F64:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    out: F64 = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return out


@dataclass(frozen=True)
class Mean:
    """A mean over positions and its standard error; None: of a single document there is no telling."""

    value: float
    se: float | None


def clustered_mean(values: F64, clusters: NDArray[np.int32] | I64) -> Mean:
    """Mean of f64 [n] and its standard error from the sums of deviations of whole clusters."""
    mean = float(values.mean())
    _, number = np.unique(clusters, return_inverse=True)
    n_clusters = int(number.max()) + 1
    if n_clusters < 2:
        return Mean(mean, None)
    sums = np.bincount(number.reshape(-1), weights=values - mean, minlength=n_clusters)
    variance = n_clusters / (n_clusters - 1) * float(np.square(sums).sum()) / len(values) ** 2
    return Mean(mean, float(np.sqrt(variance)))


@dataclass(frozen=True)
class Numbers:
    """The five numbers of a text, or the paired differences of two readings of it under the same names.

    sigma_min_p5 is the 5th percentile (linear between ranks). ppl_ratio.se by the delta method: value * se of the
    mean of nll_ours - nll_teacher.
    """

    tokens: int
    documents: int
    same_top1: Mean
    sigma_min: Mean
    sigma_min_median: float
    sigma_min_p5: float
    kl: Mean
    ppl_ratio: Mean

    def to_json(self) -> dict[str, object]:
        """As `ds4 ruler` prints it."""
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "same_top1": {"mean": self.same_top1.value, "se": self.same_top1.se},
            "sigma_min": {
                "mean": self.sigma_min.value,
                "se": self.sigma_min.se,
                "median": self.sigma_min_median,
                "p5": self.sigma_min_p5,
            },
            "kl": {"mean": self.kl.value, "se": self.kl.se},
            "ppl_ratio": {"value": self.ppl_ratio.value, "se": self.ppl_ratio.se},
        }


def summarise(figures: F64, clusters: NDArray[np.int32] | I64) -> Numbers:
    """The numbers of f64 [5, n] (FIGURES) of positions in `clusters` [n].

    Given the difference of two readings of the same positions, the same: means are differences of means, paired by
    position; median and p5 are those of the differences; the PPL ratio is ours of the second over the first's.
    """
    same, sigma, kl, nll_teacher, nll_ours = figures
    excess = clustered_mean(nll_ours - nll_teacher, clusters)
    ratio = float(np.exp(excess.value))
    median, p5 = np.percentile(sigma, (50, 5))
    return Numbers(
        len(same), len(np.unique(clusters)), clustered_mean(same, clusters), clustered_mean(sigma, clusters),
        float(median), float(p5), clustered_mean(kl, clusters),
        Mean(ratio, None if excess.se is None else ratio * excess.se),
    )  # fmt: skip
