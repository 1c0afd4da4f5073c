/* formats.cu - every conversion and function of common.cuh over arrays, for exhaustive comparison. */
#include "common.cuh"

#define OVER(NAME, TO, FROM, EXPRESSION)                                        \
    extern "C" __global__ void NAME(gptr<TO> out, gptr<const FROM> in, int n) { \
        const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;               \
        if (i < n) {                                                            \
            const FROM v = in[i];                                               \
            out[i] = EXPRESSION;                                                \
        }                                                                       \
    }                                                                           \
    EXPORT(NAME)

OVER(bf16_decode, float, u16, to_f32(bf16{v}))
OVER(bf16_encode, u16, float, from_f32<bf16>(v).v)
OVER(f16_decode, float, u16, f16_to_f32(f16{v}))
OVER(e4m3_decode, float, u8, e4m3_to_f32(v))
OVER(e4m3_encode, u8, float, f32_to_e4m3(v))
OVER(e2m1_decode, float, u8, e2m1_to_f32(v))
OVER(e2m1_encode, u8, float, (u8)f32_to_e2m1(v))
OVER(ue8m0_decode, float, u8, ue8m0_to_f32(v))
OVER(pow2_ceil, u32, float, pow2_ceil_exp(v))
OVER(exponential, float, float, exp_f(v))
OVER(logarithm, float, float, log_f(v))
OVER(logarithm1p, float, float, log1p_f(v))
OVER(sigmoid, float, float, sigmoid_f(v))
OVER(silu, float, float, silu_f(v))
OVER(softplus, float, float, softplus_f(v))

extern "C" __global__ void sine_cosine(gptr<float> sine, gptr<float> cosine, gptr<const float> in, int n) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    float s, c;
    sincos_f(i < n ? (float)in[i] : 0.0f, &s, &c);
    if (i < n) {
        sine[i] = s;
        cosine[i] = c;
    }
}
EXPORT(sine_cosine)

/// Eight at a time: the vector decoder against the scalar one, fma8 and sum8.
extern "C" __global__ void e4m3_eight(gptr<float> out, gptr<const u64> in, int n) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    float v[8];
    e4m3x8_to_f32(i < n ? (u64)in[i] : 0ull, v);
    for (int j = 0; j < 8 && i < n; j++) out[8 * i + j] = v[j];
}
EXPORT(e4m3_eight)

extern "C" __global__ void bf16_eight(gptr<float> out, gptr<const u16> in) {
    const i64 i = threadIdx.x;
    float v[8];
    bf16x8_to_f32(gld<uint4>(in, 8 * i), v);
    for (int j = 0; j < 8; j++) out[8 * i + j] = v[j];
}
EXPORT(bf16_eight)

extern "C" __global__ void dot_eights(gptr<float> out, gptr<const float> w, gptr<const float> x, int n) {
    float acc[8] = {};
    for (int i = 0; i < n; i += 8) {
        float a[8], b[8];
        for (int j = 0; j < 8; j++) {
            a[j] = w[i + j];
            b[j] = x[i + j];
        }
        fma8(acc, a, b);
    }
    if (threadIdx.x == 0) out[0] = sum8(acc);
}
EXPORT(dot_eights)

struct Tiles {
    sarr<bf16, 16 * 24> a;
    sarr<bf16, 8 * 24> b;
};

/// One m16n8k16 product: a [16,16] and b [8,16] row by row; trans: b is given as [16,8].
extern "C" __global__ void tile_product(gptr<float> out, gptr<const u16> a, gptr<const u16> b, int trans) {
    SMEM(Tiles, sm);
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) sm.a[i / 16 * 24 + i % 16] = bf16{a[i]};
    for (int i = lane; i < 128; i += 32) {
        if (trans)
            sm.b[i / 8 * 8 + i % 8] = bf16{b[i]};
        else
            sm.b[i / 16 * 24 + i % 16] = bf16{b[i]};
    }
    sync_warp();
    u32 fa[4], fb[4];
    ldmatrix_x4(fa, sm.a, (lane & 15) * 24 + (lane >> 4) * 8);
    if (trans)
        ldmatrix_x4_trans(fb, sm.b, (lane & 15) * 8);
    else
        ldmatrix_x4(fb, sm.b, (lane & 7) * 24 + (lane >> 3 & 1) * 8);
    float d[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    mma_bf16_16816(d, fa, fb[0], fb[1]);
    const int row = lane >> 2, column = 2 * (lane & 3);
    out[row * 8 + column] = d[0];
    out[row * 8 + column + 1] = d[1];
    out[(row + 8) * 8 + column] = d[2];
    out[(row + 8) * 8 + column + 1] = d[3];
}
EXPORT(tile_product)
