/* kv.cu - the window cache: norm, rope, round and store a row; move finished rows to the ring.
 *
 *   window_kv       chunk[r] = Q8( rope( x[r] * w / sqrt(mean(x[r]^2) + eps), pos[r] ) )      (no rounding in kv f32)
 *   window_commit   ring[pos[r] % ring_rows] = chunk[r], the last min(R, ring_rows) rows
 *
 * Layout      x: A [R, HEAD_DIM]; chunk, ring: window rows of kvrows.cuh, u8 [.., row bytes] or f32 [.., HEAD_DIM].
 * Launch      window_kv: grid ceil(R/4), block 128, a warp owns a row and a lane 16 channels (HEAD_DIM <= 512, a
 *             multiple of 32). window_commit: grid min(R, ring_rows), block 64, a block copies one row of B bytes.
 * Arithmetic  f32 without rounding in between. A lane sums its 16 squares in rising order, lanes meet by xor-shuffle:
 *             a row's bits depend on the row and its position alone.
 * Traffic     window_kv reads R HEAD sizeof(A) + 4 HEAD + 4 R + 2 ROPE, writes R row bytes less padding;
 *             window_commit reads and writes min(R, ring_rows) rows of B bytes, and reads their 4-byte positions.
 *             The norm weights pass through shared memory, so that a warp asks for whole lines.
 * Why so      one launch where four would do: a row is 1 KB, so the time is the launch's. The ring is written after
 *             attention has read it (the chunk is read from its own buffer), so a chunk may be longer than the ring.
 */
#include "common.cuh"
#include "kvrows.cuh"

static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 512 && ROPE_DIM % 2 == 0 && ROPE_DIM <= HEAD_DIM);

constexpr int kThreads = 128;

struct StageSmem {
    sarr<float, kThreads / 32 * stage_floats(HEAD_DIM)> weights;
};

DEV void store_window(gptr<float> chunk, int row, int c0, const float (&v)[16], float, bool mine) {
    if (mine) store16(chunk, (i64)row * HEAD_DIM + c0, v);
}

DEV void store_window(gptr<u8> chunk, int row, int c0, const float (&v)[16], float amax, bool mine) {
    if (!mine) return;
    const i64 base = (i64)row * window_row_bytes(HEAD_DIM);
    uint4 codes;
    const u32 e = q8_codes(codes, v, amax);
    gst<uint4>(chunk, base + c0, codes);
    if (c0 % 32 == 0) chunk[base + HEAD_DIM + c0 / 32] = (u8)e;
    if (c0 == 0)  // the padding is part of the row's bits
        for (int b = HEAD_DIM + HEAD_DIM / 32; b < window_row_bytes(HEAD_DIM); ++b) chunk[base + b] = (u8)0;
}

template <class A, class Row>
DEV void window_kv_body(gptr<Row> chunk, gptr<const A> x, gptr<const float> w, gptr<const i32> pos,
                        gptr<const float> freq, i32 n_rows, float eps) {
    const int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    const int c0 = threadIdx.x % 32 * kLaneCh;
    const bool mine = row < n_rows && c0 < HEAD_DIM;

    SMEM(StageSmem, sm);
    float v[16], weight[16];
    if (row < n_rows)  // the same for the warp
        warp_load16(weight, sm.weights + threadIdx.x / 32 * stage_floats(HEAD_DIM), w, HEAD_DIM);
    grid_wait();
    grid_release();
    float sum_sq = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = 0.0f;
    if (mine) load16(v, x, (i64)row * HEAD_DIM + c0);
#pragma unroll
    for (int i = 0; i < 16; ++i) sum_sq = fmaf(v[i], v[i], sum_sq);
    const float scale = 1.0f / sqrtf(warp_sum(sum_sq) / (float)HEAD_DIM + eps);
    if (mine) {
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = v[i] * scale * weight[i];
        rope16(v, c0, HEAD_DIM, ROPE_DIM, pos[row], freq, 1.0f);
    }
    const float own = amax16(v);
    store_window(chunk, row, c0, v, fmaxf(own, shfl_xor(own, 1)), mine);
}

#define WINDOW_KV(name, A, Row)                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                       \
        name(gptr<Row> chunk, gptr<const A> x, gptr<const float> w, gptr<const i32> pos, gptr<const float> freq, \
             i32 n_rows, float eps) {                                                                            \
        window_kv_body<A, Row>(chunk, x, w, pos, freq, n_rows, eps);                                             \
    }                                                                                                            \
    EXPORT(name)

WINDOW_KV(window_kv_f32_f32, float, float)
WINDOW_KV(window_kv_f32_fp4, float, u8)
WINDOW_KV(window_kv_bf16_f32, bf16, float)
WINDOW_KV(window_kv_bf16_fp4, bf16, u8)

extern "C" __global__ void __launch_bounds__(64)
    window_commit(gptr<u8> ring, gptr<const u8> chunk, gptr<const i32> pos, i32 n_rows, i32 ring_rows,
                  i32 row_bytes) {
    grid_release();
    const int row = n_rows - (int)gridDim.x + (int)blockIdx.x;
    const i64 from = (i64)row * row_bytes;
    const i64 to = (i64)(pos[row] % ring_rows) * row_bytes;
    for (int b = threadIdx.x * 16; b < row_bytes; b += 64 * 16) gst<uint4>(ring, to + b, gld<uint4>(chunk, from + b));
}
EXPORT(window_commit)
