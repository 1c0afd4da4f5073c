/* ahead.cu - a kernel that is launched ahead, for the tests of the client: right, and wrong in each way.
 *
 *   ahead        y[i] = w[i] * x[i], kind 0
 *                kinds: 1 reads x before its wait, 2 writes y before it, 3 leaves without it, 4 lets the next kernel
 *                start before it, 5 reads x by the read-only path, 6 a last thread leaves without it, 7 prefetches x
 */
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(64)
    ahead(gptr<float> y, gptr<const float> w, gptr<const float> x, int n, int kind) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    if (kind == 3) return;
    if (kind == 6 && i >= n) return;
    prefetch_all<64>(w, n);
    const float factor = i < n ? (float)w[i] : 0.0f;
    float early = 0.0f;
    if (kind == 1 && i < n) early = x[i];
    if (kind == 2 && i < n) y[i] = 0.0f;
    if (kind == 4) grid_release();
    if (kind == 7) prefetch_all<64>(x, n);
    grid_wait();
    grid_release();
    if (i >= n) return;
    const float late = kind == 5 ? gld_nc<float>(x, i) : (float)x[i];
    y[i] = factor * (kind == 1 ? early : late);
}
EXPORT(ahead)
