/* linear_step.cu - y = x W^T for one to eight rows, straight from a stored format. Compiled once a FORMAT.
 *
 *   linear_step  y[r,n] = sum_k x[r, g(n) K + k] w[n,k],   g(n) = n / (N / groups)
 *
 * Layout      w: codes and scales as weights.cuh says. x: A [R, groups K], y: B [R, N], rows contiguous.
 * Launch      *_one: R = 1; *_rows: any R, eight a grid.y. Block 128. Plain: a warp owns PAIR rows of w (one: 2,
 *             rows: 1), grid.x ceil(N / (4 PAIR)). split = 1, for matrices too short to fill the device: a block
 *             owns a row and its warps share the row's chunks. split depends on N and K only.
 *             K a multiple of 8 (32 or 256 as the format needs); N / groups even when groups > 1.
 * Arithmetic  f32. Eight running sums a lane, by column modulo 8, over whole chunks in rising order, then the tail;
 *             (0+4)+(2+6) + (1+5)+(3+7), then lanes by xor-shuffle; split: then warps in rising order (warp i had
 *             chunks i, i+4, ...). Each of them a fused multiply-add. One row gives the same bits whatever R is, in
 *             both kernels: products of one row never meet another's.
 * Traffic     reads codes once, N K code bytes / 8; scales once a row of w (FP8: tiles once a row or pair); x once a
 *             warp (split: once a block), R K elements; writes R N elements.
 * Why so      the weights are three fifths of a token's bytes and each is used R times: no staging, no barrier,
 *             the next chunk's load in flight while this one is decoded. x comes from the first-level cache: the
 *             layout of weights.cuh lets a warp read it whole lines at a time. Launched ahead: the first chunk's
 *             weights are on their way while the launch that makes x still runs.
 */
#include "common.cuh"
#include "weights.cuh"

constexpr int F = FORMAT;
constexpr int P = passes_of(F), C = 256 * P;
constexpr int kWarps = 4;

/// PAIR rows of w from n0 against up to MAX rows of x; x is already at its group.
template <int PAIR, int MAX, class A>
DEV void dot_rows(float (&sum)[PAIR][MAX], gptr<const u8> codes, gptr<const u8> scales, gptr<const A> x, i64 x_stride,
                  int n0, int N, int K, int R, int first, int step, int lane) {
    if constexpr (MAX == 1) R = 1;  // known, so no branch stands between a load of x and those of the pass before
    float acc[PAIR][MAX][8] = {};
    const int n_chunks = K / C;
    Raw<F> now[PAIR] = {}, next[PAIR] = {};
    if (first < n_chunks) {
#pragma unroll
        for (int i = 0; i < PAIR; i++) load_chunk<F>(now[i], codes, scales, min(n0 + i, N - 1), K, first, lane);
    }
    grid_wait();
    grid_release();
    for (int c = first; c < n_chunks; c += step) {
        if (c + step < n_chunks) {
#pragma unroll
            for (int i = 0; i < PAIR; i++)
                load_chunk<F>(next[i], codes, scales, min(n0 + i, N - 1), K, c + step, lane);
        }
        float factor[PAIR] = {}, low[PAIR] = {};
        if constexpr (F == kQ4K) {
#pragma unroll
            for (int i = 0; i < PAIR; i++) q4k_pair(now[i].more, lane & 7, factor[i], low[i]);
        }
#pragma unroll
        for (int j = 0; j < P; j++) {
            float w[PAIR][8];
#pragma unroll
            for (int i = 0; i < PAIR; i++) decode_pass<F>(now[i], j, lane, factor[i], low[i], w[i]);
#pragma unroll
            for (int r = 0; r < MAX; r++) {
                if (r >= R) break;
                float v[8];
                load8(x, r * x_stride + c * C + j * 256 + lane * 8, v);
#pragma unroll
                for (int i = 0; i < PAIR; i++) fma8(acc[i][r], w[i], v);
            }
        }
#pragma unroll
        for (int i = 0; i < PAIR; i++) now[i] = next[i];
    }
    int turn = n_chunks;  // the tail's passes go on where the chunks stopped
    for (int k0 = n_chunks * C; k0 < K; k0 += 256, turn++) {
        if (step > 1 && turn % step != first) continue;
        const int n_lanes = min(32, (K - k0) / 8);
        if (lane >= n_lanes) continue;
        float w[PAIR][8];
#pragma unroll
        for (int i = 0; i < PAIR; i++) {
            load_tail<F>(now[i], codes, scales, min(n0 + i, N - 1), K, k0, lane, n_lanes);
            decode_tail<F>(now[i], lane, w[i]);
        }
#pragma unroll
        for (int r = 0; r < MAX; r++) {
            if (r >= R) break;
            float v[8];
            load8(x, r * x_stride + k0 + lane * 8, v);
#pragma unroll
            for (int i = 0; i < PAIR; i++) fma8(acc[i][r], w[i], v);
        }
    }
    constexpr int kAtOnce = MAX < 4 ? MAX : 4;
#pragma unroll
    for (int r0 = 0; r0 < MAX; r0 += kAtOnce) {
        if (r0 >= R) break;
        float v[kAtOnce * PAIR];
#pragma unroll
        for (int r = 0; r < kAtOnce; r++) {
#pragma unroll
            for (int i = 0; i < PAIR; i++) v[r * PAIR + i] = sum8(acc[i][r0 + r]);
        }
        warp_sums(v);
#pragma unroll
        for (int r = 0; r < kAtOnce; r++) {
#pragma unroll
            for (int i = 0; i < PAIR; i++) sum[i][r0 + r] = v[r * PAIR + i];
        }
    }
}

template <int PAIR, int MAX, class A, class B>
DEV void linear_step(gptr<B> y, gptr<const u8> codes, gptr<const u8> scales, gptr<const A> x, int R, int N, int K,
                     int groups, int split) {
    struct Smem {
        sarr<float, kWarps * MAX> part;
    };
    SMEM(Smem, sm);
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const i64 x_stride = (i64)groups * K, r0 = (i64)blockIdx.y * MAX;
    const int rows = min((int)(R - r0), MAX);
    if (split) {  // one value for the whole launch
        const int n = blockIdx.x;
        float sum[1][MAX];
        dot_rows<1, MAX, A>(sum, codes, scales, x + (r0 * x_stride + (i64)(n / (N / groups)) * K), x_stride, n, N, K,
                            rows, warp, kWarps, lane);
#pragma unroll
        for (int r = 0; r < MAX; r++) {
            if (r < rows && lane == r) sm.part[warp * MAX + r] = sum[0][r];
        }
        sync_block();
        if (warp == 0 && lane < rows) {
            float total = sm.part[lane];
            for (int i = 1; i < kWarps; i++) total += sm.part[i * MAX + lane];
            y[(r0 + lane) * N + n] = from_f32<B>(total);
        }
        return;
    }
    const int n0 = (blockIdx.x * kWarps + warp) * PAIR;
    if (n0 >= N) {  // no barrier on this path
        grid_wait();
        return;
    }
    float sum[PAIR][MAX];
    dot_rows<PAIR, MAX, A>(sum, codes, scales, x + (r0 * x_stride + (i64)(n0 / (N / groups)) * K), x_stride, n0, N, K,
                           rows, 0, 1, lane);
#pragma unroll
    for (int r = 0; r < MAX; r++) {
#pragma unroll
        for (int i = 0; i < PAIR; i++) {
            if (r < rows && lane == r * PAIR + i && n0 + i < N) y[(r0 + r) * N + n0 + i] = from_f32<B>(sum[i][r]);
        }
    }
}

// four blocks a multiprocessor: 116 registers do, and loads of x would else be hoisted into 168. q4_k's heads would spill
// then: three
constexpr int kBlocks = F == kQ4K ? 3 : 4;
#define STEP_(format, suffix, PAIR, MAX, A, B)                                                                       \
    extern "C" __global__ void __launch_bounds__(128, MAX == 1 && sizeof(A) == 2 ? kBlocks : 1)                      \
        linear_step_##format##suffix(gptr<B> y, gptr<const u8> codes, gptr<const u8> scales, gptr<const A> x, int R, \
                                     int N, int K, int groups, int split) {                                          \
        linear_step<PAIR, MAX, A, B>(y, codes, scales, x, R, N, K, groups, split);                                   \
    }                                                                                                                \
    EXPORT(linear_step_##format##suffix)
#define STEP(format, ...) STEP_(format, __VA_ARGS__)

STEP(NAME, _bf16_bf16_one, 2, 1, bf16, bf16)
STEP(NAME, _bf16_f32_one, 2, 1, bf16, float)
STEP(NAME, _f32_f32_one, 2, 1, float, float)
STEP(NAME, _bf16_bf16_rows, 1, 8, bf16, bf16)
STEP(NAME, _bf16_f32_rows, 1, 8, bf16, float)
STEP(NAME, _f32_f32_rows, 1, 8, float, float)
