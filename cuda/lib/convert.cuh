/* convert.cuh - storage formats to float32 and back: bf16, f16, e4m3, e2m1, ue8m0. The same bits on both sides.
 *
 * Decoders are exact. Encoders round to nearest, ties to the even code, and clamp to the largest finite value
 * (448, 6); from_f32<bf16> keeps infinities and makes one quiet NaN.
 */
#pragma once
#include "base.cuh"

DEV float to_f32(float v) { return v; }
DEV float to_f32(bf16 v) { return __uint_as_float((u32)v.v << 16); }
DEV float bf16_lo(u32 pair) { return __uint_as_float(pair << 16); }
DEV float bf16_hi(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

DEV bf16 f32_to_bf16(float f) {
#ifdef __CUDACC__
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));
    return bf16{bits};
#else
    const u32 u = __float_as_uint(f);
    const u32 rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return bf16{(u16)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded)};
#endif
}
template <class A>
DEV A from_f32(float v);
template <>
DEV float from_f32<float>(float v) {
    return v;
}
template <>
DEV bf16 from_f32<bf16>(float v) {
    return f32_to_bf16(v);
}
/// Two floats as a pair of bf16, the first in the low half.
DEV u32 bf16_pair(float lo, float hi) {
#ifdef __CUDACC__
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(hi), "f"(lo));
    return bits;
#else
    return (u32)f32_to_bf16(lo).v | (u32)f32_to_bf16(hi).v << 16;
#endif
}

#ifdef __CUDACC__
DEV float f16_bits_to_f32(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
#else
DEV float f16_bits_to_f32(u16 h) {
    const u32 magnitude = h & 0x7fffu;
    // 2^112 rebiases the exponent, and makes subnormals normal
    const float finite = __uint_as_float(magnitude << 13) * 0x1p112f;
    const float special = __uint_as_float(magnitude << 13 | 0x7f800000u);
    const float f = magnitude >= 0x7c00u ? special : finite;
    return __uint_as_float(__float_as_uint(f) | (u32)(h & 0x8000u) << 16);
}
#endif
DEV float f16_to_f32(f16 h) { return f16_bits_to_f32(h.v); }
DEV float f16_to_f32(u16 h) { return f16_bits_to_f32(h); }
DEV float to_f32(f16 v) { return f16_bits_to_f32(v.v); }

/// Eight bf16 of 16 bytes, in order.
DEV void bf16x8_to_f32(uint4 v, float (&out)[8]) {
#ifdef __CUDACC__
    const u32 q[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = bf16_lo(q[i]);
        out[2 * i + 1] = bf16_hi(q[i]);
    }
#else  // as one vector: eight scalar stores read back as one would stall
    typedef u16 H8 __attribute__((vector_size(16)));
    typedef u32 U8 __attribute__((vector_size(32)));
    const U8 bits = __builtin_convertvector(__builtin_bit_cast(H8, v), U8) << 16;
    memcpy(out, &bits, sizeof out);
#endif
}

#ifdef __CUDACC__
DEV void e4m3x2_to_f32(u16 v, float& lo, float& hi) {
    u32 h;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(v));
    lo = f16_bits_to_f32((u16)h);
    hi = f16_bits_to_f32((u16)(h >> 16));
}
DEV void e4m3x8_to_f32(u64 v, float (&out)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) e4m3x2_to_f32((u16)(v >> (16 * i)), out[2 * i], out[2 * i + 1]);
}
DEV float e4m3_to_f32(u8 v) {
    float lo, hi;
    e4m3x2_to_f32((u16)v, lo, hi);
    return lo;
}
DEV u8 f32_to_e4m3(float f) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(f));
    return (u8)pair;
}
#else
DEV float e4m3_to_f32(u8 v) {
    const u32 magnitude = v & 0x7fu;
    const float f = magnitude == 0x7fu ? __uint_as_float(0x7fffe000u) : __uint_as_float(magnitude << 20) * 0x1p120f;
    return __uint_as_float(__float_as_uint(f) | (u32)(v & 0x80u) << 24);
}
DEV void e4m3x8_to_f32(u64 v, float (&out)[8]) {
    typedef u8 B8 __attribute__((vector_size(8)));
    typedef u32 U8 __attribute__((vector_size(32)));
    typedef float F8 __attribute__((vector_size(32)));
    const U8 w = __builtin_convertvector(__builtin_bit_cast(B8, v), U8);
    const U8 magnitude = w & 0x7fu;
    const U8 is_nan = (U8)(magnitude == 0x7fu) & 0x7fffe000u;
    const U8 finite = __builtin_bit_cast(U8, __builtin_bit_cast(F8, magnitude << 20) * 0x1p120f);
    const U8 bits = finite | is_nan | (w & 0x80u) << 24;
    memcpy(out, &bits, sizeof out);
}
DEV u8 f32_to_e4m3(float f) {
    const u32 u = __float_as_uint(f), sign = u >> 24 & 0x80u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return 0x7fu;
    if (a >= 0x43e00000u) return (u8)(sign | 0x7eu);  // 448 and more
    u32 code;
    if (a < 0x3c800000u) {  // below 2^-6: steps of 2^-9; adding 2^14 leaves them in the last bits, rounded to even
        code = __float_as_uint(__uint_as_float(a) + 0x1p14f) - 0x46800000u;
    } else {
        code = ((a + 0x7ffffu + (a >> 20 & 1u)) >> 20) - (120u << 3);
    }
    return (u8)(sign | (code > 0x7eu ? 0x7eu : code));
}
#endif

/// Code 0..15: sign, then 0 0.5 1 1.5 2 3 4 6.
DEV float e2m1_to_f32(u32 code) {
    const u32 m = code & 7u;
    const u32 bits = m == 0u ? 0u : m == 1u ? 0x3f000000u : (m << 22) + (126u << 23);
    return __uint_as_float(bits | (code & 8u) << 28);
}
DEV u32 f32_to_e2m1(float f) {
    const u32 u = __float_as_uint(f);
    const float a = __uint_as_float(u & 0x7fffffffu);
    // one step up at each midpoint; a tie goes to the even code
    u32 m = (u32)(a > 0.25f) + (u32)(a >= 0.75f) + (u32)(a > 1.25f) + (u32)(a >= 1.75f);
    m += (u32)(a > 2.5f) + (u32)(a >= 3.5f) + (u32)(a > 5.0f);
    return m | (u >> 28 & 8u);
}
/// 2^(code - 127); 0 is the subnormal 2^-127, 255 is NaN.
DEV float ue8m0_to_f32(u8 code) {
    const u32 bits = code == 0 ? 0x00400000u : code == 255 ? 0x7fffffffu : (u32)code << 23;
    return __uint_as_float(bits);
}
/// The ue8m0 code of 2^ceil(log2 v): the exponent field, one more if any mantissa bit is set. v positive, finite.
DEV u32 pow2_ceil_exp(float v) {
    const u32 u = __float_as_uint(v);
    return (u >> 23 & 0xffu) + (u32)((u & 0x7fffffu) != 0u);
}
