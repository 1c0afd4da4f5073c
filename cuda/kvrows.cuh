/* kvrows.cuh - the rows that the caches hold: how they are rounded, packed and read back.
 *
 * A lane owns 16 neighbouring channels: one block of Q4kv, half a block of Q8 or Q4idx, and whole rotation pairs.
 * So a row of up to 512 channels is one warp, a rotation never leaves its lane, and a block maximum needs at most
 * one shuffle. Bytes of a row, with n channels:
 *
 *   window (Q8)        n e4m3 codes, n/32 ue8m0 scales, padding to 16             512 -> 528
 *   compressed (Q4kv)  n/2 bytes of e2m1 pairs (even channel low), n/16 e4m3      512 -> 288
 *   index key (Q4idx)  n/2 bytes of e2m1 pairs, n/32 ue8m0 scales, padding to 4   128 -> 68
 *   kv f32             n floats
 *
 * Arithmetic  f32, in the order of the reference quantisers: v = amax * (1/448 or 1/6) or amax / 6; codes of the true
 *             quotient x / s, round to nearest, ties to the even code. The sign of zero is kept.
 */
#pragma once

constexpr int kLaneCh = 16;

DEV constexpr int window_row_bytes(int n) { return (n + n / 32 + 15) / 16 * 16; }
DEV constexpr int comp_row_bytes(int n) { return (n / 2 + n / 16 + 15) / 16 * 16; }
DEV constexpr int index_row_bytes(int n) { return (n / 2 + n / 32 + 3) / 4 * 4; }

DEV void load16(float (&v)[16], gptr<const float> p, i64 i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float4 f = gld<float4>(p, i + 4 * j);
        v[4 * j] = f.x, v[4 * j + 1] = f.y, v[4 * j + 2] = f.z, v[4 * j + 3] = f.w;
    }
}

DEV void load16(float (&v)[16], gptr<const bf16> p, i64 i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        float half[8];
        bf16x8_to_f32(gld<uint4>(p, i + 8 * j), half);
#pragma unroll
        for (int k = 0; k < 8; ++k) v[8 * j + k] = half[k];
    }
}

// A vector of n floats that a warp reads whole, in whole lines, into its lanes' 16 channels each; stage_floats(n)
// of shared memory a warp, four spare ones after sixteen against bank conflicts. All lanes call.
DEV constexpr int stage_floats(int n) { return n / 16 * 20; }

DEV void warp_load16(float (&v)[16], sptr<float> stage, gptr<const float> p, int n) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int at = 0; at < n; at += 128) {  // n is a constant where this is called: all loads are on their way at once
        const int i = at + lane * 4;
        if (i < n) sst<float4>(stage, i + i / 16 * 4, gld<float4>(p, i));
    }
    sync_warp();
    if (lane * kLaneCh >= n) return;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float4 f = sld<float4>(stage, lane * 20 + 4 * j);
        v[4 * j] = f.x, v[4 * j + 1] = f.y, v[4 * j + 2] = f.z, v[4 * j + 3] = f.w;
    }
}

DEV void store16(gptr<float> p, i64 i, const float (&v)[16]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) gst<float4>(p, i + 4 * j, float4{v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]});
}

DEV void store16(gptr<bf16> p, i64 i, const float (&v)[16]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        u32 w[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) w[k] = bf16_pair(v[8 * j + 2 * k], v[8 * j + 2 * k + 1]);
        gst<uint4>(p, i + 8 * j, uint4{w[0], w[1], w[2], w[3]});
    }
}

// Rotates the pairs among channels c0 .. c0 + 15 of a vector whose last `rope` of `width` channels turn by
// angle = float(pos) * freq, direction +1 or (inverse) -1.
DEV void rope16(float (&v)[16], int c0, int width, int rope, i32 pos, gptr<const float> freq, float direction) {
    const int first = width - rope;
    if (c0 + 16 <= first) return;
    float f[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // these loads in a loop of their own: the next has branches, and they would wait
        const int c = c0 + 2 * i - first;
        f[i] = c >= 0 && c < rope ? (float)freq[c / 2] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const int c = c0 + i - first;
        if (c >= 0 && c < rope) {
            float sine, cosine;
            sincos_f((float)pos * f[i / 2], sine, cosine);
            sine *= direction;
            const float re = v[i], im = v[i + 1];
            v[i] = re * cosine - im * sine;
            v[i + 1] = re * sine + im * cosine;
        }
    }
}

DEV float amax16(const float (&v)[16]) {
    float a = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) a = fmaxf(a, fabsf(v[i]));
    return a;
}

DEV float clamp_to(float x, float limit) { return fminf(fmaxf(x, -limit), limit); }

// Q8 of 16 channels of a block whose maximum is amax: codes in w, scale exponent byte returned.
DEV u32 q8_codes(uint4& w, const float (&v)[16], float amax) {
    const u32 e = pow2_ceil_exp(fmaxf(amax, 1e-4f) * (1.0f / 448.0f));
    const float s = ue8m0_to_f32((u8)e);
    u32 c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; ++i) c[i / 4] |= (u32)f32_to_e4m3(clamp_to(v[i] / s, 448.0f)) << (8 * (i % 4));
    w = uint4{c[0], c[1], c[2], c[3]};
    return e;
}

DEV uint2 e2m1_codes(const float (&v)[16], float s) {
    u32 c[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 16; ++i) c[i / 8] |= (u32)f32_to_e2m1(clamp_to(v[i] / s, 6.0f)) << (4 * (i % 8));
    return uint2{c[0], c[1]};
}

DEV u32 q4idx_exp(float amax) { return pow2_ceil_exp(fmaxf(amax, 6.0f * 0x1p-126f) * (1.0f / 6.0f)); }

DEV u32 q4kv_scale(float amax) { return f32_to_e4m3(fmaxf(amax, 6.0f * 0x1p-9f) / 6.0f); }

DEV void e4m3_decode16(float (&v)[16], const uint4& w, float s) {
    float lo[8], hi[8];
    e4m3x8_to_f32((u64)w.x | (u64)w.y << 32, lo);
    e4m3x8_to_f32((u64)w.z | (u64)w.w << 32, hi);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = lo[i] * s, v[8 + i] = hi[i] * s;
}

DEV void e2m1_decode16(float (&v)[16], const uint2& w, float s) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        v[i] = e2m1_to_f32(w.x >> (4 * i) & 15) * s;
        v[8 + i] = e2m1_to_f32(w.y >> (4 * i) & 15) * s;
    }
}
