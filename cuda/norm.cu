/* norm.cu - RMSNorm over rows.
 *
 *   rms_norm     y[r,d] = x[r,d] * w[d] / sqrt(mean_d(x[r,d]^2) + eps)
 *
 * Layout      y, x: [R, D] f32 or bf16 (name: rms_norm_<x>_<y>), rows contiguous; w: f32 [D]. y may be x.
 * Launch      grid R, block 256: one block owns one row. Any R >= 1, any D >= 1.
 * Arithmetic  f32, one rounding to y's type. Column d is summed by thread d % 256 in rising d with fused
 *             multiply-adds, then lanes by xor-shuffle, then warps in rising order: a row's bits depend on nothing
 *             but the row.
 * Traffic     reads 2 R D elements of x (the second time just after the first) and 4 R D of w, writes R D of y.
 * Why so      a row of 5,120 floats is 20 KB: too short to share among blocks, and staging it in shared memory would
 *             save a read that the cache already serves. Launched ahead: w is in L2 when x is there.
 */
#include "common.cuh"

constexpr int kThreads = 256;

template <class X, class Y>
DEV void rms_norm(gptr<Y> y, gptr<const X> x, gptr<const float> w, int width, float eps) {
    const i64 row = (i64)blockIdx.x * width;  // 64-bit: R * D passes 2^31
    prefetch_all<kThreads>(w, width);
    grid_wait();
    grid_release();
    float sum_sq = 0.0f;
    for (int d = threadIdx.x; d < width; d += kThreads) {
        const float v = to_f32(x[row + d]);
        sum_sq = fmaf(v, v, sum_sq);
    }
    const float scale = 1.0f / sqrtf(block_sum<kThreads>(sum_sq) / (float)width + eps);
#pragma unroll 4  // w by the read-only path: loads of it need not wait for the stores to y
    for (int d = threadIdx.x; d < width; d += kThreads)
        y[row + d] = from_f32<Y>(to_f32(x[row + d]) * scale * gld_nc<float>(w, d));
}

#define NORM(name, X, Y)                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads)                            \
        name(gptr<Y> y, gptr<const X> x, gptr<const float> w, int width, float eps) { \
        rms_norm<X, Y>(y, x, w, width, eps);                                          \
    }                                                                                 \
    EXPORT(name)

NORM(rms_norm_f32_f32, float, float)
NORM(rms_norm_f32_bf16, float, bf16)
NORM(rms_norm_bf16_f32, bf16, float)
NORM(rms_norm_bf16_bf16, bf16, bf16)
