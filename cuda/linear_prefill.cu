/* linear_prefill.cu - y = x W^T for many rows of bf16 activations, on tensor cores. Compiled once a FORMAT.
 *
 *   linear_prefill  y[r,n] = sum_k x[r, g(n) K + k] bf16(w[n,k]),   g(n) = n / (N / groups)
 *
 * Layout      w: codes and scales as weights.cuh says. x: bf16 [R, groups K], y: B [R, N], rows contiguous.
 * Launch      grid (ceil(N / groups / 64), ceil(R / 128), groups), block 256: a block owns 128 x 64 of y, a warp
 *             32 x 32. Any R, N >= 1; K a multiple of 8 (32 or 256 as the format needs). f32 activations go through
 *             linear_step's *_rows kernel instead: plain fused multiply-adds.
 * Arithmetic  Weights are decoded to f32 and rounded to bf16 (exact for bf16, fp4x32, fp8_32x32). A slice of 16
 *             columns is one mma from zero, added to y's element by a separate f32 add: the tensor core's own long
 *             accumulation drops low bits. Slices in the order of `column`, which depends on format and K only: a
 *             row's bits do not depend on R, nor on where in a tile the row is.
 * Traffic     reads codes and scales once a 128 rows of x, x once a 64 columns of y; writes R N elements.
 * Why so      the columns of a tile are those of whole sectors of the chunk layout, so the order of slices is
 *             permuted and no byte is asked for twice. One barrier a tile: x by cp.async and the next tile's codes
 *             travel while this one is multiplied.
 */
#include "common.cuh"
#include "weights.cuh"

constexpr int F = FORMAT;
constexpr int P = passes_of(F), C = 256 * P, Q = 8 / P;
constexpr int kM = 128, kN = 64, kK = 64, kThreads = 256;
constexpr int kPitch = kK + 8;  // 144 bytes: eight rows of an ldmatrix fall on different banks

struct Smem {
    sarr<bf16, 2 * kM * kPitch> x;
    sarr<bf16, 2 * kN * kPitch> w;
};

/// Column of octet o of tile t; K or more where the row has ended.
DEV int column(int K, int t, int o) {
    const int n_whole = K / C, t_whole = n_whole * (C / kK);
    if (t >= t_whole) return n_whole * C + (t - t_whole) * kK + o * 8;
    const int chunk = t / (C / kK), in = t % (C / kK);
    return chunk * C + o / Q * 256 + in * (Q * 8) + o % Q * 8;
}

DEV uint4 pack8(const float (&w)[8]) {
    return make_uint4(bf16_pair(w[0], w[1]), bf16_pair(w[2], w[3]), bf16_pair(w[4], w[5]), bf16_pair(w[6], w[7]));
}

template <class B>
DEV void store2(gptr<B> y, i64 at, float a, float b, bool second, bool paired) {
    if (!paired) {
        y[at] = from_f32<B>(a);
        if (second) y[at + 1] = from_f32<B>(b);
    } else if constexpr (is_same<B, float>) {
        gst<float2>(y, at, make_float2(a, b));
    } else {
        gst<u32>(y, at, bf16_pair(a, b));
    }
}

template <class B>
DEV void linear_prefill(gptr<B> y, gptr<const u8> codes, gptr<const u8> scales, gptr<const bf16> x, int R, int N,
                        int K, int groups) {
    SMEM(Smem, sm);
    const int t = threadIdx.x, lane = t & 31, warp = t / 32;
    const int per_group = N / groups, n0 = blockIdx.x * kN, m0 = blockIdx.y * kM;
    const i64 first_row = (i64)blockIdx.z * per_group, x_stride = (i64)groups * K;
    const int n_tiles = K / C * (C / kK) + (K % C + kK - 1) / kK;
    const int o = t & 7, m_warp = warp / 2 * 32, n_warp = warp % 2 * 32;
    x += (i64)blockIdx.z * K;

    constexpr int kEach = kN * 8 / kThreads;
    Raw8<F> held[kEach] = {};  // decoded only when the tile before has been multiplied
    auto fetch_x = [&](int tile) {
        const int k = column(K, tile, o), stage = (tile & 1) * kM * kPitch;
        for (int i = 0; i < kM * 8 / kThreads; i++) {
            const int m = (t + i * kThreads) / 8;
            if (m0 + m >= R) break;  // rows beyond R are never multiplied
            if (k < K) {
                cp_async16(sm.x, stage + m * kPitch + o * 8, x, min(m0 + m, R - 1) * x_stride + k);
            } else {
                sst<uint4>(sm.x, stage + m * kPitch + o * 8, make_uint4(0, 0, 0, 0));
            }
        }
        cp_async_commit();
    };
    auto fetch_w = [&](int tile) {
        const int k = column(K, tile, o);
#pragma unroll
        for (int i = 0; i < kEach; i++) {
            const int n = n0 + (t + i * kThreads) / 8;
            if (k < K && n < per_group) load_weight8<F>(held[i], codes, scales, first_row + n, K, k);
        }
    };
    auto store_w = [&](int tile) {
        const int k = column(K, tile, o);
#pragma unroll
        for (int i = 0; i < kEach; i++) {
            const int n = (t + i * kThreads) / 8;
            float w[8] = {};
            if (k < K && n0 + n < per_group) decode_weight8<F>(held[i], k, w);
            sst<uint4>(sm.w, (tile & 1) * kN * kPitch + n * kPitch + o * 8, pack8(w));
        }
    };

    float acc[2][4][4] = {};
    fetch_x(0);
    fetch_w(0);
    store_w(0);
    for (int tile = 0; tile < n_tiles; tile++) {
        cp_async_wait<0>();
        sync_block();
        if (tile + 1 < n_tiles) {
            fetch_x(tile + 1);
            fetch_w(tile + 1);
        }
        const int xs = (tile & 1) * kM * kPitch, ws = (tile & 1) * kN * kPitch;
        if (m0 + m_warp < R && n0 + n_warp < per_group) {
#pragma unroll
            for (int s = 0; s < kK; s += 16) {
                u32 b[2][4];
#pragma unroll
                for (int p = 0; p < 2; p++) {
                    const int n = n_warp + p * 16 + (lane & 7) + lane / 16 * 8;
                    ldmatrix_x4(b[p], sm.w, ws + n * kPitch + s + (lane / 8 & 1) * 8);
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (m0 + m_warp + i * 16 >= R) break;
                    u32 a[4];
                    ldmatrix_x4(a, sm.x, xs + (m_warp + i * 16 + (lane & 15)) * kPitch + s + lane / 16 * 8);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                        mma_bf16_16816(d, a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
#pragma unroll
                        for (int e = 0; e < 4; e++) acc[i][j][e] += d[e];
                    }
                }
            }
        }
        if (tile + 1 < n_tiles) store_w(tile + 1);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int m = m0 + m_warp + i * 16 + h * 8 + lane / 4, n = n0 + n_warp + j * 8 + lane % 4 * 2;
                if (m < R && n < per_group)
                    store2<B>(y, (i64)m * N + first_row + n, acc[i][j][2 * h], acc[i][j][2 * h + 1],
                              n + 1 < per_group, N % 2 == 0 && per_group % 2 == 0);
            }
        }
    }
}

#define PREFILL_(format, suffix, B)                                                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                       \
        linear_prefill_##format##suffix(gptr<B> y, gptr<const u8> codes, gptr<const u8> scales, gptr<const bf16> x, \
                                        int R, int N, int K, int groups) {                                          \
        linear_prefill<B>(y, codes, scales, x, R, N, K, groups);                                                    \
    }                                                                                                               \
    EXPORT(linear_prefill_##format##suffix)
#define PREFILL(format, ...) PREFILL_(format, __VA_ARGS__)

PREFILL(NAME, _bf16_bf16, bf16)
PREFILL(NAME, _bf16_f32, float)
