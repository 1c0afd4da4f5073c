/* codes.cuh - the vector-quantised experts as they lie on the device.
 *
 * Eight rows of one matrix (an octet) by 256 columns (32 codes of 8 weights) are a block of 384 bytes, three lines:
 * word i of lane l is u32 32 i + l. The lane's three words are the 12-bit codes of rows 0..7 at its own column group,
 * one after the other: row i in bits 12 i .. 12 i + 11. A 13th bit, where the codebook has 8,192 codewords, is bit i
 * of byte 4 (l % 8) + l / 8 of the octet's 32-byte plane block: column group l of four consecutive prefill tiles in one
 * word. So a warp reads whole lines (whole sectors of the plane), a lane needs
 * no neighbour's bits, and its eight activations serve eight rows. Blocks of an octet follow each other, NB =
 * ceil(cols / 256) of them; then, in the gate-up stream, the same octet of the other matrix; then the next octet:
 *   gate-up   u32 [E, F/8, 2, NB, 96], u8 [E, F/8, 2, NB, 32], f32 gains [E, F/8, 2, 8]
 *   down      u32 [E, D/8, NB, 96],    u8 [E, D/8, NB, 32],    f32 gains [E, D]
 * A mounted sidecar's factors of the rows of down are as its file has them, codes and scales apart: u32 [E, D/8], an
 * octet's eight E2M1 codes a word, the first row lowest, and ue8m0 u8 [E, D/32]; they say how far a factor is from 1.
 * Codebook: 4,096 or 8,192 codewords of eight E4M3 bytes, zeros after the file's last: no code can point outside.
 */
#pragma once
#include "rows.cuh"

constexpr int kBlockWords = 96;

DEV int plane_byte(int lane) { return (lane & 7) * 4 + lane / 8; }

/// What a lane holds of one block of M matrices.
template <int M>
struct Codes {
    u32 w[M][3], high[M];
};

/// Block b of the octet whose first matrix starts at block `first`; matrices of an octet are n_blocks apart.
template <int M>
DEV void load_codes(Codes<M>& c, gptr<const u32> codes, gptr<const u8> plane, i64 first, int n_blocks, int b,
                    int lane) {
#pragma unroll
    for (int m = 0; m < M; m++) {
        const i64 at = first + (i64)m * n_blocks + b;
#pragma unroll
        for (int i = 0; i < 3; i++) c.w[m][i] = gld_nc<u32>(codes, at * kBlockWords + i * 32 + lane);
        c.high[m] = plane == nullptr ? 0u : (u32)gld_nc<u8>(plane, at * 32 + plane_byte(lane));
    }
}

/// The code of row i of the octet.
DEV u32 code_of(const u32 (&w)[3], u32 high, int i) {
    const int word = 12 * i / 32, bit = 12 * i % 32;
    u32 v = w[word] >> bit;
    if (bit > 20) v |= w[word < 2 ? word + 1 : 2] << (32 - bit);
    return (v & 4095u) | (high >> i & 1u) << 12;
}

/// Two mounted sidecars' factors of the rows of down, the domain's and post-training's; null where there is none.
struct Factors {
    gptr<const u32> domain;
    gptr<const u8> domain_scale;
    gptr<const u32> post;
    gptr<const u8> post_scale;
};

/// Times one sidecar's factors 1 + code * scale of rows i .. i + N - 1 of an octet; the product is exact, fused or not.
template <int N>
DEV void times_factors(float (&g)[N], gptr<const u32> codes, gptr<const u8> scales, i64 octet, int i) {
    const u32 code = gld_nc<u32>(codes, octet) >> 4 * i;
    const float scale = ue8m0_to_f32(gld_nc<u8>(scales, octet / 4));
#pragma unroll
    for (int n = 0; n < N; n++) g[n] *= 1.0f + e2m1_to_f32(code >> 4 * n & 15u) * scale;
}

/// Both sidecars' factors of rows i .. i + N - 1, 1 where nothing is mounted.
template <int N>
DEV void factors_of(float (&g)[N], const Factors& f, i64 octet, int i) {
#pragma unroll
    for (int n = 0; n < N; n++) g[n] = 1.0f;
    if (!(f.domain == nullptr)) times_factors(g, f.domain, f.domain_scale, octet, i);
    if (!(f.post == nullptr)) times_factors(g, f.post, f.post_scale, octet, i);
}

/// Start the copy of the codebook to shared memory; every thread of the block calls, waits for its own and meets.
template <int THREADS>
DEV void stage_codebook(sptr<u64> book, gptr<const u64> codebook, int n_codes) {
    for (int i = threadIdx.x * 2; i < n_codes; i += THREADS * 2) cp_async16(book, i, codebook, i);
    cp_async_commit();
}

/// Gate and up before their gains, the row's factors: clamped SwiGLU times the routing weight.
DEV float clamped_swiglu(float gate, float up, float limit) {
    return silu_f(fminf(gate, limit)) * fminf(fmaxf(up, -limit), limit);
}
