/* compress.cu - the compressor: groups of `ratio` positions become one latent, and the latent one cache row.
 *
 *   compress_pool    row r with (pos[r] + 1) % ratio == 0 closes group j = pos[r] / ratio:
 *                    w_t = softmax over the group's tokens of g_t (per channel), pool = sum_t w_t a_t,
 *                    lat[r] = pool * norm_w / sqrt(mean(pool^2) + eps);   every other row of lat is 0
 *   compress_commit  partial[.][pos[r] % slots] = (a[r], g[r]), the last min(R, slots) rows
 *   compress_store   comp[j] = Q4kv( rope(lat[r], ratio * j) ) for closing rows     (no rounding in kv f32)
 *
 * Layout      a, g: f32 [R, HEAD_DIM]; partial: f32 [2, slots, HEAD_DIM], a then g, slots a multiple of ratio;
 *             lat: A [R, HEAD_DIM]; comp: compressed rows of kvrows.cuh, u8 [C, row bytes] or f32 [C, HEAD_DIM].
 *             With ratio 1 there is no g and no partial (null).
 * Launch      pool, store: grid ceil(R/4), block 128, a warp owns a row and a lane 16 channels. commit: grid
 *             min(R, slots), block 128. Rows are consecutive positions; members before the call come from partial.
 * Arithmetic  f32. Softmax: maximum, then exponentials and both sums in rising position, one division at the end. In
 *             bf16 mode pool is rounded to bf16 before the norm and lat after it. Squares: 16 in rising order in a
 *             lane, then xor-shuffle. A group's bits do not depend on where chunks end: partial holds what was there.
 * Traffic     pool reads 8 (4 with ratio 1) HEAD bytes a group member of the closed groups, 4 HEAD of norm_w, and
 *             writes R HEAD sizeof(A); commit moves 8 HEAD bytes a kept row; store reads HEAD sizeof(A) a closed
 *             group and writes its row. Positions: 4 bytes a row each.
 * Why so      the unrotated latent goes to the indexer first, so rotation and storage are a second launch on a copy in
 *             registers; the two can never share a buffer. Zero rows keep the index-key GEMM free of garbage.
 */
#include "common.cuh"
#include "kvrows.cuh"

static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 512 && ROPE_DIM % 2 == 0 && ROPE_DIM <= HEAD_DIM);

constexpr int kThreads = 128;

struct StageSmem {
    sarr<float, kThreads / 32 * stage_floats(HEAD_DIM)> weights;
};

template <class A>
DEV float round_to(float x) {
    return to_f32(from_f32<A>(x));
}

// channels c0 .. c0 + 15 of the group that row `row` (position p) closes
DEV void pool16(float (&v)[16], gptr<const float> a, gptr<const float> g, gptr<const float> partial, int row, i32 p,
                int c0, i32 ratio, i32 slots) {
    if (ratio == 1) {
        load16(v, a, (i64)row * HEAD_DIM + c0);
        return;
    }
    float top[16], total[16], x[16];
    const i64 gates = (i64)slots * HEAD_DIM;  // partial's second half
#pragma unroll
    for (int i = 0; i < 16; ++i) top[i] = __uint_as_float(0xff800000u), total[i] = 0.0f, v[i] = 0.0f;
    for (int t = 0; t < ratio; ++t) {
        const int from = row - ratio + 1 + t;
        const i64 slot = (i64)((p - ratio + 1 + t) % slots) * HEAD_DIM + c0;
        if (from >= 0)
            load16(x, g, (i64)from * HEAD_DIM + c0);
        else
            load16(x, partial, gates + slot);
#pragma unroll
        for (int i = 0; i < 16; ++i) top[i] = fmaxf(top[i], x[i]);
    }
    for (int t = 0; t < ratio; ++t) {
        const int from = row - ratio + 1 + t;
        const i64 slot = (i64)((p - ratio + 1 + t) % slots) * HEAD_DIM + c0;
        float e[16];
        if (from >= 0)
            load16(e, g, (i64)from * HEAD_DIM + c0);
        else
            load16(e, partial, gates + slot);
        if (from >= 0)
            load16(x, a, (i64)from * HEAD_DIM + c0);
        else
            load16(x, partial, slot);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float w = exp_f(e[i] - top[i]);
            total[i] += w;
            v[i] = fmaf(w, x[i], v[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = v[i] / total[i];
}

template <class A>
DEV void pool_body(gptr<A> lat, gptr<const float> a, gptr<const float> g, gptr<const float> partial,
                   gptr<const float> norm_w, gptr<const i32> pos, i32 n_rows, i32 ratio, i32 slots, float eps) {
    const int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    const int c0 = threadIdx.x % 32 * kLaneCh;
    const bool mine = row < n_rows && c0 < HEAD_DIM;
    prefetch_all<kThreads>(norm_w, HEAD_DIM);
    grid_wait();
    grid_release();
    const i32 p = row < n_rows ? (i32)pos[row] : 0;
    const bool closes = (p + 1) % ratio == 0;

    SMEM(StageSmem, sm);
    float v[16], weight[16];
    if (row < n_rows && closes)  // the same for the warp
        warp_load16(weight, sm.weights + threadIdx.x / 32 * stage_floats(HEAD_DIM), norm_w, HEAD_DIM);
    float sum_sq = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = 0.0f;
    if (mine && closes) pool16(v, a, g, partial, row, p, c0, ratio, slots);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        v[i] = round_to<A>(v[i]);
        sum_sq = fmaf(v[i], v[i], sum_sq);
    }
    const float scale = 1.0f / sqrtf(warp_sum(sum_sq) / (float)HEAD_DIM + eps);
    if (mine && closes) {
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = v[i] * scale * weight[i];
    }
    if (mine) store16(lat, (i64)row * HEAD_DIM + c0, v);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    compress_pool_f32(gptr<float> lat, gptr<const float> a, gptr<const float> g, gptr<const float> partial,
                      gptr<const float> norm_w, gptr<const i32> pos, i32 n_rows, i32 ratio, i32 slots, float eps) {
    pool_body<float>(lat, a, g, partial, norm_w, pos, n_rows, ratio, slots, eps);
}
EXPORT(compress_pool_f32)

extern "C" __global__ void __launch_bounds__(kThreads)
    compress_pool_bf16(gptr<bf16> lat, gptr<const float> a, gptr<const float> g, gptr<const float> partial,
                       gptr<const float> norm_w, gptr<const i32> pos, i32 n_rows, i32 ratio, i32 slots, float eps) {
    pool_body<bf16>(lat, a, g, partial, norm_w, pos, n_rows, ratio, slots, eps);
}
EXPORT(compress_pool_bf16)

extern "C" __global__ void __launch_bounds__(kThreads)
    compress_commit(gptr<float> partial, gptr<const float> a, gptr<const float> g, gptr<const i32> pos, i32 n_rows,
                    i32 slots) {
    grid_release();
    const int row = n_rows - (int)gridDim.x + (int)blockIdx.x;
    const i64 from = (i64)row * HEAD_DIM;
    const i64 to = (i64)(pos[row] % slots) * HEAD_DIM;
#pragma unroll 1
    for (int c = threadIdx.x * 4; c < HEAD_DIM; c += kThreads * 4) {
        gst<float4>(partial, to + c, gld<float4>(a, from + c));
        gst<float4>(partial, (i64)slots * HEAD_DIM + to + c, gld<float4>(g, from + c));
    }
}
EXPORT(compress_commit)

DEV void store_comp(gptr<float> comp, i64 j, int c0, const float (&v)[16]) { store16(comp, j * HEAD_DIM + c0, v); }

DEV void store_comp(gptr<u8> comp, i64 j, int c0, const float (&v)[16]) {
    const i64 base = j * comp_row_bytes(HEAD_DIM);
    const u32 scale = q4kv_scale(amax16(v));
    gst<uint2>(comp, base + c0 / 2, e2m1_codes(v, e4m3_to_f32((u8)scale)));
    comp[base + HEAD_DIM / 2 + c0 / 16] = (u8)scale;
    if (c0 == 0)  // the padding is part of the row's bits
        for (int b = HEAD_DIM / 2 + HEAD_DIM / 16; b < comp_row_bytes(HEAD_DIM); ++b) comp[base + b] = (u8)0;
}

template <class A, class Row>
DEV void store_body(gptr<Row> comp, gptr<const A> lat, gptr<const i32> pos, gptr<const float> freq, i32 n_rows,
                    i32 ratio) {
    const int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    const int c0 = threadIdx.x % 32 * kLaneCh;
    grid_release();
    if (row >= n_rows || c0 >= HEAD_DIM) return;
    const i32 p = pos[row];
    if ((p + 1) % ratio != 0) return;
    float v[16];
    load16(v, lat, (i64)row * HEAD_DIM + c0);
    rope16(v, c0, HEAD_DIM, ROPE_DIM, p - ratio + 1, freq, 1.0f);
    store_comp(comp, p / ratio, c0, v);
}

#define COMPRESS_STORE(name, A, Row)                                                                             \
    extern "C" __global__ void __launch_bounds__(kThreads) name(                                                 \
        gptr<Row> comp, gptr<const A> lat, gptr<const i32> pos, gptr<const float> freq, i32 n_rows, i32 ratio) { \
        store_body<A, Row>(comp, lat, pos, freq, n_rows, ratio);                                                 \
    }                                                                                                            \
    EXPORT(name)

COMPRESS_STORE(compress_store_f32_f32, float, float)
COMPRESS_STORE(compress_store_f32_fp4, float, u8)
COMPRESS_STORE(compress_store_bf16_f32, bf16, float)
COMPRESS_STORE(compress_store_bf16_fp4, bf16, u8)
