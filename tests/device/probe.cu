/* probe.cu - small kernels for the tests of the device client.
 *
 *   scale        y[i] = x[i] * a
 *   widen        y[i] = x[i] + WIDTH     (a compile-time size)
 *   bump         n[0] += 1, o[i] = n[0]  (state that a replay changes)
 *   reverse      y[i] = x[N-1-i] through dynamic shared memory
 */
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128) scale(gptr<float> y, gptr<const float> x, int n, float a) {
    const int i = blockIdx.x * 128 + threadIdx.x;
    if (i < n) y[i] = x[i] * a;
}
EXPORT(scale)

extern "C" __global__ void __launch_bounds__(32) widen(gptr<i32> y, gptr<const i32> x) {
    const int i = threadIdx.x;
    y[i] = x[i] + WIDTH;
}
EXPORT(widen)

extern "C" __global__ void __launch_bounds__(32) bump(gptr<u32> n, gptr<u32> o, i64 at) {
    if (threadIdx.x == 0) {
        const u32 v = n[0] + 1;
        n[0] = v;
        o[at] = v;
    }
}
EXPORT(bump)

extern "C" __global__ void __launch_bounds__(128) reverse(gptr<float> y, gptr<const float> x, int n) {
    SMEM_DYN(float, s, 0);
    for (int i = threadIdx.x; i < n; i += 128) s[i] = x[i];
    sync_block();
    for (int i = threadIdx.x; i < n; i += 128) y[i] = s[n - 1 - i];
}
EXPORT(reverse)
