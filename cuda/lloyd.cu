/* lloyd.cu - training a codebook of eight-vectors: nearest codeword, and sums over the cells.
 *
 *   lloyd_assign  index[v] = the lowest k that maximises x_v . C_k - |C_k|^2 / 2   (the nearest codeword)
 *   lloyd_sums    sum[k,d] += trunc(x[v,d] * 2^30) as a 64-bit integer, count[k] += 1, for every v with index[v] = k
 *
 * Layout      x: f32 [n, 8]; book: f32 [N, 8]; half: f32 [N], |C_k|^2 / 2; index: u16 [n], N <= 65,536.
 *             low, high: u32 [N, 8], the two halves of the sums (high as two's complement); count: u32 [N]; all
 *             zero before the first launch.
 * Launch      grid ceil(n / 256), block 256: a thread owns one vector. Any n, N >= 1. |x| < 64 and n < 2^24 a launch
 *             series, so that no sum reaches 2^62.
 * Arithmetic  assign: f32, eight fused multiply-adds in column order, then - half. sums: integers: exact up to the
 *             truncation of each x at 2^-30, and independent of the order in which threads add.
 * Traffic     assign reads 32 n of x, 36 N of codewords a block, writes 2 n. sums: 34 n read, 17 atomic words a vector.
 * Why so      floating atomics would give other bits in every run; sorting the vectors by cell would move more bytes
 *             than the carry of an integer pair. Codewords pass through shared memory 1,024 at a time.
 */
#include "common.cuh"
#include "rows.cuh"

constexpr int kThreads = 256;
constexpr int kTile = 1024;

struct Smem {
    sarr<float, kTile * 8> book;
    sarr<float, kTile> half;
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    lloyd_assign(gptr<u16> index, gptr<const float> x, gptr<const float> book, gptr<const float> half, int n, int N) {
    SMEM(Smem, sm);
    const int t = threadIdx.x;
    const i64 v = (i64)blockIdx.x * kThreads + t;
    float value[8] = {};
    if (v < n) load8(x, v * 8, value);
    float best = 0.0f;
    int at = -1;
    for (int k0 = 0; k0 < N; k0 += kTile) {
        const int count = min(kTile, N - k0);
        for (int i = t; i < count * 2; i += kThreads)
            sst<float4>(sm.book, i * 4, gld<float4>(book, (i64)k0 * 8 + i * 4));
        for (int i = t; i < count; i += kThreads) sm.half[i] = half[k0 + i];
        sync_block();
        for (int k = 0; k < count; k++) {
            const float4 a = sld<float4>(sm.book, k * 8), b = sld<float4>(sm.book, k * 8 + 4);
            float s = value[0] * a.x;
            s = fmaf(value[1], a.y, s);
            s = fmaf(value[2], a.z, s);
            s = fmaf(value[3], a.w, s);
            s = fmaf(value[4], b.x, s);
            s = fmaf(value[5], b.y, s);
            s = fmaf(value[6], b.z, s);
            s = fmaf(value[7], b.w, s) - sm.half[k];
            if (at < 0 || s > best) best = s, at = k0 + k;
        }
        sync_block();
    }
    if (v < n) index[v] = (u16)at;
}
EXPORT(lloyd_assign)

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    lloyd_sums(gptr<u32> low, gptr<u32> high, gptr<u32> count, gptr<const float> x, gptr<const u16> index, int n) {
    const i64 v = (i64)blockIdx.x * kThreads + threadIdx.x;
    if (v >= n) return;  // no barrier in this kernel
    const int k = index[v];
    float value[8];
    load8(x, v * 8, value);
#pragma unroll
    for (int d = 0; d < 8; d++) {
        const i64 fixed = (i64)(value[d] * 0x1p30f);  // toward zero
        const u32 lo = (u32)fixed, hi = (u32)((u64)fixed >> 32);
        const u32 old = atomicAdd(low + ((i64)k * 8 + d), lo);
        const u32 carry = old + lo < old;
        if (hi + carry) atomicAdd(high + ((i64)k * 8 + d), hi + carry);
    }
    atomicAdd(count + k, 1u);
}
EXPORT(lloyd_sums)
