/* weights.cuh - the storage formats of dense weights as they lie on the device, and their decoding.
 *
 * A weight matrix [N, K] (K a multiple of 8) is two planes: codes and scales. One *pass* is 256 consecutive columns,
 * eight a lane; a *chunk* is as many passes as fill one 16-byte load a lane (f32: two loads). Inside a chunk the
 * eight columns of lane l in pass j, k = chunk + 256 j + 8 l, lie in l's own 16 bytes: so a warp asks for whole
 * 128-byte lines, and x is read at 8 consecutive columns a lane in every pass. What is left of a row after its whole
 * chunks lies pass by pass in plain order (`tail`).
 *
 *   FORMAT        code bytes of 8 columns   passes a chunk   scale plane
 *   0 f32         32 (two halves of 16)     1                -
 *   1 bf16        16                        1                -
 *   2 f16         16                        1                -
 *   3 q8_0        8                         2                f16 a 32 columns; row stride a multiple of 4 bytes
 *   4 q4_k        4                         4                16-byte heads of 256 columns, as in the file (head_at)
 *   5 fp4x32      4                         4                ue8m0 a 32 columns; row stride a multiple of 4 bytes
 *   6 fp8_32x32   8                         2                ue8m0 a 32x32 tile; row stride a multiple of 2 bytes
 *
 * The scales of one chunk are ordered so that a lane's passes are neighbours: scale of pass j, columns 32 g .. of it,
 * is element g * passes + j of the chunk. In q4_k the nibble of column i of eight is bits 4i .. 4i + 3.
 * ds4/engine/ops/placement.py writes this layout; decoded values are what the file's decoder gives, rounded once to f32.
 */
#pragma once
#include "rows.cuh"

enum Format { kF32 = 0, kBF16 = 1, kF16 = 2, kQ8 = 3, kQ4K = 4, kFP4 = 5, kFP8 = 6 };

DEV constexpr int passes_of(int f) { return f <= kF16 ? 1 : f == kQ8 || f == kFP8 ? 2 : 4; }
DEV constexpr int code_bytes_of(int f) { return f == kF32 ? 32 : f <= kF16 ? 16 : f == kQ8 || f == kFP8 ? 8 : 4; }

DEV constexpr i64 round_up(i64 n, i64 to) { return (n + to - 1) / to * to; }

/// Bytes of one row (FP8: of one row of tiles) of the scale plane.
template <int F>
DEV i64 scale_stride(int n_cols) {
    if constexpr (F == kQ8) return round_up((i64)(n_cols / 32) * 2, 4);
    if constexpr (F == kFP4) return round_up(n_cols / 32, 4);
    if constexpr (F == kFP8) return round_up((n_cols + 31) / 32, 2);
    return 0;
}

/// Where head b of row n of a q4_k matrix starts. Rows go in fours: the heads of their whole chunks row by row, then,
/// for each pass of the tail, the four rows' heads: so that a row of 1,280 columns asks for no half sectors of a chunk.
DEV i64 head_at(i64 n, int n_cols, int b) {
    const int whole = n_cols / 1024 * 4;
    const i64 four = n / 4 * (n_cols / 4);
    return four + (b < whole ? (n % 4) * whole * 16 + b * 16 : whole * 64 + (b - whole) * 64 + (n % 4) * 16);
}

/// (scale, minimum) number s of a q4_k head: 12 bytes of packed 6-bit pairs after the two f16 factors.
DEV void q4k_pair(uint4 head, int s, float& scale, float& low) {
    const u32 a = head.y, b = head.z, c = head.w;
    const int shift = 8 * (s & 3);
    const u32 q = s < 4 ? (a >> shift & 63u) : ((c >> shift & 15u) | (a >> shift >> 6 & 3u) << 4);
    const u32 m = s < 4 ? (b >> shift & 63u) : ((c >> shift >> 4 & 15u) | (b >> shift >> 6 & 3u) << 4);
    scale = f16_to_f32(f16{(u16)head.x}) * (float)q;
    low = f16_to_f32(f16{(u16)(head.x >> 16)}) * (float)m;
}

/// What one lane holds of one chunk, or of one tail pass (then as if it were pass 0), before decoding.
template <int F>
struct Raw {
    uint4 code, more;  // `more`: the second half (f32), the q4_k head
    u32 scale;
};

/// Lane `lane`'s part of chunk `chunk` of row n.
template <int F>
DEV void load_chunk(Raw<F>& r, gptr<const u8> codes, gptr<const u8> scales, i64 n, int n_cols, int chunk, int lane) {
    constexpr int P = passes_of(F);
    const i64 at = n * (n_cols / 8) * code_bytes_of(F) + (i64)chunk * P * 32 * code_bytes_of(F) + lane * 16;
    r.code = gld_nc<uint4>(codes, at);
    if constexpr (F == kF32) r.more = gld_nc<uint4>(codes, at + 512);
    if constexpr (F == kQ8) r.scale = gld_nc<u32>(scales, n * scale_stride<F>(n_cols) + chunk * 32 + (lane / 4) * 4);
    if constexpr (F == kQ4K) r.more = gld_nc<uint4>(scales, head_at(n, n_cols, chunk * 4 + lane / 8));
    if constexpr (F == kFP4) r.scale = gld_nc<u32>(scales, n * scale_stride<F>(n_cols) + chunk * 32 + (lane / 4) * 4);
    if constexpr (F == kFP8)
        r.scale = gld_nc<u16>(scales, n / 32 * scale_stride<F>(n_cols) + chunk * 16 + (lane / 4) * 2);
}

/// Lane `lane`'s part of the tail pass that starts at column k0 and has n_lanes lanes at work.
template <int F>
DEV void load_tail(Raw<F>& r, gptr<const u8> codes, gptr<const u8> scales, i64 n, int n_cols, int k0, int lane,
                   int n_lanes) {
    constexpr int B = code_bytes_of(F);
    const i64 at = n * (n_cols / 8) * B + (i64)(k0 / 8) * B + lane * (B < 16 ? B : 16);
    if constexpr (B >= 16) r.code = gld_nc<uint4>(codes, at);
    if constexpr (F == kF32) r.more = gld_nc<uint4>(codes, at + n_lanes * 16);
    if constexpr (B == 8) {
        const uint2 v = gld_nc<uint2>(codes, at);
        r.code.x = v.x, r.code.y = v.y;
    }
    if constexpr (B == 4) r.code.x = gld_nc<u32>(codes, at);
    const int g = k0 / 32 + lane / 4;
    if constexpr (F == kQ8) r.scale = gld_nc<u16>(scales, n * scale_stride<F>(n_cols) + g * 2);
    if constexpr (F == kQ4K) r.more = gld_nc<uint4>(scales, head_at(n, n_cols, k0 / 256));
    if constexpr (F == kFP4) r.scale = gld_nc<u8>(scales, n * scale_stride<F>(n_cols) + g);
    if constexpr (F == kFP8) r.scale = gld_nc<u8>(scales, n / 32 * scale_stride<F>(n_cols) + g);
}

// Integers to floats eight at a time. The host's twins go through one vector: eight scalar stores read back as one
// vector would wait for each other.
#ifdef __CUDACC__
/// Signed bytes of a, then of b.
DEV void i8x8_to_f32(u32 a, u32 b, float (&o)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        o[i] = (float)((i32)(a << (24 - 8 * i)) >> 24);
        o[i + 4] = (float)((i32)(b << (24 - 8 * i)) >> 24);
    }
}
/// Nibbles, the lowest first.
DEV void u4x8_to_f32(u32 v, float (&o)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) o[i] = (float)(v >> 4 * i & 15u);
}
#else
DEV void i8x8_to_f32(u32 a, u32 b, float (&o)[8]) {
    typedef i8 B8 __attribute__((vector_size(8)));
    typedef float F8 __attribute__((vector_size(32)));
    const F8 f = __builtin_convertvector(__builtin_bit_cast(B8, (u64)b << 32 | a), F8);
    memcpy(o, &f, sizeof o);
}
DEV void u4x8_to_f32(u32 v, float (&o)[8]) {
    typedef i32 I8 __attribute__((vector_size(32)));
    typedef float F8 __attribute__((vector_size(32)));
    typedef u32 U8 __attribute__((vector_size(32)));
    const U8 nibbles = (U8{v, v, v, v, v, v, v, v} >> U8{0, 4, 8, 12, 16, 20, 24, 28}) & 15u;
    const F8 f = __builtin_convertvector(__builtin_bit_cast(I8, nibbles), F8);
    memcpy(o, &f, sizeof o);
}
#endif

/// The eight values of pass j of codes c0, c1 (8-byte codes) or c0 (4-byte codes) with their scale bits or factors.
template <int F>
DEV void decode8(uint4 code, uint4 more, int j, u32 scale, float factor, float low, float (&w)[8]) {
    const u32 c[4] = {code.x, code.y, code.z, code.w};
    if constexpr (F == kF32) {
        const u32 d[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = __uint_as_float(c[i]), w[4 + i] = __uint_as_float(d[i]);
    }
    if constexpr (F == kBF16) bf16x8_to_f32(code, w);
    if constexpr (F == kF16) {
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = f16_to_f32(f16{(u16)(c[i / 2] >> 16 * (i & 1))});
    }
    if constexpr (F == kQ8) {
        i8x8_to_f32(c[2 * j], c[2 * j + 1], w);
        const float s = f16_to_f32(f16{(u16)scale});
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] *= s;
    }
    if constexpr (F == kQ4K) {
        u4x8_to_f32(c[j], w);
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = fmaf(factor, w[i], -low);
    }
    if constexpr (F == kFP4) {
        const float s = ue8m0_to_f32((u8)scale);
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = e2m1_to_f32(c[j] >> 4 * i & 15u) * s;
    }
    if constexpr (F == kFP8) {
        e4m3x8_to_f32((u64)c[2 * j + 1] << 32 | c[2 * j], w);
        const float s = ue8m0_to_f32((u8)scale);
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] *= s;
    }
}

/// Pass j of what a lane holds of a chunk. `factor` and `low` are q4_k's pair number lane & 7 of head `r.more`, which
/// the lane computed once: all lanes call, the pairs are handed round.
template <int F>
DEV void decode_pass(const Raw<F>& r, int j, int lane, float factor, float low, float (&w)[8]) {
    u32 scale = 0;
    if constexpr (F == kQ8) scale = r.scale >> 16 * j;
    if constexpr (F == kFP4 || F == kFP8) scale = r.scale >> 8 * j & 255u;
    if constexpr (F == kQ4K) {
        factor = shfl(factor, j * 8 + lane / 4);
        low = shfl(low, j * 8 + lane / 4);
    }
    decode8<F>(r.code, r.more, j, scale, factor, low, w);
}

/// What a lane holds of a tail pass.
template <int F>
DEV void decode_tail(const Raw<F>& r, int lane, float (&w)[8]) {
    float factor = 0.0f, low = 0.0f;
    if constexpr (F == kQ4K) q4k_pair(r.more, lane / 4, factor, low);
    decode8<F>(r.code, r.more, 0, r.scale, factor, low, w);
}

/// The bytes of eight columns, wherever they lie: for prefill tiles, which load now and decode a tile later.
template <int F>
struct Raw8 {
    uint4 code, more;  // `more`: as in Raw
    u32 scale;
};

/// Columns k .. k + 7 of row n, k a multiple of 8.
template <int F>
DEV void load_weight8(Raw8<F>& r, gptr<const u8> codes, gptr<const u8> scales, i64 n, int n_cols, int k) {
    constexpr int P = passes_of(F), B = code_bytes_of(F), C = 256 * P;
    const i64 row = n * (n_cols / 8) * B;
    const int whole = n_cols / C * C, chunk = k / C, in = k % C, j = in / 256, lane = in % 256 / 8;
    const bool tail = k >= whole;
    if constexpr (B == 32) {
        const int n_lanes = tail ? (n_cols - whole) / 8 : 32;
        r.code = gld_nc<uint4>(codes, row + (i64)chunk * 1024 + lane * 16);
        r.more = gld_nc<uint4>(codes, row + (i64)chunk * 1024 + lane * 16 + n_lanes * 16);
    } else {
        const i64 at = row + (tail ? (i64)(k / 8) * B : (i64)(chunk * P * 32 * B) + lane * 16 + j * B);
        if constexpr (B == 16) r.code = gld_nc<uint4>(codes, at);
        if constexpr (B == 8) {
            const uint2 v = gld_nc<uint2>(codes, at);
            r.code.x = v.x, r.code.y = v.y;
        }
        if constexpr (B == 4) r.code.x = gld_nc<u32>(codes, at);
    }
    const int g = tail ? k / 32 : chunk * 8 * P + lane / 4 * P + j;
    if constexpr (F == kQ8) r.scale = gld_nc<u16>(scales, n * scale_stride<F>(n_cols) + g * 2);
    if constexpr (F == kFP4) r.scale = gld_nc<u8>(scales, n * scale_stride<F>(n_cols) + g);
    if constexpr (F == kFP8) r.scale = gld_nc<u8>(scales, n / 32 * scale_stride<F>(n_cols) + g);
    if constexpr (F == kQ4K) r.more = gld_nc<uint4>(scales, head_at(n, n_cols, k / 256));
}

/// The same as values.
template <int F>
DEV void decode_weight8(const Raw8<F>& r, int k, float (&w)[8]) {
    float factor = 0.0f, low = 0.0f;
    if constexpr (F == kQ4K) q4k_pair(r.more, k % 256 / 32, factor, low);
    decode8<F>(r.code, r.more, 0, r.scale, factor, low, w);
}
