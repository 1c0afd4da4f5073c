"""q4_K: 256 weights in 144 bytes, w = d * sc * q - dmin * m in eight groups of 32. Our encoder, and a decoder.

block
    0     f16 d · f16 dmin
    4     12 bytes: eight 6-bit sc and eight 6-bit m (see `_pack_scales`)
    16    128 bytes of 4-bit q: byte 32 g + i holds element i of group 2g (low nibble) and 2g + 1 (high)

The encoder works on squared error alone, in float32 (sums of 32 terms), vectorised over groups: for each
group a scan of step sizes and shifts, each with its affine least-squares fit; then for the block a scan of
(d, dmin) pairs whose rounded scales cost little; from the best few of them a search of integer scales and a
refit of d and dmin; at last the neighbours of the best scales. Same input, same bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

BLOCK, GROUPS, WIDTH, BYTES = 256, 8, 32, 144
# Searches of one block: starting pairs (d, dmin), refits of the best, and how far scales move from a start.
# With these the error is within 1 % of an exhaustive search's on whole rows; more gains little.
STARTS, ROUNDS, RIDGE = 6, 1, 2
_CHUNK = 256  # blocks at a time: 64 K weights stay in cache


def decode(blocks: U8) -> F32:
    """u8 [n, 144] -> f32 [n, 256]; products rounded as `gguf.quants` does."""
    n = len(blocks)
    d = np.ascontiguousarray(blocks[:, 0:2]).view("<f2").astype(np.float32)
    dmin = np.ascontiguousarray(blocks[:, 2:4]).view("<f2").astype(np.float32)
    sc, m = _unpack_scales(blocks[:, 4:16])
    packed = blocks[:, 16:].reshape(n, 4, 1, 32)
    q = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(n, GROUPS, WIDTH)
    step, low = d * sc, dmin * m
    out: F32 = step[:, :, None] * q - low[:, :, None]
    return out.reshape(n, BLOCK)


def encode(x: F32) -> U8:
    """f32 [n, 256] -> u8 [n, 144]; every weight finite."""
    out = np.empty((len(x), BYTES), np.uint8)
    for i in range(0, len(x), _CHUNK):
        out[i : i + _CHUNK] = _encode_chunk(np.ascontiguousarray(x[i : i + _CHUNK], np.float32))
    return out


def _pack_scales(sc: U8, m: U8) -> U8:
    """6-bit u8 [n, 8] twice -> u8 [n, 12]: low six bits of the first four, nibbles and top bits of the rest."""
    out = np.empty((len(sc), 12), np.uint8)
    out[:, 0:4] = sc[:, :4] | ((sc[:, 4:] >> 4) << 6)
    out[:, 4:8] = m[:, :4] | ((m[:, 4:] >> 4) << 6)
    out[:, 8:12] = (sc[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)
    return out


def _unpack_scales(p: U8) -> tuple[U8, U8]:
    a, b, c = p[:, 0:4], p[:, 4:8], p[:, 8:12]
    sc = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1)
    m = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1)
    return sc, m


# ---- encoder; arrays are [32, s] (element, group) so that sums run over the outer axis ----

_SCAN = tuple(float(v) for v in np.linspace(-1.6, 1.0, 14))  # tried values of (steps over the range) - 15
_SHIFTS = tuple(np.float32(v) for v in (-0.3, 0, 0.3, 0.6))  # of the codes against the least value
_DIVISORS = tuple(float(v) for v in (63.4, 63, 62.5, 62, 61.5, 61, 60.5, 60, 59, 58, 57, 56, 54, 52, 50, 47, 44, 41))
_F16_MAX = np.float32(65504)


def _encode_chunk(x: F32) -> U8:
    n = len(x)
    x_t = np.ascontiguousarray(x.reshape(n * GROUPS, WIDTH).T)
    fit = _fit_groups(x_t)
    best = _Choice(x_t, n)
    for d, dmin in _scan_blocks(fit, n, STARTS):
        start = _Choice(x_t, n)
        start.offer(d, dmin, *_nearest_scales(fit, d, dmin, n))
        start.follow_ridge(fit.sq / np.float32(WIDTH), RIDGE)
        start.refit()
        best.offer(start.d, start.dmin, start.sc, start.m)
    for _ in range(ROUNDS):
        best.improve_scales()
        best.refit()
    best.improve_scales()
    return best.packed()


class _Fit:
    """Per group the affine fit x ~ a q - b (f32 [s]) and the sums of its codes."""

    def __init__(self, a: F32, b: F32, sq: F32, sqq: F32, sxq: F32, sx: F32) -> None:
        self.a, self.b, self.sq, self.sqq, self.sxq, self.sx = a, b, sq, sqq, sxq, sx


def _fit_groups(x: F32) -> _Fit:
    """Least squares over a scan of step sizes: codes q = round(k (x - min) / range), then a and b >= 0."""
    low = np.minimum(x.min(axis=0), 0)
    span = np.maximum(x.max(axis=0) - low, np.float32(1e-37))
    sx = x.sum(axis=0)
    shifted = x - low
    q = np.empty_like(x)
    best_score = np.full(x.shape[1], -np.inf, np.float32)
    best = np.zeros((5, x.shape[1]), np.float32)  # a, b, sq, sqq, sxq
    for extra in _SCAN:
        inverse = np.float32(15 + extra) / span
        for shift in _SHIFTS:
            np.multiply(shifted, inverse, out=q)
            np.add(q, shift, out=q)
            np.rint(q, out=q)
            np.clip(q, 0, 15, out=q)
            sq = q.sum(axis=0)
            sqq, sxq = np.einsum("is,is->s", q, q), np.einsum("is,is->s", x, q)
            det = np.maximum(WIDTH * sqq - sq * sq, np.float32(1e-9))
            a = (WIDTH * sxq - sx * sq) / det
            c = (sx - a * sq) / WIDTH
            above = c > 0  # an offset above zero cannot be stored
            a = np.where(above, sxq / np.maximum(sqq, 1), a)
            c = np.where(above, 0, c)
            score = a * (2 * sxq - a * sqq - 2 * c * sq) + c * (2 * sx - WIDTH * c)  # sum x^2 - error
            take = (score > best_score) & (a >= 0)
            best_score[take] = score[take]
            for slot, value in enumerate((a, -c, sq, sqq, sxq)):
                best[slot, take] = value[take]
    a, b, sq, sqq, sxq = best
    return _Fit(a, b, sq, sqq, sxq, sx)


def _half(v: F32) -> F32:
    """Rounded to f16, saturating, as float32."""
    return np.minimum(v, _F16_MAX).astype(np.float16).astype(np.float32)


def _ratio(v: F32, step: F32) -> F32:
    """round(v / step) in 0..63; 0 where the step is 0."""
    out = np.divide(v, step, out=np.zeros_like(v), where=step > 0)
    return np.clip(np.rint(out), 0, 63)


def _nearest_scales(fit: _Fit, d: F32, dmin: F32, n: int) -> tuple[F32, F32]:
    return (
        _ratio(fit.a.reshape(n, GROUPS), d[:, None]).reshape(-1),
        _ratio(fit.b.reshape(n, GROUPS), dmin[:, None]).reshape(-1),
    )


def _scan_blocks(fit: _Fit, n: int, starts: int) -> list[tuple[F32, F32]]:
    """The (d, dmin) of each block whose rounded scales cost least with the codes of the fit held fixed.

    The cost of moving a group from (a, b) to (a', b') is sqq da^2 - 2 sq da db + 32 db^2, exact for least squares.
    """
    shape = (n, GROUPS)
    a, b, sq, sqq = (v.reshape(shape) for v in (fit.a, fit.b, fit.sq, fit.sqq))
    top_a, top_b = a.max(axis=1), b.max(axis=1)
    moves_b = []
    for divisor in _DIVISORS:
        dmin = _half(top_b / np.float32(divisor))
        moves_b.append((dmin, _ratio(b, dmin[:, None]) * dmin[:, None] - b))
    best_cost = np.full((starts, n), np.inf, np.float32)
    best_d, best_dmin = np.zeros((starts, n), np.float32), np.zeros((starts, n), np.float32)
    for i, divisor in enumerate(_DIVISORS):
        slot = i * starts // len(_DIVISORS)
        d = _half(top_a / np.float32(divisor))
        da = _ratio(a, d[:, None]) * d[:, None] - a
        fixed = (sqq * da * da).sum(axis=1)
        cross = -2 * sq * da
        for dmin, db in moves_b:
            cost = fixed + (db * (cross + WIDTH * db)).sum(axis=1)
            take = cost < best_cost[slot]
            best_cost[slot, take], best_d[slot, take], best_dmin[slot, take] = cost[take], d[take], dmin[take]
    return list(zip(best_d, best_dmin, strict=True))


class _Choice:
    """The best (d, dmin, sc, m) found so far for every block, with its squared error."""

    def __init__(self, x: F32, n: int) -> None:
        self.x, self.n = x, n
        self.d, self.dmin = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.sc, self.m = np.zeros(n * GROUPS, np.float32), np.zeros(n * GROUPS, np.float32)
        self.error = np.full(n * GROUPS, np.inf, np.float32)
        self._q, self._u = np.empty_like(x), np.empty_like(x)
        self._sx, self._sxx = x.sum(axis=0), np.einsum("is,is->s", x, x)

    def codes(self, step: F32, low: F32) -> F32:
        """q f32 [32, s] = clip(round((x + low) / step), 0, 15), in a buffer that is reused."""
        self._scaled(step, low)
        np.rint(self._u, out=self._q)
        return np.clip(self._q, 0, 15, out=self._q)

    def group_error(self, step: F32, low: F32) -> F32:
        """f32 [s]: sum over the group of (x + low - step q)^2, computed in units of the step."""
        q = self.codes(step, low)
        np.subtract(self._u, q, out=self._u)
        error = step * step * np.einsum("is,is->s", self._u, self._u)
        out: F32 = np.where(step > 0, error, self._sxx + low * (2 * self._sx + WIDTH * low))
        return out

    def _scaled(self, step: F32, low: F32) -> None:
        inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
        np.add(self.x, low, out=self._u)
        np.multiply(self._u, inverse, out=self._u)

    def offer(self, d: F32, dmin: F32, sc: F32, m: F32) -> None:
        """Take what lowers a block's error."""
        error = self.group_error(sc * np.repeat(d, GROUPS), m * np.repeat(dmin, GROUPS))
        take = _block_sum(error, self.n) < _block_sum(self.error, self.n)
        groups = np.repeat(take, GROUPS)
        self.d[take], self.dmin[take] = d[take], dmin[take]
        self.sc[groups], self.m[groups], self.error[groups] = sc[groups], m[groups], error[groups]

    def follow_ridge(self, mean_q: F32, reach: int) -> None:
        """Try sc within `reach`, each with the three m that keep the group's centre where it is.

        A longer step lets the values drift apart from the middle of the codes: with sc + i the offset that
        fits is m + i d q / dmin, q the mean code. Along that line lie the minima that single steps miss.
        """
        d, dmin = np.repeat(self.d, GROUPS), np.repeat(self.dmin, GROUPS)
        slope = np.divide(d * mean_q, dmin, out=np.zeros_like(d), where=dmin > 0)
        sc0, m0 = self.sc.copy(), self.m.copy()
        for i in range(-reach, reach + 1):
            sc, centre = np.clip(sc0 + i, 0, 63), m0 + np.rint(i * slope)
            for j in (-1, 0, 1):
                self._try_scales(sc, np.clip(centre + j, 0, 63), d, dmin)

    def _try_scales(self, sc: F32, m: F32, d: F32, dmin: F32) -> None:
        error = self.group_error(sc * d, m * dmin)
        take = error < self.error
        self.sc[take], self.m[take], self.error[take] = sc[take], m[take], error[take]

    def improve_scales(self) -> None:
        """Try every (sc, m) next to the present ones, group by group."""
        d, dmin = np.repeat(self.d, GROUPS), np.repeat(self.dmin, GROUPS)
        sc0, m0 = self.sc.copy(), self.m.copy()
        for i in (-1, 0, 1):
            for j in (-1, 0, 1):
                if i or j:
                    self._try_scales(np.clip(sc0 + i, 0, 63), np.clip(m0 + j, 0, 63), d, dmin)

    def refit(self) -> None:
        """d and dmin by least squares with codes and integer scales held fixed; kept where it helps."""
        q = self.codes(self.sc * np.repeat(self.d, GROUPS), self.m * np.repeat(self.dmin, GROUPS))
        sq, sqq = q.sum(axis=0), np.einsum("is,is->s", q, q)
        sxq, sx = np.einsum("is,is->s", self.x, q), self._sx
        sc, m, n = self.sc, self.m, self.n
        p11, p12 = _block_sum(sc * sc * sqq, n), _block_sum(sc * m * sq, n)
        p22 = _block_sum(WIDTH * m * m, n)
        r1, r2 = _block_sum(sc * sxq, n), _block_sum(m * sx, n)
        # d p11 - dmin p12 = r1;  -d p12 + dmin p22 = -r2
        det = p11 * p22 - p12 * p12
        solvable = det > 1e-6 * p11 * p22
        safe = np.where(solvable, det, 1)
        d = np.where(solvable, (r1 * p22 - r2 * p12) / safe, r1 / np.maximum(p11, 1))
        dmin = np.where(solvable, (r1 * p12 - r2 * p11) / safe, 0)
        self.offer(_half(np.maximum(d, 0)), _half(np.maximum(dmin, 0)), sc.copy(), m.copy())

    def packed(self) -> U8:
        d, dmin = np.repeat(self.d, GROUPS), np.repeat(self.dmin, GROUPS)
        q = self.codes(self.sc * d, self.m * dmin).T.reshape(self.n, GROUPS, WIDTH).astype(np.uint8)
        out = np.empty((self.n, BYTES), np.uint8)
        out[:, 0:2] = self.d.astype("<f2").view(np.uint8).reshape(-1, 2)
        out[:, 2:4] = self.dmin.astype("<f2").view(np.uint8).reshape(-1, 2)
        sc, m = (v.reshape(self.n, GROUPS).astype(np.uint8) for v in (self.sc, self.m))
        out[:, 4:16] = _pack_scales(sc, m)
        out[:, 16:] = (q[:, 0::2] | (q[:, 1::2] << 4)).reshape(self.n, 128)
        return out


def _block_sum(v: F32, n: int) -> F32:
    out: F32 = v.reshape(n, GROUPS).sum(axis=1)
    return out
