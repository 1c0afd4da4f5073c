/* hyper.cu - single-pass hyper-connections: mixes, Sinkhorn, collapse, expand (model-text 5.1, 5.2).
 *
 *   hyper_dots       part[r,p,m] = sum over slice p of x[r,i] * fn[m,i],  part[r,p,M] = sum over slice p of x[r,i]^2
 *   hyper_mix        m = (sum_p part) / sqrt(mean(x^2) + eps);  pre = sigmoid(m s0 + b) + heps,  post = 2 sigmoid(m s1 + b),
 *                    comb = Sinkhorn(m s2 + b): softmax of each row + heps, then a column step, then (iters - 1) times
 *                    a row step and a column step
 *   hyper_collapse_* y[r,d] = w[d] * h[d] / sqrt(mean_d(h^2) + eps),  h[d] = sum_c pre[r,c] x[r,c,d]
 *   hyper_expand_*   x'[r,k,d] = post[r,k] y[r,d] + sum_j comb[r,j,k] x[r,j,d]    (the sum runs over comb's first index)
 *
 * Layout      x: f32 [R, S, D] (stream-major rows, read as [R, S*D] by hyper_dots); fn: f32 [M, S*D], M = S (S + 2);
 *             part: f32 [R, P, M + 1]; pre, post: f32 [R, S]; comb: f32 [R, S, S]; y: A [R, D], A = f32 or bf16.
 *             S*D and D are multiples of 4. S = HC is compiled in, M < 32.
 * Launch      hyper_dots: grid (P, ceil(R / 8)), block 256, P = ceil(S*D / 256): a block takes 256 columns of up to 8 rows
 *             and reads its part of fn once for all of them. hyper_mix: grid R, one warp a row, lane i = entry i of comb.
 *             hyper_collapse: grid R, block 256. hyper_expand: grid (ceil(D / 256), R), block 256, in place.
 * Arithmetic  f32. A dot is 8 fmaf a lane in rising columns, then xor-shuffle; slices are added in rising order; sums over
 *             streams and over Sinkhorn rows and columns run in rising index. A row's bits depend on nothing but the row.
 * Traffic     hyper_dots reads 4 M S D bytes of fn for every 8 rows and 4 R S D of x, writes 4 R P (M + 1); hyper_mix reads
 *             that back; collapse reads R (4 S D + 4 D) of x and w and pre once a warp, 128 R S, writes R D A; expand reads
 *             R (4 S D + A D) and post and comb once a warp, 4 (S + S^2) R ceil(D / 32), writes 4 R S D.
 * Why so      fn is 2 MB at the released size and read twice a layer: it must be spread over all multiprocessors, so the
 *             dots are cut by columns and finished by one warp. The statistic over all streams comes with the dots.
 *             Dots, mix and collapse are launched ahead: fn, scale, base and w are on their way before x and part are.
 */
#include "common.cuh"

constexpr int S = HC;
constexpr int M = S * (S + 2);
constexpr int kThreads = 256;
constexpr int kSlice = 256;
constexpr int kRows = 8;
constexpr int kWarps = kThreads / 32;
constexpr int kDots = (M + kWarps) / kWarps;  // of a warp, of the M + 1: all of them together
static_assert(M < 32 && S * S <= 32, "one lane an entry, and one for the sum of squares");

struct DotSmem {
    sarr<float, kRows * kSlice> x;
};

// four blocks a multiprocessor: left to itself the compiler stops at 48 registers and spills
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    hyper_dots(gptr<float> part, gptr<const float> x, gptr<const float> fn, int rows, int width) {
    SMEM(DotSmem, sm);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int row0 = blockIdx.y * kRows, n_rows = min(kRows, rows - row0);
    const int col0 = blockIdx.x * kSlice, n_cols = min(kSlice, width - col0);
    const int m = warp;  // and every eighth after it: the sums of a warp's dots meet together
    float4 f[kDots][2] = {};
#pragma unroll
    for (int i = 0; i < kDots; i++) {
        for (int j = 0; j < 2; j++) {
            const int c = lane * 4 + 128 * j;
            if (m + i * kWarps < M && c < n_cols) f[i][j] = gld<float4>(fn, (i64)(m + i * kWarps) * width + col0 + c);
        }
    }
    grid_wait();
    grid_release();
    for (int i = threadIdx.x * 4; i < n_rows * kSlice; i += kThreads * 4) {
        const int r = i / kSlice, c = i % kSlice;
        float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
        if (c < n_cols) v = gld<float4>(x, (i64)(row0 + r) * width + col0 + c);
        sst<float4>(sm.x, i, v);
    }
    sync_block();
    if (m > M) return;  // no barrier from here on
    for (int r = 0; r < n_rows; r++) {
        const float4 v[2] = {sld<float4>(sm.x, r * kSlice + lane * 4),
                             sld<float4>(sm.x, r * kSlice + lane * 4 + 128)};
        float sum[kDots] = {};
#pragma unroll
        for (int i = 0; i < kDots; i++) {
            for (int j = 0; j < 2; j++) {
                const float4 g = m + i * kWarps < M ? f[i][j] : v[j];
                sum[i] = fmaf(v[j].x, g.x, sum[i]);
                sum[i] = fmaf(v[j].y, g.y, sum[i]);
                sum[i] = fmaf(v[j].z, g.z, sum[i]);
                sum[i] = fmaf(v[j].w, g.w, sum[i]);
            }
        }
        warp_sums(sum);
        float mine = sum[0];
#pragma unroll
        for (int i = 1; i < kDots; i++) mine = lane == i ? sum[i] : mine;
        const i64 at = ((i64)(row0 + r) * gridDim.x + blockIdx.x) * (M + 1) + m + lane * kWarps;
        if (lane < kDots && m + lane * kWarps <= M) part[at] = mine;
    }
}
EXPORT(hyper_dots)

extern "C" __global__ void __launch_bounds__(32)
    hyper_mix(gptr<float> pre, gptr<float> post, gptr<float> comb, gptr<const float> part, gptr<const float> scale,
              gptr<const float> base, int n_slices, int width, int iters, float eps, float heps) {
    const int lane = threadIdx.x;
    const i64 row = blockIdx.x;
    const gptr<const float> mine = part + (row * n_slices * (M + 1) + min(lane, M));  // lane M: the sum of squares
    const float s0 = scale[0], s1 = scale[1], s2 = scale[2];
    // lane e = S j + k holds comb[j][k]; idle lanes mirror entry 0 so that every lane takes part in every shuffle
    const int e = lane < S * S ? lane : 0, j = e / S, k = e % S;
    const float b = lane < 2 * S ? base[lane] : 0.0f, comb_b = base[2 * S + e];
    grid_wait();
    grid_release();
    float dot = 0.0f;
#pragma unroll 16  // no branch, so sixteen loads are on their way: one warp has nothing else to hide them behind
    for (int p = 0; p < n_slices; p++) dot += mine[(i64)p * (M + 1)];
    const float sum_sq = shfl(dot, M);
    const float mixed = dot * (1.0f / sqrtf(sum_sq / (float)width + eps));
    if (lane < S) pre[row * S + lane] = sigmoid_f(fmaf(mixed, s0, b)) + heps;
    if (lane >= S && lane < 2 * S) post[row * S + lane - S] = 2.0f * sigmoid_f(fmaf(mixed, s1, b));
    const float logit = shfl(mixed, 2 * S + e);
    float c = fmaf(logit, s2, comb_b);
    float top = shfl(c, S * j);
    for (int i = 1; i < S; i++) top = fmaxf(top, shfl(c, S * j + i));
    c = exp_f(c - top);
    float sum = shfl(c, S * j);
    for (int i = 1; i < S; i++) sum += shfl(c, S * j + i);
    c = c / sum + heps;
    for (int step = 0; step < 2 * iters - 1; step++) {
        const bool by_row = step & 1;  // even steps divide by the column's sum, odd ones by the row's
        const int first = by_row ? S * j : k, stride = by_row ? 1 : S;
        sum = shfl(c, first);
        for (int i = 1; i < S; i++) sum += shfl(c, first + i * stride);
        c = c / (sum + heps);
    }
    if (lane < S * S) comb[row * S * S + lane] = c;
}
EXPORT(hyper_mix)

template <class A>
DEV void collapse_row(gptr<A> y, gptr<const float> x, gptr<const float> pre, gptr<const float> w, int width,
                      float eps) {
    SMEM_DYN(float, h, 0);  // each thread reads back only what it wrote itself
    const i64 row = blockIdx.x;
    prefetch_all<kThreads>(w, width);
    grid_wait();
    grid_release();
    float p[S];
    for (int c = 0; c < S; c++) p[c] = pre[row * S + c];
    float sum_sq = 0.0f;
    for (int d = threadIdx.x; d < width; d += kThreads) {
        float v = p[0] * x[row * S * width + d];
        for (int c = 1; c < S; c++) v = fmaf(p[c], x[(row * S + c) * width + d], v);
        h[d] = v;
        sum_sq = fmaf(v, v, sum_sq);
    }
    const float scale = 1.0f / sqrtf(block_sum<kThreads>(sum_sq) / (float)width + eps);
#pragma unroll 4  // w by the read-only path: loads of it need not wait for the stores to y
    for (int d = threadIdx.x; d < width; d += kThreads)
        y[row * width + d] = from_f32<A>(h[d] * scale * gld_nc<float>(w, d));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    hyper_collapse_f32(gptr<float> y, gptr<const float> x, gptr<const float> pre, gptr<const float> w, int width,
                       float eps) {
    collapse_row<float>(y, x, pre, w, width, eps);
}
EXPORT(hyper_collapse_f32)

extern "C" __global__ void __launch_bounds__(kThreads)
    hyper_collapse_bf16(gptr<bf16> y, gptr<const float> x, gptr<const float> pre, gptr<const float> w, int width,
                        float eps) {
    collapse_row<bf16>(y, x, pre, w, width, eps);
}
EXPORT(hyper_collapse_bf16)

template <class A>
DEV void expand_column(gptr<float> x, gptr<const A> y, gptr<const float> post, gptr<const float> comb, int width) {
    const i64 row = blockIdx.y;
    const int d = blockIdx.x * kThreads + threadIdx.x;
    grid_release();
    if (d >= width) return;
    // all is loaded before the first store: for all the compiler knows, a store to x changes post and comb
    float in[S], gain[S], mix[S][S];
    for (int j = 0; j < S; j++) in[j] = x[(row * S + j) * width + d];
    for (int k = 0; k < S; k++) {
        gain[k] = post[row * S + k];
        for (int j = 0; j < S; j++) mix[j][k] = comb[(row * S + j) * S + k];
    }
    const float out = to_f32(y[row * width + d]);
    for (int k = 0; k < S; k++) {
        float v = gain[k] * out;
        for (int j = 0; j < S; j++) v = fmaf(mix[j][k], in[j], v);
        x[(row * S + k) * width + d] = v;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    hyper_expand_f32(gptr<float> x, gptr<const float> y, gptr<const float> post, gptr<const float> comb, int width) {
    expand_column<float>(x, y, post, comb, width);
}
EXPORT(hyper_expand_f32)

extern "C" __global__ void __launch_bounds__(kThreads)
    hyper_expand_bf16(gptr<float> x, gptr<const bf16> y, gptr<const float> post, gptr<const float> comb, int width) {
    expand_column<bf16>(x, y, post, comb, width);
}
EXPORT(hyper_expand_bf16)
