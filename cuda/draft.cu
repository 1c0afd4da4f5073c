/* draft.cu - around the draft stages (dspark.md 3, 6): what they read of the backbone, and the pass from draft to draft.
 *
 *   draft_tap_*       y[r, first + d] = (sum_c x[r,c,d]) / S
 *   draft_bias        logits[v] += bias[v]
 *   draft_argmax      token = the lowest v whose logits[v] is the largest; NaN below every number
 *   draft_confidence  conf[i] = sum_d w[d] x_i[d] + sum_k w[D + k] e[i,k],   x_i[d] = sum_c pre[i,c] x[i,c,d]
 *
 * Layout      x: f32 [R, S, D], S = HC compiled in; y: A [R, W], a target layer's D columns from `first` on; logits, bias:
 *             f32 [V]; token: i32 [1]; conf: f32 [B]; w: f32 [D + K]; pre: f32 [B, S]; e: f32 [B, K].
 * Launch      draft_tap: grid (ceil(D / 256), R), block 256, a thread a column. draft_bias: grid ceil(V / 1024), block 256,
 *             four strided elements a thread. draft_argmax: one block of 1,024. draft_confidence: grid B, block 256.
 * Arithmetic  f32, one rounding to A. Streams in rising order, then the quotient. A confidence is summed by thread i % 256
 *             over the D + K terms in rising order, lanes by xor-shuffle, warps in rising order. The argmax compares
 *             integers: nothing depends on the order of threads, and the token is always below V.
 * Traffic     draft_tap reads 4 R S D, writes A R D. draft_bias reads 8 V, writes 4 V. draft_argmax reads 4 V.
 *             draft_confidence reads 4 B (S D + D + 2 K), and pre once a warp, 32 B S.
 * Why so      a draft's token decides which row of the Markov table biases the next one, so the pass is a chain of short
 *             launches over logits that L2 holds. Adding and choosing are two launches because a draft may also be drawn.
 */
#include "common.cuh"

constexpr int S = HC;
constexpr int kThreads = 256;
constexpr int kEach = 4;  // elements a thread of draft_bias
constexpr int kPickThreads = 1024;
constexpr int kAhead = 8;  // loads on their way in draft_argmax

template <class A>
DEV void tap(gptr<A> y, gptr<const float> x, int width, int stride, int first) {
    const i64 row = blockIdx.y;
    const int d = blockIdx.x * kThreads + threadIdx.x;
    if (d >= width) return;
    float sum = x[row * S * width + d];
#pragma unroll
    for (int c = 1; c < S; c++) sum += x[(row * S + c) * width + d];
    y[row * stride + first + d] = from_f32<A>(sum / (float)S);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    draft_tap_f32(gptr<float> y, gptr<const float> x, int width, int stride, int first) {
    tap<float>(y, x, width, stride, first);
}
EXPORT(draft_tap_f32)

extern "C" __global__ void __launch_bounds__(kThreads)
    draft_tap_bf16(gptr<bf16> y, gptr<const float> x, int width, int stride, int first) {
    tap<bf16>(y, x, width, stride, first);
}
EXPORT(draft_tap_bf16)

extern "C" __global__ void __launch_bounds__(kThreads)
    draft_bias(gptr<float> logits, gptr<const float> bias, int vocab) {
    const int v0 = blockIdx.x * kThreads * kEach + threadIdx.x;
    float sum[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {  // all loads before the first store: it might change what they read
        const int v = v0 + i * kThreads;
        sum[i] = v < vocab ? logits[v] + bias[v] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kEach; i++) {
        const int v = v0 + i * kThreads;
        if (v < vocab) logits[v] = sum[i];
    }
}
EXPORT(draft_bias)

/// A float as an unsigned number of the same order; the zeros are one, NaN is 0.
DEV u32 ordered(float f) {
    const u32 u = __float_as_uint(f + 0.0f);
    if (!(f == f)) return 0u;
    return u >> 31 ? ~u : u | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(kPickThreads)
    draft_argmax(gptr<i32> token, gptr<const float> logits, int vocab) {
    u32 best = 0, at = 0xffffffffu;
    for (int v0 = threadIdx.x; v0 < vocab; v0 += kPickThreads * kAhead) {
        float x[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const int v = v0 + i * kPickThreads;
            x[i] = v < vocab ? (float)logits[v] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const u32 v = (u32)(v0 + i * kPickThreads), key = ordered(x[i]);
            if (v < (u32)vocab && (key > best || at == 0xffffffffu)) best = key, at = v;  // v rises: the lowest stays
        }
    }
    const u32 top = block_max<kPickThreads>(best);
    const u32 lowest = block_max<kPickThreads>(best == top ? ~at : 0u);
    if (threadIdx.x == 0) token[0] = (i32)~lowest;
}
EXPORT(draft_argmax)

extern "C" __global__ void __launch_bounds__(kThreads)
    draft_confidence(gptr<float> conf, gptr<const float> w, gptr<const float> x, gptr<const float> pre,
                     gptr<const float> e, int width, int rank) {
    const i64 row = blockIdx.x;
    prefetch_all<kThreads>(w, width + rank);
    grid_wait();
    grid_release();
    float p[S];
#pragma unroll
    for (int c = 0; c < S; c++) p[c] = pre[row * S + c];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width + rank; i += kThreads) {
        float v;
        if (i < width) {
            v = p[0] * x[row * S * width + i];
#pragma unroll
            for (int c = 1; c < S; c++) v = fmaf(p[c], x[(row * S + c) * width + i], v);
        } else {
            v = e[row * rank + i - width];
        }
        sum = fmaf(w[i], v, sum);
    }
    sum = block_sum<kThreads>(sum);
    if (threadIdx.x == 0) conf[row] = sum;
}
EXPORT(draft_confidence)
