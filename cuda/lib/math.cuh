/* math.cuh - exp, log, sine and their relations by our own polynomials, sums of eight: the same bits everywhere.
 *
 * Built from +, *, fmaf, division and bit operations only, none of which either compiler may contract or reorder.
 * Polynomials are weighted minimax fits; relative error at most 4 ulp over the stated ranges (tests measure it).
 */
#pragma once
#include "base.cuh"

/// e^x. Overflows to infinity above 88.72, gradual underflow to zero; NaN stays NaN.
DEV float exp_f(float x) {
    if (x > 89.0f) x = 89.0f;
    if (x < -104.0f) x = -104.0f;
    const float n = (x * 0x1.715476p+0f + 0x1.8p+23f) - 0x1.8p+23f;  // to the nearest integer
    float r = fmaf(n, -0x1.62e43p-1f, x);                            // exact
    r = fmaf(n, 0x1.05c61p-29f, r);
    float q = fmaf(0x1.6dbc68p-10f, r, 0x1.124148p-7f);
    q = fmaf(q, r, 0x1.555454p-5f);
    q = fmaf(q, r, 0x1.555486p-3f);
    q = fmaf(q, r, 0.5f);
    const float p = fmaf(q * r, r, r) + 1.0f;
    const int i = (int)n, half = i >> 1;  // two factors, so that neither overflows nor is subnormal
    return p * __uint_as_float((u32)(half + 127) << 23) * __uint_as_float((u32)(i - half + 127) << 23);
}

/// Natural logarithm. log 0 = -inf, of a negative NaN.
DEV float log_f(float x) {
    if (!(x > 0.0f)) return x == 0.0f ? __uint_as_float(0xff800000u) : __uint_as_float(0x7fffffffu);
    u32 u = __float_as_uint(x);
    if (u >= 0x7f800000u) return x;
    int k = 0;
    if (u < 0x00800000u) {
        u = __float_as_uint(x * 0x1p25f);
        k = -25;
    }
    u += 0x3f800000u - 0x3f3504f3u;  // so that the mantissa ends in [sqrt(1/2), sqrt(2))
    k += (int)(u >> 23) - 127;
    const float f = __uint_as_float((u & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    const float s = f / (2.0f + f), z = s * s;
    float q = fmaf(0x1.e340bcp-3f, z, 0x1.2436fep-2f);
    q = fmaf(q, z, 0x1.999a82p-2f);
    q = fmaf(q, z, 0x1.555554p-1f);
    const float half_f2 = 0.5f * f * f, dk = (float)k;
    const float tail = fmaf(s, fmaf(z, q, half_f2), dk * 0x1.7f7d1cp-20f) - half_f2 + f;
    return fmaf(dk, 0x1.62e4p-1f, tail);
}

/// log(1 + x), accurate for small x: the rounding of 1 + x is divided out.
DEV float log1p_f(float x) {
    const float u = 1.0f + x;
    if (u == 1.0f) return x;
    if (!(u < 1e30f)) return log_f(u);
    return log_f(u) * (x / (u - 1.0f));
}

/// Sine and cosine. The reduction by pi/2 in three parts is exact enough for |angle| < 2^21.
DEV void sincos_f(float angle, float* sine, float* cosine) {
    const float n = fmaf(angle, 0x1.45f306p-1f, 0x1.8p+23f) - 0x1.8p+23f;
    float r = fmaf(n, -0x1.921fb6p+0f, angle);
    r = fmaf(n, 0x1.777a5cp-25f, r);
    r = fmaf(n, 0x1.ee59dap-50f, r);
    const float z = r * r;
    float p = fmaf(-0x1.9854f0p-13f, z, 0x1.110462p-7f);
    p = fmaf(p, z, -0x1.55553ep-3f);
    const float s = fmaf(r * z, p, r);
    float q = fmaf(0x1.99222ep-16f, z, -0x1.6c0964p-10f);
    q = fmaf(q, z, 0x1.555546p-5f);
    const float c = fmaf(z * z, q, fmaf(z, -0.5f, 1.0f));
    const u32 quadrant = (u32)(int)n;
    const float a = quadrant & 1u ? c : s, b = quadrant & 1u ? s : c;
    *sine = quadrant & 2u ? -a : a;
    *cosine = (quadrant + 1u) & 2u ? -b : b;
}
DEV void sincos_f(float angle, float& sine, float& cosine) { sincos_f(angle, &sine, &cosine); }

DEV float sigmoid_f(float x) { return 1.0f / (1.0f + exp_f(-x)); }
DEV float silu_f(float x) { return x * sigmoid_f(x); }
/// log(1 + e^x), linear above 20.
DEV float softplus_f(float x) { return x > 20.0f ? x : log1p_f(exp_f(x)); }

/// Eight running sums by position: eight registers on the GPU, one vector on the host.
DEV void fma8(float (&acc)[8], const float (&w)[8], const float (&x)[8]) {
#if !defined(__CUDACC__) && defined(__FMA__) && defined(__AVX__)
    typedef float F8 __attribute__((vector_size(32)));
    F8 a, b, c;
    memcpy(&a, w, 32);
    memcpy(&b, x, 32);
    memcpy(&c, acc, 32);
    c = __builtin_ia32_vfmaddps256(a, b, c);
    memcpy(acc, &c, 32);
#else
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int j = 0; j < 8; j++) acc[j] = fmaf(w[j], x[j], acc[j]);
#endif
}
DEV float sum8(const float (&a)[8]) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }
