/* probe.cu - small kernels that exercise one thing each: what the driver's tests launch. */
#include "common.cuh"

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
    rms_norm(gptr<float> y, gptr<const float> x, gptr<const float> w, int width, float eps) {
    const i64 row = (i64)blockIdx.x * width;
    float sum_sq = 0.0f;
    for (int d = threadIdx.x; d < width; d += kThreads) sum_sq += x[row + d] * x[row + d];
    const float scale = 1.0f / sqrtf(block_sum<kThreads>(sum_sq) / width + eps);
    for (int d = threadIdx.x; d < width; d += kThreads) y[row + d] = x[row + d] * scale * w[d];
}
EXPORT(rms_norm)
